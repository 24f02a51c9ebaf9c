"""`wattgym federated`: federated fine-tuning runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(name="federated", help="Federated fine-tuning runs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Federated fine-tuning runs."""


@app.command()
def fit(
    rounds: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders of `wattgym federate`, best several with different numbers of sites; or rounds as CSV or "
            "JSON lines: round (0 = before training), loss, sites [run, work]."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Profile for `learning.profile` of a site-selection configuration.")],
    check: Annotated[
        list[Path] | None, typer.Option(help="Another run to hold the fit against; may be repeated.")
    ] = None,
) -> None:
    """Fit the emulator's learning model to recorded federated runs."""
    import math

    from wattgym.envs.federation.fit import fit_learning

    table, noise_scale = _read_runs(rounds)
    others = [(path, _read_rounds(path)[0]) for path in check or ()]
    result = fit_learning(table, ", ".join(map(str, rounds)), noise_scale)
    held_out = [(path, result.rms_on(other, str(path))) for path, other in others]
    result.save(out)
    profile, spread = result.profile, result.sd_log
    for name in ("s0", "beta", "phi"):
        value, factor = getattr(profile, name), math.exp(1.96 * spread[name])
        note = "" if name != "phi" or result.phi_identified else f"  ({_phi_note(noise_scale)})"
        typer.echo(f"{name:12} {value:10.4f}  95 % {value / factor:.4f} to {value * factor:.4f}{note}")
    typer.echo(
        f"early slope  {result.early_slope:10.4f}  per effective site-round (s0 and beta trade off against each other)"
    )
    typer.echo(f"loss         {profile.loss_start:10.4f}  at the start, floor {profile.loss_floor:.4f}")
    if noise_scale is not None:
        typer.echo(f"noise scale  {noise_scale:10.4f}  sites, from the norms of their deltas (median over rounds)")
    typer.echo(f"rms of the log residual over {result.rounds} rounds: {result.rms_log_residual:.4f}; profile: {out}")
    for path, rms in held_out:
        typer.echo(f"rms of the log residual on {path}, which was not fitted: {rms:.4f}")


def _phi_note(noise_scale: float | None) -> str:
    source = "the prior's" if noise_scale is None else "that of the deltas"
    return f"{source}: the number of sites never varied"


@app.command()
def credentials(
    sites: Annotated[Path, typer.Argument(help="Federation file that names the sites.")],
    out: Annotated[Path, typer.Option(help="New folder for certificates and keys.")],
    host: Annotated[
        list[str], typer.Option(help="Name or address under which sites reach the SuperLink; may be repeated.")
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the certificates last.")] = 365,
) -> None:
    """Make the TLS certificates and site keys of a Flower deployment on several hosts."""
    from datetime import timedelta

    from wattgym.config import load_config
    from wattgym.federated.config import FederationConfig
    from wattgym.federated.flower import require_flower

    require_flower()
    from wattgym.federated.flower.credentials import create

    made = create(out, host, load_config(FederationConfig, sites).names, timedelta(days=days))
    typer.echo(f"to the SuperLink's host: {made.ca_certificate}, {made.certificate}, {made.key}, {out}/sites/*.pub")
    typer.echo(f"to each site, and to nobody else: {made.ca_certificate} and its own {out}/sites/NAME")
    typer.echo(f"{out}/ca.key signs new certificates: keep it offline")


def _read_runs(paths: list[Path]) -> tuple[Any, float | None]:
    """All rounds as one table, each path's runs apart, and the median of the measured noise scales.

    Raises:
        UserError: One cannot be read, or is no table.
    """
    import statistics

    import pandas as pd

    from wattgym.envs.federation.fit import check_rounds

    found = [_read_rounds(path) for path in paths]
    tables = []
    for number, (path, (table, _)) in enumerate(zip(paths, found, strict=True)):
        check_rounds(table, str(path))
        own = table["run"].astype(str) if "run" in table else ""
        tables.append(table.assign(run=f"{number} " + own, work=table.get("work", 1.0)))
    scales = [scale for _, scale in found if scale is not None]
    return pd.concat(tables, ignore_index=True), statistics.median(scales) if scales else None


def _read_rounds(path: Path) -> tuple[Any, float | None]:
    """The table of a run folder or a file, and the measured noise scale, where there is one.

    Raises:
        UserError: It cannot be read, or is no table.
    """
    import pandas as pd

    from wattgym.errors import UserError

    if path.is_dir():
        from wattgym.federated.rounds_table import rounds_table

        return rounds_table(path)
    try:
        if path.suffix in (".jsonl", ".ndjson"):
            return pd.read_json(path, lines=True), None
        return pd.read_csv(path), None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path}: no CSV or JSON lines: {' '.join(str(error).split())}") from None
