"""`wattgym traces`: list, show, check and import recorded traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattgym.errors import UserError

if TYPE_CHECKING:
    from wattgym.traces import CatalogueEntry, Trace

app = typer.Typer(name="traces", help="List, show, check and import recorded traces.", no_args_is_help=True)

Kind = Annotated[str | None, typer.Option(help="Kind of trace, for example regulation, frequency, power.")]
Column = Annotated[str | None, typer.Option(help="Column of values, where it is not clear.")]
TimeColumn = Annotated[str | None, typer.Option(help="Column of times, where it is not clear.")]
Unit = Annotated[str | None, typer.Option(help="Unit of the file's numbers, for example kW or %.")]
GapPolicy = Annotated[str, typer.Option(help="What to do about missing samples: refuse, hold or interpolate.")]
MaxGap = Annotated[float | None, typer.Option("--max-gap-s", help="Longest hole that is filled, seconds.")]
TimeZone = Annotated[str | None, typer.Option(help="Zone of times without UTC offset, for example America/New_York.")]
MaxMib = Annotated[float, typer.Option(help="Largest file read, MiB unpacked.", min=1e-6)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_command(
    kind: Kind = None,
    split: Annotated[str | None, typer.Option(help="Only traces with a part in train, validation or test.")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="List the data files, tables without a series too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the shipped and the imported traces."""
    from wattgym.traces import list_tables, list_traces

    if tables:
        columns = ["table", "traces", "licence", "source"]
        rows = [[data.name, str(len(data.traces)), data.licence, data.source] for data in list_tables()]
    else:
        columns = ["id", "kind", "unit", "interval_s", "splits", "licence"]
        rows = [
            [e.id, e.kind, e.unit, f"{e.interval_s:g}" if e.interval_s else "-", ",".join(e.splits) or "-", e.licence]
            for e in list_traces(kind, split)
        ]
    if as_json:
        _print_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        _print_table(columns, rows)


@app.command()
def show(
    trace_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a trace; `wattgym traces list` shows them.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the trace into this file (.png, .svg or .pdf).")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows what is known about a trace, with its statistics and splits."""
    from wattgym.traces.catalogue import find_trace
    from wattgym.traces.series import read_series

    entry = find_trace(trace_id)
    if entry.is_series:
        trace = read_series(entry)
        facts = _series_facts(entry, trace)
        if plot is not None:
            _plot(entry, trace, plot)
    else:
        if plot is not None:
            raise UserError(f"'{trace_id}' is a table of events; there is no series to draw")
        facts = _event_facts(entry)
    if as_json:
        _print_json(facts)
    else:
        width = max(map(len, facts))
        for name, value in facts.items():
            typer.echo(f"{name:<{width}}  {_plain(value)}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="CSV (plain or gzip) or Parquet file.")],
    kind: Kind = None,
    column: Column = None,
    time_column: TimeColumn = None,
    unit: Unit = None,
    gap_policy: GapPolicy = "refuse",
    max_gap_s: MaxGap = None,
    time_zone: TimeZone = None,
    max_mib: MaxMib = 256.0,
    as_json: AsJson = False,
) -> None:
    """Reports everything that is wrong with a file, by row and column; exit code 2 if it cannot be used."""
    from dataclasses import asdict

    from wattgym.traces.table import check_file

    findings = check_file(
        file, kind=kind, column=column, time_column=time_column, unit=unit, gap_policy=gap_policy,
        max_gap_s=max_gap_s, time_zone=time_zone, max_bytes=int(max_mib * 2**20),
    )  # fmt: skip
    refused = any(finding.level == "error" for finding in findings)
    if as_json:
        _print_json({"file": str(file), "usable": not refused, "findings": [asdict(f) for f in findings]})
    else:
        for finding in findings:
            typer.echo(f"{finding.level}: {finding}")
        if not refused:
            typer.echo(f"{file}: usable" + (f" as {kind}" if kind else ""))
    if refused:
        raise typer.Exit(2)


@app.command("import")
def import_command(
    file: Annotated[Path, typer.Argument(help="File to import.")],
    kind: Annotated[str, typer.Option(help="google-power, pjm-regulation, or the kind of a series.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the result (default: $WATTGYM_DATA, else ./wattgym-data).")
    ] = None,
    trace_id: Annotated[str | None, typer.Option("--id", help="Id in the catalogue (series only).")] = None,
    split: Annotated[
        str | None, typer.Option(help="Put the whole series into one split (default: 60/18/18 % by time).")
    ] = None,
    licence: Annotated[str, typer.Option(help="Licence of the data (series only).")] = "not stated",
    signal: Annotated[str | None, typer.Option(help="regd or rega, for a CSV sheet of PJM.")] = None,
    column: Column = None,
    time_column: TimeColumn = None,
    unit: Unit = None,
    gap_policy: GapPolicy = "refuse",
    max_gap_s: MaxGap = None,
    time_zone: TimeZone = None,
    max_mib: MaxMib = 256.0,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier import.")] = False,
) -> None:
    """Imports a file so that the catalogue lists and loads it."""
    from wattgym.traces import importers, store
    from wattgym.traces.kinds import series_kinds
    from wattgym.traces.table import read_trace_file

    known = ["google-power", "pjm-regulation", *series_kinds()]
    if kind not in known:
        raise UserError(f"--kind '{kind}' cannot be imported; kinds: {', '.join(known)}")
    folder = out or store.import_folder()
    series_options = {"--id": trace_id, "--split": split, "--column": column, "--time-column": time_column,
                      "--unit": unit, "--time-zone": time_zone}  # fmt: skip
    if kind in ("google-power", "pjm-regulation"):
        given = [name for name, value in series_options.items() if value is not None]
        if given:
            raise UserError(f"{given[0]} does not apply to --kind {kind}; its files say it themselves")
    if signal is not None and kind != "pjm-regulation":
        raise UserError("--signal applies to --kind pjm-regulation only")
    if kind == "google-power":
        stored = importers.import_google_power(file, folder, gap_policy=gap_policy, max_gap_s=max_gap_s, force=force)
    elif kind == "pjm-regulation":
        stored = importers.import_pjm_regulation(
            file, folder, signal=signal, gap_policy=gap_policy, max_gap_s=max_gap_s, force=force
        )
    else:
        trace = read_trace_file(
            file, kind=kind, column=column, time_column=time_column, unit=unit, gap_policy=gap_policy,
            max_gap_s=max_gap_s, time_zone=time_zone, max_bytes=int(max_mib * 2**20),
        )  # fmt: skip
        new_id = trace_id or store.default_id(file)
        stored = store.store_trace(trace, new_id, folder, split=split, licence=licence, force=force)
    for stored_id in stored:
        typer.echo(stored_id)
    print(f"imported into {folder}; `WATTGYM_DATA={folder.resolve()}` makes the catalogue list it", file=sys.stderr)


def _series_facts(entry: CatalogueEntry, trace: Trace) -> dict[str, Any]:
    values = trace.values
    return {
        **_common_facts(entry),
        "interval_s": trace.interval_s, "samples": int(values.size), "start_s": trace.start_s, "end_s": trace.end_s,
        "mean": float(values.mean()), "std": float(values.std()),
        "min": float(values.min()), "max": float(values.max()),
        "filled_samples": trace.meta["filled_samples"],
        "splits": {
            name: [[trace.start_s, trace.end_s]] if windows == "all" else [list(window) for window in windows]
            for name, windows in entry.splits.items()
        },
    }  # fmt: skip


def _event_facts(entry: CatalogueEntry) -> dict[str, Any]:
    from wattgym.traces import load_table

    counts = {name: len(load_table(entry.id, name)) for name in entry.splits}
    return {**_common_facts(entry), "events": len(load_table(entry.id)), "events_in": counts, "splits": entry.splits}


def _common_facts(entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "id": entry.id, "kind": entry.kind, "unit": entry.unit, "source": entry.source, "licence": entry.licence,
        "file": entry.file, "column": entry.column, "clock": entry.clock,
        "starts": entry.starts.isoformat() if entry.starts else None, **entry.attributes,
    }  # fmt: skip


def _plot(entry: CatalogueEntry, trace: Trace, path: Path) -> None:
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from wattgym.files import atomic_path

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf")
    scale, unit = (3600.0, "h") if trace.duration_s > 7200 else (1.0, "s")
    scale, unit = (86_400.0, "d") if trace.duration_s > 4 * 86_400 else (scale, unit)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = {"train": "tab:blue", "validation": "tab:orange", "test": "tab:green"}
    for name, windows in entry.splits.items():
        spans = [(trace.start_s, trace.end_s)] if windows == "all" else windows
        for place, (start, end) in enumerate(spans):
            label = name if place == 0 else None
            axes.axvspan(start / scale, end / scale, color=colours[name], alpha=0.12, label=label, linewidth=0)
    times = (trace.start_s + np.arange(trace.values.size) * trace.interval_s) / scale
    axes.plot(times, trace.values, drawstyle="steps-post", linewidth=0.7, color="black")
    axes.margins(x=0.0)
    axes.set(title=entry.id, xlabel=f"time [{unit}]", ylabel=f"{entry.kind} [{entry.unit}]")
    if entry.splits:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal; tab-separated lines without decoration in a pipe."""
    if not sys.stdout.isatty():
        for row in [columns, *rows]:
            typer.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_plain(part)}" for name, part in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(f"{start:.10g} s to {end:.10g} s" for start, end in value)
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)
