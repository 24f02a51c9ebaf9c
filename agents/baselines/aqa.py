"""A rule with the 30 % / 90 % tracking constraint: quality of service first, as long as tracking is good enough."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.plant import FloatArray
from wattgym.envs.reward import BAND
from wattgym.envs.site_model import SiteModel
from wattgym.envs.task import ControlTask

REQUIRED_SHARE = 0.9
"""Share of time in which the error must be within `BAND` of the capacity."""


class AqaSettings(FrozenModel):
    """The rule's parameters; errors are shares of the offered capacity.

    Attributes:
        band: Gap between power and target that is left alone while the constraint is met with room to spare.
        aim: How far above the target to aim then: what the constraint tolerates is spent on training.
        gain: Share of the gap that one adjustment closes.
        memory: Periods over which the share of good tracking is reckoned.
        reserve: Share of time by which the constraint must be met before `band` and `aim` apply.
    """

    band: float = Field(default=0.1, ge=0.0, le=BAND)
    aim: float = Field(default=0.05, ge=0.0, le=BAND)
    gain: float = Field(default=0.7, gt=0.0, le=1.5)
    memory: float = Field(default=100.0, ge=1.0)
    reserve: float = Field(default=0.03, ge=0.0, lt=0.1)


SEARCH = {
    "band": Range(0.0, 0.3),
    "aim": Range(0.0, 0.2),
    "gain": Range(0.2, 1.2),
    "memory": Range(10.0, 300.0, log=True),
    "reserve": Range(0.0, 0.09),
}
"""Where settings are searched."""


class AqaRule:
    """Moves power by the gap to the target, uniformly over jobs with slack, and only as often as the constraint needs.

    The gap is the coming target (plus `aim`) minus the sensed power. While the running share of periods with an error
    of at most 30 % of the capacity exceeds 90 % by `reserve`, gaps within `band` are ignored; else every gap is acted
    upon and the aim is the target itself. Power is lowered on the jobs that draw what their limit allows and raised on
    all, in proportion to the watts that their nominal curves have left.

    After AQA (Zhang, Wilson, Paschalidis, Coskun; IEEE Trans. Sustainable Computing 2022), whose scheduler follows
    `Pbar + R y` every few seconds by starting and capping jobs and whose constraint is an error of at most 30 % in at
    least 90 % of the time. Its queue of jobs, bids and hour-ahead weights are not part of this problem.
    """

    name = "AQA-style rule"

    def __init__(self, settings: AqaSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Forgets past tracking; starts at the position of the base power."""
        self._task = task
        self._observed = ObservedPower(task)
        self._model = SiteModel(task.spec)
        self._position = self._model.positions(task.base_w)
        self._good = np.full(task.base_w.size, 1.0)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """One step of the rule."""
        rule, seen, model = self._settings, self._observed, self._model
        capacity = self._task.capacity_w
        within = np.abs(seen.error(observation)) <= BAND
        self._good += (within - self._good) / rule.memory
        relaxed = self._good >= REQUIRED_SHARE + rule.reserve
        gap = (seen.target_w(observation) - seen.power_w(observation)) / capacity + np.where(relaxed, rule.aim, 0.0)
        wanted_w = np.where(relaxed & (np.abs(gap) <= rule.band), 0.0, rule.gain * gap) * capacity

        nominal = model.job_power_w(self._position)
        down = nominal - model.power_w[:, :, 0]
        # A job that pauses for a checkpoint would not feel a lower limit.
        down = np.where(seen.computing(observation), down, 0.0)
        up = model.power_w[:, :, -1] - nominal
        room = np.where(wanted_w[:, None] < 0, down, up)
        moved = wanted_w / np.maximum(room.sum(axis=1), 1e-9)
        change_w = np.clip(moved, -1.0, 1.0)[:, None] * room
        slope = np.maximum(model.slope_w(self._position), 1e-3 * (model.power_w[:, :, -1]))
        self._position = np.clip(self._position + change_w / slope, 0.0, 1.0)
        return self._task.action_for(self._position, seen.feed_forward(observation), seen.limits(observation))
