"""A regulation signal on the controller's tick grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.trace import Trace

# Rounding slack, as a fraction of a tick, when a duration is turned into a number of ticks.
_TICK_SLACK = 1e-6
# A year at 2 s is 16 million ticks; more than this is a unit mistake and would exhaust the memory.
MAX_TICKS = 20_000_000


@dataclass(frozen=True, eq=False)
class Signal:
    """A regulation signal `r` sampled once a control period.

    `values[i]` holds on `[i * period_s, (i + 1) * period_s)`, counted from the beginning of the signal. `+1` = the
    grid wants more power, so the load falls (`wattgym.signals.convention`).

    Attributes:
        id: Family or recording, for example `regd` or `pjm_rega_2017_08_01`.
        family: Key of `SIGNAL_FAMILIES`, or `recorded` for a user's own trace.
        period_s: Control period, seconds.
        values: Samples in [-1, 1], shape `(n,)`, float64, finite, read-only.
        trace_id: Recording the signal was cut from; None for a generated one.
        start_s: Where the signal begins on that recording's clock, seconds.
        split: `train`, `validation` or `test` when drawn from a split, else None.
        meta: What a family adds, for example the event it realises or the options it used.
    """

    id: str
    family: str
    period_s: float
    values: NDArray[np.float64]
    trace_id: str | None = None
    start_s: float = 0.0
    split: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.array(self.values, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise UserError(f"signal '{self.id}': needs at least one sample in one dimension, got {values.shape}")
        if not (np.isfinite(self.period_s) and self.period_s > 0):
            raise UserError(f"signal '{self.id}': period must be positive, got {self.period_s} s")
        outside = ~(np.abs(values) <= 1.0)
        if outside.any():
            first = int(np.argmax(outside))
            raise UserError(f"signal '{self.id}': sample {first} is {values[first]}; valid: -1 to 1")
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    @property
    def duration_s(self) -> float:
        """Length of the signal, seconds."""
        return self.values.size * self.period_s


def tick_count(duration_s: float, period_s: float) -> int:
    """Whole control periods in a duration.

    Raises:
        UserError: The period is not positive, or the duration holds no whole period or more than `MAX_TICKS`.
    """
    if not (np.isfinite(period_s) and period_s > 0):
        raise UserError(f"period_s must be positive, got {period_s}")
    if not np.isfinite(duration_s):
        raise UserError(f"duration_s must be finite, got {duration_s}")
    ticks = int(np.floor(duration_s / period_s + _TICK_SLACK))
    if not 1 <= ticks <= MAX_TICKS:
        raise UserError(f"duration_s {duration_s:g} is {ticks} periods of {period_s:g} s; valid: 1 to {MAX_TICKS}")
    return ticks


def tick_times(duration_s: float, period_s: float) -> NDArray[np.float64]:
    """Start of each control period, `0, period_s, …`, seconds, shape `(n,)`."""
    return np.arange(tick_count(duration_s, period_s), dtype=np.float64) * period_s


def signal_from_trace(
    trace: Trace,
    *,
    period_s: float,
    start_s: float | None = None,
    duration_s: float | None = None,
    family: str = "recorded",
    split: str | None = None,
) -> Signal:
    """Samples a recorded regulation signal at each control period's start, by zero-order hold.

    Holding is what a receiver of the signal does between two updates; a period longer than the recording's
    interval keeps every so-manyth sample, as markets do when they score 2-s signals at 10 s.

    Args:
        trace: Recording in [-1, 1].
        period_s: Control period, seconds.
        start_s: Beginning on the trace's clock; its first sample when None.
        duration_s: Length, seconds; to the end of the trace when None.
        family: Recorded as the signal's family.
        split: Recorded as the signal's split.

    Raises:
        UserError: The window is not inside the trace (the message states the range) or a sample is outside [-1, 1].
    """
    begin = trace.start_s if start_s is None else float(start_s)
    length = trace.end_s - begin if duration_s is None else float(duration_s)
    check_inside(trace, begin, length)
    values = trace.at(begin + tick_times(length, period_s))
    return Signal(trace.id, family, period_s, values, trace.id, begin, split)


def check_inside(trace: Trace, start_s: float, duration_s: float) -> None:
    """Refuses a window that is not wholly inside a recording.

    Raises:
        UserError: States the recording's range and the window asked for.
    """
    slack = _TICK_SLACK * trace.interval_s
    if not (start_s >= trace.start_s - slack and start_s + duration_s <= trace.end_s + slack and duration_s > 0):
        raise UserError(
            f"signal '{trace.id}' covers {trace.start_s:g} s to {trace.end_s:g} s ({trace.duration_s:g} s long); "
            f"{duration_s:g} s from {start_s:g} s is not inside"
        )
