"""Advice by who knows the plant: what a policy that advises a predictive loop is to learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.truth import Truth
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask

ADVISER = "oracle adviser"
"""Its name as an expert to imitate."""

_ROUNDS = 2
"""Times that the loop's limits are tried on the plant's twin; advice moves limits, and with them what is drawn."""


class OracleAdviser:
    """Says of each job by how much it will draw more than the loop reckons with, found on a twin of the plant.

    It knows noise and phases to come, which nobody can. A policy that learns it with squared errors learns what is to
    be expected of it, given what is seen; that is what a plan needs. Other knobs it leaves where the loop has them.
    """

    name = ADVISER

    def reset(self, task: ControlTask) -> None:
        """Waits for the truth."""
        self._task = task
        self._truth: Truth | None = None

    def inform(self, truth: Truth) -> None:
        """Takes the truth."""
        self._truth = truth

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Advice for the coming period, shape `(B, A)`.

        Raises:
            RuntimeError: Nobody told it the truth, or actions are no advice.
        """
        spec, loop = self._task.spec, self._task.predictive
        if self._truth is None or loop is None:
            raise RuntimeError("an adviser must be told the truth, and there must be a loop to advise")
        surprise_w = np.zeros_like(spec.min_limit_w)
        for _ in range(_ROUNDS):
            position = loop.advised(surprise_w)
            limit_w = spec.min_limit_w + position * (spec.max_limit_w - spec.min_limit_w)
            surprise_w = self._truth.foresee_jobs(limit_w[None])[0] - loop.reckoned_w(position)
        advice: FloatArray = np.clip(
            surprise_w / spec.power_table_w[:, :, -1] / self._task.config.action.scale, -1.0, 1.0
        )
        return np.concatenate([advice, np.zeros((len(advice), self._task.layout.actions - advice.shape[1]))], axis=1)
