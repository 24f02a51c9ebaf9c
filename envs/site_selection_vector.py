"""The batched site-selection environment, natively for stable-baselines3 (`VecEnv`) and for Gymnasium (`VectorEnv`).

See `wattgym.envs.batch` for what batches have in common. Episodes of a batch end on their own and are followed by the
next ones at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from wattgym.envs.batch import BatchVecEnv, SeedSequences, spread
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.reward import TERMS
from wattgym.envs.federation.view import SelectionTask, SelectionView
from wattgym.envs.selection import SelectionOutcome, SiteSelection
from wattgym.envs.site_selection import action_space, as_config, observation_space
from wattgym.errors import UserError


class SiteSelectionVecEnv(BatchVecEnv):
    """A batch of site-selection environments for stable-baselines3."""

    terms = TERMS

    def __init__(self, config: SiteSelectionConfig | Mapping[str, Any] | None = None, num_envs: int = 64) -> None:
        """Builds the batch.

        Args:
            config: Configuration shared by all environments.
            num_envs: Batch size B.

        Raises:
            UserError: The configuration is invalid or cannot be met.
        """
        self.config = as_config(config)
        self.selection = SiteSelection(self.config)
        self.layout = self.selection.layout
        self.outcome: SelectionOutcome | None = None
        super().__init__(num_envs, observation_space(self.selection), action_space(self.selection))

    @property
    def task(self) -> SelectionTask:
        """What a selector is told at the start of the present episodes."""
        return self.selection.task

    @property
    def view(self) -> SelectionView:
        """What a selector knows before the coming rounds."""
        return self.selection.view

    def action_masks(self) -> NDArray[np.bool_]:
        """Which bits are open, for each site first `off`, then `on`, shape `(B, 2 N)`."""
        return self.selection.action_masks()

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """The masks of single environments, which MaskablePPO asks for in this way; anything else is refused."""
        if method_name == "action_masks":
            return list(self.action_masks()[list(self._get_indices(indices))])
        return super().env_method(method_name, *args, indices=indices, **kwargs)

    def _begin(self, rows: NDArray[np.int64] | None) -> NDArray[np.float32]:
        seeds = self.seeds.next(None if rows is None else rows.tolist())
        return self.selection.reset(seeds, rows)

    def _advance(self, actions: NDArray[Any]) -> tuple[SelectionOutcome, NDArray[np.bool_], NDArray[np.bool_]]:
        outcome = self.outcome = self.selection.step(actions)
        return outcome, outcome.terminated | outcome.truncated, outcome.truncated


class SiteSelectionVectorEnv(gym.vector.VectorEnv[NDArray[np.float32], NDArray[Any], NDArray[Any]]):
    """The same batch behind Gymnasium's vector interface (same-step autoreset)."""

    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium reads it from the class)
        "autoreset_mode": gym.vector.AutoresetMode.SAME_STEP
    }

    def __init__(
        self, num_envs: int = 1, config: SiteSelectionConfig | Mapping[str, Any] | None = None, **unused: Any
    ) -> None:
        """Builds the batch; see `SiteSelectionVecEnv`."""
        if unused:
            raise UserError(f"unknown argument '{next(iter(unused))}'; known: num_envs, config")
        self._seeds = SeedSequences(num_envs)
        self.config = as_config(config)
        self.num_envs = num_envs
        self.selection = SiteSelection(self.config)
        self.layout = self.selection.layout
        self.single_observation_space = observation_space(self.selection)
        self.single_action_space = action_space(self.selection)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts the next episodes; an integer seeds the environments `seed, seed + 1, …`."""
        if seed is not None:
            self._seeds.begin(spread(seed, self.num_envs))
        return self.selection.reset(self._seeds.next()), {}

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[NDArray[np.float32], NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Plays one round; where an episode ends, the observation is the next one's first, `final_obs` its last."""
        outcome = self.selection.step(actions)
        result = outcome.result
        info: dict[str, Any] = {
            "reward_terms": dict(zip(TERMS, outcome.terms, strict=True)),
            "chosen": result.played.chosen,
            "counted": result.played.counted,
            "waited": result.waited,
            "ineligible": outcome.ineligible,
            "repaired": outcome.repaired,
            "round_s": result.seconds,
            "time_s": outcome.time_s,
            "loss": outcome.loss,
        }
        observation = outcome.observation
        ended = outcome.terminated | outcome.truncated
        if ended.any():
            rows = np.flatnonzero(ended)
            final = np.full(self.num_envs, None, dtype=object)
            for row in rows.tolist():
                final[row] = observation[row]
            info |= {"final_obs": final, "_final_obs": ended}
            observation = self.selection.reset(self._seeds.next(rows.tolist()), rows)
        return observation, outcome.reward, outcome.terminated, outcome.truncated, info
