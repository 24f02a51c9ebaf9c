"""The slow one of two loops: which configuration each job trains in, beside the limits that a fast loop moves."""

from __future__ import annotations

import math

import numpy as np

from wattgym.envs.config import KnobRules
from wattgym.envs.configurations import Configurations, position_for, power_at
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.plant import FloatArray, PlantSpec

SLOW_S = 120.0
"""Usual time between choices, seconds."""

KEEP = 0.01
"""Usual gain of throughput below which a configuration is kept."""


class SlowLoop:
    """Chooses a configuration per job every `slow_s`, for the moving average of the target.

    That power is split between the jobs where another watt trains most, on the upper envelope of each job's table of
    configurations (the Pareto front of power and throughput, profiled before the run). A job whose share no
    configuration draws is mixed of the two around it, by turns. A configuration is kept while another would train
    less than `keep` more.

    Attributes:
        grid: Positions in the limit range at which tables are given, shape `(K,)`.
        periods: Periods from choice to choice.
        power_w: Power of the chosen configurations over the limits, shape `(B, J, K)`, W.
        plan: Positions at which the jobs draw what the choice was made for, shape `(B, J)`.
        positions: Positions of the knobs beside the limit that ask for it, each `(B, J)`; none before the first.
        setting: The choice as a command, with the highest limits; None before the first.
    """

    power_w: FloatArray
    plan: FloatArray

    def __init__(
        self,
        spec: PlantSpec,
        knobs: tuple[KnobName, ...],
        rules: KnobRules,
        slow_s: float = SLOW_S,
        keep: float = KEEP,
    ) -> None:
        """Works out the table; nothing is chosen yet.

        Args:
            spec: The plant, the table's source.
            knobs: What may be set.
            rules: Rules in force.
            slow_s: Time between choices, seconds; the knobs' dwell times if those are longer.
            keep: Gain of throughput below which a job's configuration is kept.
        """
        self._table, self._keep = Configurations(spec, knobs, rules), keep
        self.grid = self._table.grid
        dwells = [getattr(rules, f"{name}_dwell_s", 0.0) for name in knobs]
        self.periods = max(math.ceil(max([slow_s, *dwells]) / spec.period_s - 1e-9), 1)
        shape = spec.n_gpus.shape
        self._turn = np.full(shape, 0.5)
        self._chosen = np.zeros(shape, dtype=np.int64)
        self.positions: dict[KnobName, FloatArray] = {}
        self.setting: Command | None = None
        self._mean_w: FloatArray | None = None
        self._tick = 0

    def step(self, target_w: FloatArray, gain: FloatArray) -> bool:
        """Takes in the coming period's target; every `periods` it chooses anew.

        Args:
            target_w: Site power, shape `(B,)`, W.
            gain: True over tabled power of each job, as far as it is believed, shape `(B, J)`.

        Returns:
            Whether it chose.
        """
        if self._mean_w is None:
            self._mean_w = target_w
        self._mean_w = self._mean_w + (target_w - self._mean_w) / self.periods
        due = self._tick % self.periods == 0
        if due:
            self._choose(target_w if self._tick == 0 else self._mean_w, gain)
        self._tick += 1
        return due

    def _choose(self, power_w: FloatArray, gain: FloatArray) -> None:
        table = self._table
        level = table.level(table.envelope.positions(power_w, gain))[..., None]
        lower, upper, share = (
            np.take_along_axis(part, level, axis=2)[..., 0] for part in (table.lower, table.upper, table.share)
        )
        self._turn = self._turn + share
        best = np.where(self._turn >= 1.0, upper, lower)
        self._turn -= self._turn >= 1.0
        wanted_w = np.take_along_axis(table.envelope.power_w, level, axis=2)[..., 0]
        best_rate = np.take_along_axis(table.envelope.throughput, level, axis=2)[..., 0]
        power, speed = table.tables(self._chosen)
        at = position_for(wanted_w, power, table.grid)
        reached = (power[..., 0] <= wanted_w + 1.0) & (power[..., -1] >= wanted_w - 1.0)
        good = reached & (power_at(at, speed, table.grid) >= (1.0 - self._keep) * best_rate) & (self._tick > 0)
        self._chosen = np.where(good, self._chosen, best)
        self.power_w, _ = table.tables(self._chosen)
        self.plan = position_for(wanted_w, self.power_w, table.grid)
        self.setting = table.setting(self._chosen)
        self.positions = table.knob_positions(self.setting)
