"""An autoregressive forecast of the target, learned within the episode."""

from __future__ import annotations

import numpy as np

from wattgym.envs.plant import FloatArray

ORDER = 4
"""As GridPilot's forecast of host power has (arXiv 2605.26384)."""


class TargetForecast:
    """Recursive least squares on the last `ORDER` targets, for each site of its own.

    The weights are shrunk towards persistence (the next target is the last one): with `x` the last targets, `y` the
    next one and `f` the factor by which old samples are forgotten,

        S <- f S + x x',   c <- f c + x (y - x_1),   w = e_1 + (S + ridge I)^-1 c
    """

    def __init__(self, batch: int, memory: float, ridge: float) -> None:
        """Starts with persistence.

        Args:
            batch: Sites.
            memory: Samples over which old ones are forgotten.
            ridge: Pull towards persistence, in squared units of the target.
        """
        self._keep = 1.0 - 1.0 / memory
        self._ridge = ridge * np.eye(ORDER)
        self._s, self._c = np.zeros((batch, ORDER, ORDER)), np.zeros((batch, ORDER, 1))
        self._past: FloatArray | None = None

    def update(self, target: FloatArray) -> None:
        """Takes in the newest target, shape `(B,)`."""
        if self._past is None:
            self._past = np.repeat(target[:, None], ORDER, axis=1)
            return
        x = self._past[:, :, None]
        self._s = self._keep * self._s + x @ x.transpose(0, 2, 1)
        self._c = self._keep * self._c + x * (target - self._past[:, 0])[:, None, None]
        self._past = np.concatenate([target[:, None], self._past[:, :-1]], axis=1)

    def ahead(self, steps: int) -> FloatArray:
        """Forecasts of the coming `steps` targets after the newest, shape `(B, steps)`.

        Raises:
            RuntimeError: There is no target yet.
        """
        if self._past is None:
            raise RuntimeError("no target has been seen yet")
        weights = np.linalg.solve(self._s + self._ridge, self._c)[..., 0]
        weights[:, 0] += 1.0
        seen = np.empty((self._past.shape[0], ORDER + steps))
        seen[:, :ORDER] = self._past[:, ::-1]
        # A forecast that runs off is worth nothing: it stays within what the target has been and half as much again.
        bound = 1.5 * np.maximum(np.abs(self._past).max(axis=1), 1e-6)
        for k in range(ORDER, ORDER + steps):
            seen[:, k] = np.clip((seen[:, k - ORDER : k][:, ::-1] * weights).sum(axis=1), -bound, bound)
        return seen[:, ORDER:]
