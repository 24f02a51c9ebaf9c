"""What a guard tells about itself: its state, what became of each command, and counts of everything it decided."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from wattgym.hw.limits import Decision


class GuardState(StrEnum):
    """What a guard does with a command."""

    DRY_RUN = "dry run"
    ARMED = "armed"
    FROZEN = "frozen"
    CLOSED = "closed"


@dataclass
class GuardTelemetry:
    """Everything a guard decided, counted since it was made.

    Attributes:
        state: Present state.
        why: Why it is a dry run, or frozen.
        limit_mw: The limit that the guard takes to be in force (in a dry run: would be).
        requests: Commands that were asked for.
        written: Limits written to the device.
        would_write: In a dry run, limits that would have been written.
        rejected: Requests refused as wrong: not a number, out of range.
        refused: Requests not carried out because the guard is frozen or closed.
        clipped_low: Requests raised to the floor.
        clipped_high: Requests lowered to the ceiling.
        too_soon: Requests held because the last write was too recent.
        dead_banded: Requests held because they differ too little from the limit in force.
        raise_limited: Raises that were shortened.
        failed_writes: Writes that the device or the state folder refused.
        slow_writes: Writes that took longer than 0.25 s.
        read_back_retries: Reads until written limits showed, beyond the first.
        rounded: Limits that the device rounded by itself.
        failed_reads: Readings that failed or whose power was not plausible.
        implausible: Values dropped from readings.
        energy_resets: Falls of the energy counter.
        audit_failures: Audit records that could not be written.
    """

    state: GuardState = GuardState.DRY_RUN
    why: str = ""
    limit_mw: int = 0
    requests: int = 0
    written: int = 0
    would_write: int = 0
    rejected: int = 0
    refused: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    too_soon: int = 0
    dead_banded: int = 0
    raise_limited: int = 0
    failed_writes: int = 0
    slow_writes: int = 0
    read_back_retries: int = 0
    rounded: int = 0
    failed_reads: int = 0
    implausible: int = 0
    energy_resets: int = 0
    audit_failures: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for logs and JSON."""
        return {**asdict(self), "state": str(self.state)}


@dataclass(frozen=True)
class CommandResult:
    """What became of one command.

    Attributes:
        requested_w: What was asked for, W.
        limit_w: The limit in force afterwards (in a dry run: that would be), W.
        decisions: What the rules did to it.
        written: Whether the device was written to.
    """

    requested_w: float
    limit_w: float
    decisions: Decision
    written: bool
