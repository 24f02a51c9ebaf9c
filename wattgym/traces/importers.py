"""Imports the official files of Google's 2019 power trace and PJM's monthly regulation sheets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.gaps import check_policy, fill_gaps
from wattgym.traces.model import DataFile, Split, TimeColumn, TraceSpec, Windows
from wattgym.traces.store import store_file

if TYPE_CHECKING:
    import pandas as pd

DAY_S = 86_400.0

GOOGLE_COLUMNS = (
    "time", "cell", "pdu", "measured_power_util", "production_power_util",
    "bad_measurement_data", "bad_production_power_data",
)  # fmt: skip
GOOGLE_START_US = 600_000_000
GOOGLE_STEP_US = 300_000_000
GOOGLE_ROWS = 31 * 288
# The same weeks as the shipped five domains, because domains of one cell move together.
GOOGLE_SPLITS: dict[Split, Windows] = {
    "train": [(0.0, 14 * DAY_S)],
    "validation": [(15 * DAY_S, 21 * DAY_S)],
    "test": [(22 * DAY_S, 31 * DAY_S)],
}

PJM_SHEETS = {"Dynamic": "regd", "Traditional": "rega"}
PJM_STEP_S = 2
PJM_ROWS = 43_200
# Days whose afternoons are shipped with a split of their own: importing the whole day must not undo it.
_PJM_SHIPPED_DAYS: dict[tuple[str, date], Split | None] = {
    ("rega", date(2017, 8, 1)): None,
    ("rega", date(2017, 8, 2)): "test",
}


def import_google_power(
    path: Path, out: Path, *, gap_policy: str = "refuse", max_gap_s: float | None = None, force: bool = False
) -> list[str]:
    """Imports one power domain of Google's powerdata-2019 (one `csv.gz` a domain).

    Rows flagged bad are treated as missing. (The trace's PDF words the flags the other way round; Google's own
    notebook keeps the rows whose flag is not set, and so does this importer.) The clock starts at the first row,
    2019-05-01 00:00 US/Pacific. Source: google/cluster-data, PowerData2019.md, CC BY 4.0.

    Args:
        path: The file, gzip or plain.
        out: Folder for the result.
        gap_policy: What to do about rows flagged bad: `refuse`, `hold` or `interpolate`.
        max_gap_s: Longest hole filled, seconds.
        force: Replace an earlier import of this domain.

    Returns:
        Ids of the traces: measured and production power utilisation.

    Raises:
        UserError: Not such a file, cut short, or rows that the gap policy does not fill; nothing is written then.
    """
    import pandas as pd

    check_policy(gap_policy, max_gap_s)
    frame = _read_csv(path, GOOGLE_ROWS)
    missing = [name for name in GOOGLE_COLUMNS if name not in frame.columns]
    if missing:
        raise UserError(
            f"{path}: not a power domain of powerdata-2019: no column {', '.join(missing)}; "
            f"it needs {', '.join(GOOGLE_COLUMNS)}"
        )
    domains = frame[["cell", "pdu"]].drop_duplicates()
    if len(domains) != 1:
        raise UserError(f"{path}: holds {len(domains)} power domains; import one file a domain")
    times = _numbers(frame["time"], path, "time")
    expected = GOOGLE_START_US + GOOGLE_STEP_US * np.arange(len(frame))
    off = np.flatnonzero(times != expected)
    if off.size:
        row = int(off[0])
        raise UserError(
            f"{path}: line {row + 2}, column 'time': {times[row]:.0f}, expected {expected[row]} "
            f"(one row every {GOOGLE_STEP_US} µs from {GOOGLE_START_US}, in order)"
        )
    if len(frame) != GOOGLE_ROWS:
        raise UserError(f"{path}: {len(frame)} rows, the month has {GOOGLE_ROWS}; fetch it again")
    domain = _google_domain(str(domains.iloc[0, 0]), str(domains.iloc[0, 1]))
    columns: dict[str, NDArray[np.float64]] = {}
    attributes: dict[str, int | float | str] = {"import_gap_policy": gap_policy}
    for name, flag in (("measured", "bad_measurement_data"), ("production", "bad_production_power_data")):
        column = f"{name}_power_util"
        values = _numbers(frame[column], path, column)
        values[_flags(frame[flag], path, flag)] = np.nan
        _check_bounds(values, 0.0, 1.0, path, column, first_line=2)
        filled, count = fill_gaps(values, GOOGLE_STEP_US * 1e-6, gap_policy, max_gap_s, f"{path}, column '{column}'")
        columns[column] = filled
        attributes[f"{name}_filled_samples"] = count
    table = pd.DataFrame({"t_s": np.arange(GOOGLE_ROWS) * GOOGLE_STEP_US * 1e-6, **columns})
    description = DataFile(
        file=f"google2019-{domain}.parquet", licence="CC-BY-4.0", source=f"Google powerdata-2019, file {path.name}",
        kind="power_utilisation", unit="1", interval_s=GOOGLE_STEP_US * 1e-6,
        time=TimeColumn(column="t_s", format="seconds"), clock="US/Pacific", starts=datetime(2019, 5, 1),
        splits=GOOGLE_SPLITS, attributes=attributes,
        traces={f"power-util/google2019-{domain}-{name.split('_')[0]}": TraceSpec(column=name) for name in columns},
    )  # fmt: skip
    return store_file(table, description, out, force=force)


def import_pjm_regulation(
    path: Path, out: Path, *, signal: str | None = None, gap_policy: str = "refuse",
    max_gap_s: float | None = None, force: bool = False,
) -> list[str]:  # fmt: skip
    """Imports a month of PJM's 2 s regulation signals: the workbook, or one sheet exported as CSV.

    The sheets Dynamic (RegD) and Traditional (RegA) have one row every 2 s of the day and one column a day. A last
    row 24:00:00 repeats the first value of the next day and is dropped. Splits go by day of the month: to the 18th
    train, 20th to 23rd validation, from the 25th test; the days between are in none.

    Args:
        path: `.xlsx` workbook, or `.csv` of one sheet.
        out: Folder for the result.
        signal: `regd` or `rega`, for a CSV whose name holds neither Dynamic nor Traditional.
        gap_policy: What to do about empty cells: `refuse`, `hold` or `interpolate`.
        max_gap_s: Longest hole filled, seconds.
        force: Replace an earlier import of this month.

    Returns:
        Ids of the traces, one a day and signal.

    Raises:
        UserError: Not such a sheet, or empty cells that the gap policy does not fill; nothing is written then.
    """
    check_policy(gap_policy, max_gap_s)
    if signal not in (None, *PJM_SHEETS.values()):
        raise UserError(f"unknown signal '{signal}'; signals: {', '.join(PJM_SHEETS.values())}")
    # Every sheet is checked before the first is written.
    prepared = [_pjm_month(frame, name, path, gap_policy, max_gap_s) for name, frame in _pjm_sheets(path, signal)]
    stored = [store_file(table, description, out, force=force) for table, description in prepared]
    return [trace_id for ids in stored for trace_id in ids]


def _pjm_sheets(path: Path, signal: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
    import pandas as pd

    if path.suffix.lower() not in (".xlsx", ".xlsm"):
        lower = path.name.lower()
        named = signal or next((short for sheet, short in PJM_SHEETS.items() if sheet.lower() in lower), None)
        if named is None:
            raise UserError(f"{path}: is this RegD (Dynamic) or RegA (Traditional)? say --signal regd or --signal rega")
        yield named, _read_csv(path, PJM_ROWS + 1)
        return
    try:
        import openpyxl  # noqa: F401
    except ImportError:
        hint = "pip install 'wattgym[excel]', or save the sheets as CSV"
        raise UserError(f"{path}: reading a workbook needs openpyxl: {hint}") from None
    try:
        sheets: dict[Any, pd.DataFrame] = pd.read_excel(path, sheet_name=None, engine="openpyxl")
    except Exception as error:  # openpyxl and zipfile raise many types on a damaged workbook
        raise UserError(f"{path}: not readable as a workbook: {' '.join(str(error).split())}") from None
    wanted = {sheet: short for sheet, short in PJM_SHEETS.items() if signal in (None, short)}
    found = [(short, sheets[sheet]) for sheet, short in wanted.items() if sheet in sheets]
    if not found:
        raise UserError(f"{path}: no sheet {' or '.join(wanted)}; its sheets are: {', '.join(map(str, sheets))}")
    yield from found


def _pjm_month(
    frame: pd.DataFrame, signal: str, path: Path, gap_policy: str, max_gap_s: float | None
) -> tuple[pd.DataFrame, DataFile]:
    """Checks one sheet; returns the table to store and its description."""
    import pandas as pd

    place = f"{path} ({signal})"
    if len(frame.columns) < 2:
        raise UserError(f"{place}: needs a column of times and one column a day, it has {len(frame.columns)} columns")
    days = [_day(name, place) for name in frame.columns[1:]]
    if len(set(days)) != len(days) or len({(day.year, day.month) for day in days}) != 1:
        raise UserError(f"{place}: the columns must be different days of one month")
    if len(frame) == PJM_ROWS + 1:
        _check_time(frame.iloc[-1, 0], PJM_ROWS, place)
        frame = frame.iloc[:-1]
    if len(frame) != PJM_ROWS:
        raise UserError(
            f"{place}: {len(frame)} rows, a day has {PJM_ROWS} (00:00:00 to 23:59:58, then perhaps 24:00:00); "
            "import a part of a day with --kind regulation"
        )
    for row, cell in enumerate(frame.iloc[:, 0]):
        _check_time(cell, row, place)
    columns: dict[str, NDArray[np.float64]] = {"t_s": np.arange(PJM_ROWS, dtype=np.float64) * PJM_STEP_S}
    traces: dict[str, TraceSpec] = {}
    for position, day in enumerate(days, start=1):
        name = str(frame.columns[position])
        values = _numbers(frame.iloc[:, position], path, name)
        _check_bounds(values, -1.0, 1.0, path, name, first_line=2)
        values, filled = fill_gaps(values, PJM_STEP_S, gap_policy, max_gap_s, f"{place}, column '{name}'")
        columns[day.isoformat()] = values
        split = _pjm_split(signal, day)
        traces[f"regulation/pjm-{signal}-day-{day.isoformat()}"] = TraceSpec(
            column=day.isoformat(), starts=datetime.combine(day, time()), splits={split: "all"} if split else {},
            attributes={"import_gap_policy": gap_policy, "import_filled_samples": filled},
        )  # fmt: skip
    description = DataFile(
        file=f"pjm-{signal}-{days[0]:%Y-%m}.parquet", licence="PJM's terms of use (no data licence stated)",
        source=f"PJM regulation signal, file {path.name}", kind="regulation", unit="1", interval_s=PJM_STEP_S,
        time=TimeColumn(column="t_s", format="seconds"), clock="Eastern Prevailing Time", traces=traces,
    )  # fmt: skip
    return pd.DataFrame(columns), description


def _pjm_split(signal: str, day: date) -> Split | None:
    if (signal, day) in _PJM_SHIPPED_DAYS:
        return _PJM_SHIPPED_DAYS[signal, day]
    if day.day <= 18:
        return "train"
    if 20 <= day.day <= 23:
        return "validation"
    return "test" if day.day >= 25 else None


def _day(name: Any, place: str) -> date:
    """A column's day, from a date cell or a text such as 8/1/2017 (month first) or 2017-08-01."""
    if isinstance(name, datetime):
        return name.date()
    text = str(name).strip()
    for form in ("%m/%d/%Y", "%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%m/%d/%y"):
        try:
            return datetime.strptime(text, form).date()
        except ValueError:
            continue
    raise UserError(f"{place}: column '{text}' is not a day such as 8/1/2017 or 2017-08-01")


def _check_time(cell: Any, row: int, place: str) -> None:
    """Compares a row's time with its place in the day; Excel writes 24:00:00 in several ways."""
    expected_s = row * PJM_STEP_S
    seconds: float | None = None
    if isinstance(cell, timedelta):
        seconds = cell.total_seconds()
    elif isinstance(cell, datetime):
        # A time format that ran over midnight comes back as a date in Excel's first days.
        seconds = (cell - datetime.combine(cell.date(), time())).total_seconds()
        seconds += DAY_S if expected_s == DAY_S and seconds == 0 else 0.0
    elif isinstance(cell, time):
        seconds = cell.hour * 3600 + cell.minute * 60 + cell.second + cell.microsecond * 1e-6
        seconds += DAY_S if expected_s == DAY_S and seconds == 0 else 0.0
    elif match := re.fullmatch(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.0+)?)?", str(cell).strip()):
        hours, minutes, rest = match.groups()
        seconds = int(hours) * 3600.0 + int(minutes) * 60.0 + int(rest or 0)
    # Excel keeps times as fractions of a day, good to a few microseconds.
    if seconds is None or abs(seconds - expected_s) > 0.01:
        expected = f"{expected_s // 3600:02d}:{expected_s // 60 % 60:02d}:{expected_s % 60:02d}"
        raise UserError(f"{place}: line {row + 2}: the time is '{cell}', expected {expected}")


def _read_csv(path: Path, rows: int) -> pd.DataFrame:
    """A CSV file (gzip or plain) with texts left as they are; one row more than expected is read, not a huge file."""
    import zlib

    import pandas as pd

    try:
        return pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8-sig", nrows=rows + 1)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise UserError(f"{path}: cannot be read as CSV: {' '.join(str(error).split())}") from None


def _numbers(column: pd.Series[Any], path: Path, name: str) -> NDArray[np.float64]:
    """Numbers of a column, NaN where the cell is empty."""
    import pandas as pd

    text = column.astype(str).str.strip().str.lower()
    empty = (column.isna() | text.isin(["", "nan", "none", "null"])).to_numpy(dtype=bool)
    values = np.array(pd.to_numeric(text.where(~empty, "nan"), errors="coerce"), dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(values) & ~empty)
    if bad.size:
        raise UserError(f"{path}: line {bad[0] + 2}, column '{name}': '{column.iloc[bad[0]]}' is not a finite number")
    return values


def _flags(column: pd.Series[Any], path: Path, name: str) -> NDArray[np.bool_]:
    text = column.str.strip().str.lower()
    bad = np.flatnonzero(~text.isin(["true", "false", "1", "0", "t", "f"]))
    if bad.size:
        cell = column.iloc[bad[0]]
        raise UserError(f"{path}: line {bad[0] + 2}, column '{name}': '{cell}' is neither true nor false")
    return np.array(text.isin(["true", "1", "t"]), dtype=bool)


def _check_bounds(values: NDArray[np.float64], low: float, high: float, path: Path, name: str, first_line: int) -> None:
    outside = np.flatnonzero((values < low) | (values > high))
    if outside.size:
        row = int(outside[0])
        raise UserError(
            f"{path}: line {row + first_line}, column '{name}': {values[row]:g} is outside [{low:g}, {high:g}]"
        )


def _google_domain(cell: str, pdu: str) -> str:
    """`cella-pdu6` however the file writes it (`a`, `cella`; `6`, `pdu6`)."""
    cell, pdu = cell.strip().lower(), pdu.strip().lower()
    cell = cell if cell.startswith("cell") else f"cell{cell}"
    pdu = f"pdu{pdu}" if pdu.isdigit() else pdu
    if not re.fullmatch(r"[a-z0-9]+", cell) or not re.fullmatch(r"[a-z0-9_-]+", pdu):
        raise UserError(f"cell '{cell}' and pdu '{pdu}' are not names of a power domain, such as cella and pdu6")
    return f"{cell}-{pdu}"
