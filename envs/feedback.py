"""Feed-forward with a proportional-integral correction, as array code: one loop for baselines and residual actions."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.plant import FloatArray


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


class FeedbackLoop:
    """A common limit for all jobs: what it is corrected from, and a PI correction of the sensed error.

    With `e` the sensed power minus the target, in units of limit range through the model's mean slope `s` (watts per
    range), the position is `u = u_centre - P e / s - I sum(e) / s`. The integral stops where the limit is clipped or
    the rate binds and the error would push further (conditional integration). The rate limit acts on `u` itself, from
    the second period on: where the limits stood before the episode was not this loop's choice.

    Attributes:
        position: The common limit for the coming period, position in [0, 1], shape `(B,)`.
    """

    def __init__(self, gains: FeedbackGains, per_error: FloatArray) -> None:
        """Starts without memory.

        Args:
            gains: Gains; all zero makes it open-loop.
            per_error: Limit range that an error of one capacity is worth in the nominal model, shape `(B,)`.
        """
        self.position = np.zeros_like(per_error)
        self._gains = gains
        self._per_error = per_error
        self._integral = np.zeros_like(per_error)
        self._begun = False

    def step(self, centre: FloatArray, error: FloatArray) -> FloatArray:
        """The position for the coming period.

        Args:
            centre: What is corrected, position in [0, 1], shape `(B,)`.
            error: Sensed power minus target of the last period, capacities, shape `(B,)`.
        """
        gains, error = self._gains, error * self._per_error
        wanted = centre - gains.proportional * error - (self._integral + gains.integral * error)
        last = self.position if self._begun else wanted
        position: FloatArray = np.clip(np.clip(wanted, last - gains.rate, last + gains.rate), 0.0, 1.0)
        # A positive error pushes down: integrate it only while there is room to go down, and likewise upwards.
        free = np.where(error > 0, position <= wanted, position >= wanted)
        self._integral += np.where(free, gains.integral * error, 0.0)
        self.position, self._begun = position, True
        return position
