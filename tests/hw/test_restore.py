"""Giving back, and `hw set`, `hw restore`, `hw log` on the NVML stand-in: real processes, one line per fault."""

import itertools
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.hw.device import DeviceError
from wattgym.hw.guard import Guard
from wattgym.hw.restore import Outcome, give_back, restore_all
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.state import DeviceAddress, DeviceLock, SavedState, StateDir, read_state, write_state


class Commands:
    """Runs `wattgym hw …` on a machine of simulated GPUs."""

    def __init__(self, standin, state_dir):
        self.standin = standin
        self.state_dir = state_dir

    def __call__(self, *arguments, arm=True):
        line = [sys.executable, "-m", "wattgym", "hw", *arguments, "--state-dir", str(self.state_dir)]
        env = self.standin.env(WATTGYM_ARM="1" if arm else "")
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)

    @property
    def limit_mw(self):
        return int(self.standin.get(0, "requested_mw"))


@pytest.fixture
def hw(standin, tmp_path):
    """The machine; the owner of GPU 0, an H100, has set 650 W."""
    standin.set(0, "requested_mw", 650_000)
    return Commands(standin, tmp_path / "state")


def saved(path="/nowhere", **changes):
    state = SavedState(DeviceAddress("simulated", "SIM-h100-sxm-0", str(path)), "dead", 4711, 600_000, (400_000,))
    return replace(state, **changes)


# --- giving back


@given(
    present=st.sampled_from([600_000, 400_000, 450_000, 500_000, 700_000]),
    ours=st.sets(st.sampled_from([400_000, 450_000, 500_000]), min_size=1, max_size=2),
)
def test_only_our_own_limits_are_undone_and_twice_is_once(present, ours):
    device = SimulatedDevice("h100-sxm")
    device.write_as_other(present)
    state = saved(ours_mw=tuple(ours))
    first = give_back(device, state)
    expected = 600_000 if present in ours else present
    assert device.requested_limit_mw() == expected
    assert (first.outcome is Outcome.RESTORED) == (present in ours)
    assert (first.outcome is Outcome.ALREADY) == (present == 600_000)
    second = give_back(device, state)
    assert device.requested_limit_mw() == expected
    assert second.outcome is (Outcome.FOREIGN if first.outcome is Outcome.FOREIGN else Outcome.ALREADY)


class Crash(BaseException):
    """The end of the process, as far as the code can tell."""


@pytest.mark.parametrize("point", range(7))
def test_a_crash_at_any_step_of_a_write_can_be_undone(tmp_path, point):
    """Before and after each of: the state announced, the device written, the state confirmed."""
    board = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    board.write_as_other(600_000)
    folder = tmp_path / "state"
    seconds = itertools.count(0.0, 2.0)
    options = {"environ": {"WATTGYM_ARM": "1"}, "clock": lambda: next(seconds), "exit_hooks": False}
    guard = Guard(board, arm=True, state_dir=folder, **options)
    guard.set_limit_w(450.0)
    session, steps = guard._session, iter(range(100))

    def crash_here():
        if next(steps) == point:
            raise Crash

    def crashing(plain):
        def call(*arguments):
            crash_here()
            plain(*arguments)
            crash_here()

        return call

    session._save = crashing(session._save)
    board.set_power_limit_mw = crashing(board.set_power_limit_mw)
    if point < 6:
        with pytest.raises(Crash):
            guard.set_limit_w(400.0)
    else:  # a whole write takes six steps
        assert guard.set_limit_w(400.0).written
    os.kill(guard.watchdog_pid, signal.SIGKILL)
    session._lock._drop()
    assert board.requested_limit_mw() == (400_000 if point >= 3 else 450_000)
    done, failed = restore_all(StateDir(folder))
    assert ([d.outcome for d in done], failed) == ([Outcome.RESTORED], [])
    assert SimulatedDevice.attach(tmp_path / "board").requested_limit_mw() == 600_000
    session._watchdog.dismiss(done=True)


def test_a_device_that_ignores_the_restore_is_reported():
    device = SimulatedDevice("h100-sxm")
    device.write_as_other(400_000)
    device.inject(Faults(set_ignored=True))
    with pytest.raises(DeviceError, match="stays at 400000 mW"):
        give_back(device, saved())


def test_after_a_restart_of_the_machine_nothing_is_written(tmp_path):
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    device.write_as_other(400_000)
    folder = StateDir(tmp_path / "state")
    folder.make()
    write_state(folder.session_path(device.info().uuid), saved(tmp_path / "board", boot="another boot"))
    done, failed = restore_all(folder)
    assert ([d.outcome for d in done], failed) == ([Outcome.REBOOTED], [])
    assert device.requested_limit_mw() == 400_000
    assert folder.states() == []


def test_one_damaged_file_does_not_keep_the_others_waiting(tmp_path):
    folder = StateDir(tmp_path / "state")
    folder.make()
    devices = [SimulatedDevice("h100-sxm", index=n, state_path=tmp_path / f"board{n}") for n in range(3)]
    for n, device in enumerate(devices):
        device.write_as_other(400_000)
        uuid = device.info().uuid
        address = DeviceAddress("simulated", uuid, str(tmp_path / f"board{n}"))
        write_state(folder.session_path(uuid), saved(address=address))
    folder.session_path(devices[1].info().uuid).write_text('{"version": 1, "addr')
    done, failed = restore_all(folder)
    assert [d.uuid for d in done] == ["SIM-h100-sxm-0", "SIM-h100-sxm-2"]
    assert len(failed) == 1
    assert [d.requested_limit_mw() for d in devices] == [600_000, 400_000, 600_000]


def test_a_live_controllers_device_is_not_touched(tmp_path):
    folder = StateDir(tmp_path / "state")
    folder.make()
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    device.write_as_other(400_000)
    path = folder.session_path("SIM-h100-sxm-0")
    write_state(path, saved(tmp_path / "board"))
    lock = DeviceLock(folder.lock_path("SIM-h100-sxm-0"), "alive")
    lock.acquire()
    done, failed = restore_all(folder)
    lock.release()
    assert done == []
    assert "already controls this device" in failed[0]
    assert device.requested_limit_mw() == 400_000
    assert read_state(path) is not None


def test_a_restore_that_fails_can_be_tried_again(tmp_path):
    folder = StateDir(tmp_path / "state")
    folder.make()
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    device.write_as_other(400_000)
    write_state(folder.session_path("SIM-h100-sxm-0"), saved(tmp_path / "board"))
    device.inject(Faults(permission_denied=True))
    _, failed = restore_all(folder)
    assert "permission denied" in failed[0]
    device.inject(Faults())
    done, _ = restore_all(folder)
    assert done[0].outcome is Outcome.RESTORED
    assert device.requested_limit_mw() == 600_000


# --- commands


@pytest.mark.parametrize(("flags", "arm"), [([], True), (["--arm"], False)])
def test_set_without_both_keys_is_a_dry_run(hw, flags, arm):
    result = hw("set", "--device", "0", "--watts", "300", *flags, arm=arm)
    assert result.returncode == 0, result.stderr
    assert "dry run, nothing written: 650 W -> 300 W" in result.stdout
    assert hw.limit_mw == 650_000
    assert hw.standin.get(0, "set_calls") == 0


def test_set_stays_and_restore_gives_the_owners_limit_back_once(hw):
    result = hw("set", "--device", hw.standin.uuid(0), "--watts", "300", "--arm")
    assert (result.returncode, result.stdout) == (0, f"{hw.standin.uuid(0)}: 650 W -> 300 W\n"), result.stderr
    assert hw.limit_mw == 300_000
    again = hw("set", "--device", "0", "--watts", "400.5", "--arm")  # a raise takes its steps
    assert again.returncode == 0, again.stderr
    assert hw.limit_mw == 400_500
    restored = hw("restore")
    assert "restored (400.5 W -> 650 W)" in restored.stdout
    assert hw.limit_mw == 650_000
    twice = hw("restore")
    assert (twice.returncode, "nothing to restore" in twice.stdout) == (0, True)


def test_restore_after_set_leaves_a_foreign_limit(hw):
    hw("set", "--device", "0", "--watts", "300", "--arm")
    hw.standin.set(0, "requested_mw", 500_000)
    result = hw("restore")
    assert "somebody else changed it" in result.stdout
    assert hw.limit_mw == 500_000
    assert "nothing to restore" in hw("restore").stdout


def test_set_for_a_while_gives_back_by_itself(hw):
    result = hw("set", "--device", "0", "--watts", "300", "--arm", "--for", "0.3")
    assert result.returncode == 0, result.stderr
    assert "giving 650 W back" in result.stdout
    assert hw.limit_mw == 650_000
    events = [r["event"] for r in map(json.loads, hw("log", "--json").stdout.splitlines())]
    assert events == ["armed", "set", "close", "give_back"]


def test_the_log_names_time_device_values_and_program(hw):
    hw("set", "--device", "0", "--watts", "300", "--arm")
    text = hw("log", "--last", "5").stdout
    line = next(line for line in text.splitlines() if "  set  " in line)
    assert hw.standin.uuid(0) in line
    assert "old_mw=650000  new_mw=300000  read_back_mw=300000" in line
    assert "policy=wattgym hw set" in line
    assert hw("log", "--device", "GPU-ffff").stdout.startswith("no records")


BAD = {
    "unknown UUID": (["--device", "GPU-ffffffff", "--watts", "300"], "GPU-ffffffff"),
    "index out of range": (["--device", "7", "--watts", "300"], "7"),
    "milliwatts": (["--device", "0", "--watts", "300000"], "did you mean 300 W?"),
    "below the minimum": (["--device", "0", "--watts", "100"], "outside 200 to 700 W"),
    "not a number": (["--device", "0", "--watts", "nan"], "not a finite number"),
    "unknown backend": (["--device", "0", "--watts", "300", "--backend", "amd"], "amd"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_the_hardware_as_it_was(hw, case):
    arguments, message = BAD[case]
    result = hw("set", *arguments, "--arm")
    assert_refused(result, message)
    assert hw.limit_mw == 650_000


def test_a_damaged_state_file_is_one_line_for_set_and_restore(hw):
    hw.state_dir.mkdir()
    StateDir(hw.state_dir).session_path(hw.standin.uuid(0)).write_text('{"version": 1, "saved_mw": 6')
    for arguments in (("set", "--device", "0", "--watts", "300", "--arm"), ("restore",)):
        assert_refused(hw(*arguments), "damaged")
    assert hw.limit_mw == 650_000
    assert hw.standin.get(0, "set_calls") == 0


def test_an_unwritable_state_folder_is_one_line(hw):
    hw.state_dir = "/proc/nowhere"
    assert_refused(hw("set", "--device", "0", "--watts", "300", "--arm"), "cannot be written")
    assert hw.limit_mw == 650_000
    assert hw.standin.get(0, "set_calls") == 0


def test_a_stale_lock_is_taken_over_and_said_so(hw):
    hw.state_dir.mkdir()
    lock = StateDir(hw.state_dir).lock_path(hw.standin.uuid(0))
    lock.write_text('{"pid": 4194304, "session": "dead", "program": "train.py"}')
    result = hw("set", "--device", "0", "--watts", "300", "--arm")
    assert result.returncode == 0, result.stderr
    assert "took over the stale lock of PID 4194304 (train.py)" in result.stdout
    assert hw.limit_mw == 300_000


@pytest.mark.parametrize(
    ("key", "value", "flag", "message"),
    [
        ("permitted", 0, None, "SYS_ADMIN"),
        ("persistence", 0, "--allow-no-persistence", "persistence mode is off"),
        ("out_of_band_mw", 500_000, "--allow-enforced-below", "500000 mW are enforced"),
        ("mig", 2, "--allow-mig", "MIG is on"),
        ("limit_supported", 0, None, "not supported"),
        ("silent_set", 1, None, "stayed at 650000 mW"),
    ],
)
def test_unfit_hardware_is_one_line_and_as_it_was(hw, key, value, flag, message):
    hw.standin.set(0, key, value)
    arguments = ["set", "--device", hw.standin.uuid(0), "--watts", "300", "--arm"]
    assert_refused(hw(*arguments), message)
    assert hw.limit_mw == 650_000
    assert list(hw.state_dir.glob("*.json")) == []
    if flag is not None:
        allowed = hw(*arguments, flag)
        assert allowed.returncode == 0, allowed.stderr
        assert hw.limit_mw == 300_000


def assert_refused(result, message):
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr
    assert result.stderr.startswith("wattgym: error: ")
    assert len(result.stderr.splitlines()) == 1
