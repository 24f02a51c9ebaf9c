"""`wattgym deploy`: run a controller on a real training loop, on simulated or real devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def deploy(
    policy: Annotated[str, typer.Argument(help="Policy bundle, or a baseline by name, for example 'PI'.")],
    signal: Annotated[str, typer.Option(help="Signal to follow: family, trace id or file.")] = "regd",
    duration: Annotated[str, typer.Option(help="How long: 90s, 10m, 2h, or seconds.")] = "10m",
    start: Annotated[float, typer.Option(help="Where in the signal to begin, seconds.")] = 0.0,
    backend: Annotated[str | None, typer.Option(help="simulated or nvml; default: simulated.")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Device of one more job: UUID, index, cuda:N; simulated: PRESET:N.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Training jobs; default: what the bundle controls, else 2.")] = None,
    job: Annotated[str | None, typer.Option(help="lora (SmolLM2), tiny, or a job's YAML file; default: lora.")] = None,
    live: Annotated[Path | None, typer.Option(help="The whole live plant as YAML (see configs/live).")] = None,
    actuator: Annotated[
        str | None, typer.Option(help="auto, power_limit, locked_clocks or duty_cycle; default: auto.")
    ] = None,
    arm: Annotated[bool, typer.Option("--arm", help="Really write to GPUs; WATTGYM_ARM=1 is needed too.")] = False,
    period: Annotated[float | None, typer.Option(help="Control period of a baseline, seconds; default: 2.")] = None,
    knobs: Annotated[
        str | None, typer.Option(help="What a baseline may set beside the limit, by commas, for example duty_cycle.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then run the same jobs uncapped for as long, as a baseline.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(help="Losses beside an uncontrolled run: 'run' trains the same samples, or an earlier folder."),
    ] = None,
    log: Annotated[str, typer.Option(help="Log of every tick: csv, or parquet (made of the CSV at the end).")] = "csv",
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/deploy-<policy>-<time>.")] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Locks, saved limits, audit log; default: of `wattgym hw`; simulated: in the run folder."),
    ] = None,
) -> None:
    """Run a controller on a live training loop; Ctrl-C, SIGTERM and crashes give the devices back."""
    from wattgym.agents.deploy import deploy as run_deployment
    from wattgym.agents.deploy_plan import DeployOptions
    from wattgym.cli.knob_option import parse_knobs

    options = DeployOptions(
        policy=policy,
        signal=signal,
        duration=duration,
        start_s=start,
        backend=backend,
        devices=tuple(device or ()),
        jobs=jobs,
        job=job,
        live=live,
        actuator=actuator,
        arm=arm,
        period_s=period,
        knobs=() if knobs is None else parse_knobs(knobs),
        compare=compare,
        reference=reference,
        log=log,
        out=out,
        state_dir=state_dir,
    )
    code = run_deployment(options)
    if code:
        raise typer.Exit(code)
