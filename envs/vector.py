"""The batched environment, natively for stable-baselines3 (`VecEnv`) and for Gymnasium (`VectorEnv`).

All environments of a batch step as one array operation, in this process. Environment `i` seeded with `s` behaves, bit
for bit, as a single environment reset with `seed=s`; a batch seeded with `s` seeds its environments `s, s + 1, …`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.power_shaping import action_space, as_config, next_seed, observation_space
from wattgym.envs.reward import TERMS
from wattgym.envs.shaping import ControlTask, Outcome, PowerShaping
from wattgym.errors import UserError


class ShapingBatch:
    """`B` environments with their seed sequences; both vector interfaces are shells around it."""

    def __init__(self, config: PowerShapingConfig | Mapping[str, Any] | None, num_envs: int) -> None:
        if num_envs < 1:
            raise UserError(f"a batch needs at least 1 environment, got {num_envs}")
        self.config = as_config(config)
        self.num_envs = num_envs
        self.shaping = PowerShaping(self.config, Emulator(self.config), self.config.site.jobs)
        self._rngs: list[np.random.Generator] | None = None

    def seed(self, seeds: Sequence[int | None]) -> None:
        """Begins each environment's sequence of episode seeds anew."""
        self._rngs = [seeding.np_random(seed)[0] for seed in seeds]

    def reset(self) -> NDArray[np.float32]:
        """Starts the next episode of every environment, shape `(B, D)`."""
        if self._rngs is None:
            self.seed([None] * self.num_envs)
        assert self._rngs is not None
        return self.shaping.reset([next_seed(rng) for rng in self._rngs])


class PowerShapingVecEnv(VecEnv):
    """A batch of power-shaping environments for stable-baselines3.

    Infos are empty but at the end of an episode (building thousands of dictionaries a step would cost more than the
    step); the last step's arrays are in `outcome`, and callbacks read them there.
    """

    def __init__(self, config: PowerShapingConfig | Mapping[str, Any] | None = None, num_envs: int = 64) -> None:
        """Builds the batch.

        Args:
            config: Configuration shared by all environments.
            num_envs: Batch size B.

        Raises:
            UserError: The configuration is invalid.
        """
        self._batch = ShapingBatch(config, num_envs)
        self.config = self._batch.config
        self.layout = self._batch.shaping.layout
        self.outcome: Outcome | None = None
        self.render_mode = None
        super().__init__(num_envs, observation_space(self._batch.shaping), action_space(self._batch.shaping))
        self._actions: NDArray[np.floating] | None = None
        self._returns = np.zeros(num_envs)
        self._term_sums = np.zeros((len(TERMS), num_envs))

    @property
    def task(self) -> ControlTask:
        """What a controller is told at the start of the present episodes."""
        if self._batch.shaping.task is None:
            raise RuntimeError("no episode before the first reset")
        return self._batch.shaping.task

    def reset(self) -> VecEnvObs:
        """Starts the next episodes."""
        if any(seed is not None for seed in self._seeds):
            self._batch.seed(self._seeds)
        self._reset_seeds()
        self._reset_options()
        return self._start()

    def step_async(self, actions: NDArray[np.floating]) -> None:
        """Takes the actions, shape `(B, J)`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Lets one control period pass; ended episodes are followed by the next ones."""
        assert self._actions is not None
        outcome = self._batch.shaping.step(self._actions)
        self.outcome = outcome
        self._returns += outcome.reward
        self._term_sums += outcome.terms
        observation = outcome.observation
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if outcome.truncated:
            infos = self._episode_infos(outcome)
            observation = self._start()
        dones = np.full(self.num_envs, outcome.truncated)
        return observation, outcome.reward.astype(np.float32), dones, infos

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """The batch's own attribute, once per environment."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused: environments of a batch share their state."""
        raise UserError(
            f"cannot set '{attr_name}' of single environments in a batch; build the batch with another config"
        )

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Refused: a batch has no single environments to call."""
        raise UserError(f"cannot call '{method_name}' on single environments of a batch")

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Never: there are no single environments to wrap."""
        return [False] * len(list(self._get_indices(indices)))

    def _start(self) -> NDArray[np.float32]:
        self._returns[:] = 0.0
        self._term_sums[:] = 0.0
        return self._batch.reset()

    def _episode_infos(self, outcome: Outcome) -> list[dict[str, Any]]:
        length = self.config.ticks
        return [
            {
                "TimeLimit.truncated": True,
                "terminal_observation": outcome.observation[i],
                "episode": {
                    "r": float(self._returns[i]),
                    "l": length,
                    "t": 0.0,
                    **{f"mean_{name}": float(self._term_sums[k, i] / length) for k, name in enumerate(TERMS)},
                },
            }
            for i in range(self.num_envs)
        ]


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
        self._batch = ShapingBatch(config, num_envs)
        self.config = self._batch.config
        self.num_envs = num_envs
        self.layout = self._batch.shaping.layout
        self.single_observation_space = observation_space(self._batch.shaping)
        self.single_action_space = action_space(self._batch.shaping)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._over = False

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts the next episodes; an integer seeds the environments `seed, seed + 1, …`."""
        if seed is not None:
            self._batch.seed(_spread(seed, self.num_envs))
        self._over = False
        return self._batch.reset(), {}

    def step(
        self, actions: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Lets one control period pass; the step after an episode's end starts the next one and ignores actions."""
        never = np.zeros(self.num_envs, dtype=bool)
        if self._over:
            self._over = False
            return self._batch.reset(), np.zeros(self.num_envs), never, never.copy(), {}
        outcome = self._batch.shaping.step(actions)
        self._over = outcome.truncated
        info = {
            "reward_terms": dict(zip(TERMS, outcome.terms, strict=True)),
            "target_w": outcome.target_w,
            "power_w": outcome.power_w,
            "throughput": outcome.throughput,
            "decisions": outcome.telemetry.decisions,
        }
        return outcome.observation, outcome.reward, never, np.full(self.num_envs, outcome.truncated), info


def _spread(seed: int | Iterable[int | None], num_envs: int) -> list[int | None]:
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise UserError(f"got {len(seeds)} seeds for {num_envs} environments")
    return seeds
