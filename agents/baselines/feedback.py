"""Feed-forward, PI, and feed-forward with PI: the controllers that control engineers would try first."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.controller import Observed
from wattgym.config import FrozenModel
from wattgym.envs.observation import common_limit
from wattgym.envs.plant import FloatArray
from wattgym.envs.shaping import ControlTask


class FeedbackGains(FrozenModel):
    """Gains of the loop, in shares of what the nominal model says an error is worth.

    Attributes:
        proportional: Share of the last error that is corrected at once.
        integral: Share of the last error that is added to the lasting correction each period.
        rate: Largest change of the common limit per period, share of its range.
    """

    proportional: float = Field(default=0.2, ge=0.0)
    integral: float = Field(default=0.2, ge=0.0)
    rate: float = Field(default=1.0, gt=0.0)


class Feedback:
    """A common limit for all jobs from the inverse nominal model, a PI correction of the sensed error, or both.

    With `e` the sensed power minus the target, in units of limit range through the model's mean slope `s` (watts per
    range), the position is `u = u_ff - P e / s - I sum(e) / s`. The integral stops where the limit is clipped or the
    rate binds and the error would push further (conditional integration). The rate limit acts on `u` itself, from the
    second period on: where the limits stood before the episode was not this loop's choice.
    """

    def __init__(self, name: str, gains: FeedbackGains, start: Literal["feed_forward", "base"]) -> None:
        """Configures the loop.

        Args:
            name: Name in tables.
            gains: Gains; all zero makes it open-loop.
            start: What the correction is added to: the model's answer to each target, or to the base power.
        """
        self.name = name
        self._gains = gains
        self._start = start

    def reset(self, task: ControlTask) -> None:
        """Clears the integral and works out the model's slope."""
        self._task = task
        self._observed = Observed(task.layout)
        self._per_error = task.capacity_w / (task.spec.full_w - task.spec.floor_w)
        self._base = common_limit(task.spec, task.base_w[:, None])[:, 0]
        self._integral = np.zeros_like(self._base)
        self._last: FloatArray | None = None

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """One step of the loop."""
        gains, seen = self._gains, self._observed
        feed_forward = seen.feed_forward(observation)
        error = seen.error(observation) * self._per_error
        centre = feed_forward if self._start == "feed_forward" else self._base
        wanted = centre - gains.proportional * error - (self._integral + gains.integral * error)
        last = wanted if self._last is None else self._last
        position = np.clip(np.clip(wanted, last - gains.rate, last + gains.rate), 0.0, 1.0)
        # A positive error pushes down: integrate it only while there is room to go down, and likewise upwards.
        free = np.where(error > 0, position <= wanted, position >= wanted)
        self._integral += np.where(free, gains.integral * error, 0.0)
        self._last = position
        jobs = np.broadcast_to(position[:, None], (position.size, self._task.layout.jobs))
        return self._task.action_for(jobs, feed_forward, seen.limits(observation))
