"""`wattgym gap`: the same scenario on the calibrated emulator and on the live plant, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wattgym.agents.gap import Gap


def gap(
    policy: Annotated[str, typer.Argument(help="Policy bundle, or a baseline by name, for example 'PI'.")],
    profile: Annotated[Path, typer.Option(help="Profile of the plant, made by `wattgym hw calibrate`.")],
    signal: Annotated[str, typer.Option(help="Signal to follow: family, trace id or file.")] = "regd",
    duration: Annotated[str, typer.Option(help="How long: 90s, 10m, 2h, or seconds.")] = "10m",
    start: Annotated[float, typer.Option(help="Where in the signal to begin, seconds.")] = 0.0,
    backend: Annotated[str | None, typer.Option(help="simulated or nvml; default: simulated.")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="One per job: UUID, index, cuda:N; simulated: PRESET:N, PRESET:N@SEED.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="lora (SmolLM2), tiny, or a job's YAML file; default: lora.")] = None,
    live: Annotated[Path | None, typer.Option(help="The whole live plant as YAML (see configs/live).")] = None,
    actuator: Annotated[
        str | None, typer.Option(help="auto, power_limit, locked_clocks or duty_cycle; default: auto.")
    ] = None,
    arm: Annotated[bool, typer.Option("--arm", help="Really write to GPUs; WATTGYM_ARM=1 is needed too.")] = False,
    seeds: Annotated[int, typer.Option(help="Runs of the emulator.", min=1)] = 20,
    variant: Annotated[str, typer.Option(help="Rules of the PJM score; see docs/scores.md.")] = "legacy",
    out: Annotated[Path | None, typer.Option(help="File for the figures, JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run one controller on emulator and live plant; print scores, throughput and energy with their differences."""
    import json
    import tempfile

    from tqdm import tqdm

    from wattgym.agents import gap as gaps
    from wattgym.agents.deploy_plan import DeployOptions, plan_deployment
    from wattgym.cli.stopping import terminable
    from wattgym.envs.live.plant import LivePlant
    from wattgym.envs.profile import load_profile
    from wattgym.files import atomic_write_json, check_folder
    from wattgym.metrics.pjm import pjm_variant

    rules = pjm_variant(variant)
    calibrated = load_profile(profile)
    if out is not None:
        check_folder(out.parent)
    with terminable(), tempfile.TemporaryDirectory(prefix="wattgym-gap-") as folder:
        options = DeployOptions(
            policy=policy,
            signal=signal,
            duration=duration,
            start_s=start,
            backend=backend,
            devices=tuple(device or ()),
            jobs=None if live else len(device or calibrated.jobs),
            job=job,
            live=live,
            actuator=actuator,
            arm=arm,
            out=Path(folder) / "live",
        )
        plan = plan_deployment(options)
        scenario = gaps.gap_scenario(plan.env, str(profile))
        controller = plan.controller
        emulated = gaps.emulate(controller, scenario, range(seeds))
        config = plan.live.model_copy(update={"profile": str(profile)})
        with (
            LivePlant(
                config,
                scenario.period_s,
                scenario.rules,
                plan.folder,
                f"wattgym gap {policy}",
                scenario.action.knobs,
            ) as plant,
            tqdm(total=scenario.ticks, unit="tick", desc="live") as bar,
        ):
            rollout = gaps.run_live(controller, scenario, plant, watch=lambda tick: bar.update(tick.tick - bar.n))
            found = gaps.compare(controller.name, signal, emulated, rollout, range(seeds), plant, rules)
    if out is not None:
        atomic_write_json(out, found.to_json())
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        _print(found)


def _print(found: Gap) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from wattgym.agents.gap import AIMS

    def text(value: float | None, sign: str = "") -> str:
        return "—" if value is None else f"{value:{sign}.3g}"

    table = Table(
        title=f"{found.controller} on {found.signal}, {found.duration_s:g} s", box=SIMPLE_HEAD, padding=(0, 0, 0, 1)
    )
    for title in ("", "emulator", "live", "differs", "in %", "aim"):
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    for row in found.rows:
        spread = "" if row.emulated_sd is None else f" ± {row.emulated_sd:.2g}"
        relative = "—" if row.relative is None else f"{100 * row.relative:+.1f}"
        aim = ""
        if row.metric.name in AIMS:
            bound, is_relative = AIMS[row.metric.name]
            verdict = {True: "met", False: "missed", None: "—"}[row.within_aim]
            aim = f"{f'{100 * bound:g} %' if is_relative else f'{bound:g}'} {verdict}"
        unit = "" if row.metric.unit == "1" else f", {row.metric.unit}"
        table.add_row(
            row.metric.title + unit,
            text(row.emulated) + spread,
            text(row.live),
            text(row.difference, "+"),
            relative,
            aim,
        )
    Console().print(table)
    typer.echo(
        f"emulator: {len(found.seeds)} seeds, mean ± standard deviation; live: one run, ticks late by at most "
        f"{found.lateness_p99_ms:.0f} ms in 99 % of cases, {found.missed} missed"
    )
    if found.rows[0].live is None:
        typer.echo("the regulation score needs a longer run; take --duration 10m or more")
