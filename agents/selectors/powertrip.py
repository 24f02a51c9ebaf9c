"""What the PowerTrip forms share: the power-to-cost score, predicted efficiency, and the greedy stop with patience.

Reconstruction of PowerTrip (Mehboob et al., SoCC 2025, arXiv 2507.17904). Its abstract says that sites are ordered by
a power-to-cost score and that a dynamic greedy adds sites by their marginal gain in training efficiency, accuracy
gained per unit of time; the exact formulae are not public, so these are ours:

    score        h_k = P_k / c_k             available power over the communication time of a round
    efficiency   η(S) = a(S) / T(S)          predicted gain of a round over its predicted length
    gain         a(S) = u(S) · s(K_eff(S))   local work times cohort factor of the nominal learning model

`a` knows how many sites take part and how much each trains, not which data they hold. Only ratios of η decide, so the
scale that a measured window would give to `a` falls out.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.learning import cohort_factor, local_work
from wattgym.envs.federation.view import SelectionView


class GreedySettings(FrozenModel):
    """When a greedy stops.

    Attributes:
        patience: Additions in a row that may fail to improve on the best set before it stops.
        threshold: Relative gain in efficiency from which an addition counts as an improvement.
    """

    patience: int = Field(default=2, ge=0)
    threshold: float = Field(default=0.0, ge=0.0)


def power_to_cost(view: SelectionView) -> FloatArray:
    """`P_k / c_k`, W/s, shape `(B, N)`; 0 for empty slots."""
    score: FloatArray = view.known.power_w / np.maximum(view.task.comm_s, 1e-9)
    return score


def predicted_gain(view: SelectionView, sets: BoolArray) -> FloatArray:
    """`a(S)` of candidate sets, effective site-rounds, shape `(B, C)`; 0 for an empty one.

    Args:
        view: What is known.
        sets: Shape `(B, C, N)`.
    """
    learning = view.task.learning
    work = view.work(sets)
    total = np.maximum(work.sum(axis=-1), 1e-300)
    k_eff = total**2 / np.maximum((work**2).sum(axis=-1), 1e-300)
    counted = local_work(work / learning.reference_samples, learning.work_exponent)
    gain: FloatArray = (work * counted).sum(axis=-1) / total * cohort_factor(k_eff, np.array(learning.phi))
    return gain


def predicted_efficiency(view: SelectionView, sets: BoolArray) -> FloatArray:
    """`η(S)` of candidate sets, effective site-rounds per second, shape `(B, C)`."""
    efficiency: FloatArray = predicted_gain(view, sets) / np.maximum(view.round_seconds(sets), 1e-9)
    return efficiency


def greedy_stop(efficiency: FloatArray, count: IntArray, settings: GreedySettings) -> IntArray:
    """Where the greedy ends that grows a set as long as that pays.

    Args:
        efficiency: Of the sets of the best 1, 2, … sites, shape `(B, N)`.
        count: How many of them there are, shape `(B,)`.
        settings: Patience and threshold.

    Returns:
        Index of the last set that was an improvement on all before it, shape `(B,)`; 0 where there is no site.
    """
    batch, n = efficiency.shape
    best, best_value = np.zeros(batch, dtype=np.int64), efficiency[:, 0].copy()
    failed = np.zeros(batch, dtype=np.int64)
    going = np.ones(batch, dtype=bool)
    for m in range(1, n):
        going &= m < count
        better = going & (efficiency[:, m] > best_value * (1.0 + settings.threshold))
        best, best_value = np.where(better, m, best), np.where(better, efficiency[:, m], best_value)
        failed = np.where(better, 0, failed + 1)
        going &= failed <= settings.patience
    return best
