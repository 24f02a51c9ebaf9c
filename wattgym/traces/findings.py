"""What a check of a file found, by row and column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

# A file with one mistake in every row gets this many findings of the kind and one line with the number of the rest.
SHOWN_OF_A_KIND = 20


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: `error` refuses the file; `note` says what was accepted and how it was read.
        code: Kind of finding, for example `gap`, `duplicate-time`, `decimal-comma`.
        message: What is wrong and what would be valid.
        row: Line of a text file or row of a Parquet file, counted from 1; none where the whole file is meant.
        column: Column name, where one is meant.
        word: `line` or `row`.
    """

    level: Literal["error", "note"]
    code: str
    message: str
    row: int | None = None
    column: str | None = None
    word: str = "line"

    def __str__(self) -> str:
        """The finding as one line: place, then message."""
        place = [f"{self.word} {self.row}"] if self.row is not None else []
        place += [f"column '{self.column}'"] if self.column is not None else []
        return ", ".join(place) + (": " if place else "") + self.message


class Findings:
    """Collects findings of one file and keeps their number readable."""

    def __init__(self, word: str = "line") -> None:
        self.word = word
        self._found: list[Finding] = []
        self._counts: Counter[str] = Counter()

    def error(self, code: str, message: str, row: int | None = None, column: str | None = None) -> None:
        """Adds something that refuses the file."""
        self._counts[code] += 1
        if self._counts[code] <= SHOWN_OF_A_KIND:
            self._found.append(Finding("error", code, message, row, column, self.word))

    def errors(self, code: str, rows: Iterable[int], message: Callable[[int], str], column: str | None = None) -> None:
        """Adds one error a row; `message` gets the position of the row in `rows`."""
        for position, row in enumerate(rows):
            # Past the limit only the number counts, so the message is not made.
            text = message(position) if self._counts[code] < SHOWN_OF_A_KIND else ""
            self.error(code, text, int(row), column)

    def note(self, code: str, message: str, row: int | None = None, column: str | None = None) -> None:
        """Adds something that was accepted and is recorded."""
        self._found.append(Finding("note", code, message, row, column, self.word))

    @property
    def has_errors(self) -> bool:
        """Whether anything refuses the file."""
        return bool(self._counts)

    @property
    def error_count(self) -> int:
        """Number of errors, those not shown included."""
        return sum(self._counts.values())

    @property
    def notes(self) -> list[str]:
        """The notes, one line each."""
        return [str(finding) for finding in self._found if finding.level == "note"]

    def all(self) -> list[Finding]:
        """All findings by row, those about the whole file first; each kind's overflow as one line at the end."""
        ordered = sorted(self._found, key=lambda finding: finding.row or 0)
        for code, count in self._counts.items():
            if count > SHOWN_OF_A_KIND:
                ordered.append(Finding("error", code, f"and {count - SHOWN_OF_A_KIND} more of kind {code}"))
        return ordered
