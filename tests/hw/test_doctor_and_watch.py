"""`wattgym hw doctor` and `wattgym hw watch`, in processes of their own, with and without GPUs."""

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from wattgym.errors import UserError
from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceInfo, PowerKind
from wattgym.hw.doctor import device_findings
from wattgym.hw.poller import DevicePoller
from wattgym.hw.presets import load_presets
from wattgym.hw.privileges import Privileges
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.watch import COLUMNS, cells, watch_devices


def hw(*arguments, env=None, **more):
    environment = {**os.environ, **(env or {}), **more, "COLUMNS": "200"}
    command = [sys.executable, "-m", "wattgym", "hw", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def doctor(**more):
    result = hw("doctor", "--json", **more)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def problems(report, device="machine"):
    return [finding["problem"] for finding in report["findings"] if finding["device"] == device]


@pytest.fixture
def no_gpu(standin):
    """NVML answers as on a machine whose driver is not loaded, whatever this machine has."""
    environment = standin.env()
    del environment["NVML_STANDIN_STATE"]
    return environment


# --- doctor


def test_without_a_gpu_doctor_says_so_offers_the_simulator_and_exits_0(no_gpu):
    result = hw("doctor", env=no_gpu)
    assert result.returncode == 0, result.stderr
    assert "No GPU was found; the simulated backend works without one." in result.stdout
    assert "driver is not loaded" in result.stdout
    assert "remedy:" in result.stdout
    report = doctor(env=no_gpu)
    assert (report["driver"], report["devices"]) == (None, [])
    assert report["simulated_presets"] == list(load_presets())


def test_doctor_describes_each_device_and_writes_nothing(standin):
    report = doctor(env=standin.env())
    assert report["driver"] == "580.00.standin"
    assert [device["uuid"] for device in report["devices"]] == [standin.uuid(0), standin.uuid(1)]
    assert problems(report, standin.uuid(0)) == problems(report, standin.uuid(1)) == []
    first = report["devices"][0]
    assert (first["min_limit_mw"], first["max_limit_mw"], first["requested_limit_mw"]) == (200_000, 700_000, 700_000)
    assert (first["power_kind"], first["power_window_s"], first["persistence"]) == ("instant", 0.025, True)
    assert first["capabilities"]["set_power_limit"] == "ok"
    assert standin.get(0, "set_calls") == 0
    text = hw("doctor", env=standin.env()).stdout
    assert "requested 700 W, enforced 700 W" in text
    assert "min 200 W, default 700 W, max 700 W" in text
    assert "instant over 25 ms" in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("persistence", 0, "persistence mode is off"),
        ("out_of_band_mw", 500_000, "enforced limit 500 W is below the requested 700 W"),
        ("mig", 2, "split by MIG"),
        ("instant_supported", 0, "average over about 1 s"),
        ("energy_supported", 0, "no energy counter"),
        ("limit_supported", 0, "set_power_limit"),
    ],
)
def test_doctor_finds_what_stands_in_the_way(standin, key, value, words):
    standin.set(0, key, value)
    report = doctor(env=standin.env())
    found = [finding for finding in report["findings"] if finding["device"] == standin.uuid(0)]
    assert any(words in finding["problem"] for finding in found)
    assert all(finding["remedy"] for finding in found)
    assert problems(report, standin.uuid(1)) == []


@pytest.mark.parametrize(("key", "words"), [("lost", "fell off the bus"), ("unknown_error", "restart the container")])
def test_doctor_sees_a_lost_device_beside_a_good_one(standin, key, words):
    standin.set(0, key)
    report = doctor(env=standin.env())
    assert [device["index"] for device in report["devices"]] == [1]
    finding = next(finding for finding in report["findings"] if finding["device"] == "NVML index 0")
    assert finding["problem"] == "does not answer"
    assert words in finding["remedy"]


def test_doctor_recognises_the_unofficial_binding(tmp_path):
    (tmp_path / "pynvml.py").write_text("def nvmlInit(): pass\n")
    report = doctor(PYTHONPATH=str(tmp_path))
    assert report["binding"] is None
    assert "unofficial" in report["findings"][0]["problem"]
    assert "pip uninstall" in report["findings"][0]["remedy"]


def test_a_driver_older_than_the_binding_is_recognised():
    from wattgym.hw.remedies import NvmlCode, device_error

    reason = str(device_error(NvmlCode.FUNCTION_NOT_FOUND, "energy"))
    info = DeviceInfo(uuid="GPU-1", name="old", index=0, backend="nvml", capabilities={"energy": reason})
    finding = device_findings(info)[0]
    assert finding.problem == "the driver lacks functions for: energy"
    assert "update the driver" in finding.remedy


def test_a_healthy_device_has_no_findings_and_a_sick_one_all():
    clock = VirtualClock()
    assert device_findings(SimulatedDevice(clock=clock).info()) == []
    info = DeviceInfo(
        uuid="GPU-1",
        name="sick",
        index=0,
        backend="nvml",
        requested_limit_mw=700_000,
        enforced_limit_mw=500_000,
        power_kind=PowerKind.AVERAGE,
        capabilities={"energy": "no", "set_power_limit": "no"},
        is_mig=True,
        persistence=False,
    )
    assert len(device_findings(info)) == 6


@pytest.mark.parametrize(
    ("privileges", "words"),
    [
        (Privileges(root=True, sys_admin=True, container=False), None),
        (Privileges(root=True, sys_admin=None, container=False), None),
        (Privileges(root=False, sys_admin=False, container=False), "hw serve"),
        (Privileges(root=True, sys_admin=False, container=True), "--cap-add SYS_ADMIN"),
        (Privileges(root=True, sys_admin=False, container=False), "CAP_SYS_ADMIN"),
    ],
)
def test_privileges_are_judged_by_reading(privileges, words):
    reason = privileges.why_no_writes()
    assert reason is None if words is None else words in reason


# --- watch

LINE = re.compile(
    r"device=(\S+)  power_W=([\d.]+)  kind=instant  age_s=[\d.]+  limit_W=(\d+)  enforced_W=(\d+)  SM_MHz="
)


def test_watch_prints_one_line_per_device_and_sample(standin):
    result = hw("watch", "--interval", "0.1", "--count", "3", env=standin.env())
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [LINE.match(line).group(1) for line in lines] == [standin.uuid(0), standin.uuid(1)] * 3
    assert {LINE.match(line).group(3) for line in lines} == {"700", "400"}


def test_watch_shows_a_limit_that_another_process_set(standin):
    standin.set(0, "requested_mw", 450_000)
    standin.set(0, "out_of_band_mw", 300_000)
    result = hw("watch", "--device", "0", "--count", "1", env=standin.env())
    assert LINE.match(result.stdout).group(3, 4) == ("450", "300")


def test_watch_works_on_simulated_devices_that_processes_share(tmp_path):
    from wattgym.hw.open import open_device

    open_device("a40:1", "simulated", state_dir=tmp_path).write_as_other(180_000)
    result = hw("watch", "--backend", "simulated", "--count", "1", "--state-dir", str(tmp_path))
    assert LINE.match(result.stdout).group(1, 3) == ("SIM-a40-1", "180")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "0.01"], "at least 0.1 s"),
        (["--interval", "nan"], "at least 0.1 s"),
        (["--count", "0"], "at least 1"),
        (["--backend", "amd"], "valid: nvml, simulated"),
        (["--device", "h1000"], "h100-sxm"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(tmp_path, arguments, words):
    defaults = ["--backend", "simulated", "--count", "1", "--state-dir", str(tmp_path)]
    result = hw("watch", *defaults, *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_watch_without_a_driver_is_one_line_and_exit_code_2(no_gpu):
    result = hw("watch", "--count", "1", env=no_gpu)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "driver is not loaded" in result.stderr


def test_a_lost_device_is_a_dash_and_a_note_not_zero(capsys):
    device = SimulatedDevice(clock=VirtualClock(9.0))
    poller = DevicePoller([device])
    device.inject(Faults(lost=True))
    poller.poll_once()
    row = dict(zip(COLUMNS, cells(device.info(), poller.latest("SIM-h100-sxm-0")), strict=True))
    assert row["power W"] == "-"
    assert "lost" in row["note"]
    watch_devices([device], count=1)
    assert "power_W=-" in capsys.readouterr().out


def test_count_is_checked_for_library_callers_too():
    with pytest.raises(UserError, match="count -1"):
        watch_devices([], count=-1)


def test_in_a_terminal_watch_is_a_table_and_ctrl_c_ends_it_cleanly(tmp_path):
    master, slave = pty.openpty()
    arguments = ["--backend", "simulated", "--device", "h100-sxm", "--interval", "0.1", "--state-dir", str(tmp_path)]
    command = [sys.executable, "-m", "wattgym", "hw", "watch", *arguments]
    environment = {**os.environ, "COLUMNS": "160", "LINES": "40", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=slave, stderr=subprocess.PIPE, env=environment) as child:
        os.close(slave)
        seen = b""
        while b"620" not in seen and b"110.0" not in seen:
            seen += os.read(master, 4096)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    os.close(master)
    assert b"power W" in seen
    assert b"SIM-h100-sxm-0" in seen
    assert child.returncode == 0
    assert errors == b""
