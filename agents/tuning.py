"""Tunes the baselines on training scenarios, with a stated budget that is the same for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wattgym.agents.baselines import TUNABLE, TunedGains, make_tunable, tunable, usable
from wattgym.agents.rollout import Arena, commanding
from wattgym.envs.config import PowerShapingConfig
from wattgym.errors import UserError

OBJECTIVE = "mean reward"
"""What a learner maximises too, so that neither side is tuned for another goal."""


def candidate_settings(name: str, budget: int, seed: int) -> list[dict[str, Any]]:
    """The defaults of a baseline, and settings that cover its search box evenly (scrambled Sobol points).

    Args:
        name: A tunable baseline.
        budget: Number of settings, the defaults among them.
        seed: Seed of the scrambling.
    """
    entry = tunable(name)
    search, fields = entry.search, entry.settings.model_fields
    defaults = {key: fields[key].default for key in search}
    if budget == 1:
        return [defaults]
    found = [
        {
            key: type(defaults[key])(round(value) if isinstance(defaults[key], int) else value)
            for key, value in ((key, search[key].at(share)) for key, share in zip(search, point, strict=True))
        }
        for point in covering_points([0.0] * len(search), [1.0] * len(search), budget - 1, seed)
    ]
    return [defaults, *found]


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
    names: Sequence[str] = TUNABLE,
    progress: Callable[[str, int], object] = lambda name, done: None,
) -> TunedGains:
    """Finds settings for tunable baselines.

    Args:
        config: Environment whose training split is used.
        budget: Settings tried per controller.
        scenarios: Scenarios each setting is tried on; the same for all.
        seed: Seed of settings and scenarios.
        command: Recorded with the result.
        names: Which baselines.
        progress: Told the controller and how many settings have been tried.

    Raises:
        UserError: The configuration is not of the training split, or a number is not positive.
    """
    if config.signal.split != "train" or config.site.surfaces in ("validation", "test"):
        raise UserError("baselines are tuned on the training split only; set signal.split and site.surfaces to train")
    unfit = [name for name in names if name not in TUNABLE or not usable(name, config.action.knobs)]
    if unfit:
        raise UserError(f"'{unfit[0]}' cannot be tuned here: not tunable, or it needs a knob that is not enabled")
    if budget < 1 or scenarios < 1:
        raise UserError(f"budget and scenarios must be at least 1, got {budget} and {scenarios}")
    arena = Arena(commanding(config))
    seeds = np.random.default_rng(seed).integers(2**62, size=scenarios).tolist()
    best: dict[str, dict[str, Any]] = {}
    value: dict[str, float] = {}
    for name in names:
        for tried, settings in enumerate(candidate_settings(name, budget, seed), start=1):
            reached = float(arena.run(make_tunable(name, settings), seeds).reward.mean())
            if name not in value or reached > value[name]:
                best[name], value[name] = settings, reached
            progress(name, tried)
    return TunedGains(
        command=command, budget=budget, scenarios=scenarios, objective=OBJECTIVE, gains=best, objective_value=value
    )
