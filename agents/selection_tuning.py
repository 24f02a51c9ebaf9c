"""Tunes the site selectors on training federations, with a stated budget that is the same for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selection_scoring import episode_metrics, expense
from wattgym.agents.selectors import FamilySettings, TunedSelectors, make_selector, settings_of
from wattgym.agents.tuning import covering_points
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.errors import UserError

OBJECTIVE = "geometric mean of time to target (plus what the reward prices), hours; a miss counts as twice the limit"
"""What a learner's reward comes to over an episode, so that neither side is tuned for another goal."""

_SHARE = {"share": (0.05, 1.0)}
_GREEDY = {"patience": (0.0, 6.0), "threshold": (0.0, 0.1)}

SEARCH: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "random k": _SHARE,
    "power-only top k": _SHARE,
    "nearest-only top k": _SHARE,
    "fastest k": _SHARE,
    "FedCS-like deadline": {"slack": (1.0, 4.0)},
    "Oort": {**_SHARE, "penalty": (0.0, 4.0), "explore_least": (0.0, 0.4)},
    "UCB per site": {**_SHARE, "width": (0.0, 1.0)},
    "PowerTrip static": _GREEDY,
    "PowerTrip measured": {
        "window": (1.0, 4.0),
        "patience": (0.0, 3.0),
        "threshold": (0.0, 0.3),
        "start": (0.1, 1.0),
        "hold": (5.0, 60.0),
        "on_power": (0.0, 1.0),
    },
    "PowerTrip predicted": _GREEDY,
}
"""What is searched, by selector; whole numbers and switches are rounded."""


def candidate_settings(name: str, budget: int, seed: int) -> list[dict[str, Any]]:
    """Settings that cover a selector's search box evenly.

    Args:
        name: A selector of `SEARCH`.
        budget: Number of settings.
        seed: Seed of the points.
    """
    box, model = SEARCH[name], settings_of(name)
    assert model is not None
    low, high = zip(*box.values(), strict=True)
    kinds = {key: type(model.model_fields[key].default) for key in box}
    return [
        {key: value if kinds[key] is float else kinds[key](round(value)) for key, value in zip(box, point, strict=True)}
        for point in covering_points(low, high, budget, seed)
    ]


def tune_selectors(
    families: Mapping[str, SiteSelectionConfig],
    *,
    budget: int,
    scenarios: int,
    seed: int,
    command: str,
    progress: Callable[[str, int], object] = lambda name, done: None,
) -> TunedSelectors:
    """Finds settings for every tunable selector on every family.

    Args:
        families: Environments by name, of the training split.
        budget: Settings tried per selector and family.
        scenarios: Scenarios each setting is tried on; the same for all.
        seed: Seed of settings and scenarios.
        command: Recorded with the result.
        progress: Told the selector and how many settings have been tried.

    Raises:
        UserError: A configuration is not of the training split, or a number is not positive.
    """
    if budget < 1 or scenarios < 1:
        raise UserError(f"budget and scenarios must be at least 1, got {budget} and {scenarios}")
    for family, env in families.items():
        for key in ("power", "network", "market"):
            if getattr(env, key).split not in ("train", "all"):
                raise UserError(f"{family}: selectors are tuned on the training split only; set {key}.split to train")
    seeds = np.random.default_rng(seed).integers(2**62, size=scenarios).tolist()
    found = {}
    for family, env in families.items():
        arena = SelectionArena(env)
        best: dict[str, dict[str, Any]] = {}
        value: dict[str, float] = {}
        for name in SEARCH:
            for tried, settings in enumerate(candidate_settings(name, budget, seed), start=1):
                reached = _objective(arena, name, settings, seeds)
                if name not in value or reached < value[name]:
                    best[name], value[name] = settings, reached
                progress(name, tried)
        found[family] = FamilySettings(
            settings=best, objective_value={name: round(reached, 4) for name, reached in value.items()}
        )
    return TunedSelectors(command=command, budget=budget, scenarios=scenarios, objective=OBJECTIVE, families=found)


def _objective(arena: SelectionArena, name: str, settings: Mapping[str, Any], seeds: list[int]) -> float:
    weights = arena.config.reward
    expenses = [
        expense(episode_metrics(episode), weights) for episode in arena.run(make_selector(name, settings), seeds)
    ]
    return float(np.exp(np.log(expenses).mean()))
