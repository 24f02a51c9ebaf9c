"""Reads a time and a value column out of a user's CSV or Parquet file, bounded in size, naming what is wrong."""

from __future__ import annotations

import codecs
import csv
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.findings import Findings

DEFAULT_MAX_BYTES = 256 * 2**20
_CHUNK_ROWS = 65_536
_LONGEST_LINE = 2**20
_MISSING = {"", "nan", "na", "n/a", "null", "none"}
_TIME_NAMES = ("t_s", "time_s", "t", "time", "timestamp", "datetime", "date_time", "utc", "date", "seconds",
               "time_us", "time_ms", "time_utc", "time_local", "time_ept")  # fmt: skip
_NUMBER_OR_TIME = re.compile(r"[+-]?[\d.,:]+(e[+-]?\d+)?|\d{4}-\d\d-\d\d([T ][\d:.,]*(Z|[+-][\d:]+)?)?", re.IGNORECASE)


@dataclass
class RawColumns:
    """The two columns, row by row as in the file.

    Attributes:
        time_column: Its name.
        value_column: Its name.
        rows: Line or row number of each sample, shape `(n,)`.
        times: Times as text, or as numbers or `datetime64` where the file has a type for them, shape `(n,)`.
        zone: Time zone of typed times (they are UTC then), `None` for texts and for local times.
        values: Values, shape `(n,)`, NaN where missing.
        ragged: Rows with too few or too many cells (reported), shape `(n,)`; they have neither time nor value.
        broken: Rows whose value could not be read (reported), ragged ones included, shape `(n,)`.
    """

    time_column: str
    value_column: str
    rows: NDArray[np.int64]
    times: NDArray[Any]
    zone: str | None
    values: NDArray[np.float64]
    ragged: NDArray[np.bool_]
    broken: NDArray[np.bool_]


def read_columns(
    path: Path, findings: Findings, kind: str | None, column: str | None, time_column: str | None, max_bytes: int
) -> RawColumns:
    """Reads the time and the value column.

    Args:
        path: CSV (plain or gzip) or Parquet file.
        findings: Gets everything found about single rows.
        kind: Kind of trace, which helps to find the value column.
        column: Value column; `None` if it is clear which one is meant.
        time_column: Time column; `None` if it is clear which one is meant.
        max_bytes: Largest size read, unpacked.

    Raises:
        UserError: The file as a whole cannot be read: missing, empty, binary, too large, no header, no such column.
    """
    try:
        with path.open("rb") as handle:
            magic = handle.read(4)
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror or error}") from None
    if not magic:
        raise UserError("the file is empty")
    if magic == b"PAR1":
        findings.word = "row"
        return _read_parquet(path, findings, kind, column, time_column, max_bytes)
    if magic.startswith(b"PK"):
        raise UserError("this is a zip archive or an Excel workbook; save the sheet as CSV (UTF-8)")
    if magic[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError("this is UTF-16 text; save it as UTF-8")
    try:
        with gzip.open(path, "rb") if magic.startswith(b"\x1f\x8b") else path.open("rb") as handle:
            return _read_csv(handle, findings, kind, column, time_column, max_bytes)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"the gzip file is cut short or damaged ({error}); fetch it again") from None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror or error}") from None


def _read_csv(
    handle: IO[bytes], findings: Findings, kind: str | None, column: str | None, time_column: str | None, max_bytes: int
) -> RawColumns:
    lines = _text_lines(handle, findings, max_bytes)
    first = next(lines)
    delimiter = max(",;\t", key=first.count)
    if delimiter != ",":
        findings.note("delimiter", f"columns are separated by {'tab' if delimiter == chr(9) else repr(delimiter)}")
    try:
        header = [name.strip() for name in next(csv.reader([first], delimiter=delimiter, strict=True))]
    except csv.Error as error:
        raise UserError(f"line 1 is not readable as CSV: {error}") from None
    if all(_NUMBER_OR_TIME.fullmatch(name) for name in header):
        raise UserError(
            f"line 1 holds data ({first.strip()[:60]}), not column names; put a header such as t_s,value on top"
        )
    at_time, at_value = choose_columns(header, kind, column, time_column)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    rows: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    ragged: list[NDArray[np.bool_]] = []
    broken: list[NDArray[np.bool_]] = []
    times: list[str] = []
    while True:
        chunk = _csv_chunk(reader, header, at_time, at_value, findings)
        if not chunk:
            break
        numbers, time_texts, value_texts, uneven = zip(*chunk, strict=True)
        chunk_rows = np.array(numbers, dtype=np.int64)
        chunk_ragged = np.array(uneven, dtype=bool)
        chunk_values, bad = _parse_numbers(list(value_texts), chunk_rows, header[at_value], findings, chunk_ragged)
        times += time_texts
        rows.append(chunk_rows)
        values.append(chunk_values)
        ragged.append(chunk_ragged)
        broken.append(chunk_ragged | bad)
    if not rows:
        raise UserError("there is no row below the header")
    return RawColumns(
        header[at_time], header[at_value], np.concatenate(rows), np.array(times, dtype=object), None,
        np.concatenate(values), np.concatenate(ragged), np.concatenate(broken),
    )  # fmt: skip


def _text_lines(handle: IO[bytes], findings: Findings, max_bytes: int) -> Iterator[str]:
    """Lines as text; refuses what is not UTF-8 text, and more than `max_bytes`."""
    number, size = 0, 0
    while raw := handle.readline(_LONGEST_LINE):
        number += 1
        size += len(raw)
        if size > max_bytes:
            raise UserError(f"more than {max_bytes / 2**20:g} MiB of text; raise the size limit or split the file")
        if b"\0" in raw:
            raise UserError(f"line {number} holds NUL bytes: this is a binary file, not CSV")
        if len(raw) == _LONGEST_LINE:
            raise UserError(f"line {number} is longer than {_LONGEST_LINE} bytes: this is not a CSV table")
        if number == 1:
            if raw.startswith(codecs.BOM_UTF8):
                findings.note("bom", "the file starts with a byte order mark, which was skipped")
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.endswith(b"\r\n"):
                findings.note("crlf", "lines end with CR LF")
            if not raw.strip():
                raise UserError("line 1 is blank; it must hold the column names")
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"line {number} is not UTF-8 text ({error.reason}); save the file as UTF-8") from None


def _csv_chunk(
    reader: Any, header: list[str], at_time: int, at_value: int, findings: Findings
) -> list[tuple[int, str, str, bool]]:
    """Up to a chunk of rows as (line, time, value, whether the row is ragged)."""
    chunk: list[tuple[int, str, str, bool]] = []
    try:
        for row in reader:
            line = reader.line_num + 1
            if len(row) == len(header):
                chunk.append((line, row[at_time].strip(), row[at_value].strip(), False))
            elif any(cell.strip() for cell in row):
                reason = "cut short?" if len(row) < len(header) else "a decimal comma splits a number in two: write 0.5"
                findings.error("ragged", f"{len(row)} cells where the header has {len(header)} ({reason})", line)
                chunk.append((line, "", "", True))
            if len(chunk) == _CHUNK_ROWS:
                break
    except csv.Error as error:
        findings.error("csv", f"not readable as CSV: {error}", reader.line_num + 1)
    return chunk


def choose_columns(header: list[str], kind: str | None, column: str | None, time_column: str | None) -> tuple[int, int]:
    """Positions of the time and the value column.

    Raises:
        UserError: A named column is missing or twice there, or it is not clear which column is meant.
    """
    listed = ", ".join(repr(name) for name in header)
    for name in (column, time_column):
        if name is not None and header.count(name) != 1:
            state = "is there twice" if name in header else "is missing"
            raise UserError(f"column '{name}' {state}; the header has: {listed}")
    if time_column is None:
        lower = [name.lower() for name in header]
        time_column = next((header[lower.index(name)] for name in _TIME_NAMES if name in lower), None)
        if time_column is None and len(header) == 2:
            time_column = header[1] if header[0] == column else header[0]
        if time_column is None:
            raise UserError(f"no column of times (such as t_s, time or timestamp); name it; the header has: {listed}")
    others = [name for name in header if name != time_column]
    if column is None:
        named = [name for name in others if kind and (kind in name.lower() or name.lower() in kind)]
        if len(others) != 1 and len(named) != 1:
            raise UserError(f"which column holds the values? name one of: {', '.join(map(repr, others)) or 'none'}")
        column = others[0] if len(others) == 1 else named[0]
    if column == time_column:
        raise UserError(f"column '{column}' cannot be both the times and the values")
    for name in (column, time_column):
        if header.count(name) != 1:
            raise UserError(f"column '{name}' is there twice; the header has: {listed}")
    return header.index(time_column), header.index(column)


def _parse_numbers(
    texts: list[str], rows: NDArray[np.int64], column: str, findings: Findings, skip: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers from texts, NaN where missing, and which cells are broken (reported)."""
    try:
        values = np.array(texts, dtype=np.str_).astype(np.float64)
    except ValueError:
        values = np.array([_number_or_none(text) for text in texts], dtype=np.float64)
    missing = np.fromiter((text.lower() in _MISSING for text in texts), dtype=bool, count=len(texts))
    bad = ~missing & ~np.isfinite(values) & ~skip
    places = np.flatnonzero(bad)
    commas = np.array([bool(re.fullmatch(r"[+-]?[\d.]*,\d+([eE][+-]?\d+)?", texts[i])) for i in places], dtype=bool)
    with_comma, without = places[commas], places[~commas]
    findings.errors(
        "decimal-comma", rows[with_comma],
        lambda i: f"'{texts[with_comma[i]]}' has a comma in the number; write a decimal point and no "
        f"thousands separator, such as {texts[with_comma[i]].replace('.', '').replace(',', '.')}",
        column,
    )  # fmt: skip
    findings.errors("not-a-number", rows[without], lambda i: _why_not(texts[without[i]]), column)
    values[bad | missing] = np.nan
    return values, bad


def _number_or_none(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _why_not(text: str) -> str:
    shown = repr(text if len(text) <= 40 else text[:40] + "…")
    if re.fullmatch(r"[+-]?[\d.]+\s*[A-Za-z%/]+", text) and not text.lower().endswith("inf"):
        return f"{shown} has a unit in the cell; leave the number alone in it and name the unit once"
    return f"{shown} is not a finite number"


def _read_parquet(
    path: Path, findings: Findings, kind: str | None, column: str | None, time_column: str | None, max_bytes: int
) -> RawColumns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        header = list(file.schema_arrow.names)
        at_time, at_value = choose_columns(header, kind, column, time_column)
        # The footer's sizes are checked before anything is unpacked: two columns of at most 64 bytes a cell.
        unpacked = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
        if unpacked > max_bytes or file.metadata.num_rows * 16 > max_bytes:
            raise UserError(f"more than {max_bytes / 2**20:g} MiB unpacked; raise the size limit or split the file")
        table = file.read(columns=[header[at_time], header[at_value]])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"not readable as Parquet, perhaps cut short: {' '.join(str(error).split())}") from None
    if table.num_rows == 0:
        raise UserError("the table has no rows")
    rows = np.arange(1, table.num_rows + 1, dtype=np.int64)
    ragged = np.zeros(table.num_rows, dtype=bool)
    broken = ragged
    name = header[at_value]
    value_type = table.schema.field(name).type
    if pa.types.is_string(value_type) or pa.types.is_large_string(value_type):
        texts = [text or "" for text in table.column(name).to_pylist()]
        values, broken = _parse_numbers(texts, rows, name, findings, ragged)
    elif pa.types.is_integer(value_type) or pa.types.is_floating(value_type) or pa.types.is_decimal(value_type):
        values = np.array(table.column(name).cast(pa.float64()).to_pandas(), dtype=np.float64)
        broken = np.isinf(values)
        findings.errors("not-a-number", rows[broken], lambda _: "infinite is not a finite number", name)
        values[broken] = np.nan
    else:
        raise UserError(f"column '{name}' holds {value_type}, not numbers")
    times, zone = _parquet_times(table.column(header[at_time]), header[at_time])
    return RawColumns(header[at_time], name, rows, times, zone, values, ragged, broken)


def _parquet_times(column: Any, name: str) -> tuple[NDArray[Any], str | None]:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_timestamp(kind):
        # Zoned timestamps are stored in UTC; dropping the zone keeps them there.
        wanted = pa.timestamp("us", tz=None if kind.tz is None else "UTC")
        return np.array(column.cast(wanted, safe=False).to_numpy(), dtype="datetime64[us]"), kind.tz
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.array(column.cast(pa.float64()).to_pandas(), dtype=np.float64), None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array([text or "" for text in column.to_pylist()], dtype=object), None
    raise UserError(f"column '{name}' holds {kind}, not times; use seconds, timestamps or text")
