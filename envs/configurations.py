"""Table of the training configurations of each job: what draws how much, and which trains most at a given power."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.config import KnobRules
from wattgym.envs.knob_actions import fewest_active, position_of
from wattgym.envs.knobs import MIN_DUTY, Command, KnobName
from wattgym.envs.plant import FloatArray, IntArray, PlantSpec
from wattgym.envs.site_model import SiteModel, Split

LEVELS = 65
"""Powers at which each job's best configuration is looked up."""

_ACTIVE_SHARES, _DUTIES = 8, 4


class Configurations:
    """Micro-batch × active GPUs × local steps × duty of each job, over the limit range (or at the highest limit).

    Local steps cost no power in the nominal model, so of those only the fastest is kept; duty is lowered only where no
    fewer GPUs can be active, since idle GPUs spare communication and an idle duty does not.

    Attributes:
        power_w: Power of each configuration over the limits, shape `(B, J, C, K)`, W; not falling along `K`.
        throughput: Progress relative to the neutral setting, same shape.
        envelope: Power grid of each job with the best configuration's throughput, as a site model.
        lower: Configuration that is best at each level, shape `(B, J, LEVELS)`. Where no configuration draws the
            level's power, the one of the next lower level that one does.
        upper: Likewise of the next higher level; equal to `lower` outside such gaps.
        share: Share of the time in `upper` that makes the mean power the level's, same shape; 0 outside gaps.
    """

    def __init__(
        self, spec: PlantSpec, knobs: tuple[KnobName, ...], rules: KnobRules, split: Split = "optimal"
    ) -> None:
        """Works the table out.

        Args:
            spec: The plant.
            knobs: What may be set.
            rules: Rules in force.
            split: How power is split between the jobs of a site.
        """
        self._spec, self._knobs, self._rules = spec, knobs, rules
        self._list_settings()
        low, high = self.power_w.min(axis=(2, 3)), self.power_w.max(axis=(2, 3))
        grid = np.linspace(0.0, 1.0, LEVELS)
        level_w = low[..., None] + grid * np.maximum(high - low, 1e-6)[..., None]
        best = self._best(level_w)
        self.envelope = SiteModel(replace(spec, limit_grid=grid, power_table_w=level_w, throughput_table=best), split)

    def level(self, position: FloatArray) -> IntArray:
        """Level nearest to positions on the envelope's power grid."""
        return np.rint(position * (LEVELS - 1)).astype(np.int64)

    def tables(self, chosen: IntArray) -> tuple[FloatArray, FloatArray]:
        """Power and throughput of a configuration per job over the limits, each `(B, J, K)`."""
        index = chosen[..., None, None]
        power = np.take_along_axis(self.power_w, index, axis=2)[:, :, 0]
        return power, np.take_along_axis(self.throughput, index, axis=2)[:, :, 0]

    def setting(self, chosen: IntArray) -> Command:
        """A configuration per job as a command, with the highest limits."""

        def pick(values: NDArray[Any]) -> NDArray[Any]:
            return np.take_along_axis(values, chosen[..., None], axis=2)[..., 0]

        return Command(self._spec.max_limit_w, pick(self._micro), pick(self._active), pick(self._duty), self._steps)

    def knob_positions(self, setting: Command) -> dict[KnobName, FloatArray]:
        """Positions of the knobs beside the limit that ask for a setting, each `(B, J)`."""
        beside = [name for name in self._knobs if name != "power_limit"]
        return {name: position_of(self._rules, name, setting, self._spec) for name in beside}

    def _list_settings(self) -> None:
        spec, knobs, table = self._spec, self._knobs, self._spec.knobs
        limits = slice(None) if "power_limit" in knobs else slice(-1, None)
        self.grid = spec.limit_grid[limits]
        shape = spec.n_gpus.shape
        self._steps = np.ones(shape, dtype=np.int64)
        sizes = self._steps[..., None]
        if table is not None:
            sizes = table.micro_batch[:, :, : None if "micro_batch" in knobs else 1]
            if "local_steps" in knobs:
                self._steps = np.minimum(table.max_local_steps, self._rules.max_local_steps)
        settings = [
            Command(spec.max_limit_w, size, active, np.full(shape, duty), self._steps)
            for active, duty in self._working()
            for size in np.moveaxis(sizes, 2, 0)
        ]
        tables = [spec.tables(setting) for setting in settings]
        power_w, throughput = (np.stack(part, axis=2)[..., limits] for part in zip(*tables, strict=True))
        self.power_w, self.throughput = np.maximum.accumulate(power_w, axis=3), throughput
        told = zip(*((s.micro_batch, s.active_gpus, s.duty) for s in settings), strict=True)
        self._micro, self._active, self._duty = (np.stack(part, axis=2) for part in told)

    def _working(self) -> list[tuple[IntArray, float]]:
        """Active GPUs and duty of the ways to work less, neutral first."""
        knobs, rules, n_gpus = self._knobs, self._rules, self._spec.n_gpus
        ways: list[tuple[IntArray, float]] = [(n_gpus, 1.0)]
        if "active_gpus" in knobs:
            fewest = fewest_active(rules, n_gpus)
            for share in np.linspace(1.0, 0.0, _ACTIVE_SHARES)[1:]:
                ways.append((np.rint(fewest + share * (n_gpus - fewest)).astype(np.int64), 1.0))
        if "duty_cycle" in knobs:
            lowest = max(rules.min_duty, MIN_DUTY)
            ways += [(ways[-1][0], float(duty)) for duty in np.linspace(1.0, lowest, _DUTIES + 1)[1:]]
            if rules.min_duty == 0.0:
                ways.append((ways[-1][0], 0.0))
        return ways

    def _best(self, level_w: FloatArray) -> FloatArray:
        """Throughput of the best configuration at every level; sets `lower`, `upper` and `share`."""
        batch, jobs, count, _ = self.power_w.shape
        best = np.empty_like(level_w)
        self.lower = np.empty(level_w.shape, dtype=np.int64)
        self.upper = np.empty_like(self.lower)
        self.share = np.zeros_like(level_w)
        index = np.arange(LEVELS)
        for b, j in np.ndindex(batch, jobs):
            levels, power = level_w[b, j], self.power_w[b, j]
            half = 0.5001 * (levels[1] - levels[0])
            speed = np.array([np.interp(levels, power[c], self.throughput[b, j, c]) for c in range(count)])
            outside = (levels < power[:, :1] - half) | (levels > power[:, -1:] + half)
            speed[outside] = -np.inf
            choice, most = speed.argmax(axis=0), speed.max(axis=0)
            covered = np.isfinite(most)
            before = np.maximum.accumulate(np.where(covered, index, 0))
            after = np.minimum.accumulate(np.where(covered, index, LEVELS - 1)[::-1])[::-1]
            width = np.maximum(after - before, 1)
            self.share[b, j] = np.where(covered, 0.0, (index - before) / width)
            self.lower[b, j], self.upper[b, j] = choice[before], choice[after]
            best[b, j] = np.interp(index, index[covered], most[covered])
        return best


def position_for(power_w: FloatArray, table_w: FloatArray, grid: FloatArray) -> FloatArray:
    """Positions in the limit range at which jobs draw given powers; the ends where those are out of reach.

    Args:
        power_w: Powers, shape `(B, J)`, W.
        table_w: Not falling along the last axis, shape `(B, J, K)`, W.
        grid: Positions of the table, shape `(K,)`.
    """
    if grid.size == 1:
        return np.ones_like(power_w)
    index = np.clip((table_w <= power_w[..., None]).sum(axis=2) - 1, 0, grid.size - 2)[..., None]
    low, high = (np.take_along_axis(table_w, index + k, axis=2)[..., 0] for k in (0, 1))
    share = np.clip((power_w - low) / np.maximum(high - low, 1e-9), 0.0, 1.0)
    left, right = grid[index[..., 0]], grid[index[..., 0] + 1]
    found: FloatArray = left + share * (right - left)
    return found


def power_at(position: FloatArray, table_w: FloatArray, grid: FloatArray) -> FloatArray:
    """Powers of jobs at positions in the limit range, shape `(B, J)`, W; the inverse of `position_for`."""
    if grid.size == 1:
        return table_w[..., 0]
    index: NDArray[np.intp] = np.clip(np.searchsorted(grid, position, side="right") - 1, 0, grid.size - 2)
    low, high = (np.take_along_axis(table_w, index[..., None] + k, axis=2)[..., 0] for k in (0, 1))
    found: FloatArray = low + (position - grid[index]) / (grid[index + 1] - grid[index]) * (high - low)
    return found
