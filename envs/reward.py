"""The reward and its terms, each a named array."""

from __future__ import annotations

import numpy as np

from wattgym.envs.config import RewardConfig
from wattgym.envs.plant import FloatArray

TERMS = ("tracking", "throughput", "actuation", "violation")
"""Names of the reward terms, as they appear in `info["reward_terms"]`."""

BAND = 0.3
"""Error per capacity within which a period counts as followed (the 30 % / 90 % rule)."""


def reward_terms(config: RewardConfig, error: FloatArray, throughput: FloatArray, movement: FloatArray) -> FloatArray:
    """Weighted reward terms; their sum is the reward.

    The tracking term is quadratic for small errors and linear beyond `huber`, so that dips no controller can prevent
    (a checkpoint) do not drown what it can; it is scaled to fall by 1 for each capacity of error.

    Args:
        config: Weights.
        error: Metered site power minus target per capacity, shape `(B,)`.
        throughput: Site's training progress relative to full speed, shape `(B,)`.
        movement: Mean change of the limits as a share of their range, shape `(B,)`.

    Returns:
        Terms in the order of `TERMS`, shape `(4, B)`.
    """
    size = np.abs(error)
    terms = np.empty((len(TERMS), size.shape[0]))
    inner = np.minimum(size, config.huber)
    # inner^2 / 2h + (size - inner): the Huber loss over h, without a branch.
    terms[0] = -config.tracking * (inner * inner / (2.0 * config.huber) + (size - inner))
    terms[1] = config.throughput * throughput
    terms[2] = -config.actuation * movement
    terms[3] = -config.violation * np.maximum(size - BAND, 0.0)
    return terms
