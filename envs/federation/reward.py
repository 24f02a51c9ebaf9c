"""The reward of site selection and its terms, each a named array."""

from __future__ import annotations

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray
from wattgym.envs.federation.config import SelectionRewardConfig
from wattgym.envs.federation.emulator import RoundResult

TERMS = ("progress", "time", "energy", "carbon", "cost", "target")
"""Names of the reward terms, as they appear in `info["reward_terms"]`."""


def reward_terms(config: SelectionRewardConfig, result: RoundResult, way: FloatArray, reached: BoolArray) -> FloatArray:
    """Weighted reward terms; their sum is the reward.

    Progress is that of the true loss, so that evaluation noise adds no variance; policies see the evaluated loss only.
    Under `rate` a round is worth its progress per second whatever its length, and the time term is 0. Under `net` it is
    worth its progress minus its length over `time_scale_s`: the sum over an episode that reaches the target is the same
    progress for every policy, minus the time it took.

    Args:
        config: Form and weights.
        result: The round.
        way: Decrease of the log loss from start to target, shape `(B,)`.
        reached: Whether the target is reached, shape `(B,)`.

    Returns:
        Terms in the order of `TERMS`, shape `(6, B)`.
    """
    terms = np.empty((len(TERMS), way.shape[0]))
    progress = result.log_progress / way
    scaled = result.seconds * (1.0 / config.time_scale_s)
    if config.form == "rate":
        # A round takes time, and so does a wait; the guard is for a step of no length, which earns nothing.
        terms[0] = np.where(scaled > 0.0, progress / np.maximum(scaled, 1e-12), 0.0)
        terms[1] = 0.0
    else:
        terms[0] = progress
        terms[1] = -scaled
    terms[2] = -config.energy_per_kwh * result.energy_kwh
    terms[3] = -config.carbon_per_kg * result.carbon_kg
    terms[4] = -config.cost_per_usd * result.cost_usd
    terms[5] = config.target * reached
    return terms
