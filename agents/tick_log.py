"""The log of a live run: one row a tick, readable at any moment, whatever ends the run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wattgym.errors import UserError
from wattgym.files import atomic_path


class TickLog:
    """A CSV file that grows by whole rows, each handed to the operating system in one call.

    A process that is killed leaves every row that it had written; a full disk loses rows, counted, but neither ends
    the control loop nor leaves half a row.

    Args:
        path: The file; it must be new.

    Raises:
        UserError: The file cannot be made.

    Attributes:
        lost: Rows that could not be written.
    """

    def __init__(self, path: Path) -> None:
        self.lost = 0
        self._columns: list[str] | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"{path}: cannot write the log: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row; the first one sets the columns, in its order."""
        lines = []
        if self._columns is None:
            lines.append(list(row))
        lines.append([_text(value) for value in row.values()])
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows(lines)
        data = buffer.getvalue().encode("utf-8")
        end = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError("no space")
        except OSError:
            self.lost += 1
            os.ftruncate(self._fd, end)
            return
        self._columns = list(row)


def convert_to_parquet(path: Path) -> Path:
    """Writes a finished log as Parquet beside the CSV file, and returns where.

    Raises:
        UserError: It cannot be written.
    """
    import pandas as pd

    target = path.with_suffix(".parquet")
    with atomic_path(target) as temporary:
        pd.read_csv(path).to_parquet(temporary, index=False)
    return target


def _text(value: Any) -> str:
    """Numbers with all their digits; nothing for None and NaN."""
    if value is None or value != value:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
