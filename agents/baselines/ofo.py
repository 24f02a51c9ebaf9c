"""Online feedback optimisation: gradient steps on the measured plant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.config import FrozenModel
from wattgym.envs.plant import FloatArray
from wattgym.envs.site_model import SiteModel
from wattgym.envs.task import ControlTask


class OfoSettings(FrozenModel):
    """Step sizes of the optimiser.

    Attributes:
        step: Primal step; 1 closes a tracking error at once if the nominal slopes are true.
        dual: Step of the multiplier of the tracking constraint.
        throughput: Weight of throughput against a tracking error of one capacity squared.
        damping: Pull towards the position before the last step.
    """

    step: float = Field(default=0.5, gt=0.0, le=2.0)
    dual: float = Field(default=0.05, ge=0.0, le=1.0)
    throughput: float = Field(default=0.05, ge=0.0)
    damping: float = Field(default=0.0, ge=0.0, lt=1.0)


SEARCH = {
    "step": Range(0.1, 1.5),
    "dual": Range(0.001, 0.5, log=True),
    "throughput": Range(0.001, 1.0, log=True),
    "damping": Range(0.0, 0.6),
}
"""Where settings are searched."""


class OnlineFeedback:
    """Follows the gradient of throughput and tracking error, the error measured, the slopes nominal.

    With `e` the sensed power minus the coming target in capacities, `P_j` and `T_j` nominal power (capacities) and
    throughput of job j at its position `x_j`, and `n² = sum_j P_j'²`:

        lambda <- lambda + dual · e
        x_j    <- clip(x_j - step · ((e + lambda) P_j' - throughput · T_j') / n² + damping · (x_j - x_j,before))

    GPU-to-Grid (arXiv 2602.05116, code gpu2grid/openg2g) steps `-w_T T' + k eta P' + gamma (x - x_before)` on the
    logarithm of the batch size, `eta` being multipliers of voltage limits. Here the voltages' multipliers are replaced
    by the tracking error and its multiplier, and the step is normalised so that its size means the same on every site.
    The multiplier is kept within one capacity: what clips for long must not wind it up.
    """

    name = "online feedback optimisation"

    def __init__(self, settings: OfoSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Starts at the position of the base power with no multiplier."""
        self._task = task
        self._observed = ObservedPower(task)
        self._model = SiteModel(task.spec)
        self._position = self._model.positions(task.base_w)
        self._before = self._position
        self._dual = np.zeros(task.base_w.size)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """One step of the optimiser."""
        settings, seen, model = self._settings, self._observed, self._model
        capacity = self._task.capacity_w
        error = (seen.power_w(observation) - seen.target_w(observation)) / capacity
        self._dual = np.clip(self._dual + settings.dual * error, -1.0, 1.0)
        slope = model.slope_w(self._position) / capacity[:, None]
        gradient = (error + self._dual)[:, None] * slope
        gradient -= settings.throughput * model.slope_throughput(self._position)
        size = np.maximum((slope**2).sum(axis=1, keepdims=True), 1e-6)
        moved = self._position - settings.step * gradient / size + settings.damping * (self._position - self._before)
        self._before, self._position = self._position, np.clip(moved, 0.0, 1.0)
        return self._task.action_for(self._position, seen.feed_forward(observation), seen.limits(observation))
