"""From positions of knobs, as actions give them, to settings: rounding, hysteresis, dwell times, dead band.

A position lies in [0, 1]; 1 is the neutral setting of every knob (for `local_steps`: one). The power limit is not
handled here, its rules belong to the hardware guard.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wattgym.envs.config import KnobRules
from wattgym.envs.knobs import DISCRETE, MIN_DUTY, Command, KnobName
from wattgym.envs.plant import FloatArray, IntArray, PlantSpec


class KnobSettings:
    """The settings that a controller has asked for last, for a batch of sites of one episode.

    Discrete knobs are numbered from 0, the neutral setting.

    Attributes:
        names: Enabled knobs beside the power limit.
        seen: Position of the setting in force of each of them, shape `(B, J)`, as `see` has seen it last.
    """

    def __init__(self, rules: KnobRules, names: tuple[KnobName, ...], spec: PlantSpec) -> None:
        """Starts at the neutral settings, free to change.

        Args:
            rules: Hysteresis, dwell times, ranges.
            names: Enabled knobs beside the power limit.
            spec: The plant; it must have a knob table.
        """
        assert spec.knobs is not None
        self.names = names
        self._rules = rules
        self._table = spec.knobs
        self._n_gpus = spec.n_gpus
        self._period_s = spec.period_s
        shape = spec.n_gpus.shape
        counts = {
            "micro_batch": spec.knobs.micro_batches,
            "active_gpus": spec.n_gpus - fewest_active(rules, spec.n_gpus) + 1,
            "local_steps": np.minimum(spec.knobs.max_local_steps, rules.max_local_steps),
        }
        self._last_index = {name: counts[name] - 1 for name in names if name in DISCRETE}
        self._index = {name: np.zeros(shape, dtype=np.int64) for name in self._last_index}
        self._dwell_s = {name: float(getattr(rules, f"{name}_dwell_s")) for name in self._last_index}
        self._since_s = {name: np.full(shape, np.inf) for name in self._last_index}
        self._duty = np.ones(shape)
        self._position = {name: np.ones(shape) for name in names}
        self.seen = dict(self._position)

    def position(self, name: KnobName) -> FloatArray:
        """Position that was asked for last, before rounding, shape `(B, J)`."""
        return self._position[name]

    def dwell_left(self, name: KnobName) -> FloatArray:
        """Time until a discrete knob may change again, as a share of its dwell time, shape `(B, J)`."""
        left: FloatArray = np.maximum(1.0 - self._since_s[name] / max(self._dwell_s[name], 1e-9), 0.0)
        return left

    def shown(self, name: KnobName, in_force: Command) -> FloatArray:
        """Position of the setting in force, shape `(B, J)`."""
        if name == "duty_cycle":
            assert in_force.duty is not None
            low = self._rules.min_duty
            shown: FloatArray = (in_force.duty - low) / (1.0 - low)
            return shown
        position: FloatArray = 1.0 - self._numbered(name, in_force) / np.maximum(self._last_index[name], 1)
        return position

    def see(self, in_force: Command) -> FloatArray:
        """Takes in what is in force at a period's end; `seen` has the positions then.

        Returns:
            Change of the positions since the last call, mean over jobs, summed over knobs, shape `(B,)`.
        """
        movement = np.zeros(self._n_gpus.shape[0])
        for name, before in self.seen.items():
            self.seen[name] = shown = self.shown(name, in_force)
            movement += np.abs(shown - before).mean(axis=1)
        return movement

    def command(self, limit_w: FloatArray, positions: Mapping[KnobName, FloatArray]) -> Command:
        """The setting for the coming period.

        Args:
            limit_w: Power limits, passed through.
            positions: Wanted position of each enabled knob, shape `(B, J)`; clipped to [0, 1].
        """
        for name in self.names:
            position = np.clip(positions[name], 0.0, 1.0)
            self._position[name] = position
            if name == "duty_cycle":
                self._set_duty(position)
            else:
                self._set_discrete(name, position)
        named = self._index
        micro, active, steps = (named.get(name) for name in ("micro_batch", "active_gpus", "local_steps"))
        return Command(
            limit_w=limit_w,
            micro_batch=None if micro is None else self._micro_batch(micro),
            active_gpus=None if active is None else self._n_gpus - active,
            duty=self._duty if "duty_cycle" in self.names else None,
            local_steps=None if steps is None else steps + 1,
        )

    def _set_duty(self, position: FloatArray) -> None:
        low = self._rules.min_duty
        wanted = low + (1.0 - low) * position
        if low == 0.0:  # what lies between a pause and the slowest that works goes to the nearer of the two
            wanted = np.where(wanted < MIN_DUTY / 2.0, 0.0, np.maximum(wanted, MIN_DUTY))
        moved = np.abs(wanted - self._duty) >= self._rules.duty_dead_band
        # The ends are reached whatever the dead band: neutral must be neutral.
        ends = (wanted == 1.0) | (wanted == low)
        self._duty = np.where(moved | ends, wanted, self._duty)

    def _set_discrete(self, name: KnobName, position: FloatArray) -> None:
        exact = (1.0 - position) * self._last_index[name]
        index, since = self._index[name], self._since_s[name]
        beyond = np.abs(exact - index) > 0.5 + self._rules.hysteresis
        # An end asked for in full is always reached.
        ends = (position >= 1.0) | (position <= 0.0)
        free = since >= self._dwell_s[name] - 1e-9
        wanted = np.where(free & (beyond | ends), np.rint(exact).astype(np.int64), index)
        self._since_s[name] = np.where(wanted != index, 0.0, since) + self._period_s
        self._index[name] = wanted

    def _micro_batch(self, index: IntArray) -> IntArray:
        chosen: IntArray = np.take_along_axis(self._table.micro_batch, index[..., None], axis=2)[..., 0]
        return chosen

    def _numbered(self, name: KnobName, in_force: Command) -> IntArray:
        if name == "micro_batch":
            assert in_force.micro_batch is not None
            return self._table.micro_index(in_force.micro_batch)
        if name == "active_gpus":
            assert in_force.active_gpus is not None
            return self._n_gpus - in_force.active_gpus
        assert in_force.local_steps is not None
        return in_force.local_steps - 1


def reachable_w(rules: KnobRules, names: tuple[KnobName, ...], spec: PlantSpec) -> tuple[FloatArray, FloatArray]:
    """Lowest and highest nominal site power that enabled knobs reach while every job computes, each `(B,)`, W.

    Args:
        rules: Rules in force.
        names: Enabled knobs, the power limit among them or not.
        spec: The plant.
    """
    table = spec.knobs
    if table is None:
        return spec.floor_w, spec.full_w
    power = table.power_w if "micro_batch" in names else table.power_w[:, :, :1]
    lowest = power.min(axis=(2, 3)) if "power_limit" in names else power[..., -1].min(axis=2)
    share = np.ones(spec.n_gpus.shape)
    if "active_gpus" in names:
        share = fewest_active(rules, spec.n_gpus) / spec.n_gpus
    if "duty_cycle" in names:
        share = share * rules.min_duty
    low: FloatArray = (table.idle_w + share * (lowest - table.idle_w)).sum(axis=1) + spec.host_w
    high: FloatArray = power.max(axis=(2, 3)).sum(axis=1) + spec.host_w
    return low, high


def fewest_active(rules: KnobRules, n_gpus: IntArray) -> IntArray:
    """GPUs of each job that stay active whatever is asked for."""
    fewest: IntArray = np.maximum(np.ceil(rules.min_active_share * n_gpus - 1e-9).astype(np.int64), 1)
    return fewest


def position_of(rules: KnobRules, name: KnobName, command: Command, spec: PlantSpec) -> FloatArray:
    """Position that asks for a command's setting of a knob: the inverse of `KnobSettings`.

    Args:
        rules: The rules in force.
        name: A knob beside the power limit; where the command leaves it neutral, so is the position.
        command: The wanted setting.
        spec: The plant.

    Returns:
        Positions in [0, 1], shape `(B, J)`.

    Raises:
        UserError: A job cannot have the commanded micro-batch.
    """
    if command.of(name) is None:
        return np.ones(spec.n_gpus.shape)
    return np.clip(KnobSettings(rules, (name,), spec).shown(name, command), 0.0, 1.0)
