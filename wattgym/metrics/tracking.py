"""How closely power followed its target, apart from any market's rules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray, as_floats, positive, same_length

# Rounding slack when a measured value is compared with a limit.
SLACK = 1e-12


@dataclass(frozen=True)
class Tracking:
    """Tracking errors `e = power − target`, relative to the capacity unless named otherwise.

    Attributes:
        nrmse: Root mean square error.
        mae: Mean absolute error.
        p95: 95th percentile of the absolute error (linear interpolation).
        bias: Mean error: positive = too much power.
        mape: Mean absolute error relative to the target, sample by sample; NaN when a target is 0.
        share_within: Share of samples whose absolute error is at most `tolerance`.
        tolerance: Limit of `share_within`.
        passed: Whether `share_within` reaches the required share.
    """

    nrmse: float
    mae: float
    p95: float
    bias: float
    mape: float
    share_within: float
    tolerance: float
    passed: bool


def tracking(
    target_w: ArrayLike,
    power_w: ArrayLike,
    *,
    capacity_w: float,
    tolerance: float = 0.30,
    required_share: float = 0.90,
) -> Tracking:
    """Tracking errors of one series, and the 30 %/90 % rule.

    The rule asks that the error is within 30 % of the capacity for 90 % of the time; the share is counted, because
    quantile definitions differ. It is the tracking constraint of data-centre regulation studies such as AQA (Zhang,
    Wilson, Paschalidis and Coskun).

    Args:
        target_w: Target power, shape `(n,)`.
        power_w: Metered power, shape `(n,)`.
        capacity_w: Offered regulation capacity.
        tolerance: Error limit, capacities.
        required_share: Share of samples that must be within it.

    Raises:
        UserError: NaN, empty, different length, or a capacity that is not positive.
    """
    target, power = as_floats(target_w, "target"), as_floats(power_w, "power")
    same_length(target, power, "target", "power")
    error = (power - target) / positive(capacity_w, "capacity_w")
    size = np.abs(error)
    share = float((size <= tolerance + SLACK).mean())
    return Tracking(
        nrmse=float(np.sqrt(np.mean(error**2))),
        mae=float(size.mean()),
        p95=float(np.quantile(size, 0.95)),
        bias=float(error.mean()),
        mape=mape(target, power) if np.all(target != 0) else float("nan"),
        share_within=share,
        tolerance=tolerance,
        passed=share >= required_share - SLACK,
    )


def mape(target_w: ArrayLike, power_w: ArrayLike) -> float:
    """Mean of `|power − target| / |target|`, as a share.

    Raises:
        UserError: NaN, empty, different length, or a target of 0, for which it is not defined.
    """
    target, power = as_floats(target_w, "target"), as_floats(power_w, "power")
    same_length(target, power, "target", "power")
    if np.any(target == 0):
        raise UserError(f"target: sample {int(np.argmax(target == 0))} is 0; MAPE is not defined, use nRMSE")
    return float(np.mean(np.abs(power - target) / np.abs(target)))


@dataclass(frozen=True)
class RampCompliance:
    """Power changes over a span of time against a limit.

    Attributes:
        share_within: Share of spans whose change is within the limits.
        max_up_w_per_s: Steepest mean rise over a span.
        max_down_w_per_s: Steepest mean fall over a span, positive.
    """

    share_within: float
    max_up_w_per_s: float
    max_down_w_per_s: float


def ramp_compliance(
    power_w: ArrayLike, *, period_s: float, span_s: float, limit_w_per_s: float, down_limit_w_per_s: float | None = None
) -> RampCompliance:
    """Checks the mean ramp over every span of a series.

    Args:
        power_w: Power, shape `(n,)`.
        period_s: Sample interval.
        span_s: Length over which a ramp is measured, a multiple of the interval (commonly 1, 10 or 60 s).
        limit_w_per_s: Steepest allowed rise, and fall unless given.
        down_limit_w_per_s: Steepest allowed fall, positive.

    Raises:
        UserError: NaN, fewer samples than one span, a span that is no multiple, or a limit that is not positive.
    """
    power = as_floats(power_w, "power")
    steps = span_s / positive(period_s, "period_s")
    n = round(steps)
    if n < 1 or abs(steps - n) > 1e-6:
        raise UserError(f"span_s {span_s:g} must be a whole multiple of period_s {period_s:g}")
    if power.ndim != 1 or power.size <= n:
        raise UserError(f"power: shape {power.shape} holds no span of {span_s:g} s; needs at least {n + 1} samples")
    up = positive(limit_w_per_s, "limit_w_per_s")
    down = up if down_limit_w_per_s is None else positive(down_limit_w_per_s, "down_limit_w_per_s")
    ramp: FloatArray = (power[n:] - power[:-n]) / span_s
    slack = 1e-9
    return RampCompliance(
        share_within=float(((ramp <= up * (1 + slack)) & (ramp >= -down * (1 + slack))).mean()),
        max_up_w_per_s=float(max(ramp.max(), 0.0)),
        max_down_w_per_s=float(max(-ramp.min(), 0.0)),
    )
