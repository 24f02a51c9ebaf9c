"""A bandit over a few corrections of the feed-forward limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.plant import FloatArray
from wattgym.envs.reward import reward_terms
from wattgym.envs.task import ControlTask

ARMS = 9
"""As many as EnergyUCB has frequencies."""


class BanditSettings(FrozenModel):
    """The bandit's parameters.

    Attributes:
        span: Largest correction of the common limit either way, share of its range.
        explore: Weight of the upper confidence bound.
        switching: Price of changing the arm.
        hold: Periods for which an arm is kept and its rewards averaged.
        memory: Pulls after which old rewards count for little.
    """

    span: float = Field(default=0.15, gt=0.0, le=1.0)
    explore: float = Field(default=0.02, ge=0.0)
    switching: float = Field(default=0.005, ge=0.0)
    hold: int = Field(default=5, ge=1)
    memory: float = Field(default=50.0, ge=2.0)


SEARCH = {
    "span": Range(0.03, 0.4),
    "explore": Range(0.001, 0.5, log=True),
    "switching": Range(0.0001, 0.05, log=True),
    "hold": Range(1.0, 12.0),
    "memory": Range(10.0, 300.0, log=True),
}
"""Where settings are searched."""


class UcbBandit:
    """Learns within the episode which correction of the nominal limit earns most.

    The limit is the nominal model's for each target plus one of nine corrections. Each arm is pulled once, then the
    arm with the highest index `mean + explore · sqrt(ln t / n) − switching · [not the present arm]`, where mean and n
    forget exponentially. The reward is the environment's own, of the sensed error and progress.

    EnergyUCB (arXiv 2410.11855) chooses one of nine clocks by that index (its second version prices switching) and
    rewards saved energy. An arm that is one clock for good cannot follow a moving target, hence the corrections here.
    """

    name = "UCB bandit"

    def __init__(self, settings: BanditSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Forgets all arms."""
        batch = task.base_w.size
        self._task = task
        self._observed = ObservedPower(task)
        self._throughput = task.layout.job("throughput")
        gpus = task.spec.n_gpus.astype(np.float64)
        self._weight = gpus / gpus.sum(axis=1, keepdims=True)
        self._shift = self._settings.span * np.linspace(-1.0, 1.0, ARMS)
        # The middle arm corrects nothing; pull it first.
        self._untried = [ARMS // 2, *(a for a in range(ARMS) if a != ARMS // 2)]
        self._arm = np.full(batch, self._untried.pop(0))
        self._sum, self._count = np.zeros((batch, ARMS)), np.zeros((batch, ARMS))
        self._earned = np.zeros(batch)
        self._tick = 0

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Takes in the last period's reward and chooses when a pull is over."""
        hold, seen = self._settings.hold, self._observed
        if self._tick > 0:
            self._earned += self._reward(observation)
            if self._tick % hold == 0:
                self._pull_ends()
        self._tick += 1
        position = np.clip(seen.feed_forward(observation) + self._shift[self._arm], 0.0, 1.0)
        jobs = np.broadcast_to(position[:, None], (position.size, self._task.layout.jobs))
        return self._task.action_for(jobs, seen.feed_forward(observation), seen.limits(observation))

    def _reward(self, observation: NDArray[np.float32]) -> FloatArray:
        progress = (observation[:, self._throughput].astype(np.float64) + 1.0) / 2.0
        throughput = (progress * self._weight).sum(axis=1)
        error = self._observed.error(observation)
        reward: FloatArray = reward_terms(self._task.config.reward, error, throughput, np.zeros_like(error)).sum(axis=0)
        return reward

    def _pull_ends(self) -> None:
        settings = self._settings
        row = np.arange(self._arm.size)
        keep = 1.0 - 1.0 / settings.memory
        self._sum *= keep
        self._count *= keep
        self._sum[row, self._arm] += self._earned / settings.hold
        self._count[row, self._arm] += 1.0
        self._earned[:] = 0.0
        if self._untried:
            self._arm = np.full(row.size, self._untried.pop(0))
            return
        count = np.maximum(self._count, 1e-3)
        pulls = np.maximum(count.sum(axis=1, keepdims=True), np.e)
        index = self._sum / count + settings.explore * np.sqrt(np.log(pulls) / count)
        index -= settings.switching
        index[row, self._arm] += settings.switching
        self._arm = index.argmax(axis=1)
