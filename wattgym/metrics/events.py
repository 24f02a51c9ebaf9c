"""Whether a site kept its promise during a demand-response event."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray, as_floats, positive, same_length

_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class EventCompliance:
    """Compliance with one event. Powers in watts, times from the first sample.

    Attributes:
        limit_w: Highest allowed power of each sample, shape `(n,)`; infinite outside the event.
        excess_w: Power above the limit, shape `(n,)`, ≥ 0.
        max_excess_w: Largest excess.
        mean_excess_w: Mean excess over the samples of the event.
        violation_share: Share of the event's samples above the limit.
        delivered_share: Delivered over committed energy between full depth and release; reductions below 0 count as
            0 and more than was committed counts in full. NaN when the series ends before full depth.
        time_to_target_s: From the first request until power first is at or below full depth; None if never.
        rebound_w: Largest power above the baseline after the event; 0 if none or if the series ends before.
    """

    limit_w: FloatArray
    excess_w: FloatArray
    max_excess_w: float
    mean_excess_w: float
    violation_share: float
    delivered_share: float
    time_to_target_s: float | None
    rebound_w: float


def event_compliance(
    power_w: ArrayLike,
    *,
    baseline_w: float | ArrayLike,
    reduction: float,
    period_s: float,
    ramp_in_s: float,
    hold_s: float,
    start_s: float = 0.0,
) -> EventCompliance:
    """Compares power with the ramped limit `baseline · (1 − reduction · ramp)` of an event.

    The limit falls linearly over `ramp_in_s`, holds for `hold_s`, and ends; samples are judged at their own time. The
    release is not judged except for the rebound.

    Args:
        power_w: Metered power, shape `(n,)`, the first sample at 0 s.
        baseline_w: What the site would have drawn, one value or one per sample.
        reduction: Promised reduction as a share of the baseline, for example 0.25.
        period_s: Sample interval.
        ramp_in_s: Time allowed to full depth.
        hold_s: Time at full depth.
        start_s: First request.

    Raises:
        UserError: NaN, empty, wrong lengths, a reduction outside (0, 1], or no sample within the event.
    """
    power = as_floats(power_w, "power")
    baseline = np.full(power.shape, baseline_w) if np.ndim(baseline_w) == 0 else baseline_w
    baseline = as_floats(baseline, "baseline", low=0.0)
    same_length(baseline, power, "baseline", "power")
    if not 0 < reduction <= 1:
        raise UserError(f"reduction must be in (0, 1], got {reduction}")
    if ramp_in_s < 0 or not hold_s > 0:
        raise UserError(f"ramp_in_s must be >= 0 and hold_s > 0, got {ramp_in_s} and {hold_s}")
    t = np.arange(power.size) * positive(period_s, "period_s") - start_s
    full_s, end_s = ramp_in_s, ramp_in_s + hold_s
    during = (t >= -_SLACK) & (t < end_s - _SLACK)
    if not during.any():
        raise UserError(f"no sample within the event, {start_s:g} s to {start_s + end_s:g} s")
    depth = np.clip(t / ramp_in_s, 0.0, 1.0) if ramp_in_s > 0 else (t >= 0).astype(np.float64)
    full_w = baseline * (1.0 - reduction)
    limit = np.where(during, baseline * (1.0 - reduction * depth), np.inf)
    excess = np.maximum(np.where(during, power - limit, 0.0), 0.0)
    slack_w = _SLACK * np.maximum(np.abs(baseline), 1.0)
    above = excess > slack_w
    held = during & (t >= full_s - _SLACK)
    reached = np.flatnonzero((t >= -_SLACK) & (t < end_s - _SLACK) & (power <= full_w + slack_w))
    after = t >= end_s - _SLACK
    return EventCompliance(
        limit_w=limit,
        excess_w=excess,
        max_excess_w=float(excess.max()),
        mean_excess_w=float(excess[during].mean()),
        violation_share=float(above[during].mean()),
        delivered_share=_delivered(baseline[held], power[held], reduction),
        time_to_target_s=float(t[reached[0]]) if reached.size else None,
        rebound_w=float(np.maximum(power - baseline, 0.0)[after].max(initial=0.0)),
    )


def _delivered(baseline: FloatArray, power: FloatArray, reduction: float) -> float:
    committed = float(baseline.sum() * reduction)
    return float(np.maximum(baseline - power, 0.0).sum()) / committed if committed > 0 else float("nan")
