"""Reconstruction of PowerMorph: shape the training, not only the cap.

PowerMorph (Li, Ge, Guo, She, Tallent, Adetola; IPDPS 2026, DOI 10.1109/IPDPS65963.2026.00100) follows power
demand-response curves with one large training job, at higher throughput and without hurting accuracy. Its text is not
public; this is a reconstruction from its claims and its references. Where it differs, the difference is ours.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.configurations import power_at
from wattgym.envs.plant import FloatArray
from wattgym.envs.predictive import FOLLOWS, largest_rise
from wattgym.envs.slow_loop import KEEP, SLOW_S, SlowLoop
from wattgym.envs.task import ControlTask


class PowerMorphSettings(FrozenModel):
    """Parameters of both loops.

    Attributes:
        slow_s: Time between choices of configurations, seconds; at least the knobs' dwell times.
        keep: Gain of throughput below which a job's configuration is kept.
        proportional: Share of the mean error that the fast loop corrects at once.
        integral: Share of it that is added to the lasting correction each period.
        leak: Share of the lasting correction that is forgotten each period: a sensor may be as wrong as the table.
        dead_band: Mean error that is left alone, share of the capacity.
        learn: Weight of the newest period in the table's moving averages.
        credit: Share of a lasting misfit between sensor and table that is put down to the table.
        fill: Assumed probability that a job's dip (a checkpoint) goes on for another period; the site's own dips
            soon count for more.
    """

    slow_s: float = Field(default=SLOW_S, gt=0.0)
    keep: float = Field(default=KEEP, ge=0.0)
    proportional: float = Field(default=0.0, ge=0.0)
    integral: float = Field(default=0.001, ge=0.0)
    leak: float = Field(default=0.02, ge=0.0, le=1.0)
    dead_band: float = Field(default=0.05, ge=0.0)
    learn: float = Field(default=0.02, gt=0.0, le=1.0)
    credit: float = Field(default=0.1, ge=0.0, le=1.0)
    fill: float = Field(default=1.0, ge=0.0, le=1.0)


SEARCH = {
    "slow_s": Range(30.0, 300.0, log=True),
    "proportional": Range(0.0, 0.5),
    "integral": Range(0.0001, 0.1, log=True),
    "dead_band": Range(0.0, 0.2),
    "learn": Range(0.005, 0.3, log=True),
    "credit": Range(0.0, 1.0),
    "fill": Range(0.0, 1.0),
}
"""Where settings are searched."""

_FIRST_DIPS = 5.0
"""Dips that the assumption of how long they last counts for."""

_STEADY = 0.02
"""Change of a limit's position below which power has settled."""

_SHIFTS = np.linspace(-1.0, 1.0, 129)
"""Common shifts of all limits at which the site's power is tabled; linear between them."""


class PowerMorph:
    """A slow loop over configurations, a fast loop over limits.

    Slow (every `slow_s`): a configuration per job is chosen for the moving average of the target (`SlowLoop`).

    Fast (every period): with the configurations as they are, all limits move alike until the table says the target's
    power, plus a PI correction of the sensed error (its integral leaks). The error is averaged over whole optimiser
    steps, because power swings within one; errors within a dead band are left alone; the integral stops where limits
    are at their ends.

    Table: each job's entries are scaled by an exponentially weighted mean of sensed over tabled power, while the job
    follows its limit (drift, sensor). One that does not (a checkpoint) is expected to go on so as often as dips did
    before, and the others make up for it.

    The rest of the scheme - samples per update constant, gradients weighted by samples, changes between optimiser
    steps - is the plant's: knobs do it whoever sets them.
    """

    name = "PowerMorph (reconstruction)"

    def __init__(self, settings: PowerMorphSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Works out the table; nothing is known of the site beyond it."""
        settings = self._settings
        self._task, self._observed = task, ObservedPower(task)
        self._slow = SlowLoop(task.spec, task.layout.knobs, task.config.knob_rules, settings.slow_s, settings.keep)
        self._rise = largest_rise(task.spec, task.config.rules)
        period_s = task.spec.period_s
        self._window = max(math.ceil(task.config.site.knobs.step_s / period_s - 1e-9), 1)
        batch, jobs = task.spec.n_gpus.shape
        self._gain = self._ratio = np.ones((batch, jobs))
        self._follows: NDArray[np.bool_] = np.ones((batch, jobs), dtype=np.bool_)
        self._sensed_w: FloatArray = np.zeros((batch, jobs))
        self._dips, self._lasting = np.full(batch, _FIRST_DIPS), np.full(batch, _FIRST_DIPS * settings.fill)
        self._errors: list[FloatArray] = []
        self._integral_w = np.zeros(batch)
        self._begun = False

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Both loops."""
        seen, settings = self._observed, self._settings
        target_w = seen.target_w(observation)
        if self._begun:
            self._learn(observation)
        else:
            self._limits, self._begun = seen.limits(observation), True
        if self._slow.step(target_w, self._gain):
            shifted = (np.clip(self._slow.plan + shift, 0.0, 1.0) for shift in _SHIFTS)
            self._curve_w = np.stack([power_at(x, self._slow.power_w, self._slow.grid) for x in shifted], axis=2)

        error_w = seen.error(observation) * self._task.capacity_w
        self._errors = [*self._errors, error_w][-self._window :]
        mean_w = np.mean(self._errors, axis=0)
        mean_w = np.where(np.abs(mean_w) > settings.dead_band * self._task.capacity_w, mean_w, 0.0)
        wanted_w = target_w - settings.proportional * mean_w - self._integral_w - settings.integral * mean_w
        position = self._trimmed(observation, wanted_w)
        free = np.where(mean_w > 0, position.max(axis=1) > 0.0, position.min(axis=1) < 1.0)
        self._integral_w += np.where(free, settings.integral * mean_w, 0.0) - settings.leak * self._integral_w
        limits = seen.limits(observation)
        position = np.minimum(position, limits + self._rise)
        return self._task.action_for(position, seen.feed_forward(observation), limits, self._slow.positions)

    def _learn(self, observation: NDArray[np.float32]) -> None:
        """Takes the last period into the table."""
        seen, settings = self._observed, self._settings
        sensed, limits = seen.job_power_w(observation), seen.limits(observation)
        ratio = sensed / power_at(limits, self._slow.power_w, self._slow.grid)
        followed, self._follows = self._follows, ratio >= FOLLOWS * self._ratio
        self._dips += (~followed).sum(axis=1)
        self._lasting += (~followed & ~self._follows).sum(axis=1)
        # While a limit moves, dead time would pass for a misfit.
        steady = np.abs(limits - self._limits) < _STEADY
        self._limits = limits
        change = np.where(self._follows & steady, settings.learn * (ratio - self._ratio), 0.0)
        self._ratio = np.clip(self._ratio + change, 0.5, 1.5)
        self._gain = 1.0 + settings.credit * (self._ratio - 1.0)
        self._sensed_w = sensed * self._gain / self._ratio

    def _trimmed(self, observation: NDArray[np.float32], power_w: FloatArray) -> FloatArray:
        """Positions at which the site draws a power: the plan's, all shifted alike."""
        fill, gain = (self._lasting / self._dips)[:, None], self._gain
        held_w = gain * power_at(self._observed.limits(observation), self._slow.power_w, self._slow.grid)
        others_w = np.where(self._follows, 0.0, fill * self._sensed_w + (1.0 - fill) * held_w)
        budget_w = power_w - self._task.spec.host_w - others_w.sum(axis=1)
        curves = (self._curve_w * (gain * self._follows)[..., None]).sum(axis=1)
        shift = np.array([np.interp(b, curve, _SHIFTS) for b, curve in zip(budget_w, curves, strict=True)])
        position: FloatArray = np.clip(self._slow.plan + shift[:, None], 0.0, 1.0)
        return position
