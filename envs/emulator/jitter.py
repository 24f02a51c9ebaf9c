"""Everything random within an episode, drawn in blocks from one generator per environment.

What is drawn does not depend on what a controller does, nor on how many environments run side by side: the same seed
gives the same noise, bit for bit, in a batch of one and in a batch of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattgym.envs.emulator.phases import PhaseFamily
from wattgym.envs.plant import IntArray

BLOCK = 64
"""Ticks drawn at a time."""


class Jitter:
    """Relative power jitter and lost commands of `B` sites of `J` jobs, tick by tick."""

    def __init__(
        self,
        families: Sequence[PhaseFamily],
        family: IntArray,
        period_s: float,
        command_loss: float,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        """Starts at tick 0, with the first block drawn.

        Args:
            families: What `family` indexes.
            family: Phase family of each job, shape `(B, J)`.
            period_s: Control period, seconds.
            command_loss: Probability that a command is lost.
            rngs: One generator per environment, used by this object alone from here on.
        """
        coefficients = np.array([f.noise.at_period(period_s) for f in families])
        self._ar1 = coefficients[family, 0]
        gain = np.array([f.gpu_gain for f in families])[family]
        self._innovation = coefficients[family, 1] * gain
        # A dip lasts one sample of the fit; over a longer period several can fall together, over a shorter one it is
        # the same dip seen more often.
        self._dip_probability = np.array(
            [min(f.noise.dip_probability * max(period_s / f.noise.sample_s, 1.0), 1.0) for f in families]
        )[family]
        depth = [f.noise.dip_depth / max(period_s / f.noise.sample_s, 1.0) for f in families]
        self._dip_depth = np.array(depth)[family] * gain
        self._plateau = np.array([f.plateau - 1.0 for f in families])[family] * gain
        self._command_loss = command_loss
        self._rngs = list(rngs)
        shape = (len(self._rngs), BLOCK, family.shape[1])
        self._normals = np.empty(shape)
        self._uniforms = np.empty((shape[0], BLOCK, 2, shape[2]))
        self._state = np.zeros(family.shape)
        self.relative = np.empty((BLOCK, *family.shape))
        """Deviation of the GPU's relative power within compute, shape `(BLOCK, B, J)`."""
        self.lost = np.empty((BLOCK, *family.shape), dtype=bool)
        """Whether the command of the tick is lost, shape `(BLOCK, B, J)`."""
        self.any_lost: list[bool] = []
        self.refill()

    def refill(self) -> None:
        """Draws the next `BLOCK` ticks into `relative` and `lost`."""
        for b, rng in enumerate(self._rngs):
            rng.standard_normal(out=self._normals[b])
            rng.random(out=self._uniforms[b])
        state = self._state
        for k in range(BLOCK):
            state *= self._ar1
            state += self._innovation * self._normals[:, k]
            self.relative[k] = state
        chance = self._uniforms[:, :, 0].swapaxes(0, 1)
        dipped = chance < self._dip_probability
        if dipped.any():
            # Given that it fell below p, u / p is uniform again, and depths are uniform up to twice their mean.
            share = np.where(dipped, chance / np.maximum(self._dip_probability, 1e-300), 0.0)
            self.relative -= 2.0 * share * self._dip_depth
        self.relative += self._plateau
        np.less(self._uniforms[:, :, 1].swapaxes(0, 1), self._command_loss, out=self.lost)
        self.any_lost = [bool(tick.any()) for tick in self.lost]
