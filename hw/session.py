"""What an armed guard leaves where a crash cannot reach it: lock, saved limit, watchdog."""

from __future__ import annotations

import contextlib
import os
import uuid as uuids
from dataclasses import replace

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog
from wattgym.hw.device import Device
from wattgym.hw.restore import GivenBack, give_back, record_give_back
from wattgym.hw.state import (
    DeviceAddress,
    DeviceLock,
    SavedState,
    StateDir,
    boot_id,
    read_state,
    remove_state,
    write_state,
)
from wattgym.hw.watchdog import Guarding, Watchdog


class Session:
    """One controller's time with a device that lives and dies with this process: nothing to save.

    Args:
        address: The device.
        saved_mw: Limit to give back at the end.

    Attributes:
        state: What was found and written.
        notes: What the operator should know about how the session began.
    """

    def __init__(self, address: DeviceAddress, saved_mw: int) -> None:
        self.state = SavedState(address, uuids.uuid4().hex, os.getpid(), saved_mw, (saved_mw,))
        self.notes: list[str] = []

    @property
    def watchdog_pid(self) -> int | None:
        """The watchdog's process, where there is one."""
        return None

    def announce(self, last_mw: int, next_mw: int) -> None:
        """Records a limit that is about to be written beside the one in force."""
        self._save(self.state.with_ours(last_mw, next_mw))

    def confirm(self, limit_mw: int) -> None:
        """Records that a limit is in the device."""
        self._save(self.state.with_ours(limit_mw))

    def announce_clocks(self) -> None:
        """Records that clocks are about to be locked."""
        self._save(replace(self.state, clocks_locked=True))

    def beat(self) -> Guarding:
        """Gives a sign of life."""
        return Guarding.ON

    def end(self, device: Device) -> GivenBack:
        """Gives the device back.

        Raises:
            DeviceError: It could not be; whoever survives tries again.
        """
        return give_back(device, self.state)

    def hand_over(self, device: Device) -> None:
        """Ends the session of a device that fails, leaving the rest to whoever can still do it."""
        with contextlib.suppress(UserError):
            give_back(device, self.state)

    def keep(self) -> None:
        """Ends the session and leaves the limit in place."""

    def _save(self, state: SavedState) -> None:
        self.state = state


class DurableSession(Session):
    """A session with a device that outlives the process.

    Args:
        device: The device, already checked; its present limit is what will be given back.
        address: How another process finds it.
        state_dir: Where lock and state go.
        audit: Log.
        lease_s: Silence after which the watchdog takes the device away, s.
        retry_s: How long the watchdog tries to restore a device that fails, s.

    Raises:
        LockedError: Another controller owns the device.
        StateError: The state folder cannot be written, or an old state in it is damaged.
        WatchdogError: No watchdog could be started.
    """

    def __init__(
        self,
        device: Device,
        address: DeviceAddress,
        state_dir: StateDir,
        audit: AuditLog,
        *,
        lease_s: float,
        retry_s: float,
    ) -> None:
        super().__init__(address, 0)
        self._state_dir = state_dir
        self._audit = audit
        self._path = state_dir.session_path(address.uuid)
        state_dir.make()
        self._lock = DeviceLock(state_dir.lock_path(address.uuid), self.state.session)
        dead = self._lock.acquire()
        if dead is not None:
            self._note(f"took over the stale lock of PID {dead.pid} ({dead.program}), which is gone")
        saved = False
        try:
            self._undo_leftover(device)
            present = device.requested_limit_mw()
            self.state = replace(self.state, saved_mw=present, ours_mw=(present,))
            write_state(self._path, self.state)
            saved = True
            self._watchdog = Watchdog(state_dir, self.state, lease_s=lease_s, retry_s=retry_s)
        except BaseException:
            if saved:
                remove_state(self._path)
            self._lock.release()
            raise

    @property
    def watchdog_pid(self) -> int | None:
        """The watchdog's process."""
        return self._watchdog.pid

    def beat(self) -> Guarding:
        """Gives a sign of life, and tells whether the watchdog is alive and content."""
        return self._watchdog.beat()

    def end(self, device: Device) -> GivenBack:
        """Gives the device back; where that fails, the watchdog goes on trying."""
        try:
            result = give_back(device, self.state)
            remove_state(self._path)
        except UserError as error:
            self._audit.record("give_back_failed", self.state.address.uuid, session=self.state.session, why=str(error))
            self.hand_over(device)
            raise
        record_give_back(self._audit, result, by="guard", session=self.state.session)
        self._watchdog.dismiss(done=True)
        self._lock.release()
        return result

    def hand_over(self, device: Device) -> None:
        """Lets the watchdog do it: it has a connection of its own, and time to try again."""
        self._lock.release()
        self._watchdog.dismiss(done=False)

    def keep(self) -> None:
        """Turns the session's state into a keep file, which `wattgym hw restore` undoes."""
        path = self._state_dir.kept_path(self.state.address.uuid)
        try:
            before = read_state(path)
        except UserError:
            before = None  # damaged: what this session found is all that is known
        kept = self.state
        if before is not None and before.boot == kept.boot and kept.saved_mw in before.ours_mw:
            kept = replace(kept, saved_mw=before.saved_mw)  # kept twice: the first owner's limit is the one to return
        write_state(path, kept)
        remove_state(self._path)
        self._audit.record("kept", kept.address.uuid, session=kept.session, old_mw=kept.saved_mw)
        self._watchdog.dismiss(done=True)
        self._lock.release()

    def _save(self, state: SavedState) -> None:
        write_state(self._path, state, durable=False)
        super()._save(state)

    def _undo_leftover(self, device: Device) -> None:
        """A controller and its watchdog both died here: what they found is what must be given back."""
        left = read_state(self._path)
        if left is None:
            return
        if left.boot == boot_id():
            result = give_back(device, left)
            record_give_back(self._audit, result, by="next controller", session=left.session)
            self._note(f"a dead controller (PID {left.pid}) had left its limit: {result.outcome}")
        remove_state(self._path)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._audit.record("note", self.state.address.uuid, session=self.state.session, text=text)
