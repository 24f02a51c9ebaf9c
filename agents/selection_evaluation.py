"""Evaluates site selectors on identical held-out federations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, field_validator

from wattgym.agents.episodes import EpisodeResult, SelectionTrace
from wattgym.agents.evaluation import check_names
from wattgym.agents.results import EvaluationResult
from wattgym.agents.selection_rollout import SelectionArena, SelectionEpisode
from wattgym.agents.selection_scoring import episode_metrics, expense
from wattgym.agents.selectors import REFERENCE, TunedSelectors, make_selector
from wattgym.agents.selectors.planner import MOST_SITES
from wattgym.agents.selectors.selector import Selector
from wattgym.agents.validation import held_out_federation
from wattgym.config import FrozenModel
from wattgym.envs.federation.config import MAX_SITES, SiteSelectionConfig, Split
from wattgym.errors import UserError

HEADLINE = "time_to_target_relative"


class SelectionPlan(FrozenModel):
    """Which federations selectors meet.

    Attributes:
        split: Split of power weeks, market weeks and places.
        seeds: Scenarios per family and size.
        first_seed: Seed of the first scenario; scenario `i` has seed `first_seed + i`.
        sizes: Numbers of sites to evaluate at, beside each family's own; every size is a task of its own.
        own_size: Whether the family's own range of sizes is among them.
        traced: Scenarios per task whose rounds are kept for the report.
    """

    split: Split = "test"
    seeds: int = Field(default=20, ge=1)
    first_seed: int = Field(default=1000, ge=0)
    sizes: tuple[int, ...] = ()
    own_size: bool = True
    traced: int = Field(default=1, ge=0)

    @field_validator("sizes")
    @classmethod
    def _federations(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        for size in sizes:
            if not 1 <= size <= MAX_SITES or sizes.count(size) > 1:
                raise ValueError(f"{size} is no number of sites or named twice; valid: 1 to {MAX_SITES}, each once")
        return sizes

    @property
    def scenario_seeds(self) -> tuple[int, ...]:
        """Seeds of the scenarios, the same in each task."""
        return tuple(range(self.first_seed, self.first_seed + self.seeds))


def of_size(env: SiteSelectionConfig, size: int) -> SiteSelectionConfig:
    """An environment at another number of sites.

    Args:
        env: The environment.
        size: Number of sites of every episode.

    Raises:
        UserError: The configuration names its sites, so that there is no other number of them.
    """
    if env.sites.named:
        raise UserError(f"a federation of {len(env.sites.named)} named sites cannot be evaluated at {size} sites")
    return env.model_copy(update={"sites": env.sites.model_copy(update={"count": (size, size), "slots": None})})


class SelectionStage:
    """The federations of one family and size: the same ones for whoever enters."""

    def __init__(self, family: str, env: SiteSelectionConfig, plan: SelectionPlan, size: int | None = None) -> None:
        """Prepares the scenarios and draws one, so that what cannot work shows before work is spent.

        Args:
            family: Scenario family.
            env: Its environment.
            plan: Scenarios.
            size: Number of sites; None keeps the family's.

        Raises:
            UserError: The scenarios cannot be drawn.
        """
        config = held_out_federation(env if size is None else of_size(env, size), plan.split)
        low, high = (config.sites.most,) * 2 if config.sites.named else config.sites.count
        self.family = family
        self.group = f"{low} sites" if low == high else f"{low}-{high} sites"
        self.most = high
        self._seeds = plan.scenario_seeds
        self._arena = SelectionArena(config)
        self._arena.selection.reset(self._seeds[:1])

    def run(self, selector: Selector) -> tuple[SelectionEpisode, ...]:
        """Every scenario, once."""
        return self._arena.run(selector, self._seeds)

    def metrics(self, episode: SelectionEpisode, standard: SelectionEpisode) -> dict[str, float]:
        """Metrics of an episode, also relative to a standard one in the same scenario."""
        ours, theirs = episode_metrics(episode), episode_metrics(standard)
        weights = self._arena.config.reward
        return {
            HEADLINE: ours["time_to_target_s"] / theirs["time_to_target_s"],
            "expense_relative": expense(ours, weights) / expense(theirs, weights),
            **ours,
        }


def evaluate_selectors(
    families: Mapping[str, SiteSelectionConfig],
    policies: Mapping[str, Sequence[Selector]],
    baselines: Sequence[str],
    plan: SelectionPlan,
    *,
    tuned: TunedSelectors | None = None,
    provenance: Mapping[str, Any],
    progress: Callable[[str], None] = lambda text: None,
) -> EvaluationResult:
    """Runs every selector through the same scenarios.

    Args:
        families: Environments by family name; weeks and places are moved to the plan's split.
        policies: Learned policies (or other selectors) to judge, by name. Several under one name are training runs of
            one policy (told apart by their own names); intervals then cover the training seeds too.
        baselines: Names of selectors to judge them against.
        plan: Scenarios.
        tuned: Settings of the tunable selectors by family; their defaults if None or where a family is not in it.
        provenance: How it is made, for the report.
        progress: Told what runs.

    Raises:
        UserError: Names are not unique, there is nothing to evaluate, or the scenarios cannot be drawn.
    """
    check_names(policies, baselines)
    if not families:
        raise UserError("nothing to evaluate on: name at least one scenario family")
    sizes = ((None,) if plan.own_size else ()) + plan.sizes
    if not sizes:
        raise UserError("nothing to evaluate on: neither the families' own sizes nor others")
    stages = [SelectionStage(family, env, plan, size) for family, env in families.items() for size in sizes]
    largest = max(stage.most for stage in stages)
    if "horizon planner" in baselines and largest > MOST_SITES:
        raise UserError(f"the horizon planner plans for at most {MOST_SITES} sites, these federations have {largest}")
    rows: list[EpisodeResult] = []
    traces: list[SelectionTrace] = []
    for stage in stages:
        settings = tuned.of(stage.family) if tuned else {}
        reference = stage.run(make_selector(REFERENCE, settings.get(REFERENCE)))
        traced: set[str] = set()
        for name, train_run, episodes in _episodes(stage, policies, baselines, settings, progress):
            for i, (episode, standard) in enumerate(zip(episodes, reference, strict=True)):
                scenario = f"{stage.family}/{stage.group}/{plan.split}/{episode.seed}"
                values = stage.metrics(episode, standard)
                rows.append(EpisodeResult(name, scenario, stage.family, stage.group, episode.seed, values, train_run))
                if i < plan.traced and name not in traced:
                    traces.append(selection_trace(name, scenario, episode))
            traced.add(name)
    return EvaluationResult(
        rows=rows,
        baselines=tuple(baselines),
        traces=traces,
        provenance=provenance,
        headline=HEADLINE,
        problem="site_selection",
    )


def _episodes(
    stage: SelectionStage,
    policies: Mapping[str, Sequence[Selector]],
    baselines: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]],
    progress: Callable[[str], None],
) -> Iterator[tuple[str, str, tuple[SelectionEpisode, ...]]]:
    """Name, training run and episodes of every selector, policies first."""
    for name, runs in policies.items():
        for selector in runs:
            progress(f"{stage.family}, {stage.group}: {selector.name}")
            yield name, selector.name if len(runs) > 1 else "", stage.run(selector)
    for name in baselines:
        progress(f"{stage.family}, {stage.group}: {name}")
        yield name, "", stage.run(make_selector(name, settings.get(name)))


def selection_trace(name: str, scenario: str, episode: SelectionEpisode) -> SelectionTrace:
    """Course of an episode, for plots."""
    return SelectionTrace(
        controller=name,
        scenario=scenario,
        t_s=np.cumsum(episode.seconds),
        loss=episode.true_loss,
        accuracy=episode.accuracy,
        chosen=episode.chosen,
        sites=episode.sites,
    )
