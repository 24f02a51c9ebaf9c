"""Zeus-style: the best fixed micro-batch and power limit of each job."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import Observed
from wattgym.config import FrozenModel
from wattgym.envs.knob_actions import position_of
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask


class ZeusSettings(FrozenModel):
    """What counts.

    Attributes:
        energy: Weight of energy against time, `eta`.
    """

    energy: float = Field(default=0.5, ge=0.0, le=1.0)


SEARCH = {"energy": Range(0.0, 1.0)}
"""Where settings are searched."""


class ZeusFixed:
    """Micro-batch and limit that cost least per sample, held for the whole episode, whatever the grid asks.

    Zeus (You, Chung, Chowdhury, NSDI 2023; code ml-energy/zeus) minimises `eta · energy + (1 − eta) · P_max · time`
    over batch size and power limit. Per sample, with power `P` and throughput `X` that is
    `(eta · P + (1 − eta) · P_max) / X`. Zeus profiles limits as it trains and explores batch sizes by Thompson
    sampling; here both are read off the nominal tables, and the batch size is the micro-batch: samples per update stay.
    """

    name = "Zeus-style fixed"

    def __init__(self, settings: ZeusSettings) -> None:
        self._settings = settings

    def reset(self, task: ControlTask) -> None:
        """Chooses for every job."""
        self._task, self._observed = task, Observed(task.layout)
        spec, table, eta = task.spec, task.spec.knobs, self._settings.energy
        several = table is not None and "micro_batch" in task.layout.knobs
        power = table.power_w if table is not None and several else spec.power_table_w[:, :, None]
        speed = table.throughput if table is not None and several else spec.throughput_table[:, :, None]
        most = spec.power_table_w[:, :, -1, None, None]
        cost = (eta * power + (1.0 - eta) * most) / np.maximum(speed, 1e-9)
        best = cost.reshape(*cost.shape[:2], -1).argmin(axis=2)
        row, limit = np.divmod(best, cost.shape[3])
        self._position = spec.limit_grid[limit]
        self._knobs: dict[KnobName, FloatArray] = {}
        if table is not None and several:
            sizes = np.take_along_axis(table.micro_batch, row[..., None], axis=2)[..., 0]
            command = Command(spec.max_limit_w, micro_batch=sizes)
            rules = task.config.knob_rules
            self._knobs = {"micro_batch": position_of(rules, "micro_batch", command, spec)}

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """The same again."""
        seen = self._observed
        return self._task.action_for(
            self._position, seen.feed_forward(observation), seen.limits(observation), self._knobs
        )
