"""Two thresholds with randomised release: the rule of reactive power capping in fleets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.observation import common_limit
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask


class TwoThresholdSettings(FrozenModel):
    """The rule's parameters; errors are shares of the offered capacity.

    Attributes:
        low: Excess power above which limits are cut softly.
        high: Excess power above which limits are cut hard.
        soft: Factor of a soft cut.
        hard: Factor of a hard cut.
        release: How far power must be below the target before limits are raised (hysteresis).
        step: Raise of a limit, share of its range.
        chance: Probability that a job is raised in a period in which raising is due.
    """

    low: float = Field(default=0.05, ge=0.0)
    high: float = Field(default=0.3, ge=0.0)
    soft: float = Field(default=0.9, gt=0.0, le=1.0)
    hard: float = Field(default=0.6, ge=0.0, le=1.0)
    release: float = Field(default=0.05, ge=0.0)
    step: float = Field(default=0.1, gt=0.0, le=1.0)
    chance: float = Field(default=0.5, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _ordered(self) -> TwoThresholdSettings:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} must not be above high {self.high:g}")
        return self


SEARCH = {
    "low": Range(0.0, 0.2),
    "high": Range(0.2, 0.8),
    "soft": Range(0.7, 0.99),
    "hard": Range(0.2, 0.9),
    "release": Range(0.0, 0.2),
    "step": Range(0.01, 0.3),
    "chance": Range(0.2, 1.0),
}
"""Where settings are searched."""


class TwoThreshold:
    """Cuts all limits when power exceeds the target, raises them one by one when it has fallen below.

    With `e` the sensed power minus the coming target, in capacities, and `u` a job's position in its limit range:

        e > high:          u <- hard · u
        low < e <= high:   u <- soft · u
        e < -release:      u <- u + step, for each job with probability `chance`

    Thunderbolt (Li et al., OSDI 2020) throttles multiplicatively, harder above the higher of two thresholds, and
    unthrottles jobs at random times so that they do not come back together; POLCA (Patel et al., arXiv 2308.12908)
    raises only a margin below the threshold. Both keep power below a bound; here the bound is the moving target, and
    power is raised towards it again.
    """

    name = "two thresholds"

    def __init__(self, settings: TwoThresholdSettings, seed: int = 0) -> None:
        """Configures the rule.

        Args:
            settings: Its parameters.
            seed: Seed of the random releases.
        """
        self._settings = settings
        self._seed = seed

    def reset(self, task: ControlTask) -> None:
        """Starts at the position of the base power, with the same random sequence again."""
        self._task = task
        self._observed = ObservedPower(task)
        self._rng = np.random.default_rng(self._seed)
        base = common_limit(task.spec, task.base_w[:, None])
        self._position = np.repeat(base, task.layout.jobs, axis=1)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """One step of the rule."""
        rule, seen = self._settings, self._observed
        excess = (seen.power_w(observation) - seen.target_w(observation)) / self._task.capacity_w
        factor = np.where(excess > rule.high, rule.hard, np.where(excess > rule.low, rule.soft, 1.0))
        lucky = self._rng.random(self._position.shape) < rule.chance
        raised = rule.step * (lucky & (excess < -rule.release)[:, None])
        self._position = np.minimum(self._position * factor[:, None] + raised, 1.0)
        return self._task.action_for(self._position, seen.feed_forward(observation), seen.limits(observation))
