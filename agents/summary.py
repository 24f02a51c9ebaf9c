"""From episodes to tables: interquartile means with intervals, and paired differences to each baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wattgym.agents.episodes import METRICS, Problem
from wattgym.metrics.statistics import Estimate, bootstrap, paired_difference, probability_of_improvement

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.table import Table

    from wattgym.agents.results import EvaluationResult


KEY_METRICS: Mapping[Problem, tuple[str, ...]] = {
    "power_shaping": (
        "nrmse",
        "throughput_retained",
        "energy_per_token_relative",
        "actuations_per_h_per_job",
        "guard_interventions_per_h",
        "shortfall_w",
    ),
    "site_selection": (
        "time_to_target_s",
        "target_reached",
        "rounds",
        "participants_mean",
        "communication_share",
        "energy_kwh",
        "carbon_kg",
        "cost_usd",
    ),
}
"""What a reader compares first, beside the headline metric."""

_UNFOLDED = 10_000
"""Columns of output that is no terminal: more than any row needs."""


@dataclass(frozen=True)
class Difference:
    """A controller against a baseline on identical scenarios, for one metric.

    Attributes:
        controller: The controller.
        baseline: The baseline.
        metric: The metric.
        estimate: Interquartile mean of the per-scenario difference, controller minus baseline.
        p_improvement: Probability that the controller does better on a scenario of a task drawn at random.
        task: The one task compared on; empty: all of them.
    """

    controller: str
    baseline: str
    metric: str
    estimate: Estimate
    p_improvement: float
    task: str = ""

    @property
    def verdict(self) -> str:
        """`better` or `worse` where the interval excludes zero, else `no clear difference`."""
        sign = 1.0 if METRICS[self.metric].better == "higher" else -1.0
        ends = sorted((sign * self.estimate.low, sign * self.estimate.high))
        if ends[0] > 0:
            return "better"
        return "worse" if ends[1] < 0 else "no clear difference"


@dataclass(frozen=True)
class Summary:
    """Aggregated evaluation.

    Attributes:
        problem: What was controlled.
        headline: Metric of the ranking.
        ranking: Controllers, best first.
        baselines: Those of them that are baselines.
        metrics: Metrics that occur.
        estimates: Interquartile mean by controller and metric (the mean, where the metric says so).
        differences: Each controller that is no baseline against each baseline, for every metric.
        by_task: Estimates of the headline metric by controller and task, where there are several tasks.
        task_differences: Differences in the headline metric on each task, where there are several.
        notes: What a reader has to know, for example scenarios left out.
        scenarios: Number of scenarios.
        tasks: Number of tasks (strata).
        resamples: Bootstrap resamples of every interval.
    """

    problem: Problem
    headline: str
    ranking: tuple[str, ...]
    baselines: tuple[str, ...]
    metrics: tuple[str, ...]
    estimates: dict[tuple[str, str], Estimate]
    differences: tuple[Difference, ...]
    by_task: dict[tuple[str, str], Estimate]
    task_differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    scenarios: int
    tasks: int
    resamples: int

    def differences_for(self, controller: str, metric: str) -> tuple[Difference, ...]:
        """Differences of one controller in one metric, one per baseline."""
        return tuple(d for d in self.differences if (d.controller, d.metric) == (controller, metric))

    @property
    def task_names(self) -> tuple[str, ...]:
        """Tasks of `by_task`, in order of appearance."""
        return tuple(dict.fromkeys(task for _, task in self.by_task))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an interval that does not exist is null."""
        return {
            "problem": self.problem,
            "headline": self.headline,
            "scenarios": self.scenarios,
            "tasks": self.tasks,
            "resamples": self.resamples,
            "ranking": list(self.ranking),
            "baselines": list(self.baselines),
            "notes": list(self.notes),
            "metrics": {name: asdict(METRICS[name]) for name in self.metrics},
            "controllers": {
                controller: {
                    name: _plain(self.estimates[controller, name])
                    for name in self.metrics
                    if (controller, name) in self.estimates
                }
                for controller in self.ranking
            },
            "by_task": {
                task: {name: _plain(self.by_task[name, task]) for name in self.ranking} for task in self.task_names
            },
            "differences": [
                {
                    "controller": d.controller,
                    "baseline": d.baseline,
                    "metric": d.metric,
                    "task": d.task,
                    **_plain(d.estimate),
                    "p_improvement": d.p_improvement,
                    "verdict": d.verdict,
                }
                for d in (*self.differences, *self.task_differences)
            ],
        }


def summarise(result: EvaluationResult) -> Summary:
    """Aggregates an evaluation.

    A scenario for which any controller lacks a metric is left out of that metric for all of them, so that the
    comparison stays on identical scenarios; a note says so unless the metric applies to no controller there.
    """
    estimates: dict[tuple[str, str], Estimate] = {}
    differences: list[Difference] = []
    by_task: dict[tuple[str, str], Estimate] = {}
    task_differences: list[Difference] = []
    notes: list[str] = []
    for metric in result.metrics:
        scores = {name: result.scores(name, metric) for name in result.controllers}
        missing = {name: np.isnan(table).any(axis=0) for name, table in scores.items()}
        anywhere = np.any(list(missing.values()), axis=0)
        notes += _missing_notes(metric, missing, anywhere)
        keep = ~anywhere
        if not keep.any():
            continue
        tasks = np.asarray(result.tasks)
        for name, table in scores.items():
            estimates[name, metric] = _estimate(result, metric, table[:, keep], tasks[keep])
        differences += _compare(result, metric, scores, keep)
        names = tuple(dict.fromkeys(tasks[keep].tolist()))
        if metric == result.headline and len(names) > 1:
            for task in names:
                here = keep & (tasks == task)
                for name, table in scores.items():
                    by_task[name, task] = _estimate(result, metric, table[:, here], tasks[here])
                task_differences += _compare(result, metric, scores, here, task)
    return Summary(
        problem=result.problem,
        headline=result.headline,
        ranking=_rank(result.controllers, estimates, result.headline),
        baselines=tuple(result.baselines),
        metrics=tuple(name for name in result.metrics if any(key[1] == name for key in estimates)),
        estimates=estimates,
        differences=tuple(differences),
        by_task=by_task,
        task_differences=tuple(task_differences),
        notes=tuple(notes),
        scenarios=len(result.scenarios),
        tasks=len(set(result.tasks)),
        resamples=result.resamples,
    )


def _estimate(result: EvaluationResult, metric: str, table: NDArray[np.float64], tasks: NDArray[np.str_]) -> Estimate:
    statistic = METRICS[metric].statistic
    return bootstrap(table, tasks, statistic=statistic, resamples=result.resamples, seed=result.bootstrap_seed)


def _compare(
    result: EvaluationResult,
    metric: str,
    scores: dict[str, NDArray[np.float64]],
    keep: NDArray[np.bool_],
    task: str = "",
) -> list[Difference]:
    """Every candidate against every baseline on some scenarios."""
    tasks = np.asarray(result.tasks)[keep]
    better, found = METRICS[metric].better == "higher", []
    for ours in result.candidates:
        for theirs in result.baselines:
            pair = scores[ours][:, keep], scores[theirs][:, keep]
            won = probability_of_improvement(
                *pair, tasks, higher_is_better=better, resamples=100, seed=result.bootstrap_seed
            )
            estimate = paired_difference(
                *pair,
                tasks,
                statistic=METRICS[metric].statistic,
                resamples=result.resamples,
                seed=result.bootstrap_seed,
            )
            found.append(Difference(ours, theirs, metric, estimate, won.value, task))
    return found


def _rank(controllers: Iterable[str], estimates: dict[tuple[str, str], Estimate], headline: str) -> tuple[str, ...]:
    sign = -1.0 if METRICS[headline].better == "higher" else 1.0

    def key(name: str) -> tuple[float, str]:
        estimate = estimates.get((name, headline))
        return (math.inf if estimate is None else sign * estimate.value), name

    return tuple(sorted(controllers, key=key))


def _missing_notes(metric: str, missing: dict[str, Any], anywhere: Any) -> list[str]:
    everywhere = np.all(list(missing.values()), axis=0)
    partly = anywhere & ~everywhere
    if not partly.any():
        return []
    guilty = [name for name, mask in missing.items() if (mask & partly).any()]
    return [
        f"{METRICS[metric].title}: {int(partly.sum())} scenarios are left out for every controller, because "
        f"{', '.join(guilty)} had no value there."
    ]


def format_estimate(estimate: Estimate, signed: bool = False) -> str:
    """`0.812 [0.790, 0.833]`, with as many decimals as the size asks for."""
    size = max(abs(v) for v in (estimate.value, estimate.low, estimate.high) if not math.isnan(v))
    decimals = 3 if size < 10 else 1 if size < 1000 else 0
    spec = f"{'+' if signed else ''}.{decimals}f"
    value = format(estimate.value, spec)
    if math.isnan(estimate.low):
        return f"{value} [no interval]"
    return f"{value} [{estimate.low:{spec}}, {estimate.high:{spec}}]"


def heading(metric: str) -> str:
    """Column heading with unit and direction of improvement."""
    m = METRICS[metric]
    return f"{m.title}{'' if m.unit == '1' else f' ({m.unit})'} {m.arrow}"


def markdown(summary: Summary) -> str:
    """The summary as Markdown tables."""
    lines = [
        "# Evaluation",
        "",
        f"{summary.scenarios} scenarios in {summary.tasks} tasks, identical for every controller. Interquartile mean "
        f"[95 % interval of a bootstrap stratified by task, {summary.resamples} resamples]; "
        "↑ higher is better, ↓ lower is better.",
        "",
        *_markdown_table(["controller", *map(heading, summary.metrics)], _estimate_rows(summary)),
    ]
    if summary.by_task:
        lines += [
            "",
            f"## {heading(summary.headline)} by task",
            "",
            *_markdown_table(["controller", *summary.task_names], _task_rows(summary)),
        ]
    if summary.differences:
        lines += [
            "",
            "## Paired differences to each baseline",
            "",
            "Controller minus baseline on identical scenarios; P is the probability of doing better on a scenario.",
            "",
            *_markdown_table(
                ["controller", "baseline", "metric", "difference", "P", "verdict"],
                [
                    [
                        d.controller,
                        d.baseline,
                        heading(d.metric),
                        format_estimate(d.estimate, signed=True),
                        f"{d.p_improvement:.2f}",
                        d.verdict,
                    ]
                    for d in summary.differences
                ],
            ),
        ]
    lines += ["", *(f"- {note}" for note in summary.notes)] if summary.notes else []
    return "\n".join(lines) + "\n"


def _estimate_rows(summary: Summary, metrics: Sequence[str] | None = None) -> list[list[str]]:
    return [
        [
            name + (" (baseline)" if name in summary.baselines else ""),
            *(format_estimate(summary.estimates[name, metric]) for metric in metrics or summary.metrics),
        ]
        for name in summary.ranking
    ]


def _task_rows(summary: Summary) -> list[list[str]]:
    return [
        [name, *(format_estimate(summary.by_task[name, task]) for task in summary.task_names)]
        for name in summary.ranking
    ]


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"

    return [line(header), line("---" for _ in header), *map(line, rows)]


def summary_frame(summary: Summary) -> pd.DataFrame:
    """The summary as one long table: estimates (`compared_to` empty) and differences."""
    import pandas as pd

    records: list[dict[str, Any]] = []
    for (controller, metric), estimate in summary.estimates.items():
        records.append(_record(controller, "", metric, estimate))
    for (controller, task), estimate in summary.by_task.items():
        records.append(_record(controller, "", summary.headline, estimate) | {"task": task})
    for d in (*summary.differences, *summary.task_differences):
        records.append(
            _record(d.controller, d.baseline, d.metric, d.estimate)
            | {"task": d.task, "p_improvement": d.p_improvement, "verdict": d.verdict}
        )
    return pd.DataFrame(records)


def _record(controller: str, compared_to: str, metric: str, estimate: Estimate) -> dict[str, Any]:
    return {
        "controller": controller,
        "compared_to": compared_to,
        "metric": metric,
        "task": "",
        "unit": METRICS[metric].unit,
        "better": METRICS[metric].better,
        "value": estimate.value,
        "ci_low": estimate.low,
        "ci_high": estimate.high,
        "n": estimate.n,
    }


def _plain(estimate: Estimate) -> dict[str, Any]:
    low, high = (None if math.isnan(end) else end for end in (estimate.low, estimate.high))
    return {"value": estimate.value, "ci_low": low, "ci_high": high, "n": estimate.n}


def print_summary(summary: Summary, console: Console, metrics: Sequence[str] | None = None) -> None:
    """Prints the ranking and the headline differences.

    Args:
        summary: What to print.
        console: A rich console. On a terminal tables have lines and fold; elsewhere each row is one plain line.
        metrics: Columns of the ranking; default the headline metric and a few that matter beside it.
    """
    from rich.console import Console as RichConsole
    from rich.text import Text

    folded = console.is_terminal
    if not folded:
        console = RichConsole(file=console.file, width=_UNFOLDED)
    shown = tuple(metrics or key_metrics(summary))
    console.print(Text(f"{summary.scenarios} scenarios, {summary.tasks} tasks; interquartile mean [95 % interval]"))
    table = _terminal_table(["controller", *map(heading, shown)], folded)
    for name, *cells in _estimate_rows(summary, shown):
        table.add_row(Text(name), *(Text(cell.replace(" ", "\n", 1) if folded else cell) for cell in cells))
    console.print(table)
    if summary.by_task:
        console.print(Text(f"\n{heading(summary.headline)} by task"))
        table = _terminal_table(["controller", *summary.task_names], folded)
        for name, *cells in _task_rows(summary):
            table.add_row(Text(name), *(Text(cell.replace(" ", "\n", 1) if folded else cell) for cell in cells))
        console.print(table)
    compared = [d for d in summary.differences if d.metric == summary.headline]
    if compared:
        styles = {"better": "green", "worse": "red"}
        console.print(Text(f"\n{heading(summary.headline)}: difference to each baseline"))
        table = _terminal_table(["controller", "baseline", "difference", "P(better)", "verdict"], folded)
        for d in compared:
            row = (d.controller, d.baseline, format_estimate(d.estimate, signed=True), f"{d.p_improvement:.2f}")
            table.add_row(*map(Text, row), Text(d.verdict, style=styles.get(d.verdict, "")))
        console.print(table)
    for note in summary.notes:
        console.print(Text(f"note: {note}"))


def _terminal_table(columns: Sequence[str], folded: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table() if folded else Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def key_metrics(summary: Summary) -> tuple[str, ...]:
    """The headline metric and the few others that a reader compares first."""
    wanted = (summary.headline, *KEY_METRICS[summary.problem])
    return tuple(dict.fromkeys(name for name in wanted if name in summary.metrics))
