"""What only the simulated device has: the truth beside the sensor, seeds, shared state, every fault."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceError, DeviceLostError, PowerKind
from wattgym.hw.presets import load_presets
from wattgym.hw.restore import wait_for_limit_mw
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.voltage import PowerCurve


def settled(preset="v100-sxm2", demand=1.0, **options):
    clock = VirtualClock(50.0)
    device = SimulatedDevice(preset, clock=clock, **options)
    device.set_demand(demand)
    clock.sleep(5.0)
    return device, clock


def until(device, clock, condition, step_s=0.001, longest_s=2.0):
    """Seconds until the true power meets a condition."""
    waited_s = 0.0
    while not condition(device.true_power_w()):
        clock.sleep(step_s)
        waited_s += step_s
        assert waited_s < longest_s
    return waited_s


# --- step response of a V100, as measured (GridPilot's raw data, arXiv 2605.26384)


@pytest.mark.parametrize("cap_w", [150, 175, 200])
def test_v100_cut_takes_the_measured_time_undershoots_and_settles_below_the_cap(cap_w):
    device, clock = settled()
    device.set_power_limit_mw(1000 * cap_w)
    taken_s = until(device, clock, lambda power_w: power_w <= 1.02 * cap_w)
    assert 0.025 <= taken_s <= 0.095  # median 35 to 50 ms after the call returned, p95 150 ms
    lowest_w = min(device.true_power_w() for _ in range(400) if clock.sleep(0.001) is None)
    clock.sleep(3.0)
    final_w = device.true_power_w()
    assert final_w == pytest.approx(0.978 * cap_w, rel=1e-6)
    assert 0.005 <= 1.0 - lowest_w / final_w <= 0.09  # undershoot, at most 9 %
    assert device.read().power_w == pytest.approx(final_w, abs=0.001)


@pytest.mark.parametrize(("low_w", "high_w"), [(150, 250), (200, 250), (150, 200)])
def test_v100_raise_takes_the_measured_time_and_does_not_overshoot(low_w, high_w):
    device, clock = settled()
    device.set_power_limit_mw(1000 * low_w)
    clock.sleep(5.0)
    device.set_power_limit_mw(1000 * high_w)
    taken_s = until(device, clock, lambda power_w: power_w >= 0.97 * high_w)
    assert 0.100 <= taken_s <= 0.430  # median 157 to 224 ms, p95 up to 430 ms
    highest_w = max(device.true_power_w() for _ in range(1000) if clock.sleep(0.001) is None)
    assert highest_w <= 1.016 * high_w


# --- three powers


def test_the_average_reading_is_a_linear_ramp_and_the_instant_one_a_step():
    average, clock = settled("h100-sxm", power_kind=PowerKind.AVERAGE)
    start_w = average.read().power_w
    average.set_power_limit_mw(400_000)
    end_w = 400 * 0.975
    shares = []
    for _ in range(11):
        reading = average.read()
        # Where the ramp should be: the share of the window that lies after the fall, which takes some 40 ms.
        shares.append((start_w - reading.power_w) / (start_w - end_w))
        clock.sleep(0.1)
    steps = [later - earlier for earlier, later in pairwise(shares)]
    assert shares[0] == pytest.approx(0.0, abs=0.05)
    assert shares[-1] == pytest.approx(1.0, abs=0.06)
    # A boxcar rises by the same tenth each time; an exponential average would take 60 % in the first four.
    assert all(0.05 < step < 0.13 for step in steps[1:-1])
    assert average.info().power_window_s == 1.0

    instant, clock = settled("h100-sxm")
    instant.set_power_limit_mw(400_000)
    clock.sleep(0.3)
    assert instant.read().power_w == pytest.approx(end_w, rel=0.02)


def test_the_sensor_publishes_every_period_and_tells_its_age():
    device, clock = settled("h100-sxm", seed=3)
    ages, changes, last = [], 0, None
    for _ in range(200):  # 2 s in steps of 10 ms, while the load swings
        device.set_demand(0.5 + 0.5 * (changes % 2))
        clock.sleep(0.01)
        reading = device.read()
        ages.append(reading.age_s)
        changes += reading.power_w != last
        last = reading.power_w
    assert min(ages) >= 0.0
    assert max(ages) < 0.1 + 1e-9
    assert 19 <= changes <= 21


def test_truth_sensor_and_counter_are_three_things():
    device, clock = settled("a100-sxm", seed=11)
    true_w = device.true_power_w()
    sensed_w = device.read().power_w
    assert abs(sensed_w - true_w) > 0.2
    assert sensed_w == pytest.approx(true_w, rel=0.1)
    before, true_before = device.read().energy_j, device.true_energy_j()
    clock.sleep(101.0)  # a whole number of publishing periods
    counted_j = device.read().energy_j - before
    drawn_j = device.true_energy_j() - true_before
    assert counted_j == pytest.approx(sensed_w * 101.0, rel=1e-3)  # the counter integrates the sensor's view
    assert drawn_j == pytest.approx(true_w * 101.0, rel=1e-6)


def test_seeds_draw_boards_and_none_pins_the_preset():
    draws = {settled("h100-sxm", seed=seed)[0].read().power_w for seed in range(5)}
    assert len(draws) == 5
    assert settled("h100-sxm", seed=1)[0].read() == settled("h100-sxm", seed=1)[0].read()
    pinned, _ = settled("h100-sxm")
    assert pinned.read().power_w == pinned.true_power_w() == 620.0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_energy_is_the_integral_of_power_whatever_happens(data):
    device, clock = settled("v100-sxm2", seed=data.draw(st.integers(0, 9)))
    start_j, integral_j = device.true_energy_j(), 0.0
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            device.set_demand(data.draw(st.floats(0, 1)))
        else:
            device.write_as_other(1000 * data.draw(st.integers(150, 300)))
        for _ in range(data.draw(st.integers(1, 40))):
            before_w = device.true_power_w()
            clock.sleep(0.002)
            integral_j += 0.001 * (before_w + device.true_power_w())
    assert device.true_energy_j() - start_j == pytest.approx(integral_j, rel=2e-2, abs=0.3)


def test_many_changes_within_a_window_stay_close_to_the_truth():
    device, clock = settled("h100-sxm", power_kind=PowerKind.AVERAGE)
    for change in range(200):  # 20 changes a second
        device.set_demand(float(change % 2))
        clock.sleep(0.05)
    before = device.true_energy_j()
    for change in range(20):
        device.set_demand(float(change % 2))
        clock.sleep(0.05)
    assert device.read().power_w == pytest.approx(device.true_energy_j() - before, rel=0.05)


# --- faults


def test_faults_survive_the_record():
    device, _ = settled()
    given_faults = Faults(
        set_ignored=True, mig=True, set_delay_s=0.5, bmc_limit_mw=200_000, floor_w=111.5, implausible_power_w=0.0
    )
    device.inject(given_faults)
    assert device.faults() == given_faults
    device.inject(Faults())
    assert device.faults() == Faults()


@pytest.mark.parametrize("name", [f.name for f in fields(Faults) if isinstance(f.default, bool)])
def test_every_switch_round_trips(name):
    device, _ = settled()
    device.inject(replace(Faults(), **{name: True}))
    assert device.faults() == replace(Faults(), **{name: True})


def test_a_setter_that_blocks_takes_its_time_on_the_device_clock():
    device, clock = settled()
    device.inject(Faults(set_delay_s=0.5))
    before_s = clock.now_s()
    device.set_power_limit_mw(200_000)
    assert clock.now_s() - before_s == pytest.approx(0.510)
    assert device.requested_limit_mw() == 200_000


@pytest.mark.parametrize(("delay_s", "seen_mw"), [(0.0, 400_000), (0.15, 400_000), (30.0, 700_000)])
def test_a_read_back_waits_for_a_limit_that_shows_late(delay_s, seen_mw):
    device = SimulatedDevice("h100-sxm")  # on the real clock, as the waiting is
    device.inject(Faults(show_delay_s=delay_s))
    device.set_power_limit_mw(400_000)
    seen, retries = wait_for_limit_mw(device, 400_000, enforced=True)
    assert seen == seen_mw
    assert (retries > 0) == (delay_s > 0)


def test_a_stale_sensor_ages():
    device, clock = settled()
    device.inject(Faults(stale_sensor=True))
    clock.sleep(7.0)
    assert device.read().age_s == pytest.approx(7.0, abs=0.03)
    device.inject(Faults())
    assert device.read().age_s < 0.03


def test_an_unreachable_floor_can_be_raised():
    device, clock = settled()
    device.inject(Faults(floor_w=240.0))
    device.set_power_limit_mw(150_000)
    clock.sleep(3.0)
    assert device.true_power_w() == pytest.approx(240.0, rel=1e-6)


def test_the_driver_may_count_differently(tmp_path):
    device = SimulatedDevice(index=2, state_path=tmp_path / "gpu")
    assert (device.info().index, device.info().uuid) == (2, "SIM-h100-sxm-2")
    device.inject(Faults(nvml_index=5))
    again = SimulatedDevice.attach(device.state_path)
    assert (again.info().index, again.info().uuid) == (5, "SIM-h100-sxm-2")


def test_a_lost_device_goes_on_drawing_power():
    device, clock = settled()
    before = device.true_energy_j()
    device.inject(Faults(lost=True))
    clock.sleep(10.0)
    assert device.true_energy_j() > before + 2000
    with pytest.raises(DeviceLostError):
        device.read()
    device.inject(Faults())
    device.read()


@pytest.mark.parametrize("demand", [-0.1, 1.1, float("nan")])
def test_a_demand_out_of_range_is_refused(demand):
    device, _ = settled()
    with pytest.raises(UserError, match="demand"):
        device.set_demand(demand)


def test_unknown_preset_and_reading_are_one_line_errors():
    with pytest.raises(UserError, match=r"unknown GPU 'h1000'; known: .*h100-sxm"):
        SimulatedDevice("h1000")
    with pytest.raises(UserError, match=r"a100-sxm.*average"):
        SimulatedDevice("a100-sxm", power_kind=PowerKind.AVERAGE)
    with pytest.raises(UserError, match="seed"):
        SimulatedDevice(seed=-1)


@pytest.mark.parametrize("preset", list(load_presets()))
def test_every_preset_idles_trains_and_obeys(preset):
    device, clock = settled(preset, demand=0.0)
    idle_w = device.read().power_w
    device.set_demand(1.0)
    clock.sleep(5.0)
    full_w = device.read().power_w
    info = device.info()
    assert 15 < idle_w < full_w <= info.max_limit_mw / 1000
    cap_mw = round(0.6 * info.default_limit_mw)
    device.set_power_limit_mw(cap_mw)
    clock.sleep(5.0)
    assert device.read().power_w <= cap_mw / 1000
    assert device.info().min_limit_mw < info.default_limit_mw


# --- clock against power


@given(st.floats(0.05, 0.3), st.floats(0.5, 0.85), st.floats(0.6, 0.9), st.floats(0.0, 1.2))
def test_clock_and_power_invert_each_other(static, knee, floor, share):
    curve = PowerCurve(static_share=static, knee=knee, floor=floor)
    clock = curve.clock_share(share)
    assert 0.0 <= clock <= 1.0
    assert curve.power_share(1.0) == pytest.approx(1.0)
    if 0.0 < clock < 1.0:
        assert curve.power_share(clock) == pytest.approx(share, abs=1e-6)


def test_v100_curve_reproduces_the_measured_points():
    # FP32 matmul on a V100-SXM2 at locked clocks: MHz against W, fitted within 4 %.
    curve = PowerCurve(static_share=26 / 268, knee=0.75, floor=0.82)
    for mhz, watts in [(405, 60.5), (945, 118.5), (1158, 146.7), (1353, 196), (1380, 206)]:
        assert 268 * curve.power_share(mhz / 1530) == pytest.approx(watts, rel=0.04)


# --- state shared by processes

CHILD = """
import sys
from pathlib import Path
from wattgym.hw.simulated import SimulatedDevice
device = SimulatedDevice.attach(Path(sys.argv[1]))
for limit in map(int, sys.argv[2:]):
    device.set_power_limit_mw(limit)
print(device.requested_limit_mw(), device.read().power_w)
"""


def run_child(path, *limits):
    command = [sys.executable, "-W", "error", "-c", CHILD, str(path), *map(str, limits)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_two_processes_see_one_device(tmp_path):
    device = SimulatedDevice("a40", seed=5, state_path=tmp_path / "gpu")
    device.set_demand(1.0)
    limit, power_w = run_child(device.state_path, 180_000)
    assert limit == "180000"
    assert device.requested_limit_mw() == 180_000
    assert device.writes() == 1
    assert 0 < float(power_w) < 350
    # What the other wrote outlives it, and a new opening finds it.
    again = SimulatedDevice.attach(device.state_path)
    assert again.info().uuid == device.info().uuid
    assert again.info().requested_limit_mw == 180_000
    assert again.read().power_w == pytest.approx(device.read().power_w, rel=0.2)


def _write_many(path, limits, times):
    device = SimulatedDevice.attach(path)
    for turn in range(times):
        device.write_as_other(limits[turn % len(limits)])
        with device._transaction() as (state, _):
            state["writes"] += 1


def test_concurrent_writers_lose_no_update(tmp_path):
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "gpu")
    context = multiprocessing.get_context("fork")
    arguments = (device.state_path, [300_000, 400_000, 500_000], 200)
    processes = [context.Process(target=_write_many, args=arguments) for _ in range(3)]
    threads = [threading.Thread(target=_write_many, args=arguments) for _ in range(2)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join()
    assert device.writes() == 5 * 200
    assert device.requested_limit_mw() in arguments[1]


WRITER = """
import sys
from pathlib import Path
from wattgym.hw.simulated import SimulatedDevice
device = SimulatedDevice.attach(Path(sys.argv[1]))
print(flush=True)
while True:
    device.write_as_other(300_000)
    device.write_as_other(400_000)
"""


def test_a_killed_process_leaves_the_device_usable(tmp_path):
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "gpu")
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(device.state_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            while device.requested_limit_mw() == 700_000:
                pass
            os.kill(child.pid, signal.SIGKILL)
        assert device.requested_limit_mw() in (300_000, 400_000)
        device.read()
        device.write_as_other(700_000)


@pytest.mark.parametrize("damage", ["half", "other", "long"])
def test_a_damaged_state_file_is_one_clear_line(tmp_path, damage):
    path = tmp_path / "gpu"
    device = SimulatedDevice("h100-sxm", state_path=path)
    data = path.read_bytes()
    path.write_bytes({"half": data[: len(data) // 2], "other": b"x" * len(data), "long": data + b"more"}[damage])
    for call in (device.read, lambda: SimulatedDevice.attach(path), lambda: SimulatedDevice(state_path=path)):
        with pytest.raises(DeviceError, match="damaged"):
            call()
    assert path.stat().st_size  # what was there is left for a person to look at


def test_a_state_file_of_another_device_is_refused(tmp_path):
    path = tmp_path / "gpu"
    SimulatedDevice("h100-sxm", state_path=path, seed=1)
    for other in ({"preset": "a40"}, {"index": 1, "seed": 1}, {"seed": 2}, {}):
        with pytest.raises(DeviceError, match="use another file"):
            SimulatedDevice(**{"preset": "h100-sxm", "state_path": path, **other})


def test_a_missing_folder_is_one_clear_line(tmp_path):
    with pytest.raises(DeviceError, match="No such file"):
        SimulatedDevice(state_path=tmp_path / "none" / "gpu")
    with pytest.raises(DeviceError, match="cannot read"):
        SimulatedDevice.attach(tmp_path / "gpu")


def test_a_reboot_restarts_the_history_not_the_limit(tmp_path):
    path = tmp_path / "gpu"
    before = SimulatedDevice(state_path=path, clock=VirtualClock(10_000.0))
    before.write_as_other(400_000)
    after = SimulatedDevice(state_path=path, clock=VirtualClock(5.0))  # a machine's clock starts at boot
    assert after.requested_limit_mw() == 400_000
    reading = after.read()
    assert reading.power_w == pytest.approx(110.0)
    assert 0 <= reading.age_s < 0.2


def test_a_virtual_clock_does_not_run_backwards():
    with pytest.raises(ValueError, match="cannot run"):
        VirtualClock().sleep(-1.0)
