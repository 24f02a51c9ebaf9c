"""Evaluates controllers on identical held-out scenarios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from wattgym.agents.baselines import ENERGY_MATCHED, TunedGains, make_baseline
from wattgym.agents.baselines.static import StaticCap
from wattgym.agents.controller import Controller
from wattgym.agents.episodes import EpisodeResult, PowerTrace
from wattgym.agents.results import EvaluationResult
from wattgym.agents.rollout import Arena, Rollout
from wattgym.agents.scoring import scenario_metrics
from wattgym.agents.validation import held_out
from wattgym.config import FrozenModel
from wattgym.envs.config import OFFERS, PowerShapingConfig, Split
from wattgym.errors import UserError
from wattgym.metrics.pjm import PJM_VARIANTS, pjm_variant

HELD_OUT_FAMILIES = ("regd", "rega", "droop")
"""Recorded regulation signals with a test split."""

MATCH_TOLERANCE = 0.005
"""An energy-matched cap's energy is within this share of the energy it matches, where a cap can reach it."""

_MATCH_ROUNDS = 6


class EvaluationPlan(FrozenModel):
    """Which scenarios controllers meet.

    Attributes:
        families: Signal families; each is a task of its own.
        split: Split of signals and plants.
        seeds: Scenarios per family.
        first_seed: Seed of the first scenario; scenario `i` has seed `first_seed + i`.
        episode_s: Episode length, seconds.
        variant: Rules of the regulation score.
        traced: Scenarios per family whose power over time is kept for the report.
    """

    families: tuple[str, ...] = HELD_OUT_FAMILIES
    split: Split = "test"
    seeds: int = 20
    first_seed: int = 1000
    episode_s: float = 2400.0
    variant: str = "legacy"
    traced: int = 1


def evaluate(
    env: PowerShapingConfig,
    policies: Sequence[Controller],
    baselines: Sequence[str],
    plan: EvaluationPlan,
    *,
    tuned: TunedGains | None = None,
    provenance: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
) -> EvaluationResult:
    """Runs every controller through the same scenarios.

    Args:
        env: Environment that the policies were trained in; its signals and plants are moved to the plan's split.
        policies: Learned policies (or other controllers) to judge.
        baselines: Names of baselines to judge them against.
        plan: Scenarios.
        tuned: Gains of the feedback baselines; the shipped ones if None.
        provenance: How it is made, for the report.
        progress: Told what runs.

    Raises:
        UserError: A family or variant is unknown, a number is not positive, or names are not unique.
    """
    _check(plan, policies, baselines)
    seeds = list(range(plan.first_seed, plan.first_seed + plan.seeds))
    rows: list[EpisodeResult] = []
    traces: list[PowerTrace] = []
    for family in plan.families:
        arena = Arena(held_out(env, family, plan.split, plan.episode_s))
        uncapped = arena.run(make_baseline("uncapped"), seeds)
        for name, rollout in _rollouts(arena, seeds, policies, baselines, uncapped, tuned, family, progress):
            rows += _rows(name, family, plan, seeds, rollout, uncapped)
            traces += _traces(name, family, plan, rollout)
    return EvaluationResult(rows=rows, baselines=tuple(baselines), traces=traces, provenance=provenance,
                            headline=_headline(plan))  # fmt: skip


def energy_matched(arena: Arena, seeds: Sequence[int], power_w: np.ndarray[Any, np.dtype[np.float64]]) -> Rollout:
    """The static cap whose metered mean power in each scenario is the given one, found by repeated runs.

    Args:
        arena: Where.
        seeds: Scenarios.
        power_w: Mean power to match, shape `(B,)`, W.
    """
    asked = power_w.copy()
    for _ in range(_MATCH_ROUNDS):
        rollout = arena.run(StaticCap(ENERGY_MATCHED, asked), seeds)
        miss = rollout.power_w.mean(axis=1) / power_w
        if (np.abs(miss - 1.0) <= MATCH_TOLERANCE).all():
            break
        asked = asked / miss
    return rollout


def _rollouts(
    arena: Arena,
    seeds: Sequence[int],
    policies: Sequence[Controller],
    baselines: Sequence[str],
    uncapped: Rollout,
    tuned: TunedGains | None,
    family: str,
    progress: Callable[[str], None],
) -> list[tuple[str, Rollout]]:
    done: list[tuple[str, Rollout]] = []
    for policy in policies:
        progress(f"{family}: {policy.name}")
        done.append((policy.name, arena.run(policy, seeds)))
    # The cap's energy is that of the first policy, else of the strongest baseline there is.
    matched = done[0][1] if done else None
    for name in baselines:
        if name == ENERGY_MATCHED:
            continue
        progress(f"{family}: {name}")
        done.append((name, uncapped if name == "uncapped" else arena.run(make_baseline(name, tuned), seeds)))
    if ENERGY_MATCHED in baselines:
        progress(f"{family}: {ENERGY_MATCHED}")
        if matched is None:
            matched = arena.run(make_baseline("feed-forward + PI", tuned), seeds)
        done.append((ENERGY_MATCHED, energy_matched(arena, seeds, matched.power_w.mean(axis=1))))
    return done


def _rows(
    name: str, family: str, plan: EvaluationPlan, seeds: Sequence[int], rollout: Rollout, uncapped: Rollout
) -> list[EpisodeResult]:
    metrics = scenario_metrics(rollout, uncapped, pjm_variant(plan.variant))
    return [
        EpisodeResult(
            controller=name,
            scenario=f"{family}/{plan.split}/{seed}",
            family=family,
            plant_group=f"{plan.split} plants",
            seed=seed,
            metrics={metric: float(values[i]) for metric, values in metrics.items()},
        )
        for i, seed in enumerate(seeds)
    ]


def _traces(name: str, family: str, plan: EvaluationPlan, rollout: Rollout) -> list[PowerTrace]:
    t_s = np.arange(rollout.power_w.shape[1]) * rollout.period_s
    return [
        PowerTrace(
            controller=name,
            scenario=f"{family}/{plan.split}/{plan.first_seed + i}",
            t_s=t_s,
            target_w=rollout.target_w[i],
            power_w=rollout.power_w[i],
            throughput=rollout.throughput[i],
        )
        for i in range(min(plan.traced, plan.seeds))
    ]


def _headline(plan: EvaluationPlan) -> str:
    from wattgym.agents.scoring import REGULATION

    return "pjm_composite" if set(plan.families) <= set(REGULATION) else "nrmse"


def _check(plan: EvaluationPlan, policies: Sequence[Controller], baselines: Sequence[str]) -> None:
    if plan.variant not in PJM_VARIANTS:
        raise UserError(f"unknown score variant '{plan.variant}'; known: {', '.join(PJM_VARIANTS)}")
    if plan.seeds < 1 or plan.traced < 0 or plan.first_seed < 0:
        raise UserError(f"seeds must be at least 1, first_seed and traced at least 0; got {plan.seeds}, "
                        f"{plan.first_seed}, {plan.traced}")  # fmt: skip
    for family in plan.families:
        if family not in OFFERS:
            raise UserError(f"unknown signal family '{family}'; known: {', '.join(OFFERS)}")
    names = [policy.name for policy in policies] + list(baselines)
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UserError(f"two controllers are named '{doubled[0]}'; names must be unique")
    if not names:
        raise UserError("nothing to evaluate: name a run or at least one baseline")
