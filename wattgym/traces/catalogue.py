"""The catalogue of recorded traces: what there is, what it measures, where it comes from, how it is split.

`datasets/catalogue.yaml` describes the shipped files; traces that a user imported lie in the folder that
`WATTGYM_DATA` names, each with a sidecar `*.trace.yaml` of the same form. Splits are windows of time within a
trace, never shuffled rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

import wattgym
from wattgym.config import FrozenModel, load_config
from wattgym.errors import UserError
from wattgym.traces.kinds import KINDS

if TYPE_CHECKING:
    import pandas as pd

DATA_VARIABLE = "WATTGYM_DATA"
CATALOGUE_NAME = "catalogue.yaml"
SIDECAR_SUFFIX = ".trace.yaml"

Split = Literal["train", "validation", "test"]
Windows = Literal["all"] | list[tuple[float, float]]


class TimeColumn(FrozenModel):
    """Where a file's sample times are.

    Attributes:
        column: Column of times; none when `format` is `rows`.
        format: `seconds`, `microseconds`, `iso` (calendar time, read on the trace's clock), or `rows` (evenly
            spaced in row order).
        tolerance_s: How far a time may lie from its place on the even grid (rounded clocks).
        irregular: Samples are not on a grid; they are interpolated onto one, as `gaps` allows.
    """

    column: str | None = None
    format: Literal["seconds", "microseconds", "iso", "rows"]
    tolerance_s: float = Field(default=1e-3, gt=0)
    irregular: bool = False

    @model_validator(mode="after")
    def _column_unless_rows(self) -> TimeColumn:
        if (self.column is None) != (self.format == "rows"):
            raise ValueError("a time column is needed, except with format 'rows'")
        return self


class Gaps(FrozenModel):
    """What is done about missing samples.

    Attributes:
        policy: `refuse`, `hold` (the last value stays) or `interpolate` (straight line).
        max_gap_s: Longest hole that is filled, from the last sample before it to the first after it, seconds.
    """

    policy: Literal["refuse", "hold", "interpolate"] = "refuse"
    max_gap_s: float | None = Field(default=None, gt=0)


class TraceSpec(FrozenModel):
    """One trace of a file; what is not given here is taken from the file.

    Attributes:
        column: Column of values; none for a table of events.
        where: Rows that belong to the trace: column name to the value it must have.
        kind: Kind, where it differs from the file's.
        unit: Unit, where it differs from the file's.
        clock: What the clock shows, where it differs from the file's.
        starts: Calendar time of 0 s, where it differs from the file's.
        splits: Windows `[start_s, end_s)` of each split, or `all`.
        gaps: Gap policy, where it differs from the file's.
        attributes: Further facts, copied into `Trace.meta` (for example `capacity_mw`).
    """

    column: str | None = None
    where: dict[str, int | str] = Field(default_factory=dict)
    kind: str | None = None
    unit: str | None = None
    clock: str | None = None
    starts: datetime | None = None
    splits: dict[Split, Windows] | None = None
    gaps: Gaps | None = None
    attributes: dict[str, int | float | str] = Field(default_factory=dict)


class DataFile(FrozenModel):
    """One data file: its provenance and the traces in it. A file without traces is a plain table.

    Attributes:
        file: Path below the data folder, with forward slashes.
        licence: SPDX identifier, or words where there is none.
        licence_file: Text of the licence, below the data folder.
        source: Where the data come from.
        kind: Kind of its traces (`wattgym.traces.kinds`).
        unit: Unit of its traces.
        interval_s: Sample interval, seconds; none for events.
        time: Where the times are.
        clock: What the clock shows.
        starts: Calendar time of 0 s on that clock, without zone.
        scale: Factor from the file's numbers to `unit`.
        splits: Windows of each split.
        gaps: Gap policy.
        attributes: Further facts of every trace.
        traces: Trace id to what tells it apart.
    """

    file: str
    licence: str
    licence_file: str | None = None
    source: str
    kind: str | None = None
    unit: str | None = None
    interval_s: float | None = Field(default=None, gt=0)
    time: TimeColumn | None = None
    clock: str = "seconds from the first sample"
    starts: datetime | None = None
    scale: float = 1.0
    splits: dict[Split, Windows] = Field(default_factory=dict)
    gaps: Gaps = Gaps()
    attributes: dict[str, int | float | str] = Field(default_factory=dict)
    traces: dict[str, TraceSpec] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name as a table: its path without extensions."""
        return self.file.split(".")[0]


class Catalogue(FrozenModel):
    """A catalogue file: the shipped `catalogue.yaml`, or the sidecar of an imported file."""

    files: list[DataFile]


class CatalogueEntry(FrozenModel):
    """One trace, everything known about it in one place.

    Attributes:
        id: Identifier, for example `regulation/pjm-regd-test-wave`.
        kind: Kind (`wattgym.traces.kinds`).
        unit: Unit of the values.
        interval_s: Sample interval, seconds; none for a table of events.
        column: Column of values; none for events.
        where: Rows of the file that belong to the trace.
        time: Where the times are.
        clock: What the clock shows.
        starts: Calendar time of 0 s on that clock.
        scale: Factor from the file's numbers to `unit`.
        licence: Licence of the data.
        licence_file: Its text, below the data folder.
        source: Where the data come from.
        file: Path below `root`.
        root: Folder that holds the file.
        splits: Windows `[start_s, end_s)` of each split, or `all`.
        gaps: Gap policy.
        attributes: Further facts.
    """

    id: str
    kind: str
    unit: str
    interval_s: float | None
    column: str | None
    where: dict[str, int | str]
    time: TimeColumn
    clock: str
    starts: datetime | None
    scale: float
    licence: str
    licence_file: str | None
    source: str
    file: str
    root: Path
    splits: dict[Split, Windows]
    gaps: Gaps
    attributes: dict[str, int | float | str]

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        if kind not in KINDS:
            raise ValueError(f"unknown kind; kinds: {', '.join(KINDS)}")
        return kind

    @model_validator(mode="after")
    def _consistent(self) -> CatalogueEntry:
        if self.unit != KINDS[self.kind].unit:
            raise ValueError(f"{self.id}: a {self.kind} trace is kept in {KINDS[self.kind].unit}, not {self.unit}")
        if (self.column is None) != (self.interval_s is None):
            raise ValueError(f"{self.id}: a series needs a column and an interval, an event table neither")
        overlap = find_overlap(self.splits)
        if overlap:
            raise ValueError(f"{self.id}: {overlap}")
        return self

    @property
    def is_series(self) -> bool:
        """Whether `load_trace` can read it (a table of events is read with `load_table`)."""
        return self.column is not None


def find_overlap(splits: dict[Split, Windows]) -> str | None:
    """Says in words which windows of a trace overlap or are empty, or `None`."""
    spans: list[tuple[float, float, str]] = []
    for split, windows in splits.items():
        spans += [(-float("inf"), float("inf"), split)] if windows == "all" else [(a, b, split) for a, b in windows]
    for start, end, name in spans:
        if not start < end:
            return f"the {name} window [{start:g}, {end:g}) is empty"
    spans.sort()
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            return f"a {one} window ends at {end:g} s, after a {other} window starts at {start:g} s"
    return None


def data_root() -> Path:
    """Folder of the shipped data: beside the package, at the checkout's root, or where `WATTGYM_DATA` points.

    Raises:
        UserError: None of the three holds a catalogue.
    """
    package = Path(wattgym.__file__).parent
    candidates = [package / "datasets", package.parent / "datasets"]
    if os.environ.get(DATA_VARIABLE):
        candidates.append(Path(os.environ[DATA_VARIABLE]))
    # A folder alone is no proof: Hugging Face's `datasets` package also lies beside an installed wattgym.
    for candidate in candidates:
        if (candidate / CATALOGUE_NAME).is_file():
            return candidate
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise UserError(
        f"no data catalogue found; looked for {CATALOGUE_NAME} in {looked}; "
        f"set {DATA_VARIABLE} to a copy of the project's datasets folder"
    )


def data_path(relative: str) -> Path:
    """Full path of a shipped file.

    Args:
        relative: Path below the data folder, for example `instruct/gsm8k_test.jsonl.gz`.

    Raises:
        UserError: There is no such file, or the path leaves the data folder.
    """
    root = data_root()
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()) or not path.is_file():
        raise UserError(f"no data file '{relative}' in {root}")
    return path


@lru_cache(maxsize=64)
def _read_catalogue(path: Path, mtime_ns: int) -> Catalogue:
    return load_config(Catalogue, path)


def _catalogues() -> Iterator[tuple[Path, Catalogue]]:
    root = data_root()
    paths = [root / CATALOGUE_NAME]
    if os.environ.get(DATA_VARIABLE):
        imported = Path(os.environ[DATA_VARIABLE])
        if not imported.is_dir():
            raise UserError(f"{DATA_VARIABLE} is '{imported}', which is not a folder")
        paths += sorted(imported.rglob(f"*{SIDECAR_SUFFIX}"))
    for path in paths:
        yield path.parent, _read_catalogue(path, path.stat().st_mtime_ns)


def entries_of(root: Path, catalogue: Catalogue) -> list[CatalogueEntry]:
    """Every trace of a catalogue, with what it inherits from its file filled in."""
    found = []
    for data in catalogue.files:
        for trace_id, spec in data.traces.items():
            own = spec.model_dump(exclude_none=True, exclude={"where", "attributes"})
            shared = data.model_dump(exclude={"traces", "attributes"})
            attributes = {**data.attributes, **spec.attributes}
            merged: dict[str, Any] = {"column": None, **shared, **own, "where": spec.where, "attributes": attributes}
            if spec.column is None:
                merged["interval_s"] = None
            try:
                found.append(CatalogueEntry(id=trace_id, root=root, **merged))
            except ValueError as error:
                raise UserError(f"catalogue in {root}: {trace_id}: {' '.join(str(error).split())}") from None
    return found


def list_traces(kind: str | None = None, split: str | None = None) -> list[CatalogueEntry]:
    """Lists the shipped and the imported traces, in the catalogue's order.

    Args:
        kind: Only this kind.
        split: Only traces that have a window in this split.

    Raises:
        UserError: Unknown kind or split, a catalogue that is not valid, or two traces with one id.
    """
    if kind is not None and kind not in KINDS:
        raise UserError(f"unknown kind '{kind}'; kinds: {', '.join(KINDS)}")
    if split is not None:
        _check_split(split)
    found: dict[str, CatalogueEntry] = {}
    for root, catalogue in _catalogues():
        for entry in entries_of(root, catalogue):
            if entry.id in found:
                raise UserError(
                    f"two traces have the id '{entry.id}': {found[entry.id].root / found[entry.id].file} "
                    f"and {root / entry.file}; rename or remove one"
                )
            found[entry.id] = entry
    return [e for e in found.values() if kind in (None, e.kind) and (split is None or split in e.splits)]


def find_trace(trace_id: str) -> CatalogueEntry:
    """The catalogue's entry of one trace.

    Raises:
        UserError: No such trace; the message names the nearest ids.
    """
    entries = {entry.id: entry for entry in list_traces()}
    if trace_id in entries:
        return entries[trace_id]
    raise UserError(f"no trace '{trace_id}'; {_nearest(trace_id, list(entries))}")


def list_tables() -> list[DataFile]:
    """Every data file, each readable as a table with `load_table(file.name)`."""
    return [data for _, catalogue in _catalogues() for data in catalogue.files]


def find_table(name: str) -> tuple[Path, DataFile]:
    """Path and description of a table.

    Raises:
        UserError: No such table; the message names the nearest.
    """
    tables = {data.name: (root / data.file, data) for root, catalogue in _catalogues() for data in catalogue.files}
    if name in tables:
        return tables[name]
    raise UserError(f"no table '{name}'; {_nearest(name, list(tables))}")


def load_table(name: str, split: str | None = None) -> pd.DataFrame:
    """Reads a whole file as a table, or the events of one split.

    Args:
        name: Path of the file without extensions, for example `gpu_power/zeus_power_limit_batch_size`, or the id
            of an event table, for example `reserve-events/pjm-synchronized`.
        split: Only events that start in this split's windows (event tables only).

    Returns:
        The table as in the file; for events the time columns are parsed and `t_s` is the start on the trace's clock.

    Raises:
        UserError: No such table, or a split asked of a table that has none.
    """
    from wattgym.traces.series import read_events, read_frame

    events = {entry.id: entry for entry in list_traces(kind="reserve_events")}
    if name in events:
        return read_events(events[name], split_windows(name, split) if split is not None else None)
    path, data = find_table(name)
    if split is not None:
        raise UserError(f"table '{name}' has no splits; ask for the whole table")
    return read_frame(path, data.file)


def _check_split(split: str) -> None:
    if split not in ("train", "validation", "test"):
        raise UserError(f"unknown split '{split}'; splits: train, validation, test")


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "`wattgym traces list` shows them all"


def split_windows(trace_id: str, split: str) -> list[tuple[float, float]]:
    """Windows `[start_s, end_s)` of one split on the trace's clock, in order of time.

    Raises:
        UserError: No such trace or split, or the trace has no window in it.
    """
    _check_split(split)
    entry = find_trace(trace_id)
    windows = entry.splits.get(split)  # type: ignore[call-overload]
    if windows is None:
        raise UserError(f"trace '{trace_id}' has no {split} split; it has: {', '.join(entry.splits) or 'none'}")
    if windows != "all":
        return sorted((float(start), float(end)) for start, end in windows)
    from wattgym.traces.series import load_trace

    trace = load_trace(trace_id)
    return [(trace.start_s, trace.end_s)]
