"""Feed-forward with a proportional-integral correction, as array code: one loop for baselines and residual actions."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.plant import Command, FloatArray, Phase, PlantSpec, Telemetry

_RESTING = 0.1
"""A limit that moved by less than this share of its range counts as resting."""

_PLAUSIBLE = (0.7, 1.3)
"""True over nominal power of a job that computes lies within."""


class FeedbackGains(FrozenModel):
    """Gains of the loop, in shares of what the nominal model says an error is worth.

    Attributes:
        proportional: Share of the last error that is corrected at once.
        integral: Share of the last error that is added to the lasting correction each period.
        rate: Largest change of the common limit per period, share of its range.
        identify: For loops in the environment. 0: the loop corrects what the nominal model gives for the target. Above:
            what an identified model gives (`IdentifiedModel`), in which that share of each job's last deviation from
            the nominal power is learnt in a period.
    """

    proportional: float = Field(default=0.2, ge=0.0)
    integral: float = Field(default=0.2, ge=0.0)
    rate: float = Field(default=1.0, gt=0.0)
    identify: float = Field(default=0.0, ge=0.0, le=1.0)


class IdentifiedModel:
    """The nominal model, held to what jobs are seen to draw.

    A job that does not compute draws what its sensor says, whatever its limit; one that computes draws a multiple of
    its nominal power, learnt while its limit rests. So when a job stops to evaluate or to save, the others are sent at
    once to where they make up for it, where a correction of the site's error needs periods to get there.
    """

    def __init__(self, rate: float, spec: PlantSpec) -> None:
        """Starts from the nominal model.

        Args:
            rate: Share of the last deviation that is learnt in a period.
            spec: Nominal description.
        """
        self._rate, self._spec = rate, spec
        self._table = np.maximum.accumulate(spec.power_table_w, axis=2)
        self._gain = np.ones_like(spec.min_limit_w)
        self._range = np.maximum(spec.max_limit_w - spec.min_limit_w, 1e-9)
        self._last = np.full_like(self._gain, np.nan)

    def common_limit(self, target_w: FloatArray, telemetry: Telemetry) -> FloatArray:
        """The common position at which the site draws a target, shape `(B,)`.

        Args:
            target_w: Target of the coming period, shape `(B,)`, W.
            telemetry: What the plant reports of the last one.
        """
        computing = telemetry.phase == Phase.COMPUTE
        position = (telemetry.limit_w - self._spec.min_limit_w) / self._range
        nominal, _ = self._spec.response(Command(telemetry.limit_w))
        # A limit that has just moved, or a phase that has just changed, says little about the model's error.
        resting = computing & (np.abs(position - self._last) < _RESTING) & np.isfinite(telemetry.sensor_w)
        seen = np.clip(telemetry.sensor_w / np.maximum(nominal, 1e-9), *_PLAUSIBLE)
        self._gain = np.where(resting, self._gain + self._rate * (seen - self._gain), self._gain)
        self._last = np.where(computing, position, np.nan)
        idle = np.nan_to_num(np.where(computing, 0.0, telemetry.sensor_w)).sum(axis=1) + telemetry.host_w
        site = (self._table * np.where(computing, self._gain, 0.0)[..., None]).sum(axis=1) + idle[:, None]
        # The inverse of each row, which does not fall: linear between the last point below the target and the next.
        above = np.clip((site < target_w[:, None]).sum(axis=1), 1, site.shape[1] - 1)[:, None]
        low, high = (np.take_along_axis(site, above - k, axis=1)[:, 0] for k in (1, 0))
        share = np.clip((target_w - low) / np.maximum(high - low, 1e-9), 0.0, 1.0)
        grid, above = self._spec.limit_grid, above[:, 0]
        common: FloatArray = grid[above - 1] + share * (grid[above] - grid[above - 1])
        return common


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
