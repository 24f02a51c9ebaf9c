"""Runs a controller through a batch of scenarios and keeps what scores are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.agents.controller import Controller
from wattgym.agents.truth import Informed, Truth
from wattgym.envs.config import ActionConfig, PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.plant import FloatArray
from wattgym.envs.reward import TERMS
from wattgym.envs.shaping import PowerShaping
from wattgym.hw.limits import Decision
from wattgym.signals import Signal

INTERVENTIONS = int(~(Decision.NONE | Decision.DEAD_BANDED) & 0xFF)
"""Decision bits that count as interventions: all but the dead band, which only spares a write."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """What one controller did in `B` scenarios of `T` periods; arrays are `(B, T)` unless they say otherwise.

    Attributes:
        period_s: Control period, seconds.
        signal: Regulation signal.
        target_w: Target power, W.
        power_w: Metered site power, W.
        throughput: Training progress relative to full speed.
        reward: Reward.
        terms: Mean reward terms over the episode by name, each `(B,)`.
        limit: Limits in force as positions in their range, shape `(B, T, J)`.
        knobs: Other enabled knobs in force as positions, shape `(B, T, J, K)`.
        changed: Whether the command rules intervened in that period.
        base_w: Declared base, shape `(B,)`, W.
        capacity_w: Offered capacity, shape `(B,)`, W.
        families: Signal family of each scenario.
        shortfall_w: Mean power by which the offered targets left the feasible band before they were cut to it, shape
            `(B,)`, W; None where such offers are refused.
    """

    period_s: float
    signal: FloatArray
    target_w: FloatArray
    power_w: FloatArray
    throughput: FloatArray
    reward: FloatArray
    terms: dict[str, FloatArray]
    limit: FloatArray
    knobs: FloatArray
    changed: FloatArray
    base_w: FloatArray
    capacity_w: FloatArray
    families: tuple[str, ...]
    shortfall_w: FloatArray | None = None

    @property
    def response(self) -> FloatArray:
        """Metered response in the signal's sense and unit, shape `(B, T)`."""
        from wattgym.signals import response

        return response(self.base_w[:, None], self.power_w, self.capacity_w[:, None])


def commanding(config: PowerShapingConfig) -> PowerShapingConfig:
    """The environment as baselines meet it: actions are settings, whatever they mean to a policy."""
    return config.model_copy(update={"action": ActionConfig(knobs=config.action.knobs)})


class Arena:
    """One emulated environment configuration that rollouts reuse."""

    def __init__(self, config: PowerShapingConfig, plant: Emulator | None = None) -> None:
        """Prepares the plant.

        Args:
            config: The environment.
            plant: An emulator of that configuration; a plain one if None.
        """
        self.config = config
        self._plant = plant or Emulator(config)
        self._shaping = PowerShaping(config, self._plant, config.site.jobs)

    def draw(self, seeds: Sequence[int]) -> tuple[Signal, ...]:
        """The signals of scenarios, without running them.

        Raises:
            UserError: A scenario cannot be drawn, for example because no recording is long enough.
        """
        self._shaping.reset(seeds)
        return self._shaping.signals

    def run(self, controller: Controller, seeds: Sequence[int]) -> Rollout:
        """Runs one episode per seed, all side by side.

        Args:
            controller: Who acts.
            seeds: Scenario seeds; equal seeds are identical scenarios for every controller.
        """
        shaping = self._shaping
        observation = shaping.reset(seeds)
        task = shaping.task
        assert task is not None
        controller.reset(task)
        if isinstance(controller, Informed):
            controller.inform(Truth(self._plant, shaping.targets_w))
        batch, ticks, jobs = len(seeds), self.config.ticks, shaping.layout.jobs
        power, throughput, reward = (np.empty((batch, ticks)) for _ in range(3))
        limit = np.empty((batch, ticks, jobs))
        knobs = np.empty((batch, ticks, *shaping.knob_positions.shape[1:]))
        changed = np.empty((batch, ticks))
        terms = np.zeros((len(TERMS), batch))
        span = np.maximum(task.spec.max_limit_w - task.spec.min_limit_w, 1e-9)
        for k in range(ticks):
            outcome = shaping.step(controller.act(observation))
            observation = outcome.observation
            power[:, k], throughput[:, k], reward[:, k] = outcome.power_w, outcome.throughput, outcome.reward
            terms += outcome.terms
            limit[:, k] = (outcome.telemetry.limit_w - task.spec.min_limit_w) / span
            knobs[:, k] = shaping.knob_positions
            changed[:, k] = ((outcome.telemetry.decisions & INTERVENTIONS) != 0).any(axis=1)
        return Rollout(
            period_s=self.config.period_s,
            signal=shaping.signal,
            target_w=shaping.targets_w,
            power_w=power,
            throughput=throughput,
            reward=reward,
            terms={name: terms[i] / ticks for i, name in enumerate(TERMS)},
            limit=limit,
            knobs=knobs,
            changed=changed,
            base_w=task.base_w,
            capacity_w=task.capacity_w,
            families=tuple(signal.family for signal in shaping.signals),
            shortfall_w=task.shortfall_w,
        )
