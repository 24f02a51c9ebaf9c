"""Evaluates controllers on identical held-out scenarios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from pydantic import Field, field_validator

from wattgym.agents.baselines import ENERGY_MATCHED, TunedGains, make_baseline
from wattgym.agents.baselines.static import StaticCap
from wattgym.agents.controller import Controller
from wattgym.agents.episodes import EpisodeResult, PowerTrace
from wattgym.agents.results import EvaluationResult
from wattgym.agents.rollout import Arena, Rollout, commanding
from wattgym.agents.scoring import REGULATION, check_scorable, scenario_metrics
from wattgym.agents.validation import held_out
from wattgym.config import FrozenModel
from wattgym.envs.config import OFFERS, PowerShapingConfig, Split
from wattgym.envs.plant import FloatArray
from wattgym.errors import UserError
from wattgym.metrics.pjm import PJM_VARIANTS, pjm_variant

HELD_OUT_FAMILIES = ("regd", "rega", "droop")
"""Recorded regulation signals with a test split."""

MATCH_TOLERANCE = 0.005
"""An energy-matched cap's energy is within this share of the energy it matches, where any cap's is."""

_MATCH_ROUNDS = 16


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

    families: tuple[str, ...] = Field(default=HELD_OUT_FAMILIES, min_length=1)
    split: Split = "test"
    seeds: int = Field(default=20, ge=1)
    first_seed: int = Field(default=1000, ge=0)
    episode_s: float = Field(default=2400.0, gt=0.0)
    variant: str = "legacy"
    traced: int = Field(default=1, ge=0)

    @field_validator("families")
    @classmethod
    def _known_families(cls, families: tuple[str, ...]) -> tuple[str, ...]:
        for family in families:
            if family not in OFFERS or families.count(family) > 1:
                raise ValueError(f"'{family}' is unknown or named twice; known: {', '.join(OFFERS)}")
        return families

    @field_validator("variant")
    @classmethod
    def _known_variant(cls, variant: str) -> str:
        if variant not in PJM_VARIANTS:
            raise ValueError(f"unknown score variant; known: {', '.join(PJM_VARIANTS)}")
        return variant

    @property
    def scenario_seeds(self) -> tuple[int, ...]:
        """Seeds of the scenarios, the same in each family."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))


class Stage:
    """The scenarios of one signal family: the same ones for whoever enters."""

    def __init__(self, env: PowerShapingConfig, family: str, plan: EvaluationPlan) -> None:
        """Prepares the scenarios.

        Args:
            env: Environment that the policies were trained in.
            family: Signal family.
            plan: Scenarios.

        Raises:
            UserError: The family has no recording in the split, or the scenarios are too long or too short.
        """
        self.family = family
        config = held_out(env, family, plan.split, plan.episode_s)
        self._seeds = plan.scenario_seeds
        self._for_policies = Arena(config)
        self._for_baselines = Arena(commanding(config))
        check_scorable(self._for_policies, self._seeds[0], pjm_variant(plan.variant))

    def policy(self, controller: Controller) -> Rollout:
        """Runs a controller whose actions mean what the environment's configuration says."""
        return self._for_policies.run(controller, self._seeds)

    def baseline(self, controller: Controller) -> Rollout:
        """Runs a controller whose actions are limits, whatever the environment's actions mean."""
        return self._for_baselines.run(controller, self._seeds)

    def energy_matched(self, power_w: FloatArray) -> Rollout:
        """The static cap whose metered mean power in each scenario is the given one, found by repeated runs.

        Args:
            power_w: Mean power to match, shape `(B,)`, W.
        """
        asked = best = power_w
        low, high = np.zeros_like(power_w), np.full_like(power_w, np.inf)
        closest = np.full_like(power_w, np.inf)
        for _ in range(_MATCH_ROUNDS):
            drawn = self.baseline(StaticCap(ENERGY_MATCHED, asked)).power_w.mean(axis=1) / power_w
            miss = np.abs(drawn - 1.0)
            best, closest = np.where(miss < closest, asked, best), np.minimum(miss, closest)
            if (closest <= MATCH_TOLERANCE).all():
                break
            # In proportion, unless that leaves what is known to be too little and too much: a cap also shifts when
            # jobs save and evaluate, so that energy moves in jumps on which proportions alone would go in circles.
            low, high = np.where(drawn < 1.0, asked, low), np.where(drawn > 1.0, asked, high)
            asked = asked / drawn
            inside = (asked > low) & (asked < high)
            asked = np.where(inside, asked, (low + np.minimum(high, 4.0 * asked)) / 2.0)
        return self.baseline(StaticCap(ENERGY_MATCHED, best))


def evaluate(
    env: PowerShapingConfig,
    policies: Mapping[str, Sequence[Controller]],
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
        policies: Learned policies (or other controllers) to judge, by name. Several under one name are training runs
            of one controller (told apart by their own names); intervals then cover the training seeds too.
        baselines: Names of baselines to judge them against.
        plan: Scenarios.
        tuned: Gains of the feedback baselines; the shipped ones if None.
        provenance: How it is made, for the report.
        progress: Told what runs.

    Raises:
        UserError: Names are not unique, there is nothing to evaluate, or the scenarios cannot be drawn.
    """
    check_names(policies, baselines)
    # What is wrong with one family shows before the others have run for minutes.
    stages = [Stage(env, family, plan) for family in plan.families]
    rows: list[EpisodeResult] = []
    traces: list[PowerTrace] = []
    plants = f"{plan.split} plants" if env.site.by_split else "configured plants"
    for stage in stages:
        uncapped = stage.baseline(make_baseline("uncapped"))
        traced: set[str] = set()
        for name, train_run, rollout in _rollouts(stage, policies, baselines, uncapped, tuned, progress):
            metrics = scenario_metrics(rollout, uncapped, pjm_variant(plan.variant))
            for i, seed in enumerate(plan.scenario_seeds):
                scenario = f"{stage.family}/{plan.split}/{seed}"
                values = {metric: float(found[i]) for metric, found in metrics.items()}
                rows.append(EpisodeResult(name, scenario, stage.family, plants, seed, values, train_run))
                if i < plan.traced and name not in traced:
                    traces.append(_trace(name, scenario, rollout, i))
            # Plots show the first training run of a controller.
            traced.add(name)
    return EvaluationResult(
        rows=rows,
        baselines=tuple(baselines),
        traces=traces,
        provenance=provenance,
        headline="pjm_composite" if set(plan.families) <= set(REGULATION) else "nrmse",
    )


def _rollouts(
    stage: Stage,
    policies: Mapping[str, Sequence[Controller]],
    baselines: Sequence[str],
    uncapped: Rollout,
    tuned: TunedGains | None,
    progress: Callable[[str], None],
) -> Iterator[tuple[str, str, Rollout]]:
    """Name, training run and rollout of every controller, policies first."""
    matched: FloatArray | None = None
    for name, runs in policies.items():
        for controller in runs:
            progress(f"{stage.family}: {controller.name}")
            rollout = stage.policy(controller)
            if matched is None:
                matched = rollout.power_w.mean(axis=1)
            yield name, controller.name if len(runs) > 1 else "", rollout
    for name in baselines:
        progress(f"{stage.family}: {name}")
        if name == "uncapped":
            yield name, "", uncapped
        elif name == ENERGY_MATCHED:
            # The cap's energy is that of the first policy, else of the strongest baseline there is.
            if matched is None:
                matched = stage.baseline(make_baseline("feed-forward + PI", tuned)).power_w.mean(axis=1)
            yield name, "", stage.energy_matched(matched)
        else:
            yield name, "", stage.baseline(make_baseline(name, tuned))


def _trace(name: str, scenario: str, rollout: Rollout, i: int) -> PowerTrace:
    return PowerTrace(
        controller=name,
        scenario=scenario,
        t_s=np.arange(rollout.power_w.shape[1], dtype=np.float64) * rollout.period_s,
        target_w=rollout.target_w[i],
        power_w=rollout.power_w[i],
        throughput=rollout.throughput[i],
    )


class Named(Protocol):
    """Whoever has a name in tables."""

    @property
    def name(self) -> str:
        """The name."""
        ...


def check_names(policies: Mapping[str, Sequence[Named]], baselines: Sequence[str]) -> None:
    """Refuses names that a table could not tell apart, and an evaluation of nobody.

    Raises:
        UserError: A name is there twice, or there is none.
    """
    names = [*(name for name, runs in policies.items() if runs), *baselines]
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise UserError(f"two controllers are named '{doubled[0]}'; names must be unique")
    for name, runs in policies.items():
        own = [controller.name for controller in runs]
        if len(set(own)) < len(own):
            raise UserError(f"two training runs of '{name}' have the same name: {', '.join(own)}")
    if not names:
        raise UserError("nothing to evaluate: name a run or at least one baseline")
