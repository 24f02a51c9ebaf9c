"""What the batched environments share: seed sequences, and the shell that stable-baselines3 sees.

All environments of a batch step as one array operation, in this process. Environment `i` seeded with `s` behaves, bit
for bit, as a single environment reset with `seed=s`; a batch seeded with `s` seeds its environments `s, s + 1, …`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from wattgym.errors import UserError

MAX_SEED = 2**63 - 1


def next_seed(rng: np.random.Generator) -> int:
    """The seed of an environment's next episode."""
    return int(rng.integers(MAX_SEED))


class SeedSequences:
    """One sequence of episode seeds per environment of a batch."""

    def __init__(self, num_envs: int) -> None:
        """Prepares sequences that nobody has seeded.

        Raises:
            UserError: There is no environment.
        """
        if num_envs < 1:
            raise UserError(f"a batch needs at least 1 environment, got {num_envs}")
        self._num_envs = num_envs
        self._rngs: list[np.random.Generator] | None = None

    def begin(self, seeds: Sequence[int | None]) -> None:
        """Begins each environment's sequence anew."""
        self._rngs = [seeding.np_random(seed)[0] for seed in seeds]

    def next(self, rows: Iterable[int] | None = None) -> list[int]:
        """The seeds of the next episodes of some environments, or of all."""
        if self._rngs is None:
            self.begin([None] * self._num_envs)
        assert self._rngs is not None
        return [next_seed(self._rngs[row]) for row in (range(self._num_envs) if rows is None else rows)]


def spread(seed: int | Iterable[int | None], num_envs: int) -> list[int | None]:
    """Seeds of the environments of a batch, from one number or one for each.

    Raises:
        UserError: There are more or fewer seeds than environments.
    """
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise UserError(f"got {len(seeds)} seeds for {num_envs} environments")
    return seeds


class BatchOutcome(Protocol):
    """What a step of any batch brings."""

    observation: NDArray[np.float32]
    reward: NDArray[np.float64]
    terms: NDArray[np.float64]


class BatchVecEnv(VecEnv, ABC):
    """A batch for stable-baselines3.

    Infos are empty but at the end of an episode (building thousands of dictionaries a step would cost more than the
    step); the last step's arrays are in `outcome`, and callbacks read them there.
    """

    terms: tuple[str, ...]

    def __init__(self, num_envs: int, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self.seeds = SeedSequences(num_envs)
        self.render_mode = None
        super().__init__(num_envs, observation_space, action_space)
        self._actions: NDArray[np.generic] | None = None
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        self._term_sums = np.zeros((len(self.terms), num_envs))

    @abstractmethod
    def _begin(self, rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
        """Starts the next episodes of some environments, or of all; observations of all, shape `(B, D)`."""

    @abstractmethod
    def _advance(self, actions: NDArray[np.generic]) -> tuple[BatchOutcome, NDArray[np.bool_], NDArray[np.bool_]]:
        """One step: its outcome, which episodes ended, and which of them by a limit rather than a goal."""

    def reset(self) -> VecEnvObs:
        """Starts the next episodes."""
        if any(seed is not None for seed in self._seeds):
            self.seeds.begin(self._seeds)
        self._reset_seeds()
        self._reset_options()
        return self._start(None)

    def step_async(self, actions: NDArray[np.generic]) -> None:
        """Takes the actions, shape `(B, …)`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Lets one step pass; ended episodes are followed by the next ones."""
        assert self._actions is not None
        outcome, ended, truncated = self._advance(self._actions)
        reward = outcome.reward.astype(np.float32)
        self._returns += outcome.reward
        self._term_sums += outcome.terms
        self._lengths += 1
        observation = outcome.observation
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if ended.any():
            rows = np.flatnonzero(ended)
            for row in rows.tolist():
                infos[row] = self._episode_info(row, outcome, bool(truncated[row]))
            observation = self._start(rows)
        return observation, reward, ended, infos

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

    def _start(self, rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
        which = slice(None) if rows is None else rows
        self._returns[which] = 0.0
        self._lengths[which] = 0
        self._term_sums[:, which] = 0.0
        return self._begin(rows)

    def _episode_info(self, row: int, outcome: BatchOutcome, truncated: bool) -> dict[str, Any]:
        length = int(self._lengths[row])
        means = {f"mean_{name}": float(self._term_sums[k, row] / length) for k, name in enumerate(self.terms)}
        return {
            "TimeLimit.truncated": truncated,
            "terminal_observation": outcome.observation[row],
            "episode": {"r": float(self._returns[row]), "l": length, "t": 0.0, **means},
        }
