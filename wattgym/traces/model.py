"""The catalogue's form: what a data file holds and what is known about each trace in it."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from wattgym.config import FrozenModel
from wattgym.traces.kinds import KINDS

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
