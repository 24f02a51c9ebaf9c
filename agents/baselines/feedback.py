"""Feed-forward, PI, and feed-forward with PI: the controllers that control engineers would try first."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import Observed
from wattgym.envs.feedback import FeedbackGains, FeedbackLoop
from wattgym.envs.observation import common_limit
from wattgym.envs.plant import FloatArray
from wattgym.envs.site_model import SiteModel, Split
from wattgym.envs.task import ControlTask

SEARCH = {"proportional": Range(0.0, 1.0), "integral": Range(0.01, 1.0), "rate": Range(0.1, 1.0)}
"""Where gains are searched."""


class Feedback:
    """A common limit from the inverse nominal model (cap-following), a PI correction of the sensed error, or both.

    With the optimal split, the nominal power at the common position is given out where another watt trains most.
    """

    def __init__(
        self,
        name: str,
        gains: FeedbackGains,
        start: Literal["feed_forward", "base"],
        split: Split = "proportional",
    ) -> None:
        """Configures the loop.

        Args:
            name: Name in tables.
            gains: Gains; all zero makes it open-loop.
            start: What the correction is added to: the model's answer to each target, or to the base power.
            split: How the power is split between jobs.
        """
        self.name = name
        self._gains = gains
        self._start = start
        self._split: Split = split

    def reset(self, task: ControlTask) -> None:
        """Clears the integral and works out the model's slope."""
        self._task = task
        self._observed = Observed(task.layout)
        self._base = common_limit(task.spec, task.base_w[:, None])[:, 0]
        self._loop = FeedbackLoop(self._gains, task.limit_per_error)
        self._model = SiteModel(task.spec, self._split) if self._split == "optimal" else None

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """One step of the loop."""
        seen = self._observed
        feed_forward = seen.feed_forward(observation)
        centre = feed_forward if self._start == "feed_forward" else self._base
        position = self._loop.step(centre, seen.error(observation))
        jobs = np.broadcast_to(position[:, None], (position.size, self._task.layout.jobs))
        if self._model is not None:
            jobs = self._model.positions(self._model.job_power_w(jobs).sum(axis=1) + self._model.host_w)
        return self._task.action_for(jobs, feed_forward, seen.limits(observation))
