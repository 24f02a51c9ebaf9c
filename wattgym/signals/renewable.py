"""Renewable following: the load rises and falls with a recorded production curve."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.signals.signal import Signal, check_inside, tick_times
from wattgym.signals.windows import Window, no_room
from wattgym.traces.trace import Trace

_DAY_S = 86_400.0


class RenewableOptions(FrozenModel):
    """How a production curve becomes a signal over the feasible band.

    Attributes:
        reference: What counts as full production (`r = −1`): the plant's `capacity`, or the highest production of the
            same `day` (known only afterwards: a scenario, not a forecast). No production is always `r = +1`, the floor.
        time_compression: Seconds of the recording that pass in one second of the signal.
        min_daylight_share: Least share of a drawn window's samples in daylight; a night only asks for the floor.
        daylight_level: Share of full production from which a sample counts as daylight.
    """

    reference: Literal["capacity", "day"] = "capacity"
    time_compression: float = Field(1.0, ge=1.0, le=1000.0)
    min_daylight_share: float = Field(0.25, ge=0.0, le=1.0)
    daylight_level: float = Field(0.02, ge=0.0, lt=1.0)


def production_share(trace: Trace, reference: Literal["capacity", "day"]) -> NDArray[np.float64]:
    """Production as a share of full production, clipped to [0, 1] (a plant draws a little at night).

    Args:
        trace: Production record whose clock has midnight at multiples of 86,400 s.
        reference: As in `RenewableOptions`.

    Returns:
        Shares, shape `(n,)`.

    Raises:
        UserError: `capacity` is asked of a record that does not state it.
    """
    production = np.maximum(trace.values, 0.0)
    if reference == "capacity":
        capacity = trace.meta.get("capacity_mw")
        if capacity is None or not capacity > 0:
            raise UserError(f"trace '{trace.id}' states no capacity; use the renewable option reference: day")
        return np.asarray(np.minimum(production / capacity, 1.0), dtype=np.float64)
    times = trace.start_s + np.arange(production.size) * trace.interval_s
    day = np.floor(times / _DAY_S).astype(np.intp)
    highest = np.zeros(int(day[-1] - day[0]) + 1)
    np.maximum.at(highest, day - day[0], production)
    full = highest[day - day[0]]
    shares: NDArray[np.float64] = np.divide(production, full, out=np.zeros_like(production), where=full > 0)
    return shares


def renewable_signal(
    window: Window,
    start_s: float,
    duration_s: float,
    period_s: float,
    options: RenewableOptions,
    split: str | None = None,
) -> Signal:
    """Signal over a part of one window: `r = 1 − 2 · share`, linear between the recorded samples.

    Nothing outside the window is read; after its last sample the value holds.

    Raises:
        UserError: The part is not inside the window's recording.
    """
    span_s = duration_s * options.time_compression
    check_inside(window.trace, start_s, span_s)
    first_s, share = _shares(window, options.reference)
    at_s = start_s + tick_times(duration_s, period_s) * options.time_compression
    position = (at_s - first_s) / window.trace.interval_s
    values = 1.0 - 2.0 * np.interp(position, np.arange(share.size), share)
    return Signal(
        "renewable", "renewable", period_s, values, window.trace.id, start_s, split, {"options": options.model_dump()}
    )


def draw_renewable(
    windows: Sequence[Window],
    split: str,
    duration_s: float,
    period_s: float,
    rng: np.random.Generator,
    options: RenewableOptions,
) -> Signal:
    """Draws a window with enough daylight; every such beginning is equally likely.

    Raises:
        UserError: No window of the split is long enough, or none has that much daylight.
    """
    span_s = duration_s * options.time_compression
    starts = [_daylight_starts(window, span_s, options) for window in windows]
    total = sum(found.size for found in starts)
    if total == 0:
        if any(window.starts(span_s) for window in windows):
            raise UserError(
                f"renewable/{split}: no window of {span_s:g} s has {options.min_daylight_share:g} of its samples in "
                "daylight; lower min_daylight_share"
            )
        raise no_room(windows, span_s, f"renewable/{split}")
    place = int(rng.integers(total))
    index = 0
    while place >= starts[index].size:
        place -= starts[index].size
        index += 1
    window = windows[index]
    start_s = window.start_s + float(starts[index][place]) * window.trace.interval_s
    return renewable_signal(window, start_s, duration_s, period_s, options, split)


@lru_cache(maxsize=256)
def _shares(window: Window, reference: Literal["capacity", "day"]) -> tuple[float, NDArray[np.float64]]:
    part = window.trace.window(window.start_s, window.end_s - window.start_s)
    return part.start_s, production_share(part, reference)


@lru_cache(maxsize=1024)
def _daylight_starts(window: Window, span_s: float, options: RenewableOptions) -> NDArray[np.intp]:
    """Beginnings, in samples from the window's start, whose span fits and has enough daylight."""
    _, share = _shares(window, options.reference)
    needed = int(np.ceil(span_s / window.trace.interval_s - 1e-6))
    count = window.starts(span_s)
    daylight = np.concatenate([[0], np.cumsum(share > options.daylight_level)])
    lit = daylight[needed : needed + count] - daylight[:count]
    return np.flatnonzero(lit >= options.min_daylight_share * needed)
