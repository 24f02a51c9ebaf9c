"""Model-predictive control with what a learner may know: the nominal model, corrected by what is sensed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.forecast import TargetForecast
from wattgym.agents.baselines.model import SiteModel, Split
from wattgym.agents.baselines.program import TrackingProgram
from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.plant import FloatArray
from wattgym.envs.shaping import ControlTask


class PredictiveSettings(FrozenModel):
    """Weights and memories of the controller.

    Attributes:
        horizon: Periods looked ahead.
        move: Price of moving the command by one capacity, against a squared error of one capacity.
        throughput: Worth of full speed, against the same.
        credit: Share of a lasting misfit between sensor and nominal model that is put down to the model.
        fill: Share of a job's dip (a checkpoint) that the others are to fill.
        prior: Evidence that the assumed dead time counts for, squared shares of full power.
        memory: Periods over which the forecast of the target forgets.
        ridge: Pull of the forecast towards persistence.
    """

    horizon: int = Field(default=4, ge=1, le=30)
    move: float = Field(default=0.03, ge=0.0)
    throughput: float = Field(default=0.03, ge=0.0)
    credit: float = Field(default=0.2, ge=0.0, le=1.0)
    fill: float = Field(default=0.5, ge=0.0, le=1.0)
    prior: float = Field(default=0.02, gt=0.0)
    memory: float = Field(default=200.0, ge=2.0)
    ridge: float = Field(default=0.1, gt=0.0)


SEARCH = {
    "move": Range(0.002, 0.3, log=True),
    "throughput": Range(0.001, 0.3, log=True),
    "credit": Range(0.0, 1.0),
    "fill": Range(0.0, 1.0),
    "prior": Range(0.001, 0.3, log=True),
    "memory": Range(30.0, 1000.0, log=True),
    "ridge": Range(0.003, 3.0, log=True),
}
"""Where settings are searched; the horizon is not: beyond the dead time it changes little."""

ASSUMED_SHARE = 0.6
"""Share of a command that acts within its period, before anything was seen of a job."""

FOLLOWS = 0.85
"""A job that draws less than this share of what its limit lets it draw does not feel its limit."""

_FIRST = 10.0
"""Periods that the assumption of a true nominal model counts for."""


class JobEstimates:
    """What is learnt of each job while it runs.

    With `n_now` and `n_before` the nominal powers at the limits written for the last period and for the one before,
    the sensed power is modelled as `m (a n_now + (1 − a) n_before)`. `a` is a regularised least-squares fit, `m` the
    mean ratio. A sensor's gain is as wrong as a nominal model, or more: only a share of `m` is put down to the model.

    Attributes:
        gain: True over nominal power, as far as it is believed, shape `(B, J)`.
        follows: Whether each job draws what its limit allows, shape `(B, J)`.
        power_w: Power of each job in the last period, corrected for its sensor, shape `(B, J)`, W.
        now_w: Nominal power at the limits written last, shape `(B, J)`, W.
    """

    def __init__(
        self, model: SiteModel, settings: PredictiveSettings, position: FloatArray, sensed_w: FloatArray
    ) -> None:
        self._model, self._credit = model, settings.credit
        shape = position.shape
        self._evidence = np.full(shape, settings.prior)
        self._weighted = settings.prior * np.full(shape, ASSUMED_SHARE)
        self._ratio, self._count = np.ones(shape), np.full(shape, _FIRST)
        self._full = model.power_w[:, :, -1]
        self.now_w = model.job_power_w(position)
        self.gain = np.ones(shape)
        self.follows = np.ones(shape, dtype=np.bool_)
        self.power_w = sensed_w

    @property
    def share(self) -> FloatArray:
        """Share of a command that acts within its period, shape `(B, J)`."""
        share: FloatArray = np.clip(self._weighted / self._evidence, 0.05, 1.0)
        return share

    def update(self, position: FloatArray, sensed_w: FloatArray) -> None:
        """Takes in a period.

        Args:
            position: Limits written for it, shape `(B, J)`.
            sensed_w: Sensed power of each job in it, W.
        """
        before_w, self.now_w = self.now_w, self._model.job_power_w(position)
        expected = self.share * self.now_w + (1.0 - self.share) * before_w
        ratio = sensed_w / np.maximum(expected, 1e-9)
        followed, self.follows = self.follows, ratio >= FOLLOWS * self._ratio
        both = followed & self.follows
        step = (self.now_w - before_w) / self._full
        answer = (sensed_w / self._ratio - before_w) / self._full
        self._evidence += np.where(both, step * step, 0.0)
        self._weighted += np.where(both, step * answer, 0.0)
        self._count += both
        self._ratio += np.where(both, (ratio - self._ratio) / self._count, 0.0)
        self.gain = 1.0 + self._credit * (self._ratio - 1.0)
        self.power_w = sensed_w * self.gain / self._ratio


class PredictiveControl:
    """Plans a few periods ahead and does the first of them.

    The plan is for the site's power as the corrected model has it (`TrackingProgram`): jobs that do not feel their
    limits (a checkpoint) keep drawing what they draw, the others share the rest. The response is modelled with the dead
    time that was seen; coming targets are those announced, or a forecast (`TargetForecast`). Squared error, worth of
    throughput, price of moves, bounds and rates over a short horizon are the common form of power control by MPC (for
    example Wang and Chen, HPCA 2008, for servers).
    """

    def __init__(self, settings: PredictiveSettings, name: str = "MPC", split: Split = "proportional") -> None:
        """Configures the controller.

        Args:
            settings: Weights and memories.
            name: Name in tables.
            split: How power is split between jobs.
        """
        self.name = name
        self._settings = settings
        self._split: Split = split

    def reset(self, task: ControlTask) -> None:
        """Forgets what was learnt of the last site."""
        settings = self._settings
        batch = task.base_w.size
        self._task, self._observed = task, ObservedPower(task)
        self._model = SiteModel(task.spec, self._split)
        self._estimates: JobEstimates | None = None
        self._forecast = TargetForecast(batch, settings.memory, settings.ridge)
        self._program = TrackingProgram(batch, settings.horizon)
        rules = task.config.rules
        span = np.maximum(task.spec.max_limit_w - task.spec.min_limit_w, 1e-9)
        rise = rules.raise_fraction_per_s * min(rules.raise_window_s, task.spec.period_s) * task.spec.max_limit_w / span
        self._rise = np.minimum(rise, 1.0)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Learns from the last period, plans, and splits the coming period's power between the jobs."""
        settings, seen, model, task = self._settings, self._observed, self._model, self._task
        position = seen.limits(observation)
        sensed = seen.job_power_w(observation)
        if self._estimates is None:
            self._estimates = JobEstimates(model, settings, position, sensed)
        else:
            self._estimates.update(position, sensed)
        jobs = self._estimates

        # Jobs that follow their limits, and what the others draw: in part as if they followed theirs again already.
        gain = jobs.follows * jobs.gain
        dipping = settings.fill * jobs.power_w + (1.0 - settings.fill) * jobs.gain * jobs.now_w
        other_w = np.where(jobs.follows, 0.0, dipping).sum(axis=1) + model.host_w
        slope = np.maximum(model.slope_w(position), 1e-3 * model.power_w[:, :, -1]) * gain
        moving = np.maximum(slope.sum(axis=1), 1e-9)
        share = np.clip((slope * jobs.share).sum(axis=1) / moving, 0.05, 1.0)
        last_w = (jobs.now_w * gain).sum(axis=1) + other_w
        low_w = (model.power_w[:, :, 0] * gain).sum(axis=1) + other_w
        high_w = (model.power_w[:, :, -1] * gain).sum(axis=1) + other_w

        base, capacity = task.base_w, task.capacity_w
        target = self._targets(observation)
        per_capacity = capacity / moving
        commands = self._program.solve(
            last=(last_w - base) / capacity,
            target=target,
            offset=np.zeros_like(target),
            share=share,
            low=(low_w - base) / capacity,
            high=(high_w - base) / capacity,
            rise=(slope * self._rise).sum(axis=1) / capacity,
            throughput=settings.throughput * model.throughput_per_w(position) * capacity,
            move=settings.move * np.minimum(per_capacity, 10.0),
        )
        wanted_w = base + capacity * commands[:, 0]
        limits = model.positions(wanted_w - other_w + model.host_w, gain)
        return task.action_for(limits, seen.feed_forward(observation), position)

    def _targets(self, observation: NDArray[np.float32]) -> FloatArray:
        """Targets of the horizon, announced ones first, capacities from the base, shape `(B, N)`."""
        base, capacity = self._task.base_w, self._task.capacity_w
        announced_w = np.concatenate(
            [self._observed.target_w(observation)[:, None], self._observed.preview_w(observation)], axis=1
        )
        announced = ((announced_w - base[:, None]) / capacity[:, None])[:, : self._settings.horizon]
        self._forecast.update(announced[:, 0])
        missing = self._settings.horizon - announced.shape[1]
        if missing == 0:
            return announced
        if announced.shape[1] > 1:
            return np.concatenate([announced, np.repeat(announced[:, -1:], missing, axis=1)], axis=1)
        return np.concatenate([announced, self._forecast.ahead(missing)], axis=1)
