"""The watchdog process itself: what it survives, what it refuses, what it leaves to others."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from wattgym.hw.audit import read_audit
from wattgym.hw.guard import Guard
from wattgym.hw.preflight import GuardConfig
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.state import DeviceAddress, LockedError, SavedState, StateDir, StateError, is_alive, write_state
from wattgym.hw.telemetry import GuardState
from wattgym.hw.watchdog import Guarding, Watchdog, WatchdogError

ARMED = {"WATTGYM_ARM": "1"}
UUID = "SIM-h100-sxm-0"

CONTROLLER = """
import os, sys, time
from pathlib import Path
from wattgym.hw.guard import Guard
from wattgym.hw.preflight import GuardConfig
from wattgym.hw.simulated import SimulatedDevice
folder = Path(sys.argv[1])
device = SimulatedDevice("h100-sxm", state_path=folder / "board")
options = {"environ": {"WATTGYM_ARM": "1"}, "state_dir": folder / "state"}
guard = Guard(device, arm=True, config=GuardConfig(retry_s=1.5), **options)
guard.set_limit_w(400.0)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), guard.watchdog_pid, flush=True)
time.sleep(60)
"""


def until(condition, timeout_s=15.0):
    """Waits for a condition; false only if it never held."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def board(tmp_path):
    """A simulated board that processes share; its owner's limit is 600 W."""
    device = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    device.set_power_limit_mw(600_000)
    return device


@pytest.fixture
def guarded(board, tmp_path):
    """Makes armed guards on the board in this process."""
    guards = []

    def make(**config):
        options = {"environ": ARMED, "state_dir": tmp_path / "state", "exit_hooks": False}
        guards.append(Guard(board, arm=True, config=GuardConfig(**config), **options))
        return guards[-1]

    yield make
    for guard in guards:
        guard.close()


@pytest.fixture
def controller(board, tmp_path):
    """Starts a controller process in a group of its own; gives its PID and its watchdog's."""
    started, watchdogs = [], []

    def start(mode="plain"):
        line = [sys.executable, "-c", CONTROLLER, str(tmp_path), mode]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        pid, watchdog = map(int, process.stdout.readline().split())
        watchdogs.append(watchdog)
        return pid, watchdog

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    for pid in watchdogs:  # a test that failed may have left one stopped
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_it_is_in_a_session_of_its_own_and_ignores_the_terminals_signals(guarded, board):
    guard = guarded()
    pid = guard.watchdog_pid
    assert os.getsid(pid) == pid != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    time.sleep(0.3)
    assert is_alive(pid)
    guard.set_limit_w(400.0)
    assert guard.heartbeat() is GuardState.ARMED
    guard.close()
    assert not is_alive(pid)
    assert board.requested_limit_mw() == 600_000


def test_a_forked_child_of_the_controller_does_not_delay_the_restore(controller, board, tmp_path):
    pid, watchdog = controller("fork")
    assert board.requested_limit_mw() == 400_000
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: board.requested_limit_mw() == 600_000, 5.0)
    assert until(lambda: not is_alive(watchdog))
    assert not list((tmp_path / "state").glob("*.json"))


def test_asked_to_end_it_gives_the_device_back_first(controller, guarded, board):
    guard = guarded()
    guard.set_limit_w(400.0)
    os.kill(guard.watchdog_pid, signal.SIGTERM)
    assert until(lambda: board.requested_limit_mw() == 600_000)
    assert not guard.set_limit_w(450.0).written
    assert guard.telemetry.state is GuardState.FROZEN


def test_signs_of_life_hold_the_lease(guarded, board):
    guard = guarded(lease_s=0.5)
    guard.set_limit_w(400.0)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        guard.heartbeat()
        time.sleep(0.05)
    assert board.requested_limit_mw() == 400_000
    assert guard.telemetry.state is GuardState.ARMED


def test_a_write_that_ends_after_the_lease_is_undone(guarded, board):
    """The controller was past all its checks when it hung; its last write falls into a fenced device."""
    guard = guarded(lease_s=0.3)
    guard.set_limit_w(400.0)
    assert until(lambda: board.requested_limit_mw() == 600_000)
    board.set_power_limit_mw(400_000)  # what the hung write would do
    assert until(lambda: board.requested_limit_mw() == 600_000)
    assert guard.heartbeat() is GuardState.FROZEN


def test_a_foreign_limit_on_a_fenced_device_stays(guarded, board):
    guard = guarded(lease_s=0.3)
    guard.set_limit_w(400.0)
    board.write_as_other(450_000)
    time.sleep(1.0)
    assert board.requested_limit_mw() == 450_000
    guard.close()
    assert board.requested_limit_mw() == 450_000


def test_what_cannot_be_restored_in_time_stays_for_the_restore_command(controller, board, tmp_path):
    pid, watchdog = controller()
    board.inject(Faults(lost=True))
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(watchdog), 20.0)
    board.inject(Faults())
    assert board.requested_limit_mw() == 400_000
    assert (tmp_path / "state" / f"{UUID}.session.json").exists()
    assert "lost" in read_audit(tmp_path / "state" / "audit.jsonl")[-1]["why"]


def test_a_device_that_comes_back_in_time_is_restored(controller, board):
    pid, _ = controller()
    board.inject(Faults(lost=True))
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    board.inject(Faults())
    assert until(lambda: board.requested_limit_mw() == 600_000)


def test_a_new_controller_is_not_disturbed_by_the_old_ones_watchdog(controller, board, guarded):
    pid, watchdog = controller()
    os.kill(watchdog, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(pid))
    guard = guarded()
    assert any("had left its limit: restored" in note for note in guard.notes)
    assert any(f"stale lock of PID {pid}" in note for note in guard.notes)
    guard.set_limit_w(400.0)  # the very value that the old session had written
    os.kill(watchdog, signal.SIGCONT)
    assert until(lambda: not is_alive(watchdog))
    assert board.requested_limit_mw() == 400_000
    guard.close()
    assert board.requested_limit_mw() == 600_000


def test_a_second_guard_in_the_same_process_is_refused(guarded):
    guarded()
    with pytest.raises(LockedError, match=f"PID {os.getpid()}"):
        guarded()


def test_without_its_device_it_does_not_start_and_nothing_is_left(tmp_path):
    folder = StateDir(tmp_path)
    state = SavedState(DeviceAddress("simulated", UUID, str(tmp_path / "gone")), "s", os.getpid(), 600_000)
    write_state(folder.session_path(UUID), state)
    with pytest.raises(WatchdogError, match="nothing was changed"):
        Watchdog(folder, state, lease_s=1.0, retry_s=0.0)


def test_a_controller_without_a_watchdog_is_not_armed(board, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    writes = board.writes()
    with pytest.raises(WatchdogError):
        Guard(board, arm=True, environ=ARMED, state_dir=tmp_path / "state", exit_hooks=False)
    assert board.writes() == writes
    assert not list((tmp_path / "state").glob("*.json"))


def test_a_killed_watchdog_is_noticed_at_once(guarded, board):
    guard = guarded()
    guard.set_limit_w(400.0)
    pid = guard.watchdog_pid
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not is_alive(pid))
    assert guard.heartbeat() is GuardState.FROZEN
    assert board.requested_limit_mw() == 600_000


def test_a_full_pipe_is_a_sign_of_life(guarded):
    guard = guarded()
    os.kill(guard.watchdog_pid, signal.SIGSTOP)
    session = guard._session
    assert all(session.beat() is Guarding.ON for _ in range(100_000))
    os.kill(guard.watchdog_pid, signal.SIGCONT)


def test_for_nvml_it_needs_neither_numpy_nor_torch(standin, tmp_path):
    code = """
import os, sys, time
from pathlib import Path
from wattgym.hw.guard import Guard
from wattgym.hw.nvml import NvmlDevice
guard = Guard(NvmlDevice(sys.argv[1]), arm=True, state_dir=sys.argv[2])
maps = Path(f"/proc/{guard.watchdog_pid}/maps").read_text()
print("libnvidia-ml" in maps, "numpy" in maps, "torch" in maps)
guard.close()
"""
    result = standin.run(code, standin.uuid(0), str(tmp_path / "state"), WATTGYM_ARM="1")
    assert result.stdout.split() == ["True", "False", "False"], result.stderr


def test_a_full_disk_stops_the_writes_not_the_restore(guarded, board, monkeypatch):
    guard = guarded(rules={"interval_s": 0.2})
    guard.set_limit_w(400.0)

    def full(path, state, *, durable=True):
        raise StateError(f"{path}: cannot save the state (No space left on device)")

    monkeypatch.setattr("wattgym.hw.session.write_state", full)
    for _ in range(3):
        time.sleep(0.25)
        assert not guard.set_limit_w(350.0).written
    assert guard.telemetry.state is GuardState.FROZEN
    assert guard.telemetry.failed_writes == 3
    guard.close()
    assert until(lambda: board.requested_limit_mw() == 600_000)
