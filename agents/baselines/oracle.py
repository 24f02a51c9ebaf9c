"""Model-predictive control with preview and the true plant: how well control could do, a yardstick alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.program import TrackingProgram
from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import Observed
from wattgym.agents.truth import Truth
from wattgym.config import FrozenModel
from wattgym.envs.knobs import KnobName
from wattgym.envs.plant import FloatArray
from wattgym.envs.site_model import SiteModel
from wattgym.envs.slow_loop import SlowLoop
from wattgym.envs.task import ControlTask


class OracleSettings(FrozenModel):
    """Weights of the plan; see `PredictiveSettings`.

    Attributes:
        horizon: Periods looked ahead.
        rounds: Times the plan is tried on the plant's twin and corrected, each period.
        move: Price of moving the command by one capacity, against a squared error of one capacity.
        throughput: Worth of full speed, against the same.
    """

    horizon: int = Field(default=3, ge=2, le=30)
    rounds: int = Field(default=2, ge=1, le=10)
    move: float = Field(default=0.03, ge=0.0)
    throughput: float = Field(default=0.03, ge=0.0)


SEARCH = {"move": Range(0.001, 0.3, log=True), "throughput": Range(0.001, 0.3, log=True)}
"""Where settings are searched."""


class OracleControl:
    """Plans with the coming targets, on the plant's own future.

    The plan of the last period is tried on a twin of the plant, noise, checkpoints and lost commands included. Where
    the twin's power differs from the plan's model, the difference becomes the model's offset and `TrackingProgram` is
    solved again (a Gauss-Newton step with the true residual). Power is split between the jobs by their true tables.
    Where other knobs are enabled, a `SlowLoop` that knows the true tables sets them.
    """

    name = "oracle MPC"

    def __init__(self, settings: OracleSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Waits for the truth."""
        self._task, self._observed = task, Observed(task.layout)
        self._truth: Truth | None = None

    def inform(self, truth: Truth) -> None:
        """Takes the truth."""
        task, spec = self._task, truth.spec
        self._truth = truth
        self._model = SiteModel(spec, "optimal")
        self._program = TrackingProgram(task.base_w.size, self._settings.horizon)
        moved = spec.power_table_w[:, :, -1] - spec.power_table_w[:, :, 0]
        at_once = np.where(truth.delay_periods == 0, moved, 0.0).sum(axis=1) / np.maximum(moved.sum(axis=1), 1e-9)
        self._share = np.clip(at_once, 0.05, 1.0)
        self._span_w = self._model.full_w - self._model.floor_w
        self._last_w = self._model.full_w
        self._plan_w = np.repeat(truth.targets_w[:, :1], self._settings.horizon, axis=1)
        layout = task.layout
        self._slow = SlowLoop(spec, layout.knobs, task.config.knob_rules) if layout.beside_limit else None
        self._knobs: dict[KnobName, FloatArray] = {}
        self._tick = 0

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Tries and corrects the plan, then does the first of it.

        Raises:
            RuntimeError: Nobody told it the truth.
        """
        if self._truth is None:
            raise RuntimeError("an oracle must be told the truth; it runs in the emulator's arena only")
        settings, model, task = self._settings, self._model, self._task
        base, capacity = task.base_w[:, None], task.capacity_w[:, None]
        last = self._truth.targets_w.shape[1] - 1
        ahead = np.minimum(self._tick + np.arange(settings.horizon), last)
        target = (self._truth.targets_w[:, ahead] - base) / capacity
        before = (self._last_w - task.base_w) / task.capacity_w
        if (setting := self._truth.setting) is not None:
            model.follow(setting)
        for _ in range(settings.rounds):
            command = (self._plan_w - base) / capacity
            earlier = np.concatenate([before[:, None], command[:, :-1]], axis=1)
            expected = self._share[:, None] * command + (1.0 - self._share[:, None]) * earlier
            power_w = self._truth.foresee(np.stack([self._limits_w(w) for w in self._plan_w.T]))
            command = self._program.solve(
                last=before,
                target=target,
                offset=(power_w.T - base) / capacity - expected,
                share=self._share,
                low=(model.floor_w - task.base_w) / task.capacity_w,
                high=(model.full_w - task.base_w) / task.capacity_w,
                rise=self._span_w / task.capacity_w,
                throughput=settings.throughput * task.capacity_w / self._span_w,
                move=settings.move * task.capacity_w / self._span_w,
            )
            self._plan_w = base + capacity * command
        self._last_w = self._plan_w[:, 0]
        position = model.positions(self._last_w)
        self._plan_w = np.concatenate([self._plan_w[:, 1:], self._plan_w[:, -1:]], axis=1)
        if self._slow is not None:
            self._slow.step(self._truth.targets_w[:, min(self._tick, last)], np.ones_like(position))
            self._knobs = self._slow.positions
        self._tick += 1
        seen = self._observed
        return task.action_for(position, seen.feed_forward(observation), seen.limits(observation), self._knobs)

    def _limits_w(self, power_w: FloatArray) -> FloatArray:
        spec = self._task.spec
        return spec.min_limit_w + self._model.positions(power_w) * (spec.max_limit_w - spec.min_limit_w)
