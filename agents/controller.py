"""What controls power: baselines and learned policies behind one interface, for batches of sites."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.observation import ObservationLayout
from wattgym.envs.plant import FloatArray
from wattgym.envs.shaping import ControlTask


class Controller(Protocol):
    """A power-shaping controller of a batch of sites (one site is a batch of one)."""

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        ...

    def reset(self, task: ControlTask) -> None:
        """Prepares for an episode of the given task."""
        ...

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Chooses the coming period's action.

        Args:
            observation: Shape `(B, D)`, as the task's layout describes it.

        Returns:
            Actions in [-1, 1], shape `(B, J)`.
        """
        ...


class Observed:
    """Reads single features out of observation vectors, in natural units."""

    def __init__(self, layout: ObservationLayout) -> None:
        self._error = layout.site("error_1")
        self._feed_forward = layout.site("feed_forward")
        self._limit = layout.job("limit_1")

    def error(self, observation: NDArray[np.float32]) -> FloatArray:
        """Sensed power minus target of the last period, capacities, shape `(B,)`."""
        return observation[:, self._error].astype(np.float64)

    def feed_forward(self, observation: NDArray[np.float32]) -> FloatArray:
        """Nominal model's common limit for the coming target, position in [0, 1], shape `(B,)`."""
        return (observation[:, self._feed_forward].astype(np.float64) + 1.0) / 2.0

    def limits(self, observation: NDArray[np.float32]) -> FloatArray:
        """Limits in force, positions in [0, 1], shape `(B, J)`."""
        return (observation[:, self._limit].astype(np.float64) + 1.0) / 2.0
