"""Interquartile means, stratified bootstrap intervals and paired comparisons of evaluation scores.

The aggregate follows Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(NeurIPS 2021, arXiv 2108.13264): the mean of the middle half of all run-task scores, with a percentile interval from
a bootstrap that resamples within each task.

Scores come as shape `(n,)`, one per scenario, or `(runs, n)` when several training runs of one method were scored on
the same scenarios. With several runs the runs are resampled too, jointly over all tasks, because one trained policy
is used on every task: a lucky seed is lucky everywhere. Results do not depend on the order of scenarios or runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.errors import UserError

Floats = NDArray[np.float64]
NanPolicy = Literal["refuse", "omit"]
Statistic = Literal["iqm", "mean"]

MIN_RESAMPLES = 100
_CHUNK_ELEMENTS = 2_000_000  # bounds the memory of one bootstrap to some tens of megabytes


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its confidence interval.

    Attributes:
        value: The statistic of the scores themselves.
        low: Lower end of the interval; NaN if nothing was repeated, so that no interval exists.
        high: Upper end of the interval; NaN likewise.
        n: Number of scores used (scenarios times runs).
        omitted: Scenarios left out because a score was NaN (`nan_policy="omit"`).
        confidence: Coverage the interval aims at.
    """

    value: float
    low: float
    high: float
    n: int
    omitted: int = 0
    confidence: float = 0.95


def iqm(scores: ArrayLike, axis: int = -1) -> Floats:
    """Interquartile mean: the mean of the middle half of the sorted scores.

    Where a quarter of `n` is not a whole number, the scores at the two edges count by the fraction that lies inside,
    so the weights always add up to `n / 2`.

    Args:
        scores: Finite scores, any shape.
        axis: Axis to aggregate.

    Returns:
        The means, shape of `scores` without `axis`.

    Raises:
        UserError: There is no score, or one is not finite.
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim == 0 or values.shape[axis] == 0:
        raise UserError("interquartile mean: needs at least one score")
    if not np.isfinite(values).all():
        raise UserError("interquartile mean: every score must be finite, got NaN or infinity")
    return _iqm_last(np.moveaxis(values, axis, -1))


def bootstrap(
    scores: ArrayLike,
    tasks: ArrayLike | None = None,
    *,
    statistic: Statistic = "iqm",
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    nan_policy: NanPolicy = "refuse",
) -> Estimate:
    """Aggregates scores, with a percentile interval from a bootstrap stratified by task.

    Args:
        scores: Shape `(n,)` or `(runs, n)`, see the module's text.
        tasks: Task label of each scenario, shape `(n,)`; None means one task.
        statistic: `iqm` (default) or `mean`.
        resamples: Number of bootstrap resamples, at least 100; publish with 2,000 or more.
        confidence: Coverage, between 0 and 1.
        seed: Seed of the resampling; the same seed gives the same interval.
        nan_policy: `refuse` a NaN, or `omit` the scenarios that hold one and report how many.

    Returns:
        The estimate. Its interval is NaN when no task has two scenarios and there is only one run.

    Raises:
        UserError: Shapes do not fit, a score is infinite or (with `refuse`) NaN, nothing is left, or an option is
            out of range.
    """
    table, labels, omitted = _prepare(scores, tasks, nan_policy)
    aggregate = _iqm_last if statistic == "iqm" else _mean_last
    if statistic not in ("iqm", "mean"):
        raise UserError(f"statistic '{statistic}' is unknown; valid: iqm, mean")
    return _resample(table, labels, aggregate, resamples, confidence, seed, omitted)


def paired_difference(
    scores: ArrayLike,
    baseline: ArrayLike,
    tasks: ArrayLike | None = None,
    *,
    statistic: Statistic = "iqm",
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    nan_policy: NanPolicy = "refuse",
) -> Estimate:
    """Aggregates the per-scenario difference to a baseline that saw identical scenarios.

    The interval is that of the differences themselves, so variation between scenarios that both controllers share
    cancels. The interquartile mean of differences is in general not the difference of two interquartile means.

    Args:
        scores: Shape `(n,)` or `(runs, n)`.
        baseline: Shape `(n,)`, or `(runs, n)`, which enters as its mean over runs.
        tasks: As in `bootstrap`.
        statistic: As in `bootstrap`.
        resamples: As in `bootstrap`.
        confidence: As in `bootstrap`.
        seed: As in `bootstrap`.
        nan_policy: As in `bootstrap`; a scenario counts as NaN if either side is.

    Raises:
        UserError: As in `bootstrap`, or the two sides differ in their number of scenarios.
    """
    return bootstrap(
        _differences(scores, baseline),
        tasks,
        statistic=statistic,
        resamples=resamples,
        confidence=confidence,
        seed=seed,
        nan_policy=nan_policy,
    )


def probability_of_improvement(
    scores: ArrayLike,
    baseline: ArrayLike,
    tasks: ArrayLike | None = None,
    *,
    higher_is_better: bool = True,
    resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    nan_policy: NanPolicy = "refuse",
) -> Estimate:
    """Probability that the controller beats the baseline on a scenario of a task drawn at random.

    A tie counts one half and every task counts the same, as in Agarwal et al. (2021); unlike there, the two sides are
    compared scenario by scenario, because they saw the same ones.

    Args:
        scores: Shape `(n,)` or `(runs, n)`.
        baseline: As in `paired_difference`.
        tasks: As in `bootstrap`.
        higher_is_better: Whether a larger score is an improvement.
        resamples: As in `bootstrap`.
        confidence: As in `bootstrap`.
        seed: As in `bootstrap`.
        nan_policy: As in `paired_difference`.

    Raises:
        UserError: As in `paired_difference`.
    """
    difference = _differences(scores, baseline)
    wins = np.where(np.isnan(difference), np.nan, 0.5 + 0.5 * np.sign(difference) * (1 if higher_is_better else -1))
    table, labels, omitted = _prepare(wins, tasks, nan_policy)
    counts = np.bincount(labels)
    weights = np.tile(1.0 / (counts[labels] * counts.size * table.shape[0]), table.shape[0])

    def task_mean(values: Floats) -> Floats:
        return np.asarray(values @ weights, dtype=np.float64)

    return _resample(table, labels, task_mean, resamples, confidence, seed, omitted)


def _iqm_last(values: Floats) -> Floats:
    n = values.shape[-1]
    index = np.arange(n)
    # Score i covers [i, i + 1) of the sorted axis; its weight is its overlap with the middle [n/4, 3n/4).
    weights = np.clip(np.minimum(index + 1, 0.75 * n) - np.maximum(index, 0.25 * n), 0.0, 1.0)
    inside = np.flatnonzero(weights)
    first, last = inside[0], inside[-1] + 1
    middle = np.sort(values, axis=-1)[..., first:last]
    return np.asarray(middle @ weights[first:last] / weights.sum(), dtype=np.float64)


def _mean_last(values: Floats) -> Floats:
    return np.asarray(values.mean(axis=-1), dtype=np.float64)


def _differences(scores: ArrayLike, baseline: ArrayLike) -> Floats:
    ours, theirs = _as_table(scores), _as_table(baseline)
    if ours.shape[1] != theirs.shape[1]:
        raise UserError(
            f"paired comparison: {ours.shape[1]} scores against {theirs.shape[1]} of the baseline; "
            "both must cover the same scenarios"
        )
    return np.asarray(ours - theirs.mean(axis=0), dtype=np.float64)


def _as_table(scores: ArrayLike) -> Floats:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim not in (1, 2) or values.size == 0:
        raise UserError(f"scores: need shape (scenarios,) or (runs, scenarios) and at least one, got {values.shape}")
    if np.isinf(values).any():
        raise UserError("scores: every score must be finite, got infinity")
    return np.atleast_2d(values)


def _prepare(scores: ArrayLike, tasks: ArrayLike | None, nan_policy: NanPolicy) -> tuple[Floats, NDArray[np.intp], int]:
    """Checks the scores and brings them into an order that does not depend on the caller's.

    Returns:
        Scores `(runs, n)` grouped by task, task number of each column `(n,)`, number of scenarios left out.
    """
    table = _as_table(scores)
    names = np.zeros(table.shape[1]) if tasks is None else np.asarray(tasks)
    if names.shape != (table.shape[1],):
        raise UserError(f"tasks: need one label for each of the {table.shape[1]} scenarios, got shape {names.shape}")
    if nan_policy not in ("refuse", "omit"):
        raise UserError(f"nan_policy '{nan_policy}' is unknown; valid: refuse, omit")
    missing = np.isnan(table).any(axis=0)
    if missing.any() and nan_policy == "refuse":
        raise UserError(f"scores: {missing.sum()} of {missing.size} are NaN; mend them, or pass nan_policy='omit'")
    table, names = table[:, ~missing], names[~missing]
    if table.shape[1] == 0:
        raise UserError("scores: every scenario holds a NaN, nothing is left to aggregate")
    labels = np.unique(names, return_inverse=True)[1]
    columns = np.lexsort((*np.sort(table, axis=0), labels))
    rows = np.lexsort(np.sort(table, axis=1).T)
    return table[np.ix_(rows, columns)], labels[columns], int(missing.sum())


def _resample(
    table: Floats,
    labels: NDArray[np.intp],
    aggregate: Callable[[Floats], Floats],
    resamples: int,
    confidence: float,
    seed: int,
    omitted: int,
) -> Estimate:
    """Percentile interval; `aggregate` maps `(..., runs * n)` to `(...)`, run by run, columns grouped by task."""
    if resamples < MIN_RESAMPLES:
        raise UserError(f"resamples must be at least {MIN_RESAMPLES}, got {resamples}")
    if not 0.0 < confidence < 1.0:
        raise UserError(f"confidence must lie between 0 and 1, got {confidence}")
    runs, n = table.shape
    sizes = np.bincount(labels)
    value = float(aggregate(table.reshape(1, -1))[0])
    if runs == 1 and sizes.max() == 1:
        return Estimate(value, float("nan"), float("nan"), n, omitted, confidence)
    size = sizes[labels]
    start = (np.cumsum(sizes) - sizes)[labels]
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // table.size)
    draws = []
    for done in range(0, resamples, chunk):
        count = min(chunk, resamples - done)
        columns = start + rng.integers(0, size, size=(count, n))
        rows = rng.integers(0, runs, size=(count, runs))
        drawn = table[rows[:, :, None], columns[:, None, :]]
        draws.append(aggregate(drawn.reshape(count, runs * n)))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.concatenate(draws), [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high), runs * n, omitted, confidence)
