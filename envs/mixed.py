"""Several batches side by side as one batch, so that one policy learns from different configurations at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from wattgym.envs.batch import BatchVecEnv
from wattgym.errors import UserError


class MixedVecEnv(VecEnv):
    """Batches with equal observations and actions, one after the other.

    Attributes:
        parts: The batches, by name.
    """

    def __init__(self, parts: Mapping[str, BatchVecEnv]) -> None:
        """Joins batches.

        Raises:
            UserError: There is none, or their observations or actions differ.
        """
        if not parts:
            raise UserError("a mixed batch needs at least one batch")
        self.parts = dict(parts)
        (first_name, first), *others = self.parts.items()
        for name, part in others:
            same = part.observation_space == first.observation_space and part.action_space == first.action_space
            if not same:
                raise UserError(f"'{name}' has other observations or actions than '{first_name}'")
        sizes = [part.num_envs for part in self.parts.values()]
        self._ends = np.cumsum(sizes).tolist()
        self._starts = [end - size for end, size in zip(self._ends, sizes, strict=True)]
        self.render_mode = None
        super().__init__(self._ends[-1], first.observation_space, first.action_space)

    def reset(self) -> VecEnvObs:
        """Starts the next episodes; after `seed`, environment `i` of all begins with the `i`-th seed."""
        if any(seed is not None for seed in self._seeds):
            for part, start, end in zip(self.parts.values(), self._starts, self._ends, strict=True):
                part._seeds = self._seeds[start:end]
        self._reset_seeds()
        self._reset_options()
        return np.concatenate([np.asarray(part.reset()) for part in self.parts.values()])

    def step_async(self, actions: NDArray[np.generic]) -> None:
        """Hands each batch its actions."""
        for part, start, end in zip(self.parts.values(), self._starts, self._ends, strict=True):
            part.step_async(actions[start:end])

    def step_wait(self) -> VecEnvStepReturn:
        """One step of every batch."""
        observations, rewards, ends, infos = zip(*(part.step_wait() for part in self.parts.values()), strict=True)
        together: list[dict[str, Any]] = [info for part in infos for info in part]
        return np.concatenate(observations), np.concatenate(rewards), np.concatenate(ends), together

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute of each environment's batch."""
        values = [value for part in self.parts.values() for value in part.get_attr(attr_name)]
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refused, as by each batch."""
        next(iter(self.parts.values())).set_attr(attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """A method of each environment's batch, where batches allow it."""
        results = [r for part in self.parts.values() for r in part.env_method(method_name, *args, **kwargs)]
        return [results[i] for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: VecEnvIndices = None) -> list[bool]:
        """Never: there are no single environments to wrap."""
        return [False] * len(list(self._get_indices(indices)))
