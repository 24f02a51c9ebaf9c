"""The page of `scripts/results.py`: estimates with intervals, paired differences, and what is missing."""

from __future__ import annotations

import csv
import io
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from results_curves import SHARES, Curve, curve_rows

from wattgym.agents.baselines import ORACLES, load_tuned
from wattgym.agents.scoring import REGULATION
from wattgym.envs.plant import FloatArray
from wattgym.metrics.statistics import Estimate, bootstrap, paired_difference
from wattgym.runs import git_state, installed_versions

ALL = "all"
"""Name of the site whose jobs run on boards of every type of the test split."""

WITH_KNOBS = ", all knobs"
"""What the name of a baseline ends with that sets every knob."""

OBJECTIVE = "score + throughput"
"""Mean of the regulation score's composite and the throughput retained: what the paired verdicts are about."""

COLUMNS = {
    "pjm_composite": "PJM composite ↑",
    "nrmse": "nRMSE ↓",
    "mape": "MAPE ↓",
    "mape_15min": "MAPE, 15 min ↓",
    "throughput_retained": "throughput ↑",
    "energy_kwh": "energy, kWh",
    "actuations_per_h_per_job": "actuations /h ↓",
    "guard_interventions_per_h": "guard /h ↓",
}


Rows = dict[str, dict[str, FloatArray]]
"""Metrics of each training run, by its name: arrays over scenarios."""


@dataclass
class Results:
    """What is finished.

    Attributes:
        cells: Rows by family, GPU type and controller.
        not_run: What the plan names and is missing, with the reason.
        budgets: Steps and seeds that each learned controller was trained with, and what validation says.
        curves: Validations of each learned controller's runs.
        with_knobs: Learned controllers that set more than the limit.
    """

    cells: dict[tuple[str, str, str], Rows] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    budgets: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[Curve]] = field(default_factory=dict)
    with_knobs: set[str] = field(default_factory=set)

    def equipped(self, name: str, like: str, names: Sequence[str]) -> str:
        """A baseline with the knobs that another controller has, where it was run with them."""
        armed = name + WITH_KNOBS
        return armed if (like in self.with_knobs or like.endswith(WITH_KNOBS)) and armed in names else name


def scores(results: Results, families: tuple[str, ...], gpu: str, name: str, metric: str) -> NDArray[np.float64] | None:
    """Scores of a controller over the scenarios of some families, shape `(runs, scenarios)`; None if any is missing."""
    parts = []
    for family in families:
        rows = results.cells.get((family, gpu, name))
        if rows is None:
            return None
        if metric == OBJECTIVE:
            found = [(r["pjm_composite"] + r["throughput_retained"]) / 2.0 for r in rows.values()]
        else:
            found = [r[metric] for r in rows.values() if metric in r]
        if not found:
            return None
        parts.append(np.stack(found))
    return np.concatenate(parts, axis=1)


def estimate(table_: NDArray[np.float64] | None, tasks: NDArray[np.str_]) -> Estimate | None:
    """Interquartile mean with its interval; None where nothing can be said."""
    if table_ is None:
        return None
    keep = np.isfinite(table_).all(axis=0)
    return bootstrap(table_[:, keep], tasks[keep]) if keep.any() else None


def shown(found: Estimate | None, signed: bool = False, digits: int = 3) -> str:
    """An estimate as text."""
    if found is None:
        return "–"
    sign = "+" if signed else ""
    text = f"{found.value:{sign}.{digits}f}"
    return text if np.isnan(found.low) else f"{text} [{found.low:{sign}.{digits}f}, {found.high:{sign}.{digits}f}]"


def table(results: Results) -> str:
    """Every number of the page as CSV, one row a family, GPU type, controller and metric."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["family", "gpu", "controller", "metric", "value", "ci_low", "ci_high", "runs", "scenarios"])
    for family, gpu, name in results.cells:
        for metric in (*COLUMNS, "reward_mean"):
            found = scores(results, (family,), gpu, name, metric)
            if found is None or (e := estimate(found, np.full(found.shape[1], family))) is None:
                continue
            ends = ["" if np.isnan(x) else f"{x:.6g}" for x in (e.low, e.high)]
            kept = int(np.isfinite(found).all(axis=0).sum())
            writer.writerow([family, gpu, name, metric, f"{e.value:.6g}", *ends, found.shape[0], kept])
    return out.getvalue()


def render(families: tuple[str, ...], references: tuple[str, ...], scenarios: int, results: Results) -> str:
    """The page.

    Args:
        families: Signal families, as planned.
        references: Controllers that learned ones are compared with.
        scenarios: Scenarios a family and kind of site.
        results: What is finished.
    """
    names = list(dict.fromkeys(name for *_, name in results.cells))
    regulation = tuple(family for family in families if family in REGULATION)
    lines = _head(scenarios, results)
    lines += [
        "",
        "## Paired differences",
        "",
        *_verdicts(regulation, references, names, results),
    ]
    lines += ["", "## Learning", "", *_learning(results)]
    for family in families:
        here = [name for name in names if (family, ALL, name) in results.cells]
        if here:
            lines += ["", f"## {family}", "", *_family(family, here, results)]
    lines += ["", "## By GPU type", "", *_by_gpu(families, names, results)]
    lines += ["", "## Not run", ""]
    lines += [f"- {text}" for text in results.not_run] or ["Everything planned was run."]
    return "\n".join(lines) + "\n"


def _head(scenarios: int, results: Results) -> list[str]:
    git, versions, tuned = git_state(), installed_versions(), load_tuned()
    commit = f"{git.commit[:12]}{' with local changes' if git.dirty else ''}" if git else "unknown"
    made = shlex.join(["python", *(f"scripts/{Path(a).name}" if i == 0 else a for i, a in enumerate(sys.argv))])
    learned = [f"- **{name}**: {text}" for name, text in results.budgets.items()]
    return [
        "# Results",
        "",
        f"Made by `{made}` (`make results`) at commit {commit}; torch {versions.get('torch')}, "
        f"stable-baselines3 {versions.get('stable-baselines3')}. Generated whole from",
        "[configs/results.yaml](../configs/results.yaml) and the recipes in [configs/recipes](../configs/recipes);",
        "every number is in [results.csv](results.csv).",
        "",
        f"Every controller meets the same {scenarios} scenarios of the test split a signal family and kind of site: "
        "signals, boards and workloads that neither training nor tuning saw. Estimates are interquartile means with "
        "95 % intervals of a bootstrap over scenarios, and over training seeds where there are several "
        "([evaluation.md](evaluation.md#statistics)).",
        "",
        "Learned controllers and their budgets; checkpoints and recipes are chosen on the validation split alone:",
        "",
        *(learned or ["- none trained"]),
        "",
        f"Baselines are tuned with {tuned.budget} settings on {tuned.scenarios} training scenarios each.",
        "A residual *without learning* is what it is added to. [training.md](training.md#what-limits-a-policy) says "
        "what limits them.",
        "",
        f"*{WITH_KNOBS.removeprefix(', ').capitalize()}*: controllers that set micro-batch, active GPUs, duty and "
        "local steps beside the limit ([knobs.md](knobs.md)), as the recipe *knobs* does, under its rules. Scenarios, "
        "targets and the uncapped run are the same. Throughput counts samples; local steps are most of why it exceeds "
        "1, and what they do to the loss is measured by `python benchmarks/accuracy.py`.",
    ]


def _learning(results: Results) -> list[str]:
    """What the logs of the recipes say."""
    if not results.curves:
        return ["No recipe is trained."]
    head = ["recipe", *(f"{share:.0%} of the steps" for share in SHARES), "best"]
    return [
        "Validation reward at a share of each recipe's steps, mean over its runs; every validation is in "
        "[learning_curves.csv](learning_curves.csv). Residuals and imitations are judged before the first step too.",
        "",
        "![Validation reward over environment steps](images/learning_curves.svg)",
        "",
        *_markdown(head, curve_rows(results.curves)),
    ]


def _verdicts(families: tuple[str, ...], references: Sequence[str], names: list[str], results: Results) -> list[str]:
    """Paired differences in the objective and its parts, over all regulation families together."""
    if not families:
        return ["No regulation signal was planned."]
    rows = []
    oracles = [name for name in ORACLES if name in names]
    judged = [other + suffix for suffix in ("", WITH_KNOBS) for other in references[1:]]
    for name in (*results.budgets, *(other for other in judged if other in names)):
        own = [base for base in names if base == f"{name} without learning"]
        others = references if name in results.budgets else references[:1]
        # Limits alone: what the other knobs are worth.
        plain = [name.removesuffix(WITH_KNOBS)] if name.endswith(WITH_KNOBS) else []
        for reference in (*own, *plain, *(results.equipped(other, name, names) for other in (*others, *oracles))):
            cells = [name, reference]
            for metric in (OBJECTIVE, "pjm_composite", "throughput_retained", "actuations_per_h_per_job"):
                ours = scores(results, families, ALL, name, metric)
                theirs = scores(results, families, ALL, reference, metric)
                found = _paired(ours, theirs, _tasks(families, results, name))
                digits = 0 if metric.startswith("actuations") else 4
                cells.append(shown(found, signed=True, digits=digits))
                if metric == OBJECTIVE:
                    cells.append(_verdict(found))
            rows.append(cells)
    if not rows:
        return ["No learned controller was run."]
    text = (
        f"Over {', '.join(families)} on all boards: controller minus reference on identical scenarios. "
        f"*{OBJECTIVE.capitalize()}* is the mean of PJM composite and throughput retained; the verdict asks whether "
        "its interval excludes zero."
    )
    head = ["controller", "reference", OBJECTIVE, "verdict", "PJM composite", "throughput", "actuations /h"]
    return [text, "", *_markdown(head, rows)]


def _paired(
    ours: NDArray[np.float64] | None, theirs: NDArray[np.float64] | None, tasks: NDArray[np.str_]
) -> Estimate | None:
    if ours is None or theirs is None:
        return None
    keep = np.isfinite(ours).all(axis=0) & np.isfinite(theirs).all(axis=0)
    return paired_difference(ours[:, keep], theirs[:, keep], tasks[keep]) if keep.any() else None


def _verdict(found: Estimate | None) -> str:
    if found is None or np.isnan(found.low):
        return "–"
    return "better" if found.low > 0.0 else "worse" if found.high < 0.0 else "no clear difference"


def _tasks(families: tuple[str, ...], results: Results, name: str) -> NDArray[np.str_]:
    counts = [
        len(next(iter(results.cells[f, ALL, name].values()))["nrmse"])
        for f in families
        if (f, ALL, name) in results.cells
    ]
    return np.repeat(np.array([f for f in families if (f, ALL, name) in results.cells]), counts)


def _family(family: str, names: list[str], results: Results) -> list[str]:
    head = "pjm_composite" if family in REGULATION else "nrmse"
    metrics = [m for m in COLUMNS if m != ("mape_15min" if family in REGULATION else "pjm_composite")]
    found = {name: {m: _estimate(results, family, ALL, name, m) for m in metrics} for name in names}

    def key(name: str) -> float:
        value = found[name][head]
        return np.inf if value is None else (-value.value if head == "pjm_composite" else value.value)

    rows = [
        [
            f"**{name}**" if name in results.budgets else name,
            *(shown(found[name][m], digits=_digits(m)) for m in metrics),
        ]
        for name in sorted(names, key=key)
    ]
    return _markdown(["controller", *(COLUMNS[m] for m in metrics)], rows)


def _by_gpu(families: tuple[str, ...], names: list[str], results: Results) -> list[str]:
    """Headline metric and throughput of each controller on sites of one board type, family by family."""
    gpus = list(dict.fromkeys(gpu for _, gpu, _ in results.cells if gpu != ALL))
    if not gpus:
        return ["No single board type was run."]
    lines: list[str] = []
    for family in families:
        head = "pjm_composite" if family in REGULATION else "nrmse"
        rows = []
        for name in names:
            values = [_estimate(results, family, gpu, name, m) for gpu in gpus for m in (head, "throughput_retained")]
            if any(value is not None for value in values):
                rows.append([name, *(shown(value) for value in values)])
        if rows:
            columns = [f"{gpu}: {title}" for gpu in gpus for title in (COLUMNS[head], "throughput ↑")]
            lines += ["", f"### {family}", "", *_markdown(["controller", *columns], rows)]
    return lines[1:] if lines else ["No single board type was run."]


def _estimate(results: Results, family: str, gpu: str, name: str, metric: str) -> Estimate | None:
    found = scores(results, (family,), gpu, name, metric)
    return None if found is None else estimate(found, np.full(found.shape[1], family))


def _digits(metric: str) -> int:
    return 0 if metric.endswith(("_per_job", "_per_h")) else 2 if metric == "energy_kwh" else 3


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]
