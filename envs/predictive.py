"""Predictive control of a site as a loop that actions are added to, and what it learns of jobs while they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from wattgym.envs.forecast import TargetForecast
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.loop_settings import PredictiveSettings
from wattgym.envs.plant import FloatArray, PlantSpec
from wattgym.envs.site_model import SiteModel, Split
from wattgym.envs.slow_loop import SlowLoop
from wattgym.hw.limits import CommandRules

ASSUMED_SHARE = 0.6
"""Share of a command that acts within its period, before anything was seen of a job."""

FOLLOWS = 0.85
"""A job that draws less than this share of what its limit lets it draw does not feel its limit."""

_FIRST = 10.0
"""Periods that the assumption of a true nominal model counts for."""

_HAIR = 1e-4
"""Share by which raises stay below what the command rules allow, so that rounding does not exceed it."""


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
        expected_w: What the last period was expected to bring by the nominal model, shape `(B, J)`, W.
        draw: Sensed power over that, shape `(B, J)`.
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
        self.now_w = self.expected_w = model.job_power_w(position)
        self.gain = np.ones(shape)
        self.draw = np.ones(shape)
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
        self.expected_w = self.share * self.now_w + (1.0 - self.share) * before_w
        self.draw = ratio = sensed_w / np.maximum(self.expected_w, 1e-9)
        # However much of the command acts within the period, the job draws no less than at the lower of its two limits.
        least_w = np.minimum(self.now_w, before_w)
        followed, self.follows = self.follows, sensed_w >= FOLLOWS * self._ratio * least_w
        both = followed & self.follows
        step = (self.now_w - before_w) / self._full
        answer = (sensed_w / self._ratio - before_w) / self._full
        self._evidence += np.where(both, step * step, 0.0)
        self._weighted += np.where(both, step * answer, 0.0)
        self._count += both
        self._ratio += np.where(both, (ratio - self._ratio) / self._count, 0.0)
        self.gain = 1.0 + self._credit * (self._ratio - 1.0)
        self.power_w = sensed_w * self.gain / self._ratio


def largest_rise(spec: PlantSpec, rules: CommandRules) -> FloatArray:
    """How far the command rules let limits rise in a period, shares of their range, shape `(B, J)`.

    Args:
        spec: Nominal description.
        rules: Command rules in force.
    """
    span = np.maximum(spec.max_limit_w - spec.min_limit_w, 1e-9)
    rise = rules.raise_fraction_per_s * min(rules.raise_window_s, spec.period_s) * spec.max_limit_w / span
    within: FloatArray = np.minimum(rise, 1.0) * (1.0 - _HAIR)
    return within


class Plan(NamedTuple):
    """The coming periods as one tracking problem a site, all powers in capacities from the base.

    Attributes:
        last: Command in force, shape `(B,)`.
        target: Targets of the horizon, shape `(B, N)`.
        share: Share of a command that acts within its period, shape `(B,)`.
        low: Lowest command, shape `(B,)`.
        high: Highest command, shape `(B,)`.
        rise: Largest rise of the command per period, shape `(B,)`.
        throughput: Worth of one capacity more power for training, shape `(B,)`.
        move: Price of moving the command by one capacity, shape `(B,)`.
    """

    last: FloatArray
    target: FloatArray
    share: FloatArray
    low: FloatArray
    high: FloatArray
    rise: FloatArray
    throughput: FloatArray
    move: FloatArray

    def held(self, offset: FloatArray) -> FloatArray:
        """The best command if it is then held: the plan's one free number, so the optimum has a closed form.

        With `r_0 = a y + (1 − a) last + offset` and `r_k = y + offset` after it, the objective
        `sum (r_k − target_k)² − throughput r_k + move |y − last|` is a parabola with a kink at the last command. A
        control horizon of one period is the usual way to make predictive control cheap.

        Args:
            offset: What is added to the response, shape `(B,)`.

        Returns:
            Commands, shape `(B,)`.
        """
        a, later = self.share, self.target.shape[1] - 1
        wanted = self.target - offset[:, None]
        curvature = a * a + later
        pull = a * (wanted[:, 0] - (1.0 - a) * self.last) + wanted[:, 1:].sum(axis=1)
        best = (pull + 0.5 * self.throughput * (a + later)) / curvature
        step = best - self.last
        step = np.sign(step) * np.maximum(np.abs(step) - 0.5 * self.move / curvature, 0.0)
        command: FloatArray = np.clip(self.last + np.minimum(step, self.rise), self.low, self.high)
        return command

    def offset_for(self, command: FloatArray) -> FloatArray:
        """The offset with which `held` gives a command within bounds and rates, shape `(B,)`.

        Args:
            command: Wanted commands, shape `(B,)`.
        """
        a, later = self.share, self.target.shape[1] - 1
        curvature = a * a + later
        pull = curvature * command + 0.5 * self.move * np.sign(command - self.last)
        free = a * (self.target[:, 0] - (1.0 - a) * self.last) + self.target[:, 1:].sum(axis=1)
        offset: FloatArray = (free - pull) / (a + later) + 0.5 * self.throughput
        return offset


class PredictiveLoop:
    """Predicts what a site will draw and finds the limits at which it follows its targets, period by period.

    Jobs that do not feel their limits (a checkpoint) keep drawing what they draw, the others share the rest. The
    response is modelled with the dead time that was seen; coming targets are those announced, or a forecast
    (`TargetForecast`). `see` takes in a period, `plan` is what follows for the next ones, `limits` carries a command
    out. An action may say what the loop's model does not know: by how much jobs will draw more than it reckons with.
    Knobs beside the limit are set by a `SlowLoop`, and the plan is for limits under what is in force.

    Attributes:
        plan: What the period seen last leads to.
        jobs: What was learnt of the jobs; None before the first period.
    """

    plan: Plan

    def __init__(
        self,
        settings: PredictiveSettings,
        spec: PlantSpec,
        rules: CommandRules,
        base_w: FloatArray,
        capacity_w: FloatArray,
        split: Split = "proportional",
        slow: SlowLoop | None = None,
    ) -> None:
        """Starts from the nominal model.

        Args:
            settings: Weights and memories.
            spec: Nominal description.
            rules: Command rules in force; the loop raises limits no faster.
            base_w: Declared base power, shape `(B,)`, W.
            capacity_w: Offered capacity, shape `(B,)`, W.
            split: How power is split between jobs.
            slow: Sets the knobs beside the limit; None where there are none.
        """
        self._slow = slow
        self._settings, self._base, self._capacity = settings, base_w, capacity_w
        self.model = model = SiteModel(spec, split)
        self.jobs: JobEstimates | None = None
        self._forecast = TargetForecast(base_w.size, settings.memory, settings.ridge)
        self._rise = largest_rise(spec, rules)
        # A chord, not a slope: on a plateau, where another watt does nothing, its worth would be anything.
        gained = ((model.throughput[:, :, -1] - model.throughput[:, :, 0]) * model.weight).sum(axis=1)
        self._worth = settings.throughput * gained / np.maximum(model.full_w - model.floor_w, 1e-9) * capacity_w

    def see(
        self, position: FloatArray, sensed_w: FloatArray, targets_w: FloatArray, setting: Command | None = None
    ) -> None:
        """Learns from the last period and plans.

        Args:
            position: Limits in force in it, positions in their range, shape `(B, J)`.
            sensed_w: Sensed power of each job in it, W.
            targets_w: Target of the coming period and those announced after it, shape `(B, K)`, W.
            setting: Other knobs in force at its end; None where the limit is the only one.
        """
        settings, model, base, capacity = self._settings, self.model, self._base, self._capacity
        if setting is not None:
            model.follow(setting)
        if self._slow is not None:
            self._slow.step(targets_w[:, 0], np.ones_like(position) if self.jobs is None else self.jobs.gain)
        if self.jobs is None:
            self.jobs = JobEstimates(model, settings, position, sensed_w)
        else:
            self.jobs.update(position, sensed_w)
        jobs = self.jobs
        # Jobs that follow their limits, and what the others draw: in part as if they followed theirs again already.
        self._position = position
        self._gain = gain = jobs.follows * jobs.gain
        dipping = settings.fill * jobs.power_w + (1.0 - settings.fill) * jobs.gain * jobs.now_w
        self._aside = np.where(jobs.follows, 0.0, dipping)
        self._other_w = other_w = self._aside.sum(axis=1) + model.host_w
        slope = np.maximum(model.slope_w(position), 1e-3 * model.power_w[:, :, -1]) * gain
        moving = np.maximum(slope.sum(axis=1), 1e-9)
        low_w, last_w, high_w = (
            (power_w * gain).sum(axis=1) + other_w
            for power_w in (model.power_w[:, :, 0], jobs.now_w, model.power_w[:, :, -1])
        )
        self.plan = Plan(
            last=(last_w - base) / capacity,
            target=self._targets((targets_w - base[:, None]) / capacity[:, None]),
            share=np.clip((slope * jobs.share).sum(axis=1) / moving, 0.05, 1.0),
            low=(low_w - base) / capacity,
            high=(high_w - base) / capacity,
            rise=(slope * self._rise).sum(axis=1) / capacity,
            throughput=self._worth,
            move=settings.move * np.minimum(capacity / moving, 10.0),
        )

    @property
    def setting(self) -> Command | None:
        """What the knobs beside the limit are to be in the coming period; None before the first and where none are."""
        return None if self._slow is None else self._slow.setting

    @property
    def knobs(self) -> Mapping[KnobName, FloatArray]:
        """The same as positions, each `(B, J)`."""
        return {} if self._slow is None else self._slow.positions

    def limits(self, command: FloatArray) -> FloatArray:
        """The limits at which the site draws what was planned.

        Args:
            command: Site power by the loop's model, capacities from the base, shape `(B,)`.

        Returns:
            Positions in [0, 1], shape `(B, J)`, raised no faster than the command rules let them.
        """
        wanted_w = self._base + self._capacity * command
        positions = self.model.positions(wanted_w - self._other_w + self.model.host_w, self._gain)
        within: FloatArray = np.minimum(positions, self._position + self._rise)
        return within

    def advised(self, surprise_w: FloatArray) -> FloatArray:
        """The limits if jobs will draw something else than the loop reckons with.

        Args:
            surprise_w: Power that each job will draw beyond that, shape `(B, J)`, W; zero for the loop's own plan.
        """
        return self.limits(self.plan.held(surprise_w.sum(axis=1) / self._capacity))

    def advice_for(self, position: FloatArray) -> FloatArray:
        """The surprise that makes the loop draw, by its own model, what it would at given limits.

        Split as the loop splits power, so limits that were split otherwise are not met job by job.

        Args:
            position: Wanted positions, shape `(B, J)`.

        Returns:
            Power of each job, shape `(B, J)`, W.
        """
        wanted_w = (self.model.job_power_w(position) * self._gain).sum(axis=1) + self._other_w
        offset = self.plan.offset_for((wanted_w - self._base) / self._capacity)
        full_w = self.model.power_w[:, :, -1]
        surprise: FloatArray = (offset * self._capacity / full_w.sum(axis=1))[:, None] * full_w
        return surprise

    def reckoned_w(self, position: FloatArray) -> FloatArray:
        """What the loop reckons that each job will draw in the coming period, shape `(B, J)`, W.

        Args:
            position: Limits of the coming period, shape `(B, J)`.
        """
        jobs = self.jobs
        assert jobs is not None
        following = jobs.share * self.model.job_power_w(position) + (1.0 - jobs.share) * jobs.now_w
        reckoned: FloatArray = self._gain * following + self._aside
        return reckoned

    def _targets(self, announced: FloatArray) -> FloatArray:
        """Targets of the horizon, announced ones first, capacities from the base, shape `(B, N)`."""
        announced = announced[:, : self._settings.horizon]
        self._forecast.update(announced[:, 0])
        missing = self._settings.horizon - announced.shape[1]
        if missing == 0:
            return announced
        if announced.shape[1] > 1:
            return np.concatenate([announced, np.repeat(announced[:, -1:], missing, axis=1)], axis=1)
        return np.concatenate([announced, self._forecast.ahead(missing)], axis=1)
