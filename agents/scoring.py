"""From rollouts to metrics, by one accounting for every controller."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wattgym.agents.rollout import Arena, Rollout
from wattgym.envs.plant import FloatArray
from wattgym.metrics.pjm import PJM_VARIANTS, PjmVariant, pjm_score
from wattgym.metrics.training import actuations_per_hour

REGULATION = ("regd", "rega", "droop", "synthetic_regd", "recorded")
"""Families that a market would score as regulation; events and renewable following are measured by their error."""


def scenario_metrics(
    rollout: Rollout, uncapped: Rollout | None, variant: PjmVariant | None = PJM_VARIANTS["legacy"]
) -> Mapping[str, FloatArray]:
    """Metrics of each scenario.

    Args:
        rollout: What the controller did.
        uncapped: The uncapped run of the same scenarios; without it, what is relative to it is left out.
        variant: Rules of the regulation score; None leaves it out, as for a live run that is too short for it.

    Returns:
        Arrays of shape `(B,)` by metric name (`wattgym.agents.episodes.METRICS`); NaN where one does not apply.
    """
    hours = rollout.power_w.shape[1] * rollout.period_s / 3600.0
    error = (rollout.power_w - rollout.target_w) / rollout.capacity_w[:, None]
    size = np.abs(error)
    energy_kwh = rollout.power_w.mean(axis=1) / 1000.0 * hours
    settings = np.concatenate([rollout.limit[..., None], rollout.knobs], axis=3)  # Time goes last, knobs are summed.
    actuations = actuations_per_hour(np.moveaxis(settings, 1, 3), period_s=rollout.period_s, range_w=1.0).sum(axis=2)
    metrics = {
        **(_regulation(rollout, variant) if variant is not None else {}),
        "nrmse": np.sqrt((error**2).mean(axis=1)),
        "mae_over_r": size.mean(axis=1),
        "share_within_30pct": (size <= 0.3 + 1e-12).mean(axis=1),
        "mape": (np.abs(rollout.power_w - rollout.target_w) / rollout.target_w).mean(axis=1),
        "energy_kwh": energy_kwh,
        "actuations_per_h_per_job": actuations.mean(axis=1),
        "guard_interventions_per_h": rollout.changed.sum(axis=1) / hours,
        "reward_mean": rollout.reward.mean(axis=1),
    }
    if any(family not in REGULATION for family in rollout.families):
        metrics["mape_15min"] = quarter_hour_mape(rollout)
    if rollout.shortfall_w is not None:
        metrics["shortfall_w"] = rollout.shortfall_w
    if uncapped is not None:
        retained = _ratio(rollout.throughput.sum(axis=1), uncapped.throughput.sum(axis=1))
        metrics["throughput_retained"] = retained
        metrics["energy_per_token_relative"] = _ratio(
            rollout.power_w.sum(axis=1) / uncapped.power_w.sum(axis=1), retained
        )
    return metrics


def quarter_hour_mape(rollout: Rollout) -> FloatArray:
    """Mean absolute error of quarter-hourly mean powers as a share of the target's, shape `(B,)`.

    Renewable output and programmes of demand response are metered by the quarter of an hour. What is left of the last
    one is left out; NaN where not one is whole.
    """
    quarter = round(900.0 / rollout.period_s)
    batch, periods = rollout.power_w.shape
    whole = periods // quarter * quarter
    if whole == 0:
        return np.full(batch, np.nan)
    power, target = (x[:, :whole].reshape(batch, -1, quarter).mean(axis=2) for x in (rollout.power_w, rollout.target_w))
    error: FloatArray = np.abs(power / target - 1.0).mean(axis=1)
    return error


def check_scorable(arena: Arena, seed: int, variant: PjmVariant = PJM_VARIANTS["legacy"]) -> None:
    """Draws one scenario and scores a perfect response, so that what cannot work shows before work is spent.

    Raises:
        UserError: The scenario cannot be drawn, or is too short for the score.
    """
    (signal,) = arena.draw([seed])
    if signal.family in REGULATION:
        pjm_score(signal.values, signal.values, period_s=arena.config.period_s, variant=variant)


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """The quotient; NaN where the whole is zero (a scenario in which nothing was trained)."""
    quotient: FloatArray = np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)
    return quotient


def _regulation(rollout: Rollout, variant: PjmVariant) -> dict[str, FloatArray]:
    applies = np.array([family in REGULATION for family in rollout.families])
    names = ("composite", "correlation", "delay", "precision")
    result = {f"pjm_{name}": np.full(applies.shape, np.nan) for name in names}
    if applies.any():
        score = pjm_score(
            rollout.signal[applies], rollout.response[applies], period_s=rollout.period_s, variant=variant
        )
        for name in names:
            result[f"pjm_{name}"][applies] = getattr(score, name)
    return result
