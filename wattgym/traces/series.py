"""Reads catalogued traces, tables and splits from their files and checks them against what the catalogue says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.catalogue import checked_split, find_table, find_trace, list_traces
from wattgym.traces.gaps import fill_gaps
from wattgym.traces.kinds import KINDS
from wattgym.traces.model import CatalogueEntry
from wattgym.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def load_trace(trace_id: str) -> Trace:
    """Loads one trace of the catalogue.

    Args:
        trace_id: Catalogue id, for example `frequency/day-1s`; `wattgym traces list` shows them.

    Returns:
        The trace in its kind's unit. `meta` holds source, licence, file, column, clock, starts, the gap policy with
        the number of samples it filled, and the entry's attributes (for example `capacity_mw`).

    Raises:
        UserError: Unknown id, an event table, or a file that does not hold what the catalogue says.
    """
    return read_series(find_trace(trace_id))


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
    events = {entry.id: entry for entry in list_traces(kind="reserve_events")}
    if name in events:
        return read_events(events[name], split_windows(name, split) if split is not None else None)
    path, data = find_table(name)
    if split is not None:
        raise UserError(f"table '{name}' has no splits; ask for the whole table")
    return read_frame(path, data.file)


def split_windows(trace_id: str, split: str) -> list[tuple[float, float]]:
    """Windows `[start_s, end_s)` of one split on the trace's clock, in order of time.

    Raises:
        UserError: No such trace or split, or the trace has no window in it.
    """
    entry = find_trace(trace_id)
    windows = entry.splits.get(checked_split(split))
    if windows is None:
        raise UserError(f"trace '{trace_id}' has no {split} split; it has: {', '.join(entry.splits) or 'none'}")
    if windows != "all":
        return sorted((float(start), float(end)) for start, end in windows)
    trace = read_series(entry)
    return [(trace.start_s, trace.end_s)]


def read_series(entry: CatalogueEntry) -> Trace:
    """Loads the trace that a catalogue entry describes.

    Raises:
        UserError: The entry is an event table, or the file does not hold what it says.
    """
    if entry.column is None or entry.interval_s is None:
        raise UserError(f"'{entry.id}' is a table of events; read it with load_table('{entry.id}')")
    place = f"{entry.file}, column '{entry.column}'"
    frame = read_frame(entry.root / entry.file, entry.file)
    for column, value in entry.where.items():
        frame = frame[_column(frame, column, entry.file) == value]
    if frame.empty:
        raise UserError(f"{entry.file}: no row with {entry.where} for trace '{entry.id}'")
    values = _column(frame, entry.column, entry.file).to_numpy(dtype=np.float64) * entry.scale
    times = _times_s(frame, entry)
    if entry.time.irregular:
        start_s, values, filled = _regularised(times, values, entry, place)
    else:
        start_s = float(times[0])
        _check_grid(times, start_s, entry, place)
        values, filled = fill_gaps(values, entry.interval_s, entry.gaps.policy, entry.gaps.max_gap_s, place)
    _check_range(values, entry, place)
    meta: dict[str, Any] = {
        **entry.attributes,
        "source": entry.source, "licence": entry.licence, "file": entry.file, "column": entry.column,
        "clock": entry.clock, "starts": entry.starts.isoformat() if entry.starts else None,
        "gap_policy": entry.gaps.policy, "max_gap_s": entry.gaps.max_gap_s, "filled_samples": filled,
    }  # fmt: skip
    return Trace(entry.id, entry.kind, entry.unit, entry.interval_s, values, start_s, meta)


def read_events(entry: CatalogueEntry, windows: list[tuple[float, float]] | None) -> pd.DataFrame:
    """Reads a table of events, with `t_s` = start of each event on the trace's clock.

    Args:
        entry: Catalogue entry of an event table.
        windows: Keep only events that start in one of these, seconds.
    """
    import pandas as pd

    frame = read_frame(entry.root / entry.file, entry.file)
    for name in frame.columns:
        if name.startswith(("start_", "end_")):
            frame[name] = pd.to_datetime(frame[name])
    frame["t_s"] = _times_s(frame, entry)
    if windows is not None:
        inside = np.zeros(len(frame), dtype=bool)
        for start, end in windows:
            inside |= ((frame["t_s"] >= start) & (frame["t_s"] < end)).to_numpy()
        frame = frame[inside].reset_index(drop=True)
    return frame


def read_frame(path: Path, name: str) -> pd.DataFrame:
    """Reads a data file of the catalogue (CSV, Parquet or JSON lines, gzip or plain) into a table.

    Raises:
        UserError: The file is missing or not readable.
    """
    import pandas as pd

    try:
        if ".parquet" in path.name:
            return pd.read_parquet(path)
        if ".jsonl" in path.name:
            return pd.read_json(path, lines=True)
        return pd.read_csv(path)
    except FileNotFoundError:
        raise UserError(f"data file '{name}' is in the catalogue but not in {path.parent}") from None
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"data file '{name}' cannot be read: {' '.join(str(error).split())}") from None


def _column(frame: pd.DataFrame, column: str, file: str) -> Any:
    if column not in frame.columns:
        raise UserError(f"{file}: no column '{column}'; it has: {', '.join(map(str, frame.columns))}")
    return frame[column]


def _times_s(frame: pd.DataFrame, entry: CatalogueEntry) -> Floats:
    """Sample times, seconds on the trace's clock."""
    import pandas as pd

    if entry.time.column is None:
        return np.arange(len(frame), dtype=np.float64) * (entry.interval_s or 1.0)
    column = _column(frame, entry.time.column, entry.file)
    if entry.time.format == "iso":
        origin = pd.Timestamp(entry.starts) if entry.starts else pd.to_datetime(column.iloc[0])
        return np.asarray((pd.to_datetime(column) - origin).dt.total_seconds(), dtype=np.float64)
    times: Floats = column.to_numpy(dtype=np.float64)
    # Microsecond clocks count from an epoch of their own; the trace's clock starts with its first sample.
    return (times - times[0]) * 1e-6 if entry.time.format == "microseconds" else times


def _check_grid(times: Floats, start_s: float, entry: CatalogueEntry, place: str) -> None:
    expected = start_s + np.arange(times.size) * float(entry.interval_s or 0.0)
    off = np.flatnonzero(~(np.abs(times - expected) <= entry.time.tolerance_s))
    if off.size:
        row = int(off[0])
        raise UserError(
            f"{place}: sample {row} of '{entry.id}' is at {times[row]:g} s, expected {expected[row]:g} s "
            f"(one sample every {entry.interval_s:g} s)"
        )


def _regularised(times: Floats, values: Floats, entry: CatalogueEntry, place: str) -> tuple[float, Floats, int]:
    """Interpolates uneven samples onto the interval's grid; times that repeat are averaged.

    Returns:
        Start of the grid, values on it, and how many of them lie in a hole of more than 1.5 intervals.
    """
    interval_s, longest_s = float(entry.interval_s or 0.0), entry.gaps.max_gap_s
    if entry.gaps.policy != "interpolate" or longest_s is None:
        raise UserError(f"{place}: uneven samples need gaps: {{policy: interpolate, max_gap_s: …}} in the catalogue")
    times, inverse, counts = np.unique(times, return_inverse=True, return_counts=True)
    values = np.bincount(inverse, weights=values) / counts
    steps = np.diff(times)
    if steps.size and steps.max() > longest_s:
        hole = int(steps.argmax())
        raise UserError(
            f"{place}: hole of {steps[hole]:g} s after {times[hole]:g} s; at most {longest_s:g} s is filled"
        )
    grid = np.arange(times[0], times[-1], interval_s)
    in_hole = steps[np.clip(np.searchsorted(times, grid, side="right") - 1, 0, steps.size - 1)] > 1.5 * interval_s
    return float(times[0]), np.interp(grid, times, values), int(in_hole.sum())


def _check_range(values: Floats, entry: CatalogueEntry, place: str) -> None:
    kind = KINDS[entry.kind]
    bad = np.flatnonzero(~((values >= kind.low) & (values <= kind.high)))
    if bad.size:
        row = int(bad[0])
        raise UserError(
            f"{place}: sample {row} of '{entry.id}' is {values[row]:g} {kind.unit}; "
            f"{entry.kind} lies within [{kind.low:g}, {kind.high:g}]"
        )
