"""`wattgym/SiteSelection-v0`: one federation as a Gymnasium environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from wattgym.config import parse_config
from wattgym.envs.batch import next_seed
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.reward import TERMS
from wattgym.envs.federation.view import SelectionTask, SelectionView
from wattgym.envs.observation import BOUND
from wattgym.envs.selection import SelectionOutcome, SiteSelection


def as_config(config: SiteSelectionConfig | Mapping[str, Any] | None) -> SiteSelectionConfig:
    """A configuration from a model, a plain mapping (as `gym.make` passes it) or nothing.

    Raises:
        UserError: A key is unknown or a value invalid.
    """
    if isinstance(config, SiteSelectionConfig):
        return config
    data = dict(config) if isinstance(config, Mapping) else {} if config is None else config
    return parse_config(SiteSelectionConfig, data, "SiteSelection config")


def observation_space(selection: SiteSelection) -> gym.spaces.Box[np.float32]:
    """Space of one environment's observations."""
    return gym.spaces.Box(-BOUND, BOUND, (selection.layout.size,), np.float32)


def action_space(selection: SiteSelection) -> gym.Space[Any]:
    """Space of one environment's actions: a score or a bit per site slot."""
    slots = selection.layout.slots
    if selection.config.action.kind == "binary":
        return gym.spaces.MultiBinary(slots)
    return gym.spaces.Box(-1.0, 1.0, (slots,), np.float32)


class SiteSelectionEnv(gym.Env[NDArray[np.float32], NDArray[Any]]):
    """Choose, round by round, which sites of a federation train, so that the target is reached soonest.

    An action holds one number per site slot: the site takes part where it is above 0. Sites that are not eligible are
    left out; if none is left, the best predicted site takes part; if none is eligible at all, the environment waits for
    the next power sample. The observation is described feature by feature by `layout.features` and comes as a
    dictionary from `layout.as_dict`. An episode terminates when the target is reached and is truncated at its limits.
    `info` of every step says what happened, see `step_info`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (Gymnasium reads it from the class)

    def __init__(
        self,
        config: SiteSelectionConfig | Mapping[str, Any] | None = None,
        emulator: FederationEmulator | None = None,
    ) -> None:
        """Builds the environment.

        Args:
            config: Configuration model or the mapping that a YAML file holds.
            emulator: Federation to select from; a new emulated one by default.

        Raises:
            UserError: The configuration is invalid or cannot be met.
        """
        self.config = as_config(config)
        self.selection = SiteSelection(self.config, emulator)
        self.layout = self.selection.layout
        self.observation_space = observation_space(self.selection)
        self.action_space = action_space(self.selection)

    @property
    def task(self) -> SelectionTask:
        """What a selector is told at the start of the episode."""
        return self.selection.task

    @property
    def view(self) -> SelectionView:
        """What a selector knows before the coming round, in natural units (a batch of one)."""
        return self.selection.view

    def action_masks(self) -> NDArray[np.bool_]:
        """Which bits are open, for each site first `off`, then `on`, shape `(2 N,)`."""
        masks: NDArray[np.bool_] = self.selection.action_masks()[0]
        return masks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Starts an episode; without a seed, the next one of the sequence that the last seed began."""
        super().reset(seed=seed)
        episode_seed = next_seed(self.np_random)
        observation = self.selection.reset([episode_seed])
        return observation[0], {"episode_seed": episode_seed, "sites": self.task.names()}

    def step(self, action: NDArray[Any]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Plays one round."""
        outcome = self.selection.step(np.asarray(action)[None])
        ends = bool(outcome.terminated[0]), bool(outcome.truncated[0])
        return outcome.observation[0], float(outcome.reward[0]), *ends, step_info(outcome, 0)


def step_info(outcome: SelectionOutcome, index: int) -> dict[str, Any]:
    """`info` of one environment of a batch: reward terms, what took part, how long it took and what it cost.

    `waited` is true where no site was eligible and nothing but time passed; `ineligible` counts sites that were asked
    for and could not be had; `repaired` is true where the best predicted site stood in for an empty choice.
    """
    result, played = outcome.result, outcome.result.played
    return {
        "reward_terms": dict(zip(TERMS, outcome.terms[:, index].tolist(), strict=True)),
        "chosen": played.chosen[index].nonzero()[0],
        "counted": played.counted[index].nonzero()[0],
        "waited": bool(result.waited[index]),
        "ineligible": int(outcome.ineligible[index]),
        "repaired": bool(outcome.repaired[index]),
        "round_s": float(result.seconds[index]),
        "communication_s": float(result.communication_s[index]),
        "time_s": float(outcome.time_s[index]),
        "loss": float(outcome.loss[index]),
        "true_loss": float(outcome.true_loss[index]),
        "energy_kwh": float(result.energy_kwh[index]),
        "unused_kwh": float(result.unused_kwh[index]),
        "carbon_kg": float(result.carbon_kg[index]),
        "cost_usd": float(result.cost_usd[index]),
    }
