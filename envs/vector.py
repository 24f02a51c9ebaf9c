"""The batched power-shaping environment, natively for stable-baselines3 (`VecEnv`) and for Gymnasium (`VectorEnv`).

See `wattgym.envs.batch` for what batches have in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from wattgym.envs.batch import BatchVecEnv, SeedSequences, spread
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.power_shaping import action_space, as_config, observation_space
from wattgym.envs.reward import TERMS
from wattgym.envs.shaping import Outcome, PowerShaping
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError


class PowerShapingVecEnv(BatchVecEnv):
    """A batch of power-shaping environments for stable-baselines3; episodes end together."""

    terms = TERMS

    def __init__(self, config: PowerShapingConfig | Mapping[str, Any] | None = None, num_envs: int = 64) -> None:
        """Builds the batch.

        Args:
            config: Configuration shared by all environments.
            num_envs: Batch size B.

        Raises:
            UserError: The configuration is invalid.
        """
        self.config = as_config(config)
        self.shaping = PowerShaping(self.config, Emulator(self.config), self.config.site.jobs)
        self.layout = self.shaping.layout
        self.outcome: Outcome | None = None
        super().__init__(num_envs, observation_space(self.shaping), action_space(self.shaping))

    @property
    def task(self) -> ControlTask:
        """What a controller is told at the start of the present episodes."""
        if self.shaping.task is None:
            raise RuntimeError("no episode before the first reset")
        return self.shaping.task

    def _begin(self, rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
        # Episodes have one length, so whoever ends, all end.
        return self.shaping.reset(self.seeds.next())

    def _advance(self, actions: NDArray[Any]) -> tuple[Outcome, NDArray[np.bool_], NDArray[np.bool_]]:
        self.outcome = self.shaping.step(actions)
        ended = np.full(self.num_envs, self.outcome.truncated)
        return self.outcome, ended, ended


class PowerShapingVectorEnv(gym.vector.VectorEnv[NDArray[np.float32], NDArray[np.float32], NDArray[Any]]):
    """The same batch behind Gymnasium's vector interface (next-step autoreset)."""

    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium reads it from the class)
        "autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP
    }

    def __init__(
        self, num_envs: int = 1, config: PowerShapingConfig | Mapping[str, Any] | None = None, **unused: Any
    ) -> None:
        """Builds the batch; see `PowerShapingVecEnv`."""
        if unused:
            raise UserError(f"unknown argument '{next(iter(unused))}'; known: num_envs, config")
        self._seeds = SeedSequences(num_envs)
        self.config = as_config(config)
        self.num_envs = num_envs
        self._shaping = PowerShaping(self.config, Emulator(self.config), self.config.site.jobs)
        self.layout = self._shaping.layout
        self.single_observation_space = observation_space(self._shaping)
        self.single_action_space = action_space(self._shaping)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._over = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts the next episodes; an integer seeds the environments `seed, seed + 1, …`."""
        if seed is not None:
            self._seeds.begin(spread(seed, self.num_envs))
        self._over = False
        return self._shaping.reset(self._seeds.next()), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Lets one control period pass; the step after an episode's end starts the next one and ignores actions."""
        never = np.zeros(self.num_envs, dtype=bool)
        if self._over:
            self._over = False
            return self._shaping.reset(self._seeds.next()), np.zeros(self.num_envs), never, never.copy(), {}
        outcome = self._shaping.step(actions)
        self._over = outcome.truncated
        info = {
            "reward_terms": dict(zip(TERMS, outcome.terms, strict=True)),
            "target_w": outcome.target_w,
            "power_w": outcome.power_w,
            "throughput": outcome.throughput,
            "decisions": outcome.telemetry.decisions,
        }
        return outcome.observation, outcome.reward, never, np.full(self.num_envs, outcome.truncated), info
