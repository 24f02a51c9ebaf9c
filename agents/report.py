"""One self-contained HTML page about an evaluation, which opens offline and prints."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wattgym.agents.episodes import METRICS, Metric, Problem
from wattgym.agents.figures import components_figure, differences_figure, hour_figure, tradeoff_figure
from wattgym.agents.results import EvaluationResult
from wattgym.agents.selection_figures import accuracy_figure, membership_figure, participants_figure
from wattgym.agents.summary import Difference, Summary, format_estimate, heading, key_metrics
from wattgym.files import atomic_write_text


@dataclass(frozen=True)
class _Wording:
    """What a report says of its problem.

    Attributes:
        title: Heading.
        components: Metrics of the score figure, as far as they occur.
        components_title: Its heading where the headline is the first of them.
        tradeoff: Metrics of the trade-off figure, across and up.
        tradeoff_title: Its heading.
        tradeoff_caption: What its directions mean.
        second: Metric shown small in the table of scenarios.
    """

    title: str
    components: tuple[str, ...]
    components_title: str
    tradeoff: tuple[str, str]
    tradeoff_title: str
    tradeoff_caption: str
    second: str


WORDING: Mapping[Problem, _Wording] = {
    "power_shaping": _Wording(
        "Evaluation of power-shaping controllers",
        ("pjm_composite", "pjm_correlation", "pjm_delay", "pjm_precision"),
        "Parts of the score",
        ("throughput_retained", "pjm_composite"),
        "What following the signal costs",
        "Up: follows the signal better. Right: training loses less.",
        "throughput_retained",
    ),
    "site_selection": _Wording(
        "Evaluation of site selectors",
        ("time_to_target_relative", "participants_mean", "communication_share", "unused_power_share"),
        "Time to the target, and what goes with it",
        ("energy_kwh", "time_to_target_s"),
        "Time against energy",
        "Down: reaches the target sooner. Left: uses less energy.",
        "time_to_target_s",
    ),
}


@dataclass(frozen=True)
class _Cell:
    """A table cell: what to print, what to sort by, whether it is its column's or row's best."""

    text: str
    detail: str
    sort: float
    best: bool


@dataclass(frozen=True)
class _Standing:
    """One controller's place in the ranking and its comparisons in the headline metric."""

    controller: str
    place: int
    estimate: str
    worse: tuple[Difference, ...]
    unclear: tuple[Difference, ...]
    better: tuple[Difference, ...]


def write_report(result: EvaluationResult, path: str | Path) -> None:
    """Writes the report.

    Controllers are ordered by the headline metric, whoever wins.

    Raises:
        UserError: The file cannot be written.
    """
    atomic_write_text(path, render_report(result))


def render_report(result: EvaluationResult) -> str:
    """The report as one HTML text without any reference to another file or host."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("wattgym.agents", package_path="."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    summary = result.summary
    facts, documents = _provenance(result.provenance)
    return environment.get_template("report.html.j2").render(
        summary=summary,
        wording=WORDING[result.problem],
        headline=METRICS[summary.headline],
        standings=[_standing(summary, name) for name in summary.ranking if name not in summary.baselines],
        heading=heading,
        key_table=_estimate_table(summary, key_metrics(summary)),
        full_table=_estimate_table(summary, summary.metrics),
        task_table=_task_table(summary),
        difference_rows=_difference_rows(summary),
        figures=_figures(result),
        scenario_table=_scenario_table(result),
        definitions=[METRICS[name] for name in summary.metrics],
        facts=facts,
        documents=documents,
        bootstrap_seed=result.bootstrap_seed,
    )


def _standing(summary: Summary, name: str) -> _Standing:
    by_verdict: dict[str, list[Difference]] = {"worse": [], "no clear difference": [], "better": []}
    for difference in summary.differences_for(name, summary.headline):
        by_verdict[difference.verdict].append(difference)
    estimate = summary.estimates.get((name, summary.headline))
    return _Standing(
        name,
        summary.ranking.index(name) + 1,
        format_estimate(estimate) if estimate is not None else "no value",
        *(tuple(found) for found in by_verdict.values()),
    )


def _estimate_table(summary: Summary, metrics: tuple[str, ...]) -> dict[str, Any]:
    rows: dict[str, list[_Cell]] = {name: [] for name in summary.ranking}
    for metric in metrics:
        values = {name: summary.estimates[name, metric].value for name in summary.ranking}
        best = _best(values.values(), METRICS[metric])
        for name in summary.ranking:
            text, _, interval = format_estimate(summary.estimates[name, metric]).partition(" ")
            rows[name].append(_Cell(text, interval, values[name], values[name] == best))
    return {"metrics": metrics, "rows": rows}


def _task_table(summary: Summary) -> dict[str, list[_Cell]]:
    """The headline metric by controller, one cell a task."""
    rows: dict[str, list[_Cell]] = {name: [] for name in summary.ranking}
    for task in summary.task_names:
        values = {name: summary.by_task[name, task].value for name in summary.ranking}
        best = _best(values.values(), METRICS[summary.headline])
        for name in summary.ranking:
            text, _, interval = format_estimate(summary.by_task[name, task]).partition(" ")
            rows[name].append(_Cell(text, interval, values[name], values[name] == best))
    return rows


def _best(values: Iterable[float], metric: Metric) -> float:
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return math.nan
    return max(finite) if metric.better == "higher" else min(finite)


def _difference_rows(summary: Summary) -> list[dict[str, Any]]:
    shown = key_metrics(summary)
    order = {name: i for i, name in enumerate(summary.ranking)}
    chosen = [d for d in (*summary.differences, *summary.task_differences) if d.metric in shown]
    chosen.sort(key=lambda d: (order[d.controller], shown.index(d.metric), d.task, order[d.baseline]))
    return [
        {
            "controller": d.controller,
            "metric": heading(d.metric),
            "task": d.task or "all",
            "baseline": d.baseline,
            "difference": format_estimate(d.estimate, signed=True),
            "value": d.estimate.value,
            "p": d.p_improvement,
            "verdict": d.verdict,
        }
        for d in chosen
    ]


def _figures(result: EvaluationResult) -> dict[str, Any]:
    summary = result.summary
    wording = WORDING[result.problem]
    components = [name for name in wording.components if name in summary.metrics] or [summary.headline]
    compared = sorted({d.controller for d in summary.differences}, key=summary.ranking.index)
    both = all(name in summary.metrics for name in wording.tradeoff)
    chosen = dict.fromkeys(trace.scenario for trace in result.traces)
    shaping = result.problem == "power_shaping"
    return {
        "components": _data_uri(components_figure(summary, components)),
        "differences": {name: _data_uri(differences_figure(summary, name, summary.headline)) for name in compared},
        "tradeoff": _data_uri(tradeoff_figure(result, *wording.tradeoff)) if both else None,
        "hours": {scenario: _data_uri(hour_figure(result, scenario)) for scenario in chosen if shaping},
        "federations": {
            scenario: {
                "accuracy": _data_uri(accuracy_figure(result, scenario)),
                "participants": _data_uri(participants_figure(result, scenario)),
                "membership": _data_uri(membership_figure(result, scenario)),
            }
            for scenario in chosen
            if not shaping
        },
    }


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode("utf-8")).decode("ascii")


def _scenario_table(result: EvaluationResult) -> dict[str, Any]:
    """Headline metric by scenario and controller, the mean over training runs; a second metric below it."""
    ranking, headline = result.summary.ranking, result.headline
    beside_it = WORDING[result.problem].second
    second = beside_it if beside_it in result.metrics and headline != beside_it else None
    scores = {name: result.scores(name, headline).mean(axis=0) for name in ranking}
    beside = {name: result.scores(name, second).mean(axis=0) for name in ranking} if second else {}
    rows = []
    for j, (scenario, task) in enumerate(zip(result.scenarios, result.tasks, strict=True)):
        values = {name: float(scores[name][j]) for name in ranking}
        best = _best(values.values(), METRICS[headline])
        cells = [
            _Cell(
                "–" if np.isnan(values[name]) else f"{values[name]:.3f}",
                _brief(float(beside[name][j])) if second else "",
                values[name],
                values[name] == best,
            )
            for name in ranking
        ]
        rows.append({"scenario": scenario, "task": task, "cells": cells})
    return {"controllers": ranking, "rows": rows, "second": METRICS[second].title if second else ""}


def _brief(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def _provenance(provenance: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Short facts for a table, and nested parts as YAML documents."""
    import yaml

    facts, documents = {}, {}
    for key, value in provenance.items():
        title = str(key).replace("_", " ")
        sequence = isinstance(value, list | tuple)
        if isinstance(value, Mapping) or (sequence and any(isinstance(item, Mapping) for item in value)):
            documents[title] = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)
        elif sequence:
            facts[title] = ", ".join(map(str, value))
        else:
            facts[title] = "not recorded" if value is None else str(value)
    return facts, documents
