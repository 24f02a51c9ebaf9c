"""Where a simulated device's state lives: in this process, or in a file that several processes share.

The whole state is one fixed-size record. A shared record is read, changed and written back under an exclusive file
lock, in one system call each way, so a process that is killed leaves either the old record or the new one. The file is
opened anew each time: a forked child then has its own lock, and threads exclude one another too.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wattgym.hw.device import DeviceError

SEGMENTS = 64
"""Changes of target kept; windows of 1 s stay exact up to this many changes a second."""

MAGIC = b"wattgym-sim-2"

STATE = np.dtype(
    [
        ("magic", "S16"),
        ("uuid", "S64"),
        ("preset", "S48"),
        ("seed", "i8"),  # -1: nothing drawn, the preset's own values
        ("index", "i8"),
        ("demand", "f8"),
        ("requested_mw", "i8"),
        ("late_mw", "i8"),  # accepted, but not shown yet; 0: none
        ("late_at_s", "f8"),
        ("active_mw", "i8"),  # the limit that the board obeys by now
        ("pending_at_s", "f8"),  # when the requested limit takes over; infinite: it has
        ("locked_min_mhz", "i8"),
        ("locked_max_mhz", "i8"),  # 0: not locked
        ("temperature_c", "f8"),
        ("temperature_at_s", "f8"),
        ("counter_start_s", "f8"),  # the energy counter's zero
        ("counter_start_j", "f8"),
        ("stale_since_s", "f8"),  # infinite: the sensor publishes
        ("writes", "i8"),
        ("segments", "i8"),  # how many are in use; the last one is current
        (
            "segment",
            [("at_s", "f8"), ("energy_j", "f8"), ("target_w", "f8"), ("amplitude_w", "f8", (3,))],
            (SEGMENTS,),
        ),
        (
            "faults",
            [
                ("permission_denied", "?"),
                ("set_ignored", "?"),
                ("lost", "?"),
                ("unknown_error", "?"),
                ("stale_sensor", "?"),
                ("mig", "?"),
                ("persistence_off", "?"),
                ("no_energy_counter", "?"),
                ("set_delay_s", "f8"),
                ("show_delay_s", "f8"),
                ("implausible_power_w", "f8"),  # NaN: none
                ("bmc_limit_mw", "i8"),  # negative: none, here and below
                ("floor_w", "f8"),
                ("min_limit_mw", "i8"),
                ("max_limit_mw", "i8"),
                ("nvml_index", "i8"),
            ],
        ),
    ]
)

State = Any
"""One record of `STATE`; fields are read and set by name."""


class StateStore(Protocol):
    """Gives exclusive access to one record."""

    def transaction(self) -> Any:
        """A context manager whose value is the record; changes are kept when the block ends without an exception."""


class MemoryStore:
    """A record of this process, for its threads."""

    def __init__(self, initial: State) -> None:
        self._state = initial
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """The record, under a lock."""
        with self._lock:
            yield self._state


class FileStore:
    """A record in a file, for all processes that name it; created with the initial record when it is new.

    Raises:
        DeviceError: The file cannot be used, or holds something else.
    """

    def __init__(self, path: Path, initial: State) -> None:
        self.path = path
        with self._locked(os.O_CREAT) as fd:
            if os.fstat(fd).st_size == 0:
                os.pwrite(fd, initial.tobytes(), 0)
            found = self._read(fd)
        for key in ("uuid", "seed"):
            if found[key] != initial[key]:
                raise DeviceError(
                    f"{path}: holds a device with {key} {found[key]}, not {initial[key]}; use another file"
                )

    @contextmanager
    def transaction(self) -> Iterator[State]:
        """The record as it is in the file, under the file's lock; written back at the end if it changed."""
        with self._locked() as fd:
            state = self._read(fd)
            before = state.tobytes()
            yield state
            after = state.tobytes()
            if after != before:
                os.pwrite(fd, after, 0)

    @contextmanager
    def _locked(self, flags: int = 0) -> Iterator[int]:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError as error:
            raise DeviceError(f"{self.path}: cannot open the simulated device's state: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _read(self, fd: int) -> State:
        return _parse(os.pread(fd, STATE.itemsize + 1, 0), self.path)


def stored_identity(path: Path) -> tuple[str, str, int, int | None]:
    """Identity of the device whose state a file holds: UUID, preset, index, seed.

    Raises:
        DeviceError: The file is missing or holds something else.
    """
    try:
        state = _parse(path.read_bytes(), path)
    except OSError as error:
        raise DeviceError(f"{path}: cannot read the simulated device's state: {error.strerror}") from None
    seed = int(state["seed"])
    return state["uuid"].decode(), state["preset"].decode(), int(state["index"]), None if seed < 0 else seed


def _parse(data: bytes, path: Path) -> State:
    if len(data) != STATE.itemsize or not data.startswith(MAGIC):
        raise DeviceError(f"{path}: not a simulated device's state, or a damaged one; delete it to start anew")
    return np.frombuffer(bytearray(data), dtype=STATE)[0]
