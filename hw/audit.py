"""Append-only log of everything that was done to a device: one JSON object per line, rotated by size."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wattgym.errors import UserError

MAX_BYTES = 10_000_000
KEEP = 5


class AuditLog:
    """Several processes append to one log; a full or broken disk is counted, never waited for.

    Args:
        path: The current file; older ones get `.1`, `.2`, … after its name.
        max_bytes: Size beyond which the file is rotated.
        keep: Number of older files.

    Attributes:
        failures: Records that could not be written.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        self.path = path
        self.failures = 0
        self._max_bytes = max_bytes
        self._keep = keep
        self._torn = False

    def record(self, event: str, uuid: str, **details: Any) -> None:
        """Appends one record: time, event, device, process, then `details` that are not `None`."""
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "uuid": uuid,
            "pid": os.getpid(),
            **{key: value for key, value in details.items() if value is not None},
        }
        line = (json.dumps(entry, default=str) + "\n").encode()
        try:
            if self._append(line) > self._max_bytes:
                self._rotate()
        except OSError:
            self.failures += 1

    def _append(self, line: bytes) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        try:
            # After a write that the disk cut short, a newline keeps the damage to that one line.
            data = b"\n" + line if self._torn else line
            self._torn = True
            if os.write(descriptor, data) != len(data):
                raise OSError("short write")
            self._torn = False
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        """Shifts the files; a second process that finds the shift under way leaves it to the first."""
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.stat().st_size > self._max_bytes:
                    self._shift()
        finally:
            os.close(lock)

    def _shift(self) -> None:
        files = [self.path, *(self._older(n) for n in range(1, self._keep + 1))]
        for source, target in reversed(list(itertools.pairwise(files))):
            if source.exists():
                source.replace(target)
        if self._keep == 0:
            self.path.unlink()

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def read_audit(path: Path, *, last: int | None = None, uuid: str | None = None) -> list[dict[str, Any]]:
    """Reads the log, older files included, oldest record first.

    Args:
        path: The current file.
        last: Only this many of the newest records.
        uuid: Only devices whose UUID starts so.

    Returns:
        The records; lines that a full disk cut short are left out.

    Raises:
        UserError: The log is there but cannot be read.
    """
    records = (r for r in _records(path) if uuid is None or str(r.get("uuid", "")).startswith(uuid))
    try:
        return list(deque(records, maxlen=last))
    except OSError as error:
        raise UserError(f"{path}: cannot read the audit log ({error.strerror})") from None


def _records(path: Path) -> Iterator[dict[str, Any]]:
    older = [p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit()]
    for file in [*sorted(older, key=lambda p: -int(p.suffix[1:])), path]:
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record
