"""Tunes the feedback baselines on training scenarios, with a stated budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wattgym.agents.baselines import TunedGains, feedback_baseline
from wattgym.agents.rollout import Arena
from wattgym.envs.config import ActionConfig, PowerShapingConfig
from wattgym.envs.feedback import FeedbackGains
from wattgym.errors import UserError

TUNABLE = ("PI", "feed-forward + PI")
OBJECTIVE = "mean reward"
"""What a learner maximises too, so that neither side is tuned for another goal."""

_LOW, _HIGH = (0.0, 0.01, 0.1), (1.0, 1.0, 1.0)


def candidate_gains(budget: int, seed: int) -> list[FeedbackGains]:
    """Gain settings that cover the search box evenly (scrambled Sobol points).

    Args:
        budget: Number of settings.
        seed: Seed of the scrambling.
    """
    return [FeedbackGains(proportional=p, integral=i, rate=r) for p, i, r in covering_points(_LOW, _HIGH, budget, seed)]


def covering_points(low: Sequence[float], high: Sequence[float], budget: int, seed: int) -> list[list[float]]:
    """Points that cover a box evenly (scrambled Sobol), to four decimals.

    Args:
        low: Lower ends of the box.
        high: Upper ends.
        budget: Number of points.
        seed: Seed of the scrambling.
    """
    from scipy.stats import qmc

    points = qmc.Sobol(d=len(low), seed=seed).random(1 << max(budget - 1, 1).bit_length())[:budget]
    scaled = qmc.scale(points, low, high).round(4)
    return [[float(value) for value in point] for point in scaled]


def tune_baselines(
    config: PowerShapingConfig,
    *,
    budget: int,
    scenarios: int,
    seed: int,
    command: str,
    progress: Callable[[str, int], object] = lambda name, done: None,
) -> TunedGains:
    """Finds gains for every tunable baseline.

    Args:
        config: Environment whose training split is used.
        budget: Settings tried per controller.
        scenarios: Scenarios each setting is tried on; the same for all.
        seed: Seed of settings and scenarios.
        command: Recorded with the result.
        progress: Told the controller and how many settings have been tried.

    Raises:
        UserError: The configuration is not of the training split, or a number is not positive.
    """
    if config.signal.split != "train" or config.site.surfaces in ("validation", "test"):
        raise UserError("baselines are tuned on the training split only; set signal.split and site.surfaces to train")
    if budget < 1 or scenarios < 1:
        raise UserError(f"budget and scenarios must be at least 1, got {budget} and {scenarios}")
    # The baselines command limits directly, as they do in an evaluation.
    arena = Arena(config.model_copy(update={"action": ActionConfig()}))
    seeds = np.random.default_rng(seed).integers(2**62, size=scenarios).tolist()
    best: dict[str, FeedbackGains] = {}
    value: dict[str, float] = {}
    for name in TUNABLE:
        for tried, gains in enumerate(candidate_gains(budget, seed), start=1):
            reached = float(arena.run(feedback_baseline(name, gains), seeds).reward.mean())
            if name not in value or reached > value[name]:
                best[name], value[name] = gains, reached
            progress(name, tried)
    return TunedGains(
        command=command, budget=budget, scenarios=scenarios, objective=OBJECTIVE, gains=best, objective_value=value
    )
