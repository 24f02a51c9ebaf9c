"""Runs of live federations in the evaluator's format: tables, `report.html`, and comparisons of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattgym.agents.episodes import EpisodeResult
from wattgym.agents.report import write_report
from wattgym.agents.results import EvaluationResult
from wattgym.agents.selection_evaluation import HEADLINE, selection_trace
from wattgym.agents.selection_rollout import SelectionEpisode
from wattgym.agents.selection_scoring import episode_metrics

REPORT = "report.html"
FAMILY = "live federation"


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """One run of a live federation.

    Attributes:
        selector: Who chose.
        seed: Seed of data, model and emulated federation.
        episode: What happened.
    """

    selector: str
    seed: int
    episode: SelectionEpisode


def federated_result(
    runs: Sequence[FederatedRun],
    provenance: Mapping[str, Any],
    reference: str | None = None,
    baselines: Sequence[str] = (),
) -> EvaluationResult:
    """Runs as an evaluation: every seed is a scenario that all selectors met.

    Args:
        runs: The runs.
        provenance: How they were made.
        reference: Selector that times are also told relative to, seed by seed.
        baselines: Selectors that the others are compared with.

    Raises:
        UserError: A selector lacks a seed that another one has.
    """
    standard = {run.seed: episode_metrics(run.episode) for run in runs if run.selector == reference}
    rows, traces = [], []
    first_seed = runs[0].seed
    for run in runs:
        values = dict(episode_metrics(run.episode))
        if run.seed in standard:
            values[HEADLINE] = values["time_to_target_s"] / standard[run.seed]["time_to_target_s"]
        sites = len(run.episode.sites)
        scenario = f"{FAMILY}/{sites} sites/{run.seed}"
        rows.append(EpisodeResult(run.selector, scenario, FAMILY, f"{sites} sites", run.seed, values))
        if run.seed == first_seed:
            traces.append(selection_trace(run.selector, scenario, run.episode))
    return EvaluationResult(
        rows=rows,
        baselines=tuple(baselines),
        traces=traces,
        provenance=provenance,
        headline=HEADLINE if standard else "time_to_target_s",
        problem="site_selection",
    )


def write_federated_report(result: EvaluationResult, folder: Path) -> Path:
    """Writes tables and the report.

    Args:
        result: Of `federated_result`.
        folder: Where to.

    Returns:
        The report.

    Raises:
        UserError: The folder cannot be written.
    """
    result.save(folder)
    write_report(result, folder / REPORT)
    return folder / REPORT
