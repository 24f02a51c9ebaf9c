"""Turns a column of times into seconds: plain seconds, HH:MM:SS, or ISO 8601 with or without a zone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.traces.findings import Findings
from wattgym.traces.rawfile import RawColumns

Floats = NDArray[np.float64]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_CLOCK = r"^(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?$"
_ISO = r"^(\d{4}-\d{2}-\d{2})(?:[T ](\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)\s?(Z|z|[+-]\d{2}(?::?\d{2})?)?)?$"
_END_OF_DAY = r"24:00(?::00(?:\.0+)?)?"
_SCALES = {"_us": 1e-6, "_ms": 1e-3, "_ns": 1e-9}
DAY_S = 86_400.0
# Nanoseconds since 1970 fit well below; differences of larger numbers could overflow.
_LATEST = 1e20


@dataclass
class Times:
    """Times of the samples.

    Attributes:
        seconds: Seconds on the trace's clock, shape `(n,)`, NaN where unreadable.
        keep: Samples that belong to the series (a last 24:00:00 row may not), shape `(n,)`.
        starts: Calendar time of 0 s, ISO 8601, or the time of day; `None` for plain seconds.
        clock: What the clock shows.
        local: Whether daylight saving may have moved the clock.
    """

    seconds: Floats
    keep: NDArray[np.bool_]
    starts: str | None
    clock: str
    local: bool


def parse_times(raw: RawColumns, findings: Findings, time_zone: str | None) -> Times:
    """Reads the time column.

    Args:
        raw: The columns of the file.
        findings: Gets what is wrong with single rows, and what was converted.
        time_zone: IANA zone of times without an offset, for example `America/New_York`; they become UTC.

    Raises:
        UserError: No row has a time in a form that is known, or the zone is unknown.
    """
    if raw.times.dtype.kind == "f":
        return _plain_seconds(np.array(raw.times, dtype=np.float64), raw, findings, time_zone)
    if raw.times.dtype.kind == "M":
        _report(np.isnat(raw.times) & ~raw.ragged, raw, findings, "no time in this row")
        stamps = raw.times.astype("datetime64[us]")
        if raw.zone is not None:
            findings.note("time-zone", f"times in {raw.zone} were read as UTC", column=raw.time_column)
        return _calendar(stamps, raw.zone is not None, raw, findings, time_zone)
    texts = [str(text) for text in raw.times]
    first = next((text for text, ragged in zip(texts, raw.ragged, strict=True) if text and not ragged), "")
    if _NUMBER.fullmatch(first):
        return _plain_seconds(_floats(texts), raw, findings, time_zone)
    if re.match(_CLOCK, first):
        return _clock_times(texts, raw, findings)
    if re.match(_ISO, first):
        return _iso_times(texts, raw, findings, time_zone)
    raise UserError(
        f"column '{raw.time_column}': '{first[:40]}' is not a time that can be read; "
        "use seconds, HH:MM:SS, or ISO 8601 such as 2024-03-31T14:00:00+02:00"
    )


def _report(mask: NDArray[np.bool_], raw: RawColumns, findings: Findings, message: str, code: str = "bad-time") -> None:
    places = np.flatnonzero(mask)
    findings.errors(code, raw.rows[places], lambda i: message.format(raw.times[places[i]]), raw.time_column)


def _floats(texts: list[str]) -> Floats:
    return np.array([float(text) if _NUMBER.fullmatch(text) else np.nan for text in texts], dtype=np.float64)


def _plain_seconds(seconds: Floats, raw: RawColumns, findings: Findings, time_zone: str | None) -> Times:
    if time_zone is not None:
        raise UserError(f"column '{raw.time_column}' holds plain numbers; a time zone does not apply to them")
    seconds = np.where(np.abs(seconds) <= _LATEST, seconds, np.nan)
    _report(np.isnan(seconds) & ~raw.ragged, raw, findings, "'{}' is not a number of seconds, as the first row is")
    factor = next((f for suffix, f in _SCALES.items() if raw.time_column.lower().endswith(suffix)), 1.0)
    if factor != 1.0:
        findings.note("time-unit", f"times were multiplied by {factor:g} to get seconds", column=raw.time_column)
    seconds = seconds * factor
    return Times(seconds, np.ones(seconds.size, dtype=bool), None, f"seconds of column '{raw.time_column}'", False)


def _clock_times(texts: list[str], raw: RawColumns, findings: Findings) -> Times:
    import pandas as pd

    parts = pd.Series(texts).str.extract(_CLOCK)
    hours, minutes, seconds = (parts[i].astype(float) for i in range(3))
    total = np.array(hours * 3600 + minutes * 60 + seconds.fillna(0.0), dtype=np.float64)
    impossible = np.asarray((hours > 24) | (minutes > 59) | (seconds >= 60)) | (total > DAY_S)
    unreadable = np.isnan(total)
    _report(unreadable & ~raw.ragged, raw, findings, "'{}' is not a time of day HH:MM:SS, as the first row is")
    _report(impossible & ~unreadable & ~raw.ragged, raw, findings, "'{}' is not a time of day")
    total[impossible] = np.nan
    keep = np.ones(total.size, dtype=bool)
    if total.size > 1 and total[-1] == DAY_S:
        # It is the first sample of the next day, which has a row of its own in the next day's file.
        keep[-1] = False
        findings.note(
            "end-of-day",
            "the last row, 24:00:00, is the end of the day and was dropped",
            int(raw.rows[-1]),
            raw.time_column,
        )
    known = np.flatnonzero(~np.isnan(total))
    starts = texts[int(known[0])] if known.size else None
    start = float(total[known[0]]) if known.size else 0.0
    return Times(total - start, keep, starts, "time of day, zone not stated", True)


def _iso_times(texts: list[str], raw: RawColumns, findings: Findings, time_zone: str | None) -> Times:
    import pandas as pd

    parts = pd.Series(texts, dtype=object).str.extract(_ISO)
    date, clock, offset = parts[0], parts[1].fillna("00:00:00"), parts[2]
    rolled = clock.str.fullmatch(_END_OF_DAY).to_numpy(dtype=bool) & date.notna().to_numpy()
    clock = clock.mask(rolled, "00:00:00")
    stamps = pd.to_datetime(date + "T" + clock, format="ISO8601", errors="coerce")
    stamps = stamps + pd.to_timedelta(np.where(rolled, 1, 0), unit="D")
    if rolled.any():
        rows = raw.rows[np.flatnonzero(rolled)]
        findings.note(
            "end-of-day",
            f"24:00:00 was read as 00:00:00 of the next day ({rows.size} rows)",
            int(rows[0]),
            raw.time_column,
        )
    bad = stamps.isna().to_numpy()
    _report(bad & ~raw.ragged, raw, findings, "'{}' is not a date and time in ISO 8601, as the first row is")
    zoned = offset.notna().to_numpy()
    good = ~bad & ~raw.ragged
    if zoned[good].any() and not zoned[good].all():
        odd = good & (zoned != zoned[good][0])
        message = "'{}' " + ("has no UTC offset, as the first row has" if zoned[good][0] else
                             "has a UTC offset, which the first row lacks")  # fmt: skip
        _report(odd, raw, findings, message, "mixed-time-zones")
    offsets = {text: _offset_s(text) for text in offset.dropna().unique()}
    if offsets:
        shift = offset.map(offsets).fillna(0.0).astype(float)
        stamps = stamps - pd.to_timedelta(shift, unit="s")
        listed = ", ".join(sorted(offsets))
        findings.note("time-zone", f"times with offset {listed} were read as UTC", column=raw.time_column)
    values = stamps.to_numpy(dtype="datetime64[us]")
    return _calendar(values, bool(offsets), raw, findings, time_zone)


def _offset_s(text: str) -> float:
    if text in "Zz":
        return 0.0
    digits = text[1:].replace(":", "").ljust(4, "0")
    return (1 if text[0] == "+" else -1) * (int(digits[:2]) * 3600.0 + int(digits[2:]) * 60.0)


def _calendar(
    stamps: NDArray[Any],
    is_utc: bool,
    raw: RawColumns,
    findings: Findings,
    time_zone: str | None,
) -> Times:
    """Seconds from the first time; local times become UTC where their zone is named."""
    if time_zone is not None:
        if is_utc:
            raise UserError(f"column '{raw.time_column}' states its UTC offsets; leave the time zone away")
        stamps = _localised(stamps, raw, findings, time_zone)
        is_utc = True
    keep = np.ones(stamps.size, dtype=bool)
    known = np.flatnonzero(~np.isnat(stamps))
    if not known.size:
        return Times(np.full(stamps.size, np.nan), keep, None, "calendar time", not is_utc)
    origin = stamps[known[0]]
    seconds = (stamps - origin) / np.timedelta64(1, "s")
    whole = origin.astype("datetime64[s]")
    starts = str(whole if whole == origin else origin) + ("+00:00" if is_utc else "")
    clock = "UTC" if is_utc else "local time, zone not stated"
    return Times(np.array(seconds, dtype=np.float64), keep, starts, clock, not is_utc)


def _localised(stamps: NDArray[Any], raw: RawColumns, findings: Findings, time_zone: str) -> NDArray[Any]:
    import zoneinfo

    import pandas as pd

    try:
        zone = zoneinfo.ZoneInfo(time_zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise UserError(f"unknown time zone '{time_zone}'; use an IANA name such as America/New_York") from None
    local = pd.DatetimeIndex(stamps)
    try:
        utc = local.tz_localize(zone, ambiguous="infer", nonexistent="NaT")
    except ValueError as error:
        # A repeated hour that is there once only gives no clue which of the two it was.
        utc = local.tz_localize(zone, ambiguous="NaT", nonexistent="NaT")
        lost = np.asarray(utc.isna()) & ~np.asarray(local.isna())
        reason = "is in the hour that daylight saving repeats; the rows do not say which of the two: use UTC offsets"
        _report(lost, raw, findings, "'{}' " + reason, "daylight-saving")
        if not lost.any():
            raise UserError(f"column '{raw.time_column}': {error}") from None
    else:
        skipped = np.asarray(utc.isna()) & ~np.asarray(local.isna())
        message = f"'{{}}' does not exist in {time_zone}: daylight saving skips it"
        _report(skipped, raw, findings, message, "daylight-saving")
    findings.note("time-zone", f"local times in {time_zone} were read as UTC", column=raw.time_column)
    return np.array(utc.tz_convert("UTC").tz_localize(None).to_numpy(dtype="datetime64[us]"))
