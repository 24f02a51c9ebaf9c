"""Compares policies during training, on the validation split of signals and plants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.agents.config import TrainingConfig
from wattgym.agents.controller import Controller
from wattgym.agents.rollout import Arena
from wattgym.agents.scoring import check_scorable, scenario_metrics
from wattgym.config import parse_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.plant import FloatArray

SHOWN = ("reward_mean", "pjm_composite", "pjm_precision", "nrmse", "mae_over_r", "actuations_per_h_per_job")
"""Metrics that go to the log."""


@dataclass(frozen=True)
class ValidationScores:
    """Scores of one validation.

    Attributes:
        reward: Mean reward over families, what policies are selected by.
        by_family: Mean of each metric, by signal family.
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
        self._arenas = {
            family: Arena(held_out(config.env, family, "validation", settings.episode_s))
            for family in settings.families
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
    signal = {"families": {family: 1.0}, "split": split, "offers": env.signal.offers}
    site = env.site.model_copy(update={"surfaces": split}) if env.site.by_split else env.site
    return parse_config(
        PowerShapingConfig, {**dict(env), "site": site, "signal": signal, "episode_s": episode_s}, f"{split} scenarios"
    )


def _applies(values: FloatArray) -> bool:
    return not bool(np.isnan(values).all())
