"""The catalogue of recorded traces: what there is, what it measures, where it comes from, how it is split.

`datasets/catalogue.yaml` describes the shipped files; traces that a user imported lie in the folder that
`WATTGYM_DATA` names, each with a sidecar `*.trace.yaml` of the same form (`wattgym.traces.model`). Splits are
windows of time within a trace, never shuffled rows.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

import wattgym
from wattgym.config import load_config
from wattgym.errors import UserError
from wattgym.traces.kinds import kind_of
from wattgym.traces.model import Catalogue, CatalogueEntry, DataFile, Split

DATA_VARIABLE = "WATTGYM_DATA"
CATALOGUE_NAME = "catalogue.yaml"
SIDECAR_SUFFIX = ".trace.yaml"


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


def _imported_folder() -> Path | None:
    """Folder of the user's imports.

    Raises:
        UserError: `WATTGYM_DATA` names something that is not a folder.
    """
    named = os.environ.get(DATA_VARIABLE)
    if not named:
        return None
    if not Path(named).is_dir():
        raise UserError(f"{DATA_VARIABLE} is '{named}', which is not a folder")
    return Path(named)


def _catalogues(imported: Path | None) -> Iterator[tuple[Path, Catalogue]]:
    paths = [data_root() / CATALOGUE_NAME]
    if imported is not None:
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


def all_entries(imported: Path | None) -> dict[str, CatalogueEntry]:
    """Every shipped trace and every one imported into a folder, by id.

    Args:
        imported: Folder of imports, or `None` for the shipped traces alone.

    Raises:
        UserError: A catalogue is not valid, or two traces have one id.
    """
    found: dict[str, CatalogueEntry] = {}
    for root, catalogue in _catalogues(imported):
        for entry in entries_of(root, catalogue):
            if entry.id in found:
                raise UserError(
                    f"two traces have the id '{entry.id}': {found[entry.id].root / found[entry.id].file} "
                    f"and {root / entry.file}; rename or remove one"
                )
            found[entry.id] = entry
    return found


def list_traces(kind: str | None = None, split: str | None = None) -> list[CatalogueEntry]:
    """Lists the shipped and the imported traces, in the catalogue's order.

    Args:
        kind: Only this kind.
        split: Only traces that have a window in this split.

    Raises:
        UserError: Unknown kind or split, a catalogue that is not valid, or two traces with one id.
    """
    if kind is not None:
        kind_of(kind)
    wanted = checked_split(split) if split is not None else None
    entries = all_entries(_imported_folder()).values()
    return [e for e in entries if kind in (None, e.kind) and (wanted is None or wanted in e.splits)]


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
    return [data for _, catalogue in _catalogues(_imported_folder()) for data in catalogue.files]


def find_table(name: str) -> tuple[Path, DataFile]:
    """Path and description of a table.

    Raises:
        UserError: No such table; the message names the nearest.
    """
    catalogues = _catalogues(_imported_folder())
    tables = {data.name: (root / data.file, data) for root, catalogue in catalogues for data in catalogue.files}
    if name in tables:
        return tables[name]
    raise UserError(f"no table '{name}'; {_nearest(name, list(tables))}")


def checked_split(name: str) -> Split:
    """The name of a split.

    Raises:
        UserError: It is none; the message lists them.
    """
    if name not in get_args(Split):
        raise UserError(f"unknown split '{name}'; splits: {', '.join(get_args(Split))}")
    return cast("Split", name)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "`wattgym traces list` shows them all"
