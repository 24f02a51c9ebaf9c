"""A small process that gives a device back when the controller that changed it dies or hangs.

It runs in a session of its own, so that Ctrl-C and a closing terminal do not reach it, and listens on a pipe: bytes
are signs of life, a `q` is a farewell, an end of file is the controller's death (a process descriptor says so too,
in case a forked child keeps the pipe open). Without a sign of life for longer than the lease it takes the device
away from the controller and keeps watch until that one is gone, because a controller that wakes up might still
finish a write. For NVML devices it imports neither torch nor NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog
from wattgym.hw.device import Device, DeviceError
from wattgym.hw.restore import GivenBack, Outcome, give_back, open_address, record_give_back
from wattgym.hw.state import (
    DeviceLock,
    LockedError,
    SavedState,
    StateDir,
    StateError,
    read_holder,
    read_state,
    remove_state,
)

BEAT, FAREWELL = b".", b"q"
READY, FENCED = b"ready\n", b"fenced\n"
START_S = 20.0
"""How long a watchdog may take to open its device, s; a first driver initialisation can take seconds."""
LOOK_S = 0.1
"""How often a fenced device is looked at, s."""


class WatchdogError(DeviceError):
    """No watchdog could be started, so nothing may be written."""


class Guarding(Enum):
    """What a controller learns when it gives a sign of life."""

    ON = "on"
    FENCED = "fenced"
    DEAD = "dead"


class Watchdog:
    """The controller's end: starts the process and feeds it.

    Args:
        state_dir: Folder with the session's state file.
        state: The session.
        lease_s: Longest silence, s.
        retry_s: How long the process tries to restore a device that fails, s.

    Raises:
        WatchdogError: It did not start, or cannot open the device.
    """

    def __init__(self, state_dir: StateDir, state: SavedState, *, lease_s: float, retry_s: float) -> None:
        command = [sys.executable, "-P", "-m", "wattgym.hw.watchdog", "--session", state.session]
        command += ["--state-dir", str(state_dir.path.absolute()), "--uuid", state.address.uuid]
        command += ["--pid", str(os.getpid()), "--lease", repr(lease_s), "--retry", repr(retry_s)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._feed, self._reports = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._feed, False)
        os.register_at_fork(after_in_child=self._close_pipes)
        self._await_ready(state.address.uuid)

    @property
    def pid(self) -> int:
        """The watchdog's process."""
        return self._process.pid

    def beat(self) -> Guarding:
        """Gives a sign of life, and tells whether the device is still ours to write."""
        if self._feed < 0:
            return Guarding.DEAD
        with contextlib.suppress(BlockingIOError):  # a full pipe holds signs of life enough
            try:
                os.write(self._feed, BEAT)
            except BrokenPipeError:
                return Guarding.FENCED if self._report() == FENCED else Guarding.DEAD
        report = self._report()
        if report is None:
            return Guarding.ON
        return Guarding.FENCED if report == FENCED else Guarding.DEAD

    def dismiss(self, *, done: bool) -> None:
        """Ends the process.

        Args:
            done: The device was given back; else the watchdog is left to try by itself.
        """
        if self._feed < 0:
            return
        if done:
            with contextlib.suppress(OSError):
                os.write(self._feed, FAREWELL)
        self._close_pipes()
        if not done:  # it may try for a while; somebody has to collect its exit status
            threading.Thread(target=self._process.wait, daemon=True).start()
            return
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _report(self) -> bytes | None:
        """What the process said: `None` for nothing, empty when it is gone."""
        if not select.select([self._reports], [], [], 0)[0]:
            return None
        return os.read(self._reports, 4096)

    def _await_ready(self, uuid: str) -> None:
        said, end = b"", time.monotonic() + START_S
        while not said.endswith(b"\n"):
            if not select.select([self._reports], [], [], max(0.0, end - time.monotonic()))[0]:
                break
            chunk = os.read(self._reports, 4096)
            if not chunk:
                break
            said += chunk
        if said != READY:
            self._close_pipes()
            self._process.kill()
            self._process.wait()
            why = said.decode(errors="replace").strip() or f"it did not answer within {START_S:g} s"
            raise WatchdogError(f"{uuid}: no watchdog, so nothing was changed: {why}")

    def _close_pipes(self) -> None:
        if self._feed >= 0:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._feed = self._reports = -1


@dataclass
class _Keeper:
    """The process's own side: one session on one device."""

    state_dir: StateDir
    uuid: str
    session: str
    retry_s: float
    device: Device
    audit: AuditLog

    def state(self) -> SavedState | None:
        """The session's state, unless it has ended or another controller has taken over."""
        state = read_state(self.state_dir.session_path(self.uuid))
        return state if state is not None and state.session == self.session else None

    def fence(self, *, first: bool) -> None:
        """Gives the device back from under a controller that hangs; the state file stays, for it may wake up."""
        try:
            state = self.state()
            if state is not None:
                result = self._give_back(state)
                if first or result.outcome is Outcome.RESTORED:
                    record_give_back(self.audit, result, by="watchdog: lease over", session=self.session)
        except UserError as error:
            if first:
                self.audit.record("watchdog_failed", self.uuid, session=self.session, why=str(error))

    def finish(self) -> None:
        """Gives the device back for a dead controller and clears up, unless somebody else is at it."""
        lock = DeviceLock(self.state_dir.lock_path(self.uuid), self.session)
        try:
            self._take(lock)
            state = self.state()
            if state is None:
                return
            result = self._give_back(state)
            remove_state(self.state_dir.session_path(self.uuid))
            record_give_back(self.audit, result, by="watchdog", session=self.session)
        except UserError as error:
            # What could not be given back stays in the state file for `wattgym hw restore`.
            self.audit.record("watchdog_failed", self.uuid, session=self.session, why=str(error))
        finally:
            lock.release()

    def _take(self, lock: DeviceLock) -> None:
        """The kernel frees a dead controller's lock; a child that inherited it must not stop the restore."""
        end = time.monotonic() + 1.0
        while True:
            try:
                lock.acquire()
                return
            except LockedError:
                holder = read_holder(self.state_dir.lock_path(self.uuid))
                if holder is not None and holder.session != self.session:
                    raise
                if time.monotonic() > end:
                    return
                time.sleep(0.02)

    def _give_back(self, state: SavedState) -> GivenBack:
        end = time.monotonic() + self.retry_s
        while True:
            try:
                return give_back(self.device, state)
            except DeviceError:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.1)
                with contextlib.suppress(DeviceError):  # the driver may have been loaded anew
                    fresh = open_address(state.address)
                    self.device.close()
                    self.device = fresh


def watch(keeper: _Keeper, pid: int, lease_s: float) -> None:
    """Follows a controller until it says farewell or dies, or this process is asked to end."""
    asked_to_end = False

    def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end = True

    signal.signal(signal.SIGTERM, on_sigterm)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(pid), select.POLLIN)
    os.write(1, READY)
    last_beat, fenced = time.monotonic(), False
    while True:
        silence_s = time.monotonic() - last_beat
        ready = dict(poll.poll(1000 * (LOOK_S if fenced else max(0.0, min(0.25, lease_s - silence_s)))))
        if 0 in ready:
            said = os.read(0, 65536)
            if FAREWELL in said:
                return
            if not said:
                break
            last_beat = time.monotonic()
        elif ready:
            break
        late = asked_to_end or time.monotonic() - last_beat > lease_s
        if late and not fenced:
            with contextlib.suppress(OSError):
                os.write(1, FENCED)
        if late or fenced:
            keeper.fence(first=not fenced)
            fenced = True
        if asked_to_end:
            return
    keeper.finish()


def main() -> None:
    """Runs the process; its standard input and output are the pipes to the controller."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="wattgym.hw.watchdog")
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--uuid", required=True)
    parser.add_argument("--session", required=True)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--retry", type=float, required=True)
    wanted = parser.parse_args()
    state_dir = StateDir(wanted.state_dir)
    try:
        state = read_state(state_dir.session_path(wanted.uuid))
        if state is None or state.session != wanted.session:
            raise StateError(f"{wanted.uuid}: no state of session {wanted.session}")
        device = open_address(state.address)
    except UserError as error:
        os.write(1, " ".join(str(error).split()).encode() + b"\n")
        sys.exit(2)
    os.chdir("/")
    with contextlib.suppress(OSError):  # memory pressure should not take the watchdog before the controller
        Path("/proc/self/oom_score_adj").write_text("-900", encoding="ascii")
    audit = AuditLog(state_dir.audit_path)
    watch(_Keeper(state_dir, wanted.uuid, wanted.session, wanted.retry, device, audit), wanted.pid, wanted.lease)


if __name__ == "__main__":
    main()
