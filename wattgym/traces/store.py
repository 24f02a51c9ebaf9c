"""Writes imported traces as Parquet with a sidecar that the catalogue reads, whole or not at all."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattgym.errors import UserError
from wattgym.files import atomic_path, atomic_write_text
from wattgym.traces.catalogue import DATA_VARIABLE, SIDECAR_SUFFIX, all_entries, checked_split, entries_of
from wattgym.traces.model import Catalogue, CatalogueEntry, DataFile, Split, TimeColumn, TraceSpec, Windows
from wattgym.traces.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_FOLDER = "wattgym-data"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def import_folder() -> Path:
    """Folder for imported traces: `WATTGYM_DATA`, else `wattgym-data` here."""
    return Path(os.environ.get(DATA_VARIABLE) or DEFAULT_FOLDER)


def default_splits(trace: Trace) -> dict[Split, Windows]:
    """Splits of an imported trace by time: 60 % train, 18 % validation, 18 % test, with 2 % unused between them.

    Windows begin and end where samples do, so no sample is in two; a trace too short for a window goes without it.
    """
    size = trace.values.size
    parts: dict[Split, tuple[float, float]] = {"train": (0.0, 0.6), "validation": (0.62, 0.8), "test": (0.82, 1.0)}
    splits: dict[Split, Windows] = {}
    for split, (low, high) in parts.items():
        first, end = math.ceil(low * size), math.floor(high * size)
        if first < end:
            splits[split] = [(trace.start_s + first * trace.interval_s, trace.start_s + end * trace.interval_s)]
    return splits


def default_id(path: Path) -> str:
    """Id of an imported series that was given none: `imported/` and the file's name without extensions."""
    return "imported/" + re.sub(r"[^A-Za-z0-9_-]+", "-", path.name.split(".")[0]).strip("-").lower()


def store_trace(
    trace: Trace,
    trace_id: str,
    out: Path,
    *,
    split: str | None,
    licence: str,
    force: bool,
) -> list[str]:
    """Stores one trace under an id of its own.

    Args:
        trace: What to store.
        trace_id: Id in the catalogue, parts separated by slashes.
        out: Folder, created where missing.
        split: The split that gets the whole trace; `None` splits it by time (`default_splits`).
        licence: Licence of the data.
        force: Replace an import of the same name.

    Returns:
        The ids stored, here the one.

    Raises:
        UserError: As `store_file`.
    """
    import numpy as np
    import pandas as pd

    splits = {checked_split(split): "all"} if split is not None else default_splits(trace)
    times_s = trace.start_s + np.arange(trace.values.size) * trace.interval_s
    frame = pd.DataFrame({"t_s": times_s, "value": trace.values})
    notes = {"notes": "; ".join(trace.meta["notes"])} if trace.meta.get("notes") else {}
    filled = {"imported_gap_policy": trace.meta["gap_policy"], "imported_filled_samples": trace.meta["filled_samples"]}
    description = DataFile(
        file=f"{_file_stem(trace_id)}.parquet", licence=licence, source=str(trace.meta["source"]), kind=trace.kind,
        unit=trace.unit, interval_s=trace.interval_s, time=TimeColumn(column="t_s", format="seconds"),
        clock=_clock(trace), starts=_naive(trace.meta.get("starts")),
        attributes={**filled, **notes}, traces={trace_id: TraceSpec(column="value", splits=splits)},
    )  # fmt: skip
    return store_file(frame, description, out, force=force)


def store_file(frame: pd.DataFrame, description: DataFile, out: Path, *, force: bool) -> list[str]:
    """Writes a table and its sidecar. The sidecar comes last: without it the catalogue does not see the table.

    Args:
        frame: The table that `description.file` will hold.
        description: Catalogue entry of the file.
        out: Folder, created where missing.
        force: Replace an import of the same name.

    Returns:
        Ids of the traces stored.

    Raises:
        UserError: An id is not valid or taken, the file is there already, or the folder cannot be written.
    """
    data_path = out / description.file
    sidecar = data_path.with_name(data_path.name.removesuffix(".parquet") + SIDECAR_SUFFIX)
    new = entries_of(out, Catalogue(files=[description]))
    _check_ids(new, data_path, out)
    if (data_path.exists() or sidecar.exists()) and not force:
        raise UserError(f"{data_path} is there already; use --force to replace it, or another --id")
    existed = data_path.exists()
    with atomic_path(data_path) as temporary:
        frame.to_parquet(temporary, index=False)
    try:
        atomic_write_text(sidecar, _yaml(Catalogue(files=[description])))
    except BaseException:
        if not existed:
            with suppress(OSError):
                data_path.unlink()
        raise
    return [entry.id for entry in new]


def _check_ids(new: list[CatalogueEntry], data_path: Path, out: Path) -> None:
    known = all_entries(out if out.is_dir() else None)
    for entry in new:
        if not _ID.fullmatch(entry.id):
            raise UserError(f"'{entry.id}' is not a trace id; use letters, digits, '.', '_' and '-' between slashes")
        other = known.get(entry.id)
        if other is not None and (other.root / other.file).resolve() != data_path.resolve():
            raise UserError(f"the id '{entry.id}' is taken by {other.root / other.file}; choose another with --id")


def _yaml(catalogue: Catalogue) -> str:
    import yaml

    data: Any = catalogue.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def _file_stem(trace_id: str) -> str:
    return trace_id.replace("/", "-")


def _naive(starts: str | None) -> datetime | None:
    """Calendar time without zone; a bare time of day has no date to keep."""
    if starts is None or "-" not in starts:
        return None
    return datetime.fromisoformat(starts).replace(tzinfo=None)


def _clock(trace: Trace) -> str:
    starts = trace.meta.get("starts")
    start = f", from {starts}" if starts and "-" not in starts else ""
    return f"{trace.meta.get('clock', 'seconds')}{start}"
