"""Reads a user's own CSV or Parquet file as a trace, strictly, and says by row and column what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.findings import Finding, Findings
from wattgym.traces.gaps import check_policy, fill_gaps, hole_problem, missing_runs
from wattgym.traces.kinds import KINDS, factor_to, kind_of, series_kinds
from wattgym.traces.rawfile import DEFAULT_MAX_BYTES, RawColumns, read_columns
from wattgym.traces.times import DAY_S, Times, parse_times
from wattgym.traces.trace import Trace

Floats = NDArray[np.float64]

# A step may miss a whole number of intervals by this part of an interval (clock jitter, rounded times).
_JITTER = 0.1
_HOUR_S = 3600.0


@dataclass(frozen=True)
class _Wanted:
    kind: str | None
    column: str | None
    time_column: str | None
    unit: str | None
    gap_policy: str
    max_gap_s: float | None
    time_zone: str | None
    max_bytes: int


def read_trace_file(
    path: str | Path,
    *,
    kind: str | None = None,
    column: str | None = None,
    time_column: str | None = None,
    unit: str | None = None,
    gap_policy: str = "refuse",
    max_gap_s: float | None = None,
    time_zone: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Trace:
    """Reads one series from a user's CSV (plain or gzip) or Parquet file.

    The first line names the columns. Times are seconds, `HH:MM:SS`, or ISO 8601; with UTC offsets they become UTC.
    Samples must be evenly spaced: a step may miss a whole number of intervals by a tenth of one.

    Args:
        path: The file.
        kind: What it measures (`wattgym.traces.kinds`): fixes the unit and the possible range. `None` checks neither.
        column: Value column; may be left out where only one can be meant.
        time_column: Time column; may be left out where its name says so.
        unit: Unit of the file's numbers, converted to the kind's unit. `None`: the kind's unit already.
        gap_policy: `refuse` (default), `hold` (the last value stays) or `interpolate` (straight line).
        max_gap_s: Longest hole that `hold` and `interpolate` fill, from the sample before it to the one after, seconds.
        time_zone: IANA zone of times without an offset; they become UTC.
        max_bytes: Largest size read, unpacked.

    Returns:
        The trace. `meta` records file, columns, unit, gap policy, filled samples and their runs `(first, end)`, clock,
        and in `notes` everything that was accepted although it was not plain (byte order mark, zones, a dropped
        24:00:00 row, …).

    Raises:
        UserError: The file cannot be read or something in it is wrong; the message names row and column of the
            first error and the number of others. `check_file` returns them all.
    """
    wanted = _Wanted(kind, column, time_column, unit, gap_policy, max_gap_s, time_zone, max_bytes)
    findings = Findings()
    trace = _read(Path(path), wanted, findings)
    if trace is not None:
        return trace
    errors = [finding for finding in findings.all() if finding.level == "error"]
    others = findings.error_count - 1
    more = f" (and {others} more; `wattgym traces check` lists them)" if others else ""
    raise UserError(f"{path}: {errors[0]}{more}")


def check_file(
    path: str | Path,
    *,
    kind: str | None = None,
    column: str | None = None,
    time_column: str | None = None,
    unit: str | None = None,
    gap_policy: str = "refuse",
    max_gap_s: float | None = None,
    time_zone: str | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> list[Finding]:
    """Reports everything that `read_trace_file` would refuse or record, not the first error only.

    Args: as `read_trace_file`.

    Returns:
        Findings in the order of rows; the file is usable if none has the level `error`.

    Raises:
        UserError: The options themselves are wrong (unknown kind, unit or gap policy).
    """
    wanted = _Wanted(kind, column, time_column, unit, gap_policy, max_gap_s, time_zone, max_bytes)
    findings = Findings()
    _read(Path(path), wanted, findings)
    return findings.all()


def _read(path: Path, wanted: _Wanted, findings: Findings) -> Trace | None:
    """The trace, or `None` when `findings` holds errors."""
    check_policy(wanted.gap_policy, wanted.max_gap_s)
    if wanted.kind is not None and wanted.kind not in series_kinds():
        raise UserError(f"'{wanted.kind}' is not a kind of series; kinds: {', '.join(series_kinds())}")
    if wanted.kind is not None and wanted.unit is not None:
        factor_to(wanted.kind, wanted.unit, "")
    try:
        raw = read_columns(path, findings, wanted.kind, wanted.column, wanted.time_column, wanted.max_bytes)
        factor = factor_to(wanted.kind, wanted.unit, raw.value_column) if wanted.kind is not None else 1.0
        times = parse_times(raw, findings, wanted.time_zone)
    except UserError as error:
        findings.error("file", str(error))
        return None
    keep = times.keep
    with np.errstate(over="ignore"):  # what becomes infinite is reported as out of range
        values = raw.values[keep] * factor
    seconds, rows, broken = times.seconds[keep], raw.rows[keep], raw.broken[keep]
    interval_s = _check_steps(seconds, rows, raw, times, findings)
    if wanted.kind is not None:
        _check_range(values, rows, raw.value_column, wanted.kind, findings)
    # One absurd time must not ask for an absurd amount of memory.
    samples = (seconds[-1] - seconds[0]) / interval_s if interval_s is not None else 0.0
    too_long = samples * 8 > max(wanted.max_bytes, 16 * rows.size)
    if interval_s is None or too_long:
        _report_missing(seconds, values, rows, broken, raw, findings)
        if too_long:
            span = f"{seconds[-1] - seconds[0]:g} s at {interval_s:g} s"
            findings.error("too-long", f"the times span {span}, more samples than the size limit allows")
        return None
    start_s, grid, grid_rows, in_file = _on_grid(seconds, values, rows, broken, interval_s)
    _check_holes(grid, grid_rows, in_file, interval_s, raw, times, wanted, findings)
    if findings.has_errors:
        return None
    filled_values, filled = fill_gaps(grid, interval_s, wanted.gap_policy, wanted.max_gap_s, str(path))
    if filled:
        findings.note("filled", f"{filled} missing samples were filled by policy {wanted.gap_policy}")
    known = KINDS[wanted.kind].unit if wanted.kind is not None else wanted.unit or "unknown"
    meta: dict[str, Any] = {
        "source": path.name, "licence": "not stated", "file": str(path), "column": raw.value_column,
        "time_column": raw.time_column, "unit_in_file": wanted.unit or known, "clock": times.clock,
        "starts": times.starts, "gap_policy": wanted.gap_policy, "max_gap_s": wanted.max_gap_s,
        "filled_samples": filled, "filled_runs": missing_runs(grid), "notes": findings.notes,
    }  # fmt: skip
    return Trace(path.name, wanted.kind or "other", known, interval_s, filled_values, start_s, meta)


def _check_steps(
    seconds: Floats, rows: NDArray[np.int64], raw: RawColumns, times: Times, findings: Findings
) -> float | None:
    """Reports steps that are not forward or not a whole number of intervals; returns the interval if all are."""
    steps = _steps(seconds)
    forward = steps[steps > 0]
    if not forward.size:
        if np.isnan(seconds).any():
            return None
        findings.error("too-short", "fewer than two samples in order of time; the interval cannot be known")
        return None
    interval_s = _usual_step(forward)
    time_text = [str(text) for text in raw.times[times.keep]]
    later = rows[1:]

    duplicate, backward = np.flatnonzero(steps == 0), np.flatnonzero(steps < 0)
    findings.errors(
        "duplicate-time", later[duplicate],
        lambda i: f"'{time_text[duplicate[i] + 1]}' repeats the time of {findings.word} {rows[duplicate[i]]}"
        + _repeated_hour(0.0, interval_s, times),
        raw.time_column,
    )  # fmt: skip
    findings.errors(
        "backward-time", later[backward],
        lambda i: f"'{time_text[backward[i] + 1]}' is before '{time_text[backward[i]]}' of the row above"
        + _repeated_hour(float(steps[backward[i]]), interval_s, times),
        raw.time_column,
    )  # fmt: skip
    whole = np.rint(steps / interval_s)
    uneven = np.flatnonzero((steps > 0) & ((np.abs(steps / interval_s - whole) > _JITTER) | (whole == 0)))
    findings.errors(
        "uneven-time", later[uneven],
        lambda i: f"{steps[uneven[i]]:g} s after the row above, where the interval is {interval_s:g} s; "
        "resample to an even interval",
        raw.time_column,
    )  # fmt: skip
    if duplicate.size or backward.size or uneven.size or np.isnan(seconds).any():
        return None
    return _settled_interval(seconds, whole, interval_s, raw.time_column, findings)


def _steps(seconds: Floats) -> Floats:
    """Time from each row to the next; no clock resolves less than a nanosecond."""
    steps = np.diff(seconds)
    return np.where(np.abs(steps) < 1e-9, 0.0, steps)


def _usual_step(forward: Floats) -> float:
    """The lower median: a step that occurs, even where every other one is a gap."""
    return float(np.sort(forward)[(forward.size - 1) // 2])


def _settled_interval(seconds: Floats, whole: Floats, usual_s: float, column: str, findings: Findings) -> float:
    """The interval over the whole file, in round numbers where they fit, with the jitter noted."""
    position = np.concatenate([[0.0], np.cumsum(whole)])
    interval_s = (seconds[-1] - seconds[0]) / position[-1]
    if abs(usual_s - interval_s) * position[-1] <= _JITTER * interval_s:
        interval_s = usual_s
    jitter_s = float(np.abs(seconds - seconds[0] - position * interval_s).max())
    if jitter_s > 1e-6 * interval_s:
        moved = f"times were moved to an even grid of {interval_s:.9g} s, by at most {jitter_s:.3g} s"
        findings.note("jitter", moved, column=column)
    return float(interval_s)


def _repeated_hour(step_s: float, interval_s: float, times: Times) -> str:
    if not times.local:
        return ""
    if abs(step_s - (interval_s - _HOUR_S)) < _JITTER * interval_s:
        return ": an hour is repeated, as when daylight saving ends; give times with UTC offsets or name the time zone"
    if step_s <= interval_s - DAY_S / 2 and step_s > -DAY_S and times.clock.startswith("time of day"):
        return ": a new day seems to start; give full dates, and 24:00:00 for the end of a day"
    return ""


def _check_range(values: Floats, rows: NDArray[np.int64], column: str, kind_name: str, findings: Findings) -> None:
    kind = kind_of(kind_name)
    outside = np.flatnonzero((values < kind.low) | (values > kind.high))
    unit = "" if kind.unit == "1" else f" {kind.unit}"
    hint = f" of kind {kind_name}" + (f" ({kind.hint})" if kind.hint else "")
    findings.errors(
        "out-of-range", rows[outside],
        lambda i: f"{values[outside[i]]:g} is outside [{kind.low:g}, {kind.high:g}]{unit}{hint}",
        column,
    )  # fmt: skip


def _report_missing(
    seconds: Floats,
    values: Floats,
    rows: NDArray[np.int64],
    broken: NDArray[np.bool_],
    raw: RawColumns,
    findings: Findings,
) -> None:
    """Names empty cells and gaps of a file whose times are too broken to place its samples."""
    missing = rows[np.isnan(values) & ~broken]
    findings.errors("missing-value", missing, lambda _: "the cell is empty or NaN", raw.value_column)
    steps = _steps(seconds)
    interval_s = _usual_step(steps[steps > 0]) if (steps > 0).any() else np.inf
    whole = np.rint(steps / interval_s)
    gaps = np.flatnonzero((whole > 1) & (np.abs(steps / interval_s - whole) <= _JITTER))
    findings.errors(
        "gap", rows[gaps],
        lambda i: f"after this, the next sample comes {steps[gaps[i]]:g} s later; the interval is {interval_s:g} s",
        raw.time_column,
    )  # fmt: skip


def _on_grid(
    seconds: Floats, values: Floats, rows: NDArray[np.int64], broken: NDArray[np.bool_], interval_s: float
) -> tuple[float, Floats, NDArray[np.int64], NDArray[np.bool_]]:
    """Places the samples on the even grid.

    Returns:
        Start in seconds; values, NaN where there is none; the row of each sample, or for a sample without a row the
        row before the hole; and which samples have a row. Broken cells (already reported) count as known.
    """
    position = np.rint((seconds - seconds[0]) / interval_s).astype(np.intp)
    size = int(position[-1]) + 1
    grid = np.full(size, np.nan)
    grid[position] = np.where(broken, 0.0, values)
    in_file = np.zeros(size, dtype=bool)
    in_file[position] = True
    grid_rows = rows[np.cumsum(in_file) - 1]
    return float(seconds[0]), grid, grid_rows, in_file


def _check_holes(
    grid: Floats, rows: NDArray[np.int64], in_file: NDArray[np.bool_], interval_s: float,
    raw: RawColumns, times: Times, wanted: _Wanted, findings: Findings,
) -> None:  # fmt: skip
    for first, end in missing_runs(grid):
        problem = hole_problem(first, end, grid.size, interval_s, wanted.gap_policy, wanted.max_gap_s)
        if problem is None:
            continue
        if in_file[first:end].all():
            cells = "the cell is" if end - first == 1 else f"{end - first} cells from here are"
            findings.error("missing-value", f"{cells} empty or NaN; {problem}", int(rows[first]), raw.value_column)
        else:
            hour = times.local and abs((end - first) * interval_s - _HOUR_S) < _JITTER * interval_s
            summer = "; one hour is missing, as when daylight saving starts: give UTC offsets or name the time zone"
            message = f"after this, {end - first} samples of {interval_s:g} s are missing; {problem}"
            findings.error("gap", message + (summer if hour else ""), int(rows[first - 1]), raw.time_column)
