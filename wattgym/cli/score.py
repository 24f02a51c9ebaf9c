"""`wattgym score`: how well a response followed a regulation signal, from any two CSV or Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wattgym.metrics import PjmScore, PjmVariant, Tracking
    from wattgym.traces import Trace


def score(
    signal: Annotated[Path, typer.Option(help="Regulation signal in [-1, 1]; +1 asks a load to draw less.")],
    response: Annotated[Path, typer.Option(help="What was delivered in that sense, or with --base the metered power.")],
    variant: Annotated[
        str, typer.Option(help="Rules of the score (docs/scores.md); a wrong name lists them.")
    ] = "legacy",
    interval: Annotated[
        float | None,
        typer.Option(help="Seconds between samples: needed for files without a time column, checked for the others."),
    ] = None,
    capacity: Annotated[float | None, typer.Option(help="Full response, in the response's unit. Default: 1.")] = None,
    base: Annotated[
        float | None,
        typer.Option(help="Declared base power: the response is then metered power of a load, in the unit of both."),
    ] = None,
    signal_column: Annotated[str | None, typer.Option(help="Column of the signal, where it is not plain.")] = None,
    response_column: Annotated[str | None, typer.Option(help="Column of the response, where it is not plain.")] = None,
    align: Annotated[str, typer.Option(help="How samples are paired: exact, overlap, or index.")] = "exact",
    allow_gaps: Annotated[
        bool, typer.Option("--allow-gaps", help="Score missing responses by the variant's rules instead of refusing.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one rule of the variant, for example windows=rolling.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Score a response to a regulation signal: correlation, delay, precision and their composite.

    The response is per unit of capacity in the signal's sense, or with --capacity in any unit, or with --base and
    --capacity a load's metered power: (base - power) / capacity. Both files need a header line.
    """
    from wattgym.errors import UserError
    from wattgym.metrics import pjm_score
    from wattgym.metrics.alignment import align as align_traces
    from wattgym.signals import response as delivered_response

    rules = _rules(variant, set_ or [])
    if base is not None and capacity is None:
        raise UserError("--base makes the response metered power, which needs --capacity in the same unit")
    if capacity is not None and not 0 < capacity < float("inf"):
        raise UserError(f"--capacity must be positive and finite, got {capacity:g}")
    full = 1.0 if capacity is None else capacity
    asked = _read(signal, "--signal-column", interval, kind="regulation", column=signal_column)
    given = _read(response, "--response-column", interval, column=response_column, gaps=allow_gaps)
    r, metered, period_s = align_traces(asked, given, align)
    delivered = metered / full if base is None else delivered_response(base, metered, full)
    result = pjm_score(r, delivered, period_s=period_s, variant=rules)
    errors = _tracking(r, delivered)
    if as_json:
        import json

        record = {**result.summary(), "period_s": period_s, "samples": int(r.size), "tracking": _plain(errors)}
        typer.echo(json.dumps(record, allow_nan=False))
        return
    typer.echo(_text(result, errors, period_s, r.size))


def _rules(name: str, changes: list[str]) -> PjmVariant:
    import yaml

    from wattgym.config import parse_config
    from wattgym.errors import UserError
    from wattgym.metrics import PjmVariant, pjm_variant

    preset = pjm_variant(name)
    if not changes:
        return preset
    values: dict[str, Any] = {**preset.model_dump(), "name": f"{preset.name}, {', '.join(changes)}"}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes KEY=VALUE, got '{change}'")
        try:
            values[key.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {key.strip()}: '{text}' is not a value") from None
    return parse_config(PjmVariant, values, "--set")


def _read(
    path: Path,
    option: str,
    interval_s: float | None,
    *,
    kind: str | None = None,
    column: str | None,
    gaps: bool = False,
) -> Trace:
    """Reads one file and holds its interval against `--interval`."""
    from wattgym.errors import UserError
    from wattgym.traces.table import read_trace_file

    # Filled samples are taken out again by the alignment: filling only keeps the grid even.
    options: dict[str, Any] = {"gap_policy": "hold", "max_gap_s": 1e9} if gaps else {}
    try:
        if interval_s is not None and _has_one_column(path):
            trace = _read_untimed(path, interval_s, kind=kind, **options)
        else:
            trace = read_trace_file(path, kind=kind, column=column, **options)
    except UserError as error:
        hint = f"; choose it with {option}" if "name one of" in str(error) else ""
        raise UserError(f"{error}{hint}") from None
    if interval_s is not None and abs(trace.interval_s - interval_s) > 1e-6 * interval_s:
        raise UserError(f"{path}: a sample every {trace.interval_s:g} s, but --interval says {interval_s:g} s")
    return trace


def _has_one_column(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            first = handle.readline(65_536)
    except OSError:
        return False  # the reader says why
    return first[:2] != b"\x1f\x8b" and first[:4] != b"PAR1" and not any(d in first for d in (b",", b";", b"\t"))


def _read_untimed(path: Path, interval_s: float, **options: Any) -> Trace:
    """Reads a file of values only, by the same strict rules: a copy gets a time column in front."""
    import tempfile

    from wattgym.errors import UserError
    from wattgym.traces.table import read_trace_file

    if not 0 < interval_s < float("inf"):
        raise UserError(f"--interval must be positive and finite, got {interval_s:g}")
    with tempfile.TemporaryDirectory() as folder:
        timed = Path(folder) / path.name
        with path.open("rb") as source, timed.open("wb") as copy:
            header = source.readline().removeprefix(b"\xef\xbb\xbf")
            copy.write(b"t_s," + header)
            for row, line in enumerate(source):
                copy.write(f"{row * interval_s!r},".encode() + line)
        try:
            return read_trace_file(timed, **options)
        except UserError as error:
            raise UserError(str(error).replace(str(timed), str(path))) from None


def _tracking(r: Any, delivered: Any) -> Tracking | None:
    """Errors in capacities over the samples that are there; None when there are none."""
    import numpy as np

    from wattgym.metrics import tracking

    there = ~np.isnan(delivered)
    return tracking(r[there], delivered[there], capacity_w=1.0) if there.any() else None


def _plain(errors: Tracking | None) -> dict[str, float | bool] | None:
    if errors is None:
        return None
    return {
        "nrmse": errors.nrmse,
        "mae": errors.mae,
        "p95": errors.p95,
        "bias": errors.bias,
        "share_within_30_percent": errors.share_within,
        "within_30_percent_for_90_percent": errors.passed,
    }


def _text(result: PjmScore, errors: Tracking | None, period_s: float, samples: int) -> str:
    summary = result.summary()

    def number(value: float | None) -> str:
        return "not scored" if value is None else f"{value:.4f}"

    assumed = " (assumed: the operator's formula is not confirmed)" if summary["assumed"] else ""
    by_status = summary["windows_by_status"]
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in by_status.items() if count)
    lines = [
        f"variant      {summary['variant']}{assumed}",
        f"composite    {number(summary['composite'])}",
        f"correlation  {number(summary['correlation'])}",
        f"delay        {number(summary['delay'])}",
        f"precision    {number(summary['precision'])}",
        f"windows      {summary['windows']}: {counts}",
        f"intervals    {summary['intervals']} of {result.variant.interval_s:g} s, "
        f"{summary['intervals_forfeited']} below {result.variant.forfeit_below:g} (forfeited)",
    ]
    if errors is not None:
        verdict = "passes" if errors.passed else "fails"
        lines += [
            f"nRMSE        {errors.nrmse:.4f} of capacity (mean error {errors.bias:+.4f}, 95 % of errors below "
            f"{errors.p95:.4f})",
            f"30 % rule    {100 * errors.share_within:.1f} % of the time within 30 % of capacity ({verdict} 90 %)",
        ]
    return "\n".join([*lines, f"samples      {samples}, one every {period_s:g} s"])
