"""Controllers that do not react: uncapped, a constant cap, and random limits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.controller import Observed
from wattgym.envs.observation import common_limit
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError


class StaticCap:
    """One limit position for every job, held for the whole episode.

    It is the position at which the nominal model draws a given site power: the declared base by default, or, for an
    energy-matched cap, the mean power of the controller it is compared with.
    """

    def __init__(self, name: str = "static cap", power_w: FloatArray | None = None) -> None:
        """Chooses the power to hold.

        Args:
            name: Name in tables.
            power_w: Site power to hold, shape `(B,)`, W; the task's base power if None.
        """
        self.name = name
        self._power_w = power_w

    def reset(self, task: ControlTask) -> None:
        """Works out the position."""
        power = task.base_w if self._power_w is None else self._power_w
        if power.shape != task.base_w.shape:
            raise UserError(
                f"'{self.name}' was given powers for {power.shape[0]} sites, the task has {task.base_w.size}"
            )
        self._task = task
        self._observed = Observed(task.layout)
        self._position = common_limit(task.spec, power[:, None])

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """The same limits again."""
        seen = self._observed
        position = np.broadcast_to(self._position, (observation.shape[0], self._task.layout.jobs))
        return self._task.action_for(position, seen.feed_forward(observation), seen.limits(observation))


class Uncapped:
    """No limit below the highest: training at full speed, whatever the grid asks."""

    name = "uncapped"

    def reset(self, task: ControlTask) -> None:
        """Remembers the task."""
        self._task = task
        self._observed = Observed(task.layout)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """The highest limits."""
        seen = self._observed
        position = np.ones((observation.shape[0], self._task.layout.jobs))
        return self._task.action_for(position, seen.feed_forward(observation), seen.limits(observation))


class RandomLimits:
    """Uniformly random limits, drawn anew each period: what knowing nothing is worth."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def reset(self, task: ControlTask) -> None:
        """Starts the same random sequence again."""
        self._rng = np.random.default_rng(self._seed)
        self._task = task
        self._observed = Observed(task.layout)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Fresh random limits."""
        seen = self._observed
        position = self._rng.uniform(0.0, 1.0, (observation.shape[0], self._task.layout.jobs))
        return self._task.action_for(position, seen.feed_forward(observation), seen.limits(observation))
