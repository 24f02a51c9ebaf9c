"""The quadratic program of the predictive controllers, for a batch of sites, solved by OSQP."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from wattgym.envs.plant import FloatArray

_ROUNDING = 1e-6
"""Capacities by which a bound may pass the other where both are sums of the same powers."""


class TrackingProgram:
    """Commands over a horizon that track targets, train much and move little.

    For each site, with commands `y_k` (k = 0 … N−1), `y_-1` the last one, all powers in capacities from the base:

        minimise    sum_k (r_k − target_k)² − throughput · r_k + move · |y_k − y_k−1|
        subject to  r_k = a y_k + (1 − a) y_k−1 + offset_k        (a: share of a change that acts within its period)
                    low <= y_k <= high,   y_k − y_k−1 <= rise

    The sites of a batch are blocks of one sparse program that OSQP (Stellato et al., Mathematical Programming
    Computation 2020) sets up once and then solves every period from its last solution.
    """

    def __init__(self, batch: int, horizon: int) -> None:
        """Sets the structure up.

        Args:
            batch: Sites.
            horizon: Periods N.
        """
        import osqp

        self._batch, self._horizon = batch, horizon
        n = horizon
        # Per site: y (N) and the sizes of the moves (N).
        pattern = sparse.bmat([[sparse.eye(n) + sparse.eye(n, k=1), None], [None, sparse.csc_matrix((n, n))]])
        hessian = sparse.block_diag([pattern] * batch, format="csc")
        difference = sparse.eye(n) - sparse.eye(n, k=-1)
        rows = sparse.bmat([[sparse.eye(n), None], [difference, -sparse.eye(n)], [difference, sparse.eye(n)],
                            [difference, None]])  # fmt: skip
        constraints = sparse.block_diag([rows] * batch, format="csc")
        self._hessian = hessian
        coordinates = hessian.tocoo()
        column, row = coordinates.col % (2 * n), coordinates.row % (2 * n)
        self._site, self._column, self._above = coordinates.col // (2 * n), column, row != column
        self._solver: Any = osqp.OSQP()
        low, high = np.full(batch * 4 * n, -1.0), np.full(batch * 4 * n, 1.0)
        self._solver.setup(
            hessian, np.zeros(batch * 2 * n), constraints, low, high,
            verbose=False, eps_abs=1e-4, eps_rel=1e-4, max_iter=400, polishing=False,
        )  # fmt: skip

    def solve(
        self,
        last: FloatArray,
        target: FloatArray,
        offset: FloatArray,
        share: FloatArray,
        low: FloatArray,
        high: FloatArray,
        rise: FloatArray,
        throughput: FloatArray,
        move: FloatArray,
    ) -> FloatArray:
        """The best commands.

        Args:
            last: Command in force, shape `(B,)`.
            target: Targets, shape `(B, N)`.
            offset: What is added to the response, shape `(B, N)`.
            share: Share `a`, shape `(B,)`.
            low: Lowest command, shape `(B,)`.
            high: Highest command, shape `(B,)`.
            rise: Largest rise of the command per period, shape `(B,)`.
            throughput: Worth of one capacity more power for training, shape `(B,)`.
            move: Price of moving the command by one capacity, shape `(B,)`.

        Returns:
            Commands, shape `(B, N)`; the last command where the solver finds nothing.

        Raises:
            ValueError: A site's bounds contradict each other; the sites of a batch are one program, so all would hang.
        """
        feasible = (low <= high + _ROUNDING) & (rise >= 0.0)
        if not feasible.all():
            raise ValueError(f"sites {np.flatnonzero(~feasible)}: no command satisfies their bounds")
        low = np.minimum(low, high)
        n, batch = self._horizon, self._batch
        a, b = share[:, None], 1.0 - share[:, None]
        last_column = self._column == n - 1
        site_a, site_b = share[self._site], 1.0 - share[self._site]
        diagonal = 2.0 * (site_a**2 + np.where(last_column, 0.0, site_b**2))
        values = np.where(self._above, 2.0 * site_a * site_b, diagonal)

        # (r_k − t_k)² with r_k = a y_k + b y_k−1 + c_k: linear terms, the last command folded into c_0.
        wanted = target - offset
        wanted[:, 0] -= (b * last[:, None])[:, 0]
        following = np.concatenate([wanted[:, 1:], np.zeros((batch, 1))], axis=1)
        has_next = np.arange(n) < n - 1
        linear = -2.0 * (a * wanted + b * following) - throughput[:, None] * (a + np.where(has_next, b, 0.0))
        q = np.concatenate([linear, np.repeat(move[:, None], n, axis=1)], axis=1)

        first = np.zeros((batch, n))
        first[:, 0] = last
        endless = np.full((batch, n), np.inf)
        lower = np.concatenate([np.repeat(low[:, None], n, axis=1), -endless, first, -endless], axis=1)
        upper = np.concatenate([np.repeat(high[:, None], n, axis=1), first, endless, first + rise[:, None]], axis=1)
        self._solver.update(q=q.ravel(), l=lower.ravel(), u=upper.ravel(), Px=values)
        found = self._solver.solve(raise_error=False)
        commands = np.asarray(found.x, dtype=np.float64).reshape(batch, 2 * n)[:, :n]
        commands = np.where(np.isfinite(commands), commands, last[:, None])
        result: FloatArray = np.clip(commands, low[:, None], high[:, None])
        return result
