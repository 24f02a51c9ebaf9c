"""Compares policies during training, on scenarios of the validation split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wattgym.agents.config import SelectionTrainingConfig, TrainingConfig
from wattgym.agents.controller import Controller
from wattgym.agents.rollout import Arena
from wattgym.agents.scoring import check_scorable, scenario_metrics
from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selection_scoring import episode_metrics, expense
from wattgym.agents.selectors import REFERENCE, make_selector
from wattgym.agents.selectors.selector import ObservationPolicy, Observing, Selector
from wattgym.config import parse_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.federation.config import SiteSelectionConfig, Split
from wattgym.envs.plant import FloatArray

SHOWN = ("reward_mean", "pjm_composite", "pjm_precision", "nrmse", "mae_over_r", "actuations_per_h_per_job")
"""Metrics of power shaping that go to the log."""

SELECTION_SHOWN = ("log_gain", "time_to_target_s", "target_reached", "participants_mean")
"""Metrics of site selection that go to the log."""


@dataclass(frozen=True)
class ValidationScores:
    """Scores of one validation.

    Attributes:
        reward: What policies are selected by: the mean over families of the mean reward (power shaping), or of the
            logarithm of the reference's expense over the policy's (site selection).
        by_family: Mean of each metric, by family.
    """

    reward: float
    by_family: dict[str, dict[str, float]]


class Validation:
    """The same scenarios each time; policies are compared by their mean reward."""

    def __init__(self, config: TrainingConfig) -> None:
        """Prepares the scenarios.

        Raises:
            UserError: A family is unknown, has no recording in the split, or the scenarios are too long or too short.
        """
        settings = config.validation
        env = config.env.model_copy(update={"reward": settings.reward or config.env.reward})
        self._arenas = {
            family: Arena(held_out(env, family, "validation", settings.episode_s)) for family in settings.families
        }
        self._seeds = np.random.default_rng(config.seed).integers(2**62, size=settings.scenarios).tolist()
        for arena in self._arenas.values():
            check_scorable(arena, self._seeds[0])

    def run(self, controller: Controller) -> ValidationScores:
        """Scores a controller."""
        scores: dict[str, dict[str, float]] = {}
        for family, arena in self._arenas.items():
            metrics = scenario_metrics(arena.run(controller, self._seeds), uncapped=None)
            scores[family] = {name: float(np.nanmean(metrics[name])) for name in SHOWN if _applies(metrics[name])}
        reward = float(np.mean([family["reward_mean"] for family in scores.values()]))
        return ValidationScores(reward, scores)


class SelectionValidation:
    """The same federations each time; policies are compared by what the way to the target cost them.

    The expense of an episode is its time over `reward.time_scale_s` plus whatever energy, emissions and money the
    reward puts a price on. Compared is its logarithm against PowerTrip's predicted greedy in the same scenario, so that
    long and short scenarios count alike.
    """

    def __init__(self, config: SelectionTrainingConfig) -> None:
        """Prepares the scenarios and runs the reference through them.

        Raises:
            UserError: A family has nothing in the validation split.
        """
        settings = config.validation
        self._arenas = {
            name: SelectionArena(held_out_federation(env, "validation")) for name, env in config.envs.items()
        }
        self._seeds = np.random.default_rng(config.seed).integers(2**62, size=settings.scenarios).tolist()
        self._reference: dict[str, FloatArray] = {}

    def run(self, controller: ObservationPolicy) -> ValidationScores:
        """Scores a policy."""
        scores: dict[str, dict[str, float]] = {}
        for family, arena in self._arenas.items():
            if family not in self._reference:
                self._reference[family] = self._expenses(arena, make_selector(REFERENCE))[0]
            spent, metrics = self._expenses(arena, Observing(controller))
            scores[family] = {"log_gain": float(np.log(self._reference[family] / spent).mean())} | {
                name: float(np.mean([episode[name] for episode in metrics])) for name in SELECTION_SHOWN[1:]
            }
        return ValidationScores(float(np.mean([family["log_gain"] for family in scores.values()])), scores)

    def _expenses(self, arena: SelectionArena, selector: Selector) -> tuple[FloatArray, list[Mapping[str, float]]]:
        """What each episode cost; a target that was missed counts as twice the time limit."""
        metrics = [episode_metrics(episode) for episode in arena.run(selector, self._seeds)]
        return np.array([expense(m, arena.config.reward) for m in metrics]), metrics


def held_out_federation(env: SiteSelectionConfig, split: Split) -> SiteSelectionConfig:
    """A training environment moved to another split of power weeks, market weeks and, unless they are listed, places.

    Args:
        env: The environment trained in.
        split: `train`, `validation` or `test`.
    """
    parts = {name: getattr(env, name).model_copy(update={"split": split}) for name in ("power", "network", "market")}
    return env.model_copy(update=parts)


def held_out(env: PowerShapingConfig, family: str, split: str, episode_s: float) -> PowerShapingConfig:
    """A training environment moved to another split of signals and, unless its surfaces are listed, of plants.

    Args:
        env: The environment trained in.
        family: Signal family.
        split: `train`, `validation` or `test`.
        episode_s: Episode length, seconds.

    Raises:
        UserError: The family is unknown, or the length is no whole number of periods.
    """
    kept = {key: getattr(env.signal, key) for key in ("offers", "band", "infeasible")}
    signal = {"families": {family: 1.0}, "split": split, **kept}
    site = env.site.model_copy(update={"surfaces": split}) if env.site.by_split else env.site
    return parse_config(
        PowerShapingConfig, {**dict(env), "site": site, "signal": signal, "episode_s": episode_s}, f"{split} scenarios"
    )


def _applies(values: FloatArray) -> bool:
    return not bool(np.isnan(values).all())
