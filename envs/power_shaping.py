"""`wattgym/PowerShaping-v0`: one site as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from wattgym.config import parse_config
from wattgym.envs.batch import next_seed
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.observation import BOUND
from wattgym.envs.plant import Plant
from wattgym.envs.reward import TERMS
from wattgym.envs.shaping import Outcome, PowerShaping
from wattgym.envs.task import ControlTask


def as_config(config: PowerShapingConfig | Mapping[str, Any] | None) -> PowerShapingConfig:
    """A configuration from a model, a plain mapping (as `gym.make` passes it) or nothing.

    Raises:
        UserError: A key is unknown or a value invalid.
    """
    if isinstance(config, PowerShapingConfig):
        return config
    data = dict(config) if isinstance(config, Mapping) else {} if config is None else config
    return parse_config(PowerShapingConfig, data, "PowerShaping config")


def observation_space(shaping: PowerShaping) -> gym.spaces.Box[np.float32]:
    """Space of one environment's observations."""
    return gym.spaces.Box(-BOUND, BOUND, (shaping.layout.size,), np.float32)


def action_space(shaping: PowerShaping) -> gym.spaces.Box[np.float32]:
    """Space of one environment's actions."""
    return gym.spaces.Box(-1.0, 1.0, (shaping.layout.actions,), np.float32)


class PowerShapingEnv(gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Follow a grid signal with a site of training jobs, losing as little training as possible.

    An action holds one number in [-1, 1] per enabled knob and job, knob by knob (see `ActionConfig`); the observation
    is described feature by feature by `layout.features`. Episodes end truncated, never terminated. `info` of every
    step holds `reward_terms`, `target_w`, `power_w` (metered), `throughput`, and `decisions` (what the command rules
    changed, per job).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium reads it from the class)

    def __init__(
        self, config: PowerShapingConfig | Mapping[str, Any] | None = None, plant: Plant | None = None
    ) -> None:
        """Builds the environment.

        Args:
            config: Configuration model or the mapping that a YAML file holds.
            plant: Plant to control; the emulator by default.

        Raises:
            UserError: The configuration is invalid.
        """
        self.config = as_config(config)
        self._shaping = PowerShaping(self.config, plant or Emulator(self.config), self.config.site.jobs)
        self.layout = self._shaping.layout
        self.observation_space = observation_space(self._shaping)
        self.action_space = action_space(self._shaping)

    @property
    def task(self) -> ControlTask:
        """What a controller is told at the start of the episode."""
        if self._shaping.task is None:
            raise RuntimeError("no episode before the first reset")
        return self._shaping.task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts an episode; without a seed, the next one of the sequence that the last seed began."""
        super().reset(seed=seed)
        episode_seed = next_seed(self.np_random)
        observation = self._shaping.reset([episode_seed])
        info = {"episode_seed": episode_seed, "signal": self._shaping.signals[0].id}
        if self.task.shortfall_w is not None:
            info["shortfall_w"] = float(self.task.shortfall_w[0])
        return observation[0], info

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Lets one control period pass."""
        outcome = self._shaping.step(np.asarray(action)[None])
        return outcome.observation[0], float(outcome.reward[0]), False, outcome.truncated, step_info(outcome, 0)

    def close(self) -> None:
        """Releases the plant."""
        self._shaping.plant.close()


def step_info(outcome: Outcome, index: int) -> dict[str, Any]:
    """`info` of one environment of a batch."""
    return {
        "reward_terms": dict(zip(TERMS, outcome.terms[:, index].tolist(), strict=True)),
        "target_w": float(outcome.target_w[index]),
        "power_w": float(outcome.power_w[index]),
        "throughput": float(outcome.throughput[index]),
        "decisions": outcome.telemetry.decisions[index],
    }
