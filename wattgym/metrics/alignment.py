"""Pairs the samples of two recordings, and refuses to guess when more than one pairing is possible."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, get_args

import numpy as np

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray
from wattgym.traces.trace import Trace

AlignMode = Literal["exact", "overlap", "index"]

# Two clocks agree when they differ by less than this part of an interval.
_SLACK = 1e-3


def align(signal: Trace, response: Trace, mode: str = "exact") -> tuple[FloatArray, FloatArray, float]:
    """Brings a signal and the response to it onto common samples.

    - `exact`: same interval, start and length, by their clocks.
    - `overlap`: the time that both cover, at the coarser of the two intervals; each sample holds until the next.
    - `index`: first sample to first sample whatever the clocks show; same interval; the longer one is cut.

    Args:
        signal: What was asked.
        response: What was delivered; samples that the reader filled are missing (NaN) again.
        mode: One of the three.

    Returns:
        Signal and response of equal shape `(n,)`, and their interval in seconds.

    Raises:
        UserError: Unknown mode, the two differ where the mode needs them equal, their clocks cannot be compared, or
            they have no time in common. The message names the mode that would resolve it.
    """
    if mode not in get_args(AlignMode):
        raise UserError(f"unknown alignment '{mode}'; choose one of: {', '.join(get_args(AlignMode))}")
    delivered = _with_gaps(response)
    if mode == "index":
        _same_interval(signal, response, "with index alignment")
        n = min(signal.values.size, delivered.size)
        return signal.values[:n], delivered[:n], signal.interval_s
    signal_s, response_s = _starts(signal, response)
    if mode == "exact":
        _same_interval(signal, response, "or choose the overlap alignment")
        if abs(signal_s - response_s) > _SLACK * signal.interval_s:
            raise UserError(
                f"the response starts {response_s - signal_s:g} s after the signal (negative: before); choose the "
                "overlap alignment for their common time or index for first sample to first sample"
            )
        if signal.values.size != delivered.size:
            raise UserError(
                f"the signal has {signal.values.size} samples and the response {delivered.size}; choose the overlap "
                "alignment for their common time"
            )
        return signal.values, delivered, signal.interval_s
    period_s = max(signal.interval_s, response.interval_s)
    begin_s = max(signal_s, response_s)
    end_s = min(signal_s + signal.duration_s, response_s + response.duration_s)
    n = int(np.floor((end_s - begin_s) / period_s + _SLACK))
    if n < 1:
        signal_end_s, response_end_s = signal_s + signal.duration_s, response_s + response.duration_s
        raise UserError(
            f"the signal covers {signal_s:g} s to {signal_end_s:g} s, the response {response_s:g} s to "
            f"{response_end_s:g} s: no time in common; choose the index alignment if the clocks differ"
        )
    ticks = begin_s + np.arange(n, dtype=np.float64) * period_s
    return (
        _hold(signal.values, signal_s, signal.interval_s, ticks),
        _hold(delivered, response_s, response.interval_s, ticks),
        period_s,
    )


def _with_gaps(trace: Trace) -> FloatArray:
    values = trace.values.copy()
    for first, end in trace.meta.get("filled_runs", ()):
        values[first:end] = np.nan
    return values


def _hold(values: FloatArray, start_s: float, interval_s: float, ticks: FloatArray) -> FloatArray:
    index = np.floor((ticks - start_s) / interval_s + _SLACK).astype(np.intp)
    return values[np.minimum(index, values.size - 1)]


def _same_interval(signal: Trace, response: Trace, remedy: str) -> None:
    if abs(signal.interval_s - response.interval_s) > 1e-6 * signal.interval_s:
        raise UserError(
            f"the signal has a sample every {signal.interval_s:g} s, the response every {response.interval_s:g} s; "
            f"bring them to one interval, {remedy}"
        )


def _starts(signal: Trace, response: Trace) -> tuple[float, float]:
    """Starts of both on one clock, seconds from the signal's own zero."""
    (signal_clock, signal_zero), (response_clock, response_zero) = _clock(signal), _clock(response)
    if signal_clock != response_clock:
        raise UserError(
            f"the signal's times are {signal_clock}, the response's {response_clock}: their clocks cannot be compared; "
            "choose the index alignment for first sample to first sample"
        )
    return signal.start_s, response.start_s + (response_zero - signal_zero)


def _clock(trace: Trace) -> tuple[str, float]:
    """What a trace's clock shows, and what it shows at 0 s, in seconds."""
    starts = trace.meta.get("starts")
    if starts is None:
        return "plain seconds", 0.0
    try:
        stamp = datetime.fromisoformat(starts)
    except ValueError:
        parts = [float(part) for part in str(starts).split(":")]
        return "times of day", sum(part * 60.0 ** (2 - place) for place, part in enumerate(parts))
    if stamp.tzinfo is None:
        return "local calendar times", stamp.replace(tzinfo=UTC).timestamp()
    return "UTC calendar times", stamp.timestamp()
