"""State files, locks and the audit log: what they hold, and what happens when they are damaged or the disk is full."""

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog, read_audit
from wattgym.hw.simulated import SimulatedDevice
from wattgym.hw.state import (
    DeviceAddress,
    DeviceLock,
    LockedError,
    SavedState,
    StateDir,
    StateError,
    default_state_dir,
    read_holder,
    read_state,
    remove_state,
    write_state,
)

STATE = SavedState(DeviceAddress("nvml", "GPU-1"), "a session", 4711, 700_000, (400_000, 450_000), True)


def test_a_state_survives_its_file(tmp_path):
    path = tmp_path / "x.session.json"
    write_state(path, STATE)
    assert read_state(path) == STATE
    write_state(path, replace(STATE, ours_mw=(500_000,)), durable=False)
    assert read_state(path).ours_mw == (500_000,)
    assert [p.name for p in tmp_path.iterdir()] == ["x.session.json"]
    remove_state(path)
    remove_state(path)
    assert read_state(path) is None


def test_file_and_folder_are_synced_before_the_first_write(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd)))
    write_state(tmp_path / "x.session.json", STATE)
    assert synced == [str(tmp_path / ".x.session.json.new"), str(tmp_path)]


@given(cut=st.integers(0, 200))
def test_a_half_written_state_is_refused_in_one_line(cut, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "half.session.json"
    write_state(path, STATE, durable=False)
    text = path.read_text()
    path.write_text(text[: min(cut, len(text) - 1)])
    with pytest.raises(StateError, match="damaged") as caught:
        read_state(path)
    assert "\n" not in str(caught.value)
    assert "nvidia-smi" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"saved_mw": -1},
        {"saved_mw": 700_000.0},
        {"saved_mw": True},
        {"saved_mw": "700000"},
        {"ours_mw": [400_000, None]},
        {"ours_mw": 400_000},
        {"version": 99},
        {"address": {"uuid": "GPU-1"}},
        {"address": None},
        {"unknown": 1},
        {"clocks_locked": "no"},
        {"session": None},
    ],
)
def test_a_state_with_wrong_values_is_refused(tmp_path, change):
    path = tmp_path / "x.session.json"
    write_state(path, STATE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StateError, match="damaged"):
        read_state(path)


@pytest.mark.parametrize("text", ["[]", "null", "5", '"text"', "\x00\x00"])
def test_something_else_in_the_file_is_refused(tmp_path, text):
    path = tmp_path / "x.session.json"
    path.write_text(text)
    with pytest.raises(StateError):
        read_state(path)


@pytest.mark.parametrize("path", ["/proc/nowhere", "/dev/null/x"])
def test_an_unwritable_folder_is_one_line(path):
    with pytest.raises(StateError, match="nothing was changed") as caught:
        StateDir(path).make()
    assert "WATTGYM_STATE_DIR" in str(caught.value)


def test_where_the_state_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("WATTGYM_STATE_DIR", str(tmp_path))
    assert default_state_dir() == tmp_path
    monkeypatch.delenv("WATTGYM_STATE_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert str(default_state_dir()) == "/var/lib/wattgym"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/home/me/.state")
    assert str(default_state_dir()) == "/home/me/.state/wattgym"


def test_a_uuid_cannot_leave_the_folder(tmp_path):
    assert StateDir(tmp_path).session_path("../../etc/passwd").parent == tmp_path


# --- locks


def test_a_second_lock_is_refused_and_told_who_has_the_first(tmp_path):
    path = tmp_path / "GPU-1.lock"
    first, second = DeviceLock(path, "one"), DeviceLock(path, "two")
    assert first.acquire() is None
    with pytest.raises(LockedError, match=f"PID {os.getpid()}"):
        second.acquire()
    first.release()
    assert second.acquire() is None  # let go in good order: nothing stale
    second.release()


def test_a_dead_processs_lock_is_taken_over_with_a_note(tmp_path):
    path = tmp_path / "GPU-1.lock"
    code = (
        "import os, sys; from pathlib import Path; from wattgym.hw.state import DeviceLock\n"
        "DeviceLock(Path(sys.argv[1]), 'dead').acquire(); os.kill(os.getpid(), 9)"
    )
    died = subprocess.Popen([sys.executable, "-c", code, str(path)])
    died.wait()
    lock = DeviceLock(path, "new")
    holder = lock.acquire()
    assert (holder.pid, holder.session) == (died.pid, "dead")
    assert read_holder(path).pid == os.getpid()
    lock.release()


@pytest.mark.parametrize("text", ["", "nonsense", "{}", '{"pid": "x"}', "4711\n"])
def test_a_damaged_lock_file_is_no_obstacle(tmp_path, text):
    path = tmp_path / "GPU-1.lock"
    path.write_text(text)
    lock = DeviceLock(path, "new")
    assert lock.acquire() is None
    lock.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    path = tmp_path / "GPU-1.lock"
    lock = DeviceLock(path, "parent")
    lock.acquire()
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(LockedError):  # the child's end of it is closed, the parent's is not
        DeviceLock(path, "other").acquire()
    lock.release()
    other = DeviceLock(path, "other")
    other.acquire()  # though the child lives
    other.release()
    os.write(done[1], b".")
    os.waitpid(child, 0)
    for fd in (*ready, *done):
        os.close(fd)


# --- audit log


def test_records_come_back_in_order_over_rotations(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=1000, keep=3)
    for number in range(45):
        log.record("set", "GPU-1" if number % 2 else "GPU-2", number=number, nothing=None)
    files = sorted(p.name for p in tmp_path.glob("audit.jsonl*") if not p.name.endswith(".lock"))
    assert files == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    assert all((tmp_path / name).stat().st_size < 1200 for name in files)
    numbers = [r["number"] for r in read_audit(tmp_path / "audit.jsonl")]
    assert numbers == list(range(numbers[0], 45))
    assert [r["number"] for r in read_audit(tmp_path / "audit.jsonl", last=3, uuid="GPU-1")] == [39, 41, 43]
    assert "nothing" not in read_audit(tmp_path / "audit.jsonl")[0]
    assert log.failures == 0


def test_two_processes_lose_no_record_while_one_rotates(tmp_path):
    code = (
        "import sys; from pathlib import Path; from wattgym.hw.audit import AuditLog\n"
        "log = AuditLog(Path(sys.argv[1]), max_bytes=2000, keep=200)\n"
        "for n in range(300): log.record('set', sys.argv[2], n=n)\n"
        "sys.exit(log.failures)"
    )
    path = tmp_path / "audit.jsonl"
    runs = [subprocess.Popen([sys.executable, "-c", code, str(path), f"GPU-{k}"]) for k in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    for k in range(3):
        assert sorted(r["n"] for r in read_audit(path, uuid=f"GPU-{k}")) == list(range(300))


def test_a_full_disk_is_counted_and_costs_one_line(tmp_path, monkeypatch):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.record("set", "GPU-1", n=0)
    real = os.write

    def half(fd, data):
        real(fd, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    log.record("set", "GPU-1", n=1)
    monkeypatch.setattr(os, "write", real)
    log.record("set", "GPU-1", n=2)
    assert log.failures == 1
    assert [r["n"] for r in read_audit(tmp_path / "audit.jsonl")] == [0, 2]


def test_a_missing_folder_is_counted(tmp_path):
    log = AuditLog(tmp_path / "nowhere" / "audit.jsonl")
    log.record("set", "GPU-1")
    assert log.failures == 1
    assert read_audit(log.path) == []


def test_a_read_only_folder_leaves_hardware_and_state_as_they_were(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    board = SimulatedDevice("h100-sxm", state_path=tmp_path / "board")
    board.write_as_other(400_000)
    uuid = board.info().uuid
    state = replace(STATE, address=DeviceAddress("simulated", uuid, str(tmp_path / "board")), clocks_locked=False)
    write_state(StateDir(folder).session_path(uuid), state)
    folder.chmod(0o555)
    # Root writes everywhere, so a child becomes somebody else first; what it needs is imported before.
    code = (
        "import os, sys; from wattgym.hw.restore import restore_all; from wattgym.hw.state import StateDir\n"
        "import wattgym.hw.simulated\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setuid(54321)\n"
        "print(restore_all(StateDir(sys.argv[1])))"
    )
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(parent.stat().st_mode | 0o055)
    line = [sys.executable, "-c", code, str(folder)]
    said = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("([], [")
    assert "nothing was changed" in said
    assert board.requested_limit_mw() == 400_000
    assert read_state(StateDir(folder).session_path(uuid)) == state


@pytest.mark.parametrize("path", ["/dev/null", "/dev/null/x"])
def test_a_folder_that_is_none_is_one_line(path):
    with pytest.raises(UserError, match="cannot read the audit log"):
        read_audit(Path(path) / "audit.jsonl")
    with pytest.raises(StateError, match="cannot read the state folder"):
        StateDir(path).states()
