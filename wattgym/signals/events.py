"""Demand-response events: when they come, how deep the load must go, and how fast.

An event is a trapezoid: the request rises from 0 to 1 over `ramp_in_s`, holds, and falls back over `ramp_out_s`.
`r = 1` means the whole offered capacity, here a share of the base power (`capacity_share`), so the load falls by
that share.

Start times and lengths come from recorded calls of synchronized reserve. A drawn episode is a stretch of the record's
own clock with one recorded event inside: other events of the split that fall into the stretch appear too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.signals.signal import Signal, tick_times


class EventOptions(FrozenModel):
    """Shape of an event.

    Attributes:
        capacity_share: Capacity as a share of the declared base power.
        ramp_in_s: Time from the first request to the full one; 0 = at once.
        hold_s: Nominal time at full request.
        ramp_out_s: Time of the release.
        lengths: `recorded` multiplies `hold_s` by the recorded event's length over the split's median length, so that a
            median event has the nominal length and the spread is the recorded one; `nominal` always holds `hold_s`.
        max_hold_s: Longest hold.
    """

    capacity_share: float = Field(gt=0, le=1)
    ramp_in_s: float = Field(ge=0)
    hold_s: float = Field(gt=0)
    ramp_out_s: float = Field(ge=0)
    lengths: Literal["recorded", "nominal"] = "recorded"
    max_hold_s: float = Field(gt=0)


class PeakEventOptions(EventOptions):
    """A utility's peak event, after the Phoenix demonstration of May 2025: −25 % for 3 h, 15-min ramps.

    The release is gradual, over one hour: the demonstration's was described so without a figure.
    """

    capacity_share: float = Field(0.25, gt=0, le=1)
    ramp_in_s: float = Field(900.0, ge=0)
    hold_s: float = Field(10_800.0, gt=0)
    ramp_out_s: float = Field(3_600.0, ge=0)
    max_hold_s: float = Field(36_000.0, gt=0)


class EmergencyOptions(EventOptions):
    """An unannounced emergency, after the London trial of December 2025: −30 % within 30 s, held 10 min.

    The five-minute release is our choice. Synchronized reserve is called for at most 30 min.
    """

    capacity_share: float = Field(0.30, gt=0, le=1)
    ramp_in_s: float = Field(30.0, ge=0)
    hold_s: float = Field(600.0, gt=0)
    ramp_out_s: float = Field(300.0, ge=0)
    max_hold_s: float = Field(1_800.0, gt=0)


@dataclass(frozen=True, eq=False)
class EventRecord:
    """Recorded events of one split, by start.

    Attributes:
        start_s: Starts, seconds on the record's clock, shape `(n,)`.
        length_s: Lengths, seconds, shape `(n,)`.
    """

    start_s: NDArray[np.float64]
    length_s: NDArray[np.float64]


def event_profile(
    times_s: NDArray[np.float64],
    start_s: NDArray[np.float64],
    hold_s: NDArray[np.float64],
    *,
    ramp_in_s: float,
    ramp_out_s: float,
) -> NDArray[np.float64]:
    """Request in [0, 1] at the given times; where events overlap, the deeper one counts.

    Args:
        times_s: Times, shape `(n,)`.
        start_s: Starts of the events, shape `(m,)`, on the same clock.
        hold_s: Times at full request, shape `(m,)`.
        ramp_in_s: Time from start to full request.
        ramp_out_s: Time of the release.

    Returns:
        `r`, shape `(n,)`.
    """
    since = times_s[None, :] - start_s[:, None]
    left = (ramp_in_s + hold_s + ramp_out_s)[:, None] - since
    rising = since / ramp_in_s if ramp_in_s > 0 else np.where(since >= 0, 1.0, 0.0)
    falling = left / ramp_out_s if ramp_out_s > 0 else np.where(left > 0, 1.0, 0.0)
    return np.asarray(np.clip(np.minimum(rising, falling), 0.0, 1.0).max(axis=0, initial=0.0), dtype=np.float64)


def nominal_event(
    family: str, duration_s: float, period_s: float, options: EventOptions, start_s: float = 0.0
) -> Signal:
    """One event of nominal length that begins with the signal's clock; `start_s` cuts into it."""
    times = start_s + tick_times(duration_s, period_s)
    values = event_profile(
        times, np.zeros(1), np.array([options.hold_s]), ramp_in_s=options.ramp_in_s, ramp_out_s=options.ramp_out_s
    )
    return Signal(family, family, period_s, values, None, start_s, None, {"capacity_share": options.capacity_share})


def draw_event(
    family: str,
    record: EventRecord,
    split: str,
    duration_s: float,
    period_s: float,
    rng: np.random.Generator,
    options: EventOptions,
    trace_id: str,
) -> Signal:
    """Draws one recorded event and where in the episode it begins.

    The beginning is uniform over the places where the whole event fits; when the episode is shorter than the
    event, over its first half, and the episode ends within the event. It falls on a tick.

    Raises:
        UserError: The split has no event.
    """
    if record.start_s.size == 0:
        raise UserError(f"{family}/{split}: no recorded event belongs to this split")
    times = tick_times(duration_s, period_s)
    holds = _holds(record, options)
    chosen = int(rng.integers(record.start_s.size))
    whole = options.ramp_in_s + holds[chosen] + options.ramp_out_s
    room = duration_s - whole if whole <= duration_s else duration_s / 2
    onset_s = float(times[int(rng.integers(int(room / period_s) + 1))]) if room >= period_s else 0.0
    episode_s = float(record.start_s[chosen]) - onset_s
    longest = options.ramp_in_s + float(holds.max()) + options.ramp_out_s
    first, last = np.searchsorted(record.start_s, [episode_s - longest, episode_s + duration_s])
    near = slice(int(first), int(last))
    values = event_profile(
        times,
        record.start_s[near] - episode_s,
        holds[near],
        ramp_in_s=options.ramp_in_s,
        ramp_out_s=options.ramp_out_s,
    )
    meta = {
        "capacity_share": options.capacity_share,
        "onset_s": onset_s,
        "hold_s": float(holds[chosen]),
        "recorded_length_s": float(record.length_s[chosen]),
        "options": options.model_dump(),
    }
    return Signal(family, family, period_s, values, trace_id, episode_s, split, meta)


def _holds(record: EventRecord, options: EventOptions) -> NDArray[np.float64]:
    if options.lengths == "nominal":
        return np.full(record.length_s.size, min(options.hold_s, options.max_hold_s))
    relative = record.length_s / np.median(record.length_s)
    return np.asarray(np.minimum(options.hold_s * relative, options.max_hold_s), dtype=np.float64)
