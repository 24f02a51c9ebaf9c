"""Pause and resume: jobs train at full power or not at all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.knob_actions import position_of
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask


class PauseSettings(FrozenModel):
    """The rule's parameters.

    Attributes:
        integral: Share of the sensed error that is added to the lasting correction each period.
        hysteresis: How far the wanted power must leave what runs before anything changes, share of the capacity.
        turn_s: Time after which another job is the first to be paused, seconds.
    """

    integral: float = Field(default=0.02, ge=0.0)
    hysteresis: float = Field(default=0.1, ge=0.0)
    turn_s: float = Field(default=300.0, gt=0.0)


SEARCH = {
    "integral": Range(0.001, 0.3, log=True),
    "hysteresis": Range(0.0, 0.5),
    "turn_s": Range(30.0, 1200.0, log=True),
}
"""Where settings are searched."""


class PauseResume:
    """Jobs run in a rotating order as long as the target's power lasts; the next one runs part of the time.

    In the order of turns, a job runs (duty 1) while its nominal power above idle fits into what is left of the target,
    the first that does not fit gets the duty that does, and the rest are paused (the lowest duty that `knob_rules`
    allow). Nothing changes while the wanted power is within the hysteresis of what runs. Pausing as a stack of running
    jobs is how a published regulator of GPU nodes spans gaps wider than one GPU's cap range; Emerald Conductor
    (arXiv 2507.00909) pauses by flexibility tiers.
    """

    name = "pause/resume"

    def __init__(self, settings: PauseSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Every job runs."""
        self._task, self._observed = task, ObservedPower(task)
        spec, settings = task.spec, self._settings
        self._idle_w = task.knobs.idle_w
        self._span_w = spec.power_table_w[:, :, -1] - self._idle_w
        self._lowest = task.config.knob_rules.min_duty
        self._turn = max(round(settings.turn_s / spec.period_s), 1)
        self._correction_w = np.zeros(task.base_w.size)
        self._running_w = np.full(task.base_w.size, np.inf)
        self._duty = np.ones(spec.n_gpus.shape)
        self._tick = 0

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Chooses who runs in the coming period."""
        seen, spec, settings = self._observed, self._task.spec, self._settings
        capacity_w = self._task.capacity_w
        error_w = seen.error(observation) * capacity_w
        self._correction_w = np.clip(self._correction_w - settings.integral * error_w, -capacity_w, capacity_w)
        wanted_w = seen.target_w(observation) + self._correction_w
        moved = np.abs(wanted_w - self._running_w) > settings.hysteresis * capacity_w
        turned, self._tick = self._tick % self._turn == 0, self._tick + 1
        duty = self._shared_out(wanted_w - spec.host_w, first=(self._tick - 1) // self._turn)
        change = moved | turned
        self._duty = np.where(change[:, None], duty, self._duty)
        self._running_w = np.where(change, wanted_w, self._running_w)
        command = Command(spec.max_limit_w, duty=self._duty)
        positions: dict[KnobName, FloatArray] = {
            "duty_cycle": position_of(self._task.config.knob_rules, "duty_cycle", command, spec)
        }
        ones = np.ones_like(duty)
        return self._task.action_for(ones, seen.feed_forward(observation), seen.limits(observation), positions)

    def _shared_out(self, power_w: FloatArray, first: int) -> FloatArray:
        """Duties that draw a power, jobs running in the order that begins with `first`."""
        jobs = self._span_w.shape[1]
        order = (np.arange(jobs) + first) % jobs
        span = (1.0 - self._lowest) * self._span_w[:, order]
        left = power_w - (self._idle_w + self._lowest * self._span_w).sum(axis=1)
        share = np.clip((left[:, None] - (np.cumsum(span, axis=1) - span)) / np.maximum(span, 1e-9), 0.0, 1.0)
        duty: FloatArray = np.empty_like(share)
        duty[:, order] = self._lowest + (1.0 - self._lowest) * share
        return duty
