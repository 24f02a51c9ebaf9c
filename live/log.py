"""Tables that a job appends to, one row a step; a resumed job continues them without a gap or a repetition."""

from __future__ import annotations

import csv
import errno
import io
import os
from pathlib import Path

from wattgym.files import atomic_write_text

STEPS_FILE = "steps.csv"
STEPS = (
    "step", "samples", "tokens", "loss", "micro_batch", "step_time_s", "free_step_time_s", "duty", "speed",
    "active_ranks", "rank_steps",
)  # fmt: skip
EVALUATIONS_FILE = "evaluations.csv"
EVALUATIONS = ("step", "samples", "loss")


class Table:
    """A CSV file whose first column is the step.

    Args:
        path: The file.
        columns: Names of the columns.
        last_step: Rows after this step are dropped: they belong to work that was lost and is done again.

    Raises:
        UserError: The file cannot be written.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], last_step: int) -> None:
        self._path = path
        self._pending = ""
        kept = [row for row in _rows(path, len(columns)) if int(row[0]) <= last_step]
        atomic_write_text(path, _csv([list(columns), *kept]))

    def append(self, *values: float | int | str) -> None:
        """Adds a row. Rows that the disk refused are kept and written with the next one.

        Raises:
            OSError: The disk refused.
        """
        self._pending += _csv([[repr(v) if isinstance(v, float) else str(v) for v in values]])
        self.flush()

    def flush(self) -> None:
        """Writes pending rows.

        Raises:
            OSError: The disk refused.
        """
        if not self._pending:
            return
        data = self._pending.encode("utf-8")
        with self._path.open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                file.truncate(end)  # no half row
                raise
        self._pending = ""


def _rows(path: Path, width: int) -> list[list[str]]:
    """Whole rows of an earlier process; its last one may be torn."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    whole = text[: text.rfind("\n") + 1]
    return [row for row in csv.reader(io.StringIO(whole)) if len(row) == width and row[0].isdecimal()]


def _csv(rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
