"""The round log: one JSON line a round, written when the round is over, read again to resume or to fit."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.messages import Assignment, Evaluation, Fate, RoundRecord, SiteMetrics, SiteOutcome

LOG_FILE = "rounds.jsonl"


class RoundLog:
    """Rounds of one run, appended one by one; a line that a crash cut short is dropped when the log is opened."""

    def __init__(self, path: Path) -> None:
        """Opens or begins a log.

        Args:
            path: The file.

        Raises:
            UserError: A line other than the last is no record of a round.
        """
        self.path = path
        self.lines: list[tuple[RoundRecord, dict[str, Any]]] = []
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            self.lines = _parse(path, whole)
            if len(whole) < len(content):
                path.write_bytes(whole)

    @property
    def records(self) -> list[RoundRecord]:
        """The rounds so far, the evaluation before training (round 0) first."""
        return [record for record, _ in self.lines]

    def append(self, record: RoundRecord, **more: Any) -> None:
        """Adds a round; it is on disk when this returns.

        Args:
            record: The round.
            **more: Further values of the line, such as emulated time and energy.
        """
        line = json.dumps({**record_json(record), **_finite(more)}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append((record, more))


def read_log(path: str | Path) -> list[tuple[RoundRecord, dict[str, Any]]]:
    """The rounds of a log with the further values of their lines.

    Raises:
        UserError: There is no such file, or it is no round log.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{file}: no such round log")
    content = file.read_bytes()
    return _parse(file, content[: content.rfind(b"\n") + 1])


def _parse(path: Path, content: bytes) -> list[tuple[RoundRecord, dict[str, Any]]]:
    found = []
    for number, text in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        try:
            found.append(_record(json.loads(text)))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number}: no record of a round: {error!r}") from None
    return found


def record_json(record: RoundRecord) -> dict[str, Any]:
    """A round as plain values that JSON has words for."""
    values: dict[str, Any] = _finite(asdict(record))
    return values


def _record(data: dict[str, Any]) -> tuple[RoundRecord, dict[str, Any]]:
    own = {field.name for field in fields(RoundRecord)}
    return record_from(data), {name: value for name, value in data.items() if name not in own}


def record_from(data: dict[str, Any]) -> RoundRecord:
    """A round from what `record_json` made of it.

    Raises:
        KeyError: A value is missing.
        TypeError: A value is of another type.
        ValueError: A value is unknown.
    """
    own = {field.name for field in fields(RoundRecord)}
    outcomes = tuple(
        SiteOutcome(
            **{
                **_numbers(outcome, ("delta_norm", "round_trip_s", "transfer_s")),
                "fate": Fate(outcome["fate"]),
                "assignment": Assignment(**outcome["assignment"]),
                "metrics": None if outcome["metrics"] is None else SiteMetrics(**_metrics(outcome["metrics"])),
            }
        )
        for outcome in data["outcomes"]
    )
    evaluation = Evaluation(**_numbers(data["evaluation"], ("accuracy",)))
    known = {name: data[name] for name in own if name not in ("outcomes", "evaluation")}
    known = _numbers(known, ("noise_scale",))
    return RoundRecord(outcomes=outcomes, evaluation=evaluation, **known)


def _metrics(data: dict[str, Any]) -> dict[str, Any]:
    whole = ("samples", "tokens", "steps")
    return {name: value if name in whole else _number(value) for name, value in data.items()}


def _numbers(data: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {**data, **{name: _number(data[name]) for name in names}}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _finite(value: Any) -> Any:
    """The same with `None` for numbers that JSON has none for."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
