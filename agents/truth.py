"""What only oracles are told: the coming targets, and the plant itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.plant import Command, FloatArray, IntArray, PlantSpec


class Truth:
    """The door to everything that a controller cannot know.

    Attributes:
        targets_w: Targets of every period of the episode, shape `(B, T)`, W.
        spec: True power and throughput at every limit.
        delay_periods: Whole periods by which each job's commands act late, shape `(B, J)`.
    """

    def __init__(self, plant: Emulator, targets_w: FloatArray) -> None:
        self._plant = plant
        self.targets_w = targets_w
        self.spec: PlantSpec = plant.true_spec
        self.delay_periods: IntArray = plant.delay_periods

    @property
    def setting(self) -> Command | None:
        """The knobs in force; None where the power limit is the only one."""
        return self._plant.setting

    def foresee(self, limit_w: FloatArray) -> FloatArray:
        """Site power of the coming periods if these limits are commanded, other knobs as they are; nothing happens.

        Args:
            limit_w: Limits per GPU, shape `(N, B, J)`, W.

        Returns:
            Metered power, hosts included, shape `(N, B)`, W.
        """
        power: FloatArray = self.foresee_jobs(limit_w).sum(axis=2) + self.spec.host_w
        return power

    def foresee_jobs(self, limit_w: FloatArray) -> FloatArray:
        """The same of each job, without hosts, shape `(N, B, J)`, W."""
        twin, setting = self._plant.fork(), self._plant.setting
        power = np.empty(limit_w.shape)
        for k, limits in enumerate(limit_w):
            twin.apply(Command(limits) if setting is None else replace(setting, limit_w=limits))
            power[k] = twin.advance().meter_w
        return power


@runtime_checkable
class Informed(Protocol):
    """A controller that must be told the truth: a yardstick, not something that could be deployed."""

    def inform(self, truth: Truth) -> None:
        """Tells it, after each reset."""
        ...
