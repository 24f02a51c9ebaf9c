"""The nominal model as baselines use it: power and progress at each job's limit, and how to split a site's power."""

from __future__ import annotations

from typing import Literal

import numpy as np

from wattgym.envs.plant import Command, FloatArray, IntArray, PlantSpec

Split = Literal["proportional", "optimal"]
"""`proportional`: one position in every job's limit range. `optimal`: where another watt trains most."""

_TINY_W = 1e-9


class SiteModel:
    """Tables of `B` sites of `J` jobs over positions in the limit range, 0 to 1.

    Power is made monotone over the position (a limit is a ceiling: a higher one never lowers power), so that it can be
    inverted. The optimal split fills steps of the tables in the order of throughput (weighted by GPUs) per watt. For
    concave curves that is the optimum (equal marginal returns); others are replaced by their least concave majorant,
    the slopes of which are an antitonic regression of the curve's slopes weighted by power (Barlow et al., Statistical
    Inference under Order Restrictions, 1972), so that at most one job lies between two points where its curve bends
    the wrong way.
    """

    def __init__(self, spec: PlantSpec, split: Split = "proportional") -> None:
        """Prepares the tables.

        Args:
            spec: Nominal description.
            split: How `positions` splits power between jobs.
        """
        gpus = spec.n_gpus.astype(np.float64)
        self.weight = gpus / gpus.sum(axis=1, keepdims=True)
        self.grid = spec.limit_grid
        self.host_w = spec.host_w
        self._spec, self._split = spec, split
        self._take(spec.power_table_w, spec.throughput_table)

    def follow(self, setting: Command) -> None:
        """Takes the tables of another setting of the knobs beside the limit.

        Args:
            setting: Its limits do not matter.
        """
        power_w, throughput = self._spec.tables(setting)
        if not (np.array_equal(throughput, self.throughput) and np.array_equal(power_w, self._given_w)):
            self._take(power_w, throughput)

    def _take(self, power_w: FloatArray, throughput: FloatArray) -> None:
        self._given_w, self.throughput = power_w, throughput
        self.power_w = np.maximum.accumulate(power_w, axis=2)
        self.step_w = np.diff(self.power_w, axis=2)
        if self._split == "optimal":
            self._order = self._best_order()

    @property
    def floor_w(self) -> FloatArray:
        """Lowest site power, shape `(B,)`, W."""
        floor: FloatArray = self.power_w[:, :, 0].sum(axis=1) + self.host_w
        return floor

    @property
    def full_w(self) -> FloatArray:
        """Highest site power, shape `(B,)`, W."""
        full: FloatArray = self.power_w[:, :, -1].sum(axis=1) + self.host_w
        return full

    def job_power_w(self, position: FloatArray) -> FloatArray:
        """Power of each job at its position, shape `(B, J)`, W."""
        return self._lookup(self.power_w, position)

    def slope_w(self, position: FloatArray) -> FloatArray:
        """Watts per unit of position, shape `(B, J)`."""
        return self._slope(self.power_w, position)

    def slope_throughput(self, position: FloatArray) -> FloatArray:
        """Site throughput per unit of each job's position, shape `(B, J)`."""
        slope: FloatArray = self._slope(self.throughput, position) * self.weight
        return slope

    def positions(self, power_w: FloatArray, gain: FloatArray | None = None) -> FloatArray:
        """Positions at which the site draws a power.

        Args:
            power_w: Site power, hosts included, shape `(B,)`, W.
            gain: True over nominal power of each job, shape `(B, J)`; 0 leaves a job out (its position is then that of
                a job that draws nothing). 1 if None.

        Returns:
            Positions in [0, 1], shape `(B, J)`; the ends where the power is out of reach.
        """
        table = self.power_w if gain is None else self.power_w * gain[:, :, None]
        power = power_w - self.host_w
        return self._filled(power, gain) if self._split == "optimal" else self._common(power, table.sum(axis=1))

    def throughput_per_w(self, position: FloatArray) -> FloatArray:
        """Site throughput that another watt buys, split like the last one, shape `(B,)`."""
        watts = self.slope_w(position).sum(axis=1)
        progress = self.slope_throughput(position).sum(axis=1)
        per_w: FloatArray = progress / np.maximum(watts, _TINY_W)
        return per_w

    def _lookup(self, table: FloatArray, position: FloatArray) -> FloatArray:
        index, share = self._interval(position)
        low = np.take_along_axis(table, index[..., None], axis=2)[..., 0]
        high = np.take_along_axis(table, index[..., None] + 1, axis=2)[..., 0]
        value: FloatArray = low + share * (high - low)
        return value

    def _slope(self, table: FloatArray, position: FloatArray) -> FloatArray:
        """Over the interval of two grid steps around the position, so that a kink does not make it jump."""
        reach = 1.0 / (self.grid.size - 1)
        low, high = np.clip(position - reach, 0.0, 1.0), np.clip(position + reach, 0.0, 1.0)
        slope: FloatArray = (self._lookup(table, high) - self._lookup(table, low)) / (high - low)
        return slope

    def _interval(self, position: FloatArray) -> tuple[IntArray, FloatArray]:
        grid = self.grid
        index = np.clip(np.searchsorted(grid, position, side="right") - 1, 0, grid.size - 2)
        return index, np.clip((position - grid[index]) / (grid[index + 1] - grid[index]), 0.0, 1.0)

    def _common(self, power_w: FloatArray, site_w: FloatArray) -> FloatArray:
        found = [np.interp(power, table, self.grid) for power, table in zip(power_w, site_w, strict=True)]
        return np.repeat(np.array(found)[:, None], self.power_w.shape[1], axis=1)

    def _best_order(self) -> IntArray:
        """Indices of all steps of a site's jobs, most throughput per watt first, shape `(B, J * (K - 1))`."""
        from scipy.optimize import isotonic_regression

        step_w = np.maximum(self.step_w, _TINY_W)
        slope = np.diff(self.throughput, axis=2) * self.weight[..., None] / step_w
        concave = np.empty_like(slope)
        for b, j in np.ndindex(slope.shape[:2]):
            concave[b, j] = isotonic_regression(slope[b, j], weights=step_w[b, j], increasing=False).x
        return np.argsort(-concave.reshape(concave.shape[0], -1), axis=1, kind="stable")

    def _filled(self, power_w: FloatArray, gain: FloatArray | None) -> FloatArray:
        batch, jobs, steps = self.step_w.shape
        step = self.step_w if gain is None else self.step_w * gain[:, :, None]
        lowest = (self.power_w[:, :, 0] if gain is None else self.power_w[:, :, 0] * gain).sum(axis=1)
        ordered = np.take_along_axis(step.reshape(batch, -1), self._order, axis=1)
        before = np.cumsum(ordered, axis=1) - ordered
        fill = (power_w - lowest)[:, None] - before
        fill /= np.maximum(ordered, _TINY_W)
        share = np.empty_like(fill)
        np.put_along_axis(share, self._order, np.clip(fill, 0.0, 1.0), axis=1)
        positions: FloatArray = share.reshape(batch, jobs, steps) @ np.diff(self.grid)
        return positions
