"""`wattgym federate`: a live federated fine-tune whose sites a policy selects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wattgym.federated.config import FederationConfig
    from wattgym.federated.engine import Engine

ENGINES = ("local", "process", "flower")
FLOWER = "flower"


def federate(
    sites: Annotated[Path, typer.Option(help="Federation file: sites, model, data, links (docs/federated.md).")],
    policy: Annotated[str, typer.Option(help="Selector by name, or the folder of a bundle or a training run.")],
    rounds: Annotated[int, typer.Option(help="Rounds at most.")] = 50,
    engine: Annotated[
        str, typer.Option(help="local (all in this process), process (one process a site) or flower.")
    ] = "process",
    out: Annotated[Path, typer.Option(help="Run folder, new or empty, or that of the run to resume.")] = Path(
        "runs/federated"
    ),
    seed: Annotated[int, typer.Option(help="Seed of what the emulated federation draws.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    join_s: Annotated[float, typer.Option(help="Longest wait for the sites, seconds.")] = 600.0,
    superlink: Annotated[
        str | None, typer.Option(help="flower: HOST:PORT of a running SuperLink instead of one on this machine.")
    ] = None,
    ca_certificate: Annotated[
        Path | None, typer.Option(help="flower: certificate of the authority that signed the SuperLink's.")
    ] = None,
) -> None:
    """Fine-tune a language model over sites that a policy selects round by round; Ctrl-C stops after the round."""
    from wattgym.errors import UserError
    from wattgym.federated.config import load_federation
    from wattgym.federated.policy import live_selector

    if engine not in ENGINES:
        raise UserError(f"--engine {engine}: valid are {', '.join(ENGINES)}")
    if engine != "flower" and (superlink is not None or ca_certificate is not None):
        raise UserError("--superlink and --ca-certificate go with --engine flower")
    config = load_federation(sites)
    live_selector(policy)
    if rounds < 1:
        raise UserError(f"--rounds {rounds}: valid is 1 or more")
    if not resume and _site_folder(out).exists():
        raise UserError(f"{_site_folder(out)}: holds the sites of an earlier run; choose another --out, or --resume it")
    if engine == "flower":
        _over_flower(config, policy, rounds, seed, sites, out, resume, join_s, superlink, ca_certificate)
        return
    from wattgym.cli.stopping import terminable
    from wattgym.federated.runner import run

    with terminable(), _engine(engine, config, out) as carrier:
        result = run(carrier, config, policy, rounds, out, seed=seed, resume=resume, join_s=join_s)
    _show_fleet(out)
    if result.stopped:
        typer.echo(f"stopped; go on with --resume --out {out}")
    if result.report is not None:
        typer.echo(f"adapter: {out / 'adapter'}; report: {result.report}")
    if result.stopped:
        raise typer.Exit(130)


def _show_fleet(out: Path) -> None:
    """Writes and tells what the sites drew together, where they followed signals."""
    if not _site_folder(out).is_dir():
        return
    from wattgym.federated.fleet import FLEET_FIGURE, read_fleet, write_fleet

    fleet = read_fleet(_site_folder(out))
    if fleet is None:
        return
    errors = write_fleet(fleet, out)
    typer.echo(
        f"fleet of {len(fleet.power_w)} sites over {errors['seconds']:.0f} s: power {100 * errors['fleet']:.1f} % off "
        f"the sum of targets (sites {100 * errors['sites_mean']:.1f} %); {out / FLEET_FIGURE}"
    )


def _site_folder(out: Path) -> Path:
    """Where the sites of a run on this machine keep their state: beside the run, which is the aggregator's."""
    return out.parent / f"{out.name}-sites"


def _engine(name: str, config: FederationConfig, out: Path) -> Engine:
    if name == "local":
        from wattgym.federated.in_process import InProcessEngine

        return InProcessEngine(config, _site_folder(out))
    from wattgym.federated.processes import ProcessEngine

    return ProcessEngine(config, _site_folder(out))


def _over_flower(
    config: FederationConfig,
    policy: str,
    rounds: int,
    seed: int,
    sites: Path,
    out: Path,
    resume: bool,
    join_s: float,
    superlink: str | None,
    ca_certificate: Path | None,
) -> None:
    """Runs the loop inside Flower's server app; trainers of a loopback run are processes of this machine."""
    from wattgym.errors import UserError
    from wattgym.federated.flower import require_flower

    require_flower()
    from wattgym.cli.stopping import terminable
    from wattgym.federated.flower.deploy import run_loopback, run_remote
    from wattgym.federated.processes import ProcessEngine
    from wattgym.federated.site.client import SOCKET_FILE

    settings: dict[str, str | int | float | bool] = {
        "federation": str(sites.absolute()),
        "policy": str(Path(policy).absolute()) if Path(policy).is_dir() else policy,
        "rounds": rounds,
        "seed": seed,
        "out": str(out.absolute()),
        "resume": resume,
        "join-s": join_s,
    }
    folder = _site_folder(out)
    with terminable():
        if superlink is not None:
            if ca_certificate is None:
                raise UserError("--superlink needs --ca-certificate: connections are encrypted")
            run_remote(superlink, ca_certificate, folder / FLOWER, settings, typer.echo)
            return
        with ProcessEngine(config, folder) as trainers:
            sockets = {name: folder.absolute() / name / SOCKET_FILE for name in config.names}
            run_loopback(sockets, folder / FLOWER, settings, typer.echo, watch=trainers.members)
