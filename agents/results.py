"""Results of an evaluation: identical scenarios for every controller, saved as files that people and code read."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.episodes import METRICS, TRACE_TYPES, EpisodeResult, Problem, Trace
from wattgym.agents.summary import Summary, markdown, summarise, summary_frame
from wattgym.errors import UserError
from wattgym.files import atomic_path, atomic_write_json, atomic_write_text, read_json_object

SCHEMA_VERSION = 1
"""Version of the files that `EvaluationResult.save` writes."""

MANIFEST = "evaluation.json"
RESULTS = "results.csv"
TRACES = "traces.parquet"

_KEYS = ("controller", "train_run", "scenario", "family", "plant_group", "seed")


@dataclass(frozen=True, eq=False)
class EvaluationResult:
    """Every controller on identical scenarios.

    Attributes:
        rows: One per controller, training run and scenario.
        baselines: Names of the controllers that the others are compared with.
        traces: The course of chosen scenarios over time.
        provenance: How it was made, plain JSON values: configuration, seeds, versions, commit, command, tuning
            budget, what was held out. Shown in the report as it is.
        headline: Metric that controllers are ranked by.
        problem: What was controlled.
        resamples: Bootstrap resamples of every interval.
        bootstrap_seed: Seed of the bootstrap.

    Raises:
        UserError: There are no rows, a row is there twice, controllers did not see identical scenarios, or a name
            is unknown.
    """

    rows: Sequence[EpisodeResult]
    baselines: Sequence[str] = ()
    traces: Sequence[Trace] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    headline: str = "pjm_composite"
    problem: Problem = "power_shaping"
    resamples: int = 2000
    bootstrap_seed: int = 0

    def __post_init__(self) -> None:
        if not self.rows:
            raise UserError("an evaluation needs at least one episode")
        if not any(self.headline in row.metrics for row in self.rows):
            raise UserError(f"headline metric '{self.headline}' is not among the results: {', '.join(self.metrics)}")
        seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        for row in self.rows:
            first = self._scenarios[row.scenario]
            if (row.family, row.plant_group, row.seed) != (first.family, first.plant_group, first.seed):
                raise UserError(
                    f"scenario '{row.scenario}' differs between '{first.controller}' and '{row.controller}'"
                )
            runs = seen[row.controller, row.train_run]
            if row.scenario in runs:
                raise UserError(f"'{row.controller}' ran scenario '{row.scenario}' twice")
            runs.add(row.scenario)
        for (controller, run), scenarios in seen.items():
            missing = sorted(self._scenarios.keys() - scenarios)
            if missing:
                name = f"'{controller}'" + (f", training run '{run}'," if run else "")
                raise UserError(
                    f"{name} lacks {len(missing)} of {len(self._scenarios)} scenarios, first '{missing[0]}'"
                )
        self._check_references()

    def _check_references(self) -> None:
        """Refuses names and traces that no row goes with."""
        for name in (*self.baselines, *(trace.controller for trace in self.traces)):
            if name not in self.controllers:
                raise UserError(f"controller '{name}' has no results; there are: {', '.join(self.controllers)}")
        for trace in self.traces:
            if not isinstance(trace, TRACE_TYPES[self.problem]):
                raise UserError(f"trace of '{trace.controller}' is none of {self.problem.replace('_', ' ')}")
            if trace.scenario not in self._scenarios:
                raise UserError(f"trace of '{trace.controller}': unknown scenario '{trace.scenario}'")

    @cached_property
    def _scenarios(self) -> dict[str, EpisodeResult]:
        """First row of every scenario, in order of appearance."""
        found: dict[str, EpisodeResult] = {}
        for row in self.rows:
            found.setdefault(row.scenario, row)
        return found

    @cached_property
    def controllers(self) -> tuple[str, ...]:
        """Names of the controllers, in order of appearance."""
        return tuple(dict.fromkeys(row.controller for row in self.rows))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Controllers that are no baselines."""
        return tuple(name for name in self.controllers if name not in self.baselines)

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Scenario ids, in order of appearance."""
        return tuple(self._scenarios)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task of each scenario, aligned with `scenarios`."""
        return tuple(row.task for row in self._scenarios.values())

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that occur, in the registry's order."""
        present = {name for row in self.rows for name, value in row.metrics.items() if not math.isnan(value)}
        return tuple(name for name in METRICS if name in present)

    def scores(self, controller: str, metric: str) -> NDArray[np.float64]:
        """Scores of one controller.

        Returns:
            Shape `(runs, scenarios)`, aligned with `scenarios`; NaN where the metric does not apply.

        Raises:
            UserError: The controller is unknown.
        """
        if controller not in self.controllers:
            raise UserError(f"controller '{controller}' has no results; there are: {', '.join(self.controllers)}")
        column = {scenario: j for j, scenario in enumerate(self.scenarios)}
        ours = [row for row in self.rows if row.controller == controller]
        run = {name: i for i, name in enumerate(dict.fromkeys(row.train_run for row in ours))}
        table = np.full((len(run), len(column)), np.nan)
        for row in ours:
            table[run[row.train_run], column[row.scenario]] = row.metrics.get(metric, math.nan)
        return table

    @cached_property
    def summary(self) -> Summary:
        """Aggregates with intervals, and the paired differences to each baseline."""
        return summarise(self)

    def save(self, folder: str | Path) -> None:
        """Writes `results.csv`, `summary.csv`, `summary.json`, `summary.md`, `traces.parquet`, `evaluation.json`.

        Each file is written whole or not at all. The manifest `evaluation.json` goes first when an earlier
        evaluation is replaced and comes last, so an interrupted save is never read as a whole one.

        Raises:
            UserError: The folder cannot be written.
            ValueError: The provenance holds values that JSON has no word for.
        """
        import pandas as pd

        out = Path(folder)
        manifest = out / MANIFEST
        try:
            manifest.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{out}: cannot write: {error.strerror or error}") from None
        records = [
            {key: getattr(row, key) for key in _KEYS} | {name: row.metrics.get(name, math.nan) for name in self.metrics}
            for row in self.rows
        ]
        atomic_write_text(out / RESULTS, pd.DataFrame(records).to_csv(index=False, lineterminator="\n"))
        atomic_write_text(out / "summary.csv", summary_frame(self.summary).to_csv(index=False, lineterminator="\n"))
        atomic_write_json(out / "summary.json", self.summary.to_dict())
        atomic_write_text(out / "summary.md", markdown(self.summary))
        parts = [
            pd.DataFrame({"controller": trace.controller, "scenario": trace.scenario} | trace.table())
            for trace in self.traces
        ]
        empty = pd.DataFrame(columns=["controller", "scenario", *TRACE_TYPES[self.problem].columns])
        with atomic_path(out / TRACES) as temporary:
            (pd.concat(parts, ignore_index=True) if parts else empty).to_parquet(temporary, index=False)
        atomic_write_json(
            manifest,
            {
                "schema_version": SCHEMA_VERSION,
                "baselines": list(self.baselines),
                "headline": self.headline,
                "problem": self.problem,
                "resamples": self.resamples,
                "bootstrap_seed": self.bootstrap_seed,
                "provenance": dict(self.provenance),
            },
        )

    @classmethod
    def load(cls, folder: str | Path) -> EvaluationResult:
        """Reads what `save` wrote.

        Raises:
            UserError: The folder holds no whole evaluation, one of another schema version, or a damaged file.
        """
        out = Path(folder)
        if not (out / MANIFEST).is_file():
            raise UserError(f"{out}: holds no finished evaluation (no {MANIFEST})")
        data = read_json_object(out / MANIFEST)
        if data.get("schema_version") != SCHEMA_VERSION:
            raise UserError(
                f"{out / MANIFEST}: schema version {data.get('schema_version')!r}, "
                f"this WattGym reads version {SCHEMA_VERSION}"
            )
        try:
            return cls(
                rows=_read_rows(out / RESULTS),
                baselines=tuple(data["baselines"]),
                traces=_read_traces(out / TRACES, data["problem"]),
                provenance=data["provenance"],
                headline=data["headline"],
                problem=data["problem"],
                resamples=data["resamples"],
                bootstrap_seed=data["bootstrap_seed"],
            )
        except KeyError as error:
            raise UserError(f"{out}: evaluation is damaged, {error} is missing") from None


def _read_rows(path: Path) -> list[EpisodeResult]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or ()
            records = list(reader)
        missing = [key for key in _KEYS if key not in header]
        if missing:
            raise ValueError(f"column '{missing[0]}' is missing")
        # DictReader fills a row that was cut short with None, and files surplus cells under the key None.
        uneven = [i for i, record in enumerate(records, start=1) if None in record or None in record.values()]
        if uneven:
            raise ValueError(f"row {uneven[0]} has not as many cells as the header")
        return [
            EpisodeResult(
                controller=record["controller"],
                scenario=record["scenario"],
                family=record["family"],
                plant_group=record["plant_group"],
                seed=int(record["seed"]),
                metrics={name: float(text or "nan") for name, text in record.items() if name not in _KEYS},
                train_run=record["train_run"],
            )
            for record in records
        ]
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise UserError(f"{path}: cannot read: {error}") from None


def _read_traces(path: Path, problem: Problem) -> list[Trace]:
    import pandas as pd
    import pyarrow as pa

    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot read: {' '.join(str(error).split())}") from None
    try:
        return [
            TRACE_TYPES[problem].of_table(
                str(controller), str(scenario), {str(key): part[key].tolist() for key in part}
            )
            for (controller, scenario), part in frame.groupby(["controller", "scenario"], sort=False)
        ]
    except KeyError as error:
        raise UserError(f"{path}: cannot read: column {error} is missing") from None
