"""Orders of sites and the sets that go with them, for whole batches."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray


class Share(FrozenModel):
    """How many sites a top-k rule takes.

    Attributes:
        share: k as a share of the eligible sites, rounded to the nearest whole number, at least 1.
    """

    share: float = Field(default=0.5, gt=0.0, le=1.0)

    def count(self, eligible: BoolArray) -> IntArray:
        """The k of each environment, shape `(B,)`."""
        k: IntArray = np.maximum(np.floor(self.share * eligible.sum(axis=1) + 0.5), 1).astype(np.int64)
        return k


def places(score: FloatArray, eligible: BoolArray) -> IntArray:
    """Each site's place by falling score, 0 first, those that are not eligible last; ties go to the lower slot.

    Args:
        score: Shape `(B, N)`.
        eligible: Shape `(B, N)`.
    """
    order = np.argsort(np.where(eligible, -score, np.inf), axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return place


def best_k(score: FloatArray, eligible: BoolArray, k: IntArray) -> BoolArray:
    """The `k` eligible sites with the highest score, shape `(B, N)`."""
    chosen: BoolArray = eligible & (places(score, eligible) < k[:, None])
    return chosen


def prefixes(score: FloatArray, eligible: BoolArray) -> BoolArray:
    """The sets of the best 1, 2, … N sites, shape `(B, N, N)`; beyond the eligible ones the sets grow no further."""
    place = places(score, eligible)
    sizes = np.arange(1, place.shape[1] + 1)
    sets: BoolArray = (place[:, None, :] < sizes[None, :, None]) & eligible[:, None, :]
    return sets


def pick(sets: BoolArray, index: IntArray) -> BoolArray:
    """One set of each environment.

    Args:
        sets: Shape `(B, C, N)`.
        index: Shape `(B,)`.

    Returns:
        Shape `(B, N)`.
    """
    picked: BoolArray = sets[np.arange(sets.shape[0]), index]
    return picked
