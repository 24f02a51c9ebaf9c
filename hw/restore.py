"""Giving a device back: the one way in which guard, watchdog and `wattgym hw restore` undo what was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog
from wattgym.hw.device import Device, DeviceError
from wattgym.hw.state import (
    DeviceAddress,
    DeviceLock,
    SavedState,
    StateDir,
    boot_id,
    file_stem,
    read_state,
    remove_state,
)

READ_BACK_S = 0.5
"""How long a new limit may take to show; a read-back can lag more than 100 ms behind the write (Variorum)."""

Opener = Callable[[DeviceAddress], Device]


class Outcome(StrEnum):
    """What giving back came to."""

    RESTORED = "restored"
    ALREADY = "already as before"
    FOREIGN = "left as found: somebody else changed it"
    REBOOTED = "nothing to do: the machine was restarted since"


@dataclass(frozen=True)
class GivenBack:
    """The result for one device.

    Attributes:
        uuid: The device.
        outcome: What was done.
        saved_mw: Limit before the controller's first write.
        found_mw: Limit found now, before anything was done; `None` after a restart, when it was not read.
    """

    uuid: str
    outcome: Outcome
    saved_mw: int
    found_mw: int | None


def address_of(device: Device) -> DeviceAddress | None:
    """How another process finds a device; `None` if it lives and dies with this one, or has a server that guards it."""
    info = device.info()
    if info.backend == "nvml":
        return DeviceAddress("nvml", info.uuid)
    shared = getattr(device, "state_path", None)
    return None if shared is None else DeviceAddress(info.backend, info.uuid, str(Path(shared).absolute()))


def open_address(address: DeviceAddress) -> Device:
    """Opens the device that an address names, in any process.

    Raises:
        UserError: It is not there, or its driver is not.
    """
    if address.state_path is not None:
        from wattgym.hw.simulated import SimulatedDevice

        return SimulatedDevice.attach(Path(address.state_path))
    from wattgym.hw.nvml import NvmlDevice

    return NvmlDevice(address.uuid)


def wait_for_limit_mw(
    device: Device, limit_mw: int, *, enforced: bool, timeout_s: float = READ_BACK_S
) -> tuple[int, int]:
    """Reads a limit back until it shows or time is up.

    Args:
        device: The device.
        limit_mw: The limit that was written.
        enforced: Also wait for the enforced limit, not only the requested one.
        timeout_s: How long to try.

    Returns:
        The last value read, and how many times more than once it had to be read.
    """
    end, pause, retries = time.monotonic() + timeout_s, 0.01, 0
    while True:
        seen = device.requested_limit_mw()
        if seen == limit_mw and enforced:
            seen = device.enforced_limit_mw()
        if seen == limit_mw or time.monotonic() >= end:
            return seen, retries
        time.sleep(pause)
        pause, retries = min(2 * pause, 0.1), retries + 1


def give_back(device: Device, state: SavedState) -> GivenBack:
    """Restores the saved limit if the present one is ours, and clocks if we locked them.

    Args:
        device: The device.
        state: What the controller found and wrote.

    Raises:
        DeviceError: The device is lost, refuses, or does not show the restored limit.
    """
    uuid, saved = state.address.uuid, state.saved_mw
    if state.clocks_locked:
        device.reset_clocks()
    found = device.requested_limit_mw()
    if found == saved:
        return GivenBack(uuid, Outcome.ALREADY, saved, found)
    if found not in state.ours_mw:
        return GivenBack(uuid, Outcome.FOREIGN, saved, found)
    device.set_power_limit_mw(saved)
    seen, _ = wait_for_limit_mw(device, saved, enforced=False)
    if seen != saved:
        raise DeviceError(f"{uuid}: the limit stays at {seen} mW after a restore to {saved} mW")
    return GivenBack(uuid, Outcome.RESTORED, saved, found)


def restore_leftover(
    state_dir: StateDir, path: Path, audit: AuditLog, *, opener: Opener = open_address
) -> GivenBack | None:
    """Undoes what a dead controller, or `wattgym hw set`, left in place; idempotent.

    Args:
        state_dir: The state folder.
        path: A session or keep file in it.
        audit: Log.
        opener: Opens the device.

    Returns:
        What was done; `None` if the file is gone by now.

    Raises:
        LockedError: A live controller owns the device.
        StateError: The file is damaged, or the folder cannot be written; nothing was changed.
        DeviceError: The device refuses; the state file stays for another try.
    """
    first = read_state(path)
    if first is None:
        return None
    lock = DeviceLock(state_dir.lock_path(first.address.uuid), session="restore")
    lock.acquire()
    try:
        state = read_state(path)  # a controller may have finished while we waited
        return None if state is None else undo(state, path, audit, opener=opener, by="restore")
    finally:
        lock.release()


def undo(state: SavedState, path: Path, audit: AuditLog, *, by: str, opener: Opener = open_address) -> GivenBack:
    """Gives back what a state file describes and removes the file; the caller holds the device's lock."""
    uuid = state.address.uuid
    if state.boot != boot_id():
        result = GivenBack(uuid, Outcome.REBOOTED, state.saved_mw, None)
    else:
        device = opener(state.address)
        try:
            result = give_back(device, state)
        finally:
            device.close()
    remove_state(path)
    record_give_back(audit, result, by=by, session=state.session)
    return result


def record_give_back(audit: AuditLog, result: GivenBack, *, by: str, session: str) -> None:
    """Logs a result."""
    audit.record(
        "give_back",
        result.uuid,
        by=by,
        session=session,
        outcome=result.outcome.name.lower(),
        old_mw=result.found_mw,
        new_mw=result.saved_mw,
    )


def restore_all(
    state_dir: StateDir, *, uuid: str | None = None, opener: Opener = open_address
) -> tuple[list[GivenBack], list[str]]:
    """Undoes every leftover of a state folder; one that fails does not keep the others waiting.

    Args:
        state_dir: The state folder.
        uuid: Only devices whose UUID starts so.
        opener: Opens a device.

    Returns:
        What was done, and one line for each file that could not be dealt with.
    """
    audit = AuditLog(state_dir.audit_path)
    done: list[GivenBack] = []
    failed: list[str] = []
    for path in state_dir.states():
        if not path.name.startswith(file_stem(uuid or "")):
            continue
        try:
            result = restore_leftover(state_dir, path, audit, opener=opener)
            if result is not None:
                done.append(result)
        except UserError as error:
            failed.append(str(error))
    return done, failed
