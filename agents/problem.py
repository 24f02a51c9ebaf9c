"""What a training has to know of its control problem; everything else is the same for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from wattgym.agents.checkpoint import shown_names
from wattgym.agents.config import (
    ON_POLICY,
    AnyTrainingConfig,
    NetworkConfig,
    SelectionTrainingConfig,
    TrainingConfig,
)
from wattgym.agents.rollout import Arena
from wattgym.agents.validation import SelectionValidation, Validation, ValidationScores, held_out
from wattgym.envs.federation.reward import TERMS as SELECTION_TERMS
from wattgym.envs.mixed import MixedVecEnv
from wattgym.envs.reward import TERMS
from wattgym.envs.selection import SiteSelection
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv
from wattgym.envs.vector import PowerShapingVecEnv

Record = Callable[[str, float], None]
"""Adds a value to the mean of a curve since its last point."""


class Validator(Protocol):
    """Scores policies on the same scenarios each time."""

    def run(self, controller: Any) -> ValidationScores:
        """Scores a policy."""
        ...


class Problem(Protocol):
    """One control problem, as configured."""

    def check(self) -> None:
        """Draws every kind of scenario once, because a rare one might not come up for a long time.

        Raises:
            UserError: One cannot be drawn.
        """
        ...

    def validation(self) -> Validator:
        """What checkpoints are compared on."""
        ...

    def batch(self) -> VecEnv:
        """The environments trained in."""
        ...

    def policy(self, batch: VecEnv) -> tuple[Any, dict[str, Any]]:
        """The policy's class, or its name in stable-baselines3, and its arguments."""
        ...

    def features(self, batch: VecEnv) -> tuple[str, ...]:
        """Names of what the policy sees."""
        ...

    def begin(self, batch: VecEnv) -> None:
        """Prepares curves for the coming steps."""
        ...

    def record(self, batch: VecEnv, record: Record) -> None:
        """Adds the step just made to the curves."""
        ...


def problem_of(config: AnyTrainingConfig) -> Problem:
    """The problem that a configuration is for."""
    return SelectionProblem(config) if isinstance(config, SelectionTrainingConfig) else ShapingProblem(config)


class ShapingProblem:
    """Power shaping."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config

    def check(self) -> None:
        """Draws an episode of every signal family."""
        env, seed = self._config.env, self._config.seed
        if env.signal.trace is not None:
            Arena(env).draw([seed])
            return
        for family, weight in env.signal.families.items():
            if weight > 0:
                Arena(held_out(env, family, "train", env.episode_s)).draw([seed])

    def validation(self) -> Validator:
        """Scenarios of the validation split, by signal family."""
        return Validation(self._config)

    def batch(self) -> VecEnv:
        """Emulated sites."""
        return PowerShapingVecEnv(self._config.env, self._config.train.num_envs)

    def policy(self, batch: VecEnv) -> tuple[Any, dict[str, Any]]:
        """A plain network, recurrent where the algorithm is, or one for every job."""
        network = self._config.network
        if network.architecture != "per_job":
            return plain_policy(self._config)
        from wattgym.agents.job_policy import JobPolicy

        layout = _shaping(batch).layout
        return JobPolicy, {
            "jobs": layout.jobs,
            "site": len(layout.site_features),
            "hidden": network.hidden,
            "activation_fn": activation(network),
            "log_std_init": network.log_std_init,
        }

    def features(self, batch: VecEnv) -> tuple[str, ...]:
        """Names of the observation's features."""
        return tuple(feature.name for feature in _shaping(batch).layout.features)

    def begin(self, batch: VecEnv) -> None:
        """Remembers the capacities that the coming step's errors are shares of."""
        self._capacity_w = _shaping(batch).task.capacity_w

    def record(self, batch: VecEnv, record: Record) -> None:
        """Reward terms, error and throughput."""
        env = _shaping(batch)
        outcome = env.outcome
        assert outcome is not None
        for name, term in zip(TERMS, outcome.terms.mean(axis=1).tolist(), strict=True):
            record(f"reward/{name}", term)
        error = np.abs(outcome.power_w - outcome.target_w) / self._capacity_w
        record("reward/total", float(outcome.reward.mean()))
        record("rollout/mae_over_r", float(error.mean()))
        record("rollout/throughput", float(outcome.throughput.mean()))
        # At an episode's end the next one, with capacities of its own, has already begun.
        self._capacity_w = env.task.capacity_w


class SelectionProblem:
    """Site selection."""

    def __init__(self, config: SelectionTrainingConfig) -> None:
        self._config = config

    def check(self) -> None:
        """Draws an episode of every family."""
        for env in self._config.envs.values():
            SiteSelection(env).reset([self._config.seed])

    def validation(self) -> Validator:
        """Scenarios of the validation split, by family."""
        return SelectionValidation(self._config)

    def batch(self) -> VecEnv:
        """Emulated federations of every family, side by side."""
        shares = shared_out(self._config.train.num_envs, [f.envs for f in self._config.families.values()])
        return MixedVecEnv(
            {
                name: SiteSelectionVecEnv(env, envs)
                for (name, env), envs in zip(self._config.envs.items(), shares, strict=True)
            }
        )

    def policy(self, batch: VecEnv) -> tuple[Any, dict[str, Any]]:
        """A network over sites, or a plain one."""
        network = self._config.network
        if not network.over_sites:
            return plain_policy(self._config)
        from wattgym.agents.set_features import SetLayout
        from wattgym.agents.set_policy import SetPolicy

        first = next(iter(selections(batch).values())).selection
        return SetPolicy, {
            "layout": SetLayout.of(first.layout, first.emulator.library.learning).plain(),
            "architecture": network.architecture,
            "hidden": network.hidden,
            "heads": network.heads,
            "activation_fn": activation(network),
        }

    def features(self, batch: VecEnv) -> tuple[str, ...]:
        """Names of the observation's features; those of a site once, where the network is over sites."""
        layout = next(iter(selections(batch).values())).layout
        return shown_names(layout, self._config.network.over_sites)

    def begin(self, batch: VecEnv) -> None:
        """Nothing to prepare."""

    def record(self, batch: VecEnv, record: Record) -> None:
        """Reward terms, participants, and by family the time of episodes that reached their target."""
        totals, terms, shares = [], [], []
        for name, part in selections(batch).items():
            outcome = part.outcome
            assert outcome is not None
            totals.append(outcome.reward)
            terms.append(outcome.terms)
            shares.append(outcome.result.played.chosen.sum(axis=1))
            for seconds in outcome.time_s[outcome.terminated].tolist():
                record(f"rollout_{name}/time_to_target_s", seconds)
            for reached in outcome.terminated[outcome.terminated | outcome.truncated].tolist():
                record(f"rollout_{name}/reached", float(reached))
        for label, term in zip(SELECTION_TERMS, np.concatenate(terms, axis=1).mean(axis=1).tolist(), strict=True):
            record(f"reward/{label}", term)
        record("reward/total", float(np.concatenate(totals).mean()))
        record("rollout/participants", float(np.concatenate(shares).mean()))


def selections(batch: VecEnv) -> dict[str, SiteSelectionVecEnv]:
    """The federations of a site-selection batch, by family."""
    assert isinstance(batch, MixedVecEnv)
    return {name: part for name, part in batch.parts.items() if isinstance(part, SiteSelectionVecEnv)}


def shared_out(total: int, shares: list[float]) -> list[int]:
    """Whole numbers in proportion to shares that sum to the total, each at least 1.

    Args:
        total: Sum; where it is too small for one each, one each is given.
        shares: Positive numbers.
    """
    ideal = np.array(shares) * total / sum(shares)
    counts = np.maximum(np.floor(ideal), 1).astype(int)
    # Whoever is furthest below its share is next.
    while counts.sum() < total:
        counts[np.argmax(ideal - counts)] += 1
    return [int(count) for count in counts]


def plain_policy(config: AnyTrainingConfig) -> tuple[str, dict[str, Any]]:
    """A network that reads the observation as it is, and its arguments."""
    network = config.network
    arguments: dict[str, Any] = {"net_arch": list(network.hidden), "activation_fn": activation(network)}
    if config.train.algorithm in ON_POLICY:
        arguments["log_std_init"] = network.log_std_init
    if config.train.algorithm != "recurrent_ppo":
        return "MlpPolicy", arguments
    return "MlpLstmPolicy", {**arguments, "lstm_hidden_size": network.lstm_hidden}


def activation(network: NetworkConfig) -> Any:
    """The activation's class."""
    import torch

    return {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[network.activation]


def _shaping(batch: VecEnv) -> PowerShapingVecEnv:
    assert isinstance(batch, PowerShapingVecEnv)
    return batch
