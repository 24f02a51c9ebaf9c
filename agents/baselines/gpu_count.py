"""GPU-count scaling: as many active GPUs as the target's power allows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.knob_actions import fewest_active, position_of
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask


class GpuCountSettings(FrozenModel):
    """The rule's parameters.

    Attributes:
        integral: Share of the sensed error that is added to the lasting correction each period.
        lead: Weight of the newest target against the mean over the dwell time; 1 follows every move.
    """

    integral: float = Field(default=0.02, ge=0.0)
    lead: float = Field(default=0.3, gt=0.0, le=1.0)


SEARCH = {"integral": Range(0.001, 0.3, log=True), "lead": Range(0.05, 1.0)}
"""Where settings are searched."""


class GpuCount:
    """The same share of every job's GPUs works, at the highest limit; the others idle.

    With `n` GPUs, nominal idle power `P_0` and full power `P_1` of all jobs, the share is
    `(target + correction − P_0) / (P_1 − P_0)`, and each job rounds it to GPUs so that the site's sum comes closest
    (largest remainders first). Elastic scaling of data-parallel jobs as a power knob: Emerald Conductor (arXiv
    2507.00909) and curtail-llm (arXiv 2602.22760) change the resources of jobs so.
    """

    name = "GPU-count scaling"

    def __init__(self, settings: GpuCountSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Starts without a correction."""
        self._task, self._observed = task, ObservedPower(task)
        spec = task.spec
        self._idle_w = task.knobs.idle_w
        self._per_gpu_w = (spec.power_table_w[:, :, -1] - self._idle_w) / spec.n_gpus
        self._fewest = fewest_active(task.config.knob_rules, spec.n_gpus)
        self._correction_w = np.zeros(task.base_w.size)
        self._smooth_w: FloatArray | None = None

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Chooses the GPUs of the coming period."""
        seen, spec, settings = self._observed, self._task.spec, self._settings
        target_w = seen.target_w(observation)
        smooth_w = target_w if self._smooth_w is None else self._smooth_w
        self._smooth_w = smooth_w + settings.lead * (target_w - smooth_w)
        error_w = seen.error(observation) * self._task.capacity_w
        bound_w = self._task.capacity_w
        self._correction_w = np.clip(self._correction_w - settings.integral * error_w, -bound_w, bound_w)

        wanted_w = self._smooth_w + self._correction_w - spec.host_w - self._idle_w.sum(axis=1)
        span_w = (self._per_gpu_w * spec.n_gpus).sum(axis=1)
        share = np.clip(wanted_w / span_w, 0.0, 1.0)
        exact = np.clip(share[:, None] * spec.n_gpus, self._fewest, spec.n_gpus)
        active = np.floor(exact)
        # What rounding down leaves over goes to the largest remainders, while it lasts.
        order = np.argsort(active - exact, axis=1, kind="stable")
        cost = np.take_along_axis(self._per_gpu_w, order, axis=1)
        left_w = ((exact - active) * self._per_gpu_w).sum(axis=1, keepdims=True)
        more = (np.cumsum(cost, axis=1) - cost / 2.0 <= left_w) & np.take_along_axis(exact > active, order, axis=1)
        np.put_along_axis(active, order, np.take_along_axis(active, order, axis=1) + more, axis=1)
        command = Command(spec.max_limit_w, active_gpus=active.astype(np.int64))
        positions: dict[KnobName, FloatArray] = {
            "active_gpus": position_of(self._task.config.knob_rules, "active_gpus", command, spec)
        }
        ones = np.ones_like(exact)
        return self._task.action_for(ones, seen.feed_forward(observation), seen.limits(observation), positions)
