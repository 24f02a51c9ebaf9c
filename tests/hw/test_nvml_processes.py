"""The unmodified binding on the C stand-in, found by the dynamic loader, in processes of their own."""

import json
import os
import signal
import subprocess
import sys

import pytest

OPEN = "from wattgym.hw.open import open_device, open_devices\n"


def check(result):
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_limit_set_in_one_process_is_seen_in_another_and_outlives_it(standin):
    check(standin.run(OPEN + "open_device('0').set_power_limit_mw(450_000)"))
    assert check(standin.run(OPEN + "print(open_device('0').requested_limit_mw())")) == "450000"
    assert standin.get(0, "requested_mw") == 450_000
    assert standin.get(1, "requested_mw") == 400_000


def test_addresses_through_the_real_library(make_standin):
    machine = make_standin("H100,A100,A100")
    machine.set(1, "mig", 2)
    code = OPEN + "import sys; print(*(d.info().uuid for d in open_devices(sys.argv[1:])))"
    mig = "MIG-fa4e0001-0000-5000-8000-00000000000"
    assert check(machine.run(code, "0", "GPU-fa4e0002")).split() == [machine.uuid(0), machine.uuid(2)]
    assert check(machine.run(code, machine.uuid(2))) == machine.uuid(2)
    # Two instances of one GPU are one device: its power is the whole GPU's and counts once.
    assert check(machine.run(code, mig + "0", mig + "1")) == machine.uuid(1)
    assert check(machine.run(code, "cuda:0", CUDA_VISIBLE_DEVICES=mig + "1")) == machine.uuid(1)
    assert check(machine.run(code, "cuda:0", CUDA_VISIBLE_DEVICES=machine.uuid(2))) == machine.uuid(2)
    everything = check(machine.run(code)).split()
    assert everything == [machine.uuid(index) for index in range(3)]
    unknown = machine.run(code, "7")
    assert "NVML index 7 does not exist; valid: 0 … 2" in unknown.stderr


def test_cuda_order_may_differ_from_nvml_order(make_standin):
    machine = make_standin("A100,H100")
    code = OPEN + "print(open_device('cuda:0').info().uuid)"
    uncertain = machine.run(code)
    assert "fastest first" in uncertain.stderr.splitlines()[-1]
    assert check(machine.run(code, CUDA_DEVICE_ORDER="PCI_BUS_ID")) == machine.uuid(0)


FORK = (
    OPEN
    + """
import json, os
import pynvml
device = open_device("0")
device.set_power_limit_mw(500_000)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    try:
        pynvml.nvmlDeviceGetCount()
        bare = "ok"
    except pynvml.NVMLError as error:
        bare = str(error)
    seen = device.requested_limit_mw()
    device.set_power_limit_mw(450_000)
    power_w = device.read().power_w
    os.write(writer, json.dumps([bare, seen, power_w]).encode())
    device.close()
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps([*json.loads(os.read(reader, 1000)), device.requested_limit_mw(), device.read().power_w]))
"""
)


def test_a_forked_child_initialises_anew(standin):
    bare, seen, child_w, parent_sees, parent_w = json.loads(check(standin.run(FORK)))
    assert bare == "Uninitialized"  # what a plain NVML call answers in the child
    assert (seen, parent_sees) == (500_000, 450_000)
    assert child_w > 0
    assert parent_w > 0


WRITER = (
    OPEN
    + """
import sys
device = open_device("0")
print("ready", flush=True)
while True:
    for limit_mw in map(int, sys.argv[1:]):
        device.set_power_limit_mw(limit_mw)
        device.read()
"""
)


def test_a_writer_killed_in_mid_call_leaves_the_devices_usable(standin):
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, "300000", "350000"]
        with subprocess.Popen(command, env=standin.env(), stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            while standin.get(0, "requested_mw") == 700_000:
                pass
            os.kill(child.pid, signal.SIGKILL)
        assert standin.get(0, "requested_mw") in (300_000, 350_000)
        check(standin.run(OPEN + "open_device('0').set_power_limit_mw(700_000)"))


def test_threads_may_share_a_device(standin):
    code = (
        OPEN
        + """
from concurrent.futures import ThreadPoolExecutor
device = open_device("0")
def work(turn):
    device.set_power_limit_mw(300_000 + 1000 * (turn % 50))
    return device.read().power_w
with ThreadPoolExecutor(8) as pool:
    print(all(watts > 0 for watts in pool.map(work, range(400))))
"""
    )
    assert check(standin.run(code)) == "True"


def test_without_a_driver_the_library_says_so(standin):
    environment = standin.env()
    del environment["NVML_STANDIN_STATE"]
    code = OPEN + "open_devices(None)"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "kernel driver is not loaded" in result.stderr.splitlines()[-1]


def test_an_old_driver_is_asked_by_the_older_name(standin, old_standin_library):
    code = OPEN + "d = open_device('0'); print(d.info().capabilities['throttle_reasons'], d.read().throttle_reasons)"
    result = standin.run(code, LD_LIBRARY_PATH=str(old_standin_library.parent))
    assert check(result) == "ok 1"  # idle


@pytest.mark.parametrize("fault", ["lost", "unknown_error"])
def test_one_broken_gpu_does_not_hide_the_others(standin, fault):
    standin.set(0, fault, 1)
    code = OPEN + "print(*(d.info().uuid for d in open_devices(None)))"
    assert check(standin.run(code)) == standin.uuid(1)
    addressed = standin.run(OPEN + f"open_device({standin.uuid(0)!r})")
    assert "DeviceLostError" in addressed.stderr.splitlines()[-1]
