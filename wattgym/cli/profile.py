"""`wattgym profile`: a table of what each setting of the knobs does to power and throughput of a plant's jobs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from wattgym.agents.deploy_plan import DeployOptions
    from wattgym.envs.knobs import KnobName
    from wattgym.envs.profile import JobProfile
    from wattgym.envs.profiling import ProfilePlan, Sweep


def profile(
    out: Annotated[Path, typer.Option(help="File for the profile, YAML; table (CSV) and figure (SVG) go beside it.")],
    config: Annotated[Path | None, typer.Option(help="A run's file: profile its emulated site.")] = None,
    backend: Annotated[str | None, typer.Option(help="Live plant: simulated or nvml; default: simulated.")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="Live plant, one per job: see 'wattgym hw calibrate'.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Live plant: training jobs; default: one per device, else 2.")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Live plant: lora (SmolLM2), tiny, or a job's YAML file.")] = None,
    live: Annotated[Path | None, typer.Option(help="The whole live plant as YAML (see configs/live).")] = None,
    actuator: Annotated[
        str | None, typer.Option(help="Live plant: auto, power_limit, locked_clocks or duty_cycle.")
    ] = None,
    arm: Annotated[bool, typer.Option("--arm", help="Really write to GPUs; WATTGYM_ARM=1 is needed too.")] = False,
    knobs: Annotated[
        str | None, typer.Option(help="Knobs beside the limit, with commas; default: all that the plant has.")
    ] = None,
    limits: Annotated[int, typer.Option(help="Limits per job, evenly spaced.")] = 5,
    repeats: Annotated[int, typer.Option(help="Visits of each configuration.")] = 3,
    dwell: Annotated[float, typer.Option(help="Seconds measured at each visit.")] = 20.0,
    settle: Annotated[float, typer.Option(help="Seconds left out after each change.")] = 4.0,
    cross: Annotated[
        bool, typer.Option("--cross", help="Cross all knobs, not only limits with micro-batches.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the emulated site and of the order of visits.")] = 0,
) -> None:
    """Sweep the knobs of a plant's jobs: power and throughput of each configuration, their spread, the Pareto front.

    A live plant's devices are moved, so real ones need --arm; they are given back at the end, on Ctrl-C too. An
    interrupted sweep leaves the table of the visits that were made, but no profile.
    """
    from wattgym.agents.deploy_plan import DeployOptions
    from wattgym.cli.knob_option import parse_knobs
    from wattgym.config import parse_config
    from wattgym.envs.profiling import ProfilePlan
    from wattgym.errors import UserError
    from wattgym.files import check_folder

    names = None if knobs is None else parse_knobs(knobs)
    settings = {
        "limits": limits,
        "repeats": repeats,
        "dwell_s": dwell,
        "settle_s": settle,
        "cross": cross,
        "seed": seed,
    }
    plan = parse_config(ProfilePlan, settings, "profile")
    check_folder(out.parent)
    options = DeployOptions(
        policy="",
        backend=backend,
        devices=tuple(device or ()),
        jobs=len(device) if device and jobs is None else jobs,
        job=job,
        live=live,
        actuator=actuator,
        arm=arm,
    )
    wants_live = options != DeployOptions(policy="")
    if wants_live and config is not None:
        raise UserError("--config profiles an emulated site; it excludes the options of a live plant")
    if wants_live:
        _live(options, names, plan, out)
    else:
        _emulated(config, names, plan, out)


def _emulated(config: Path | None, knobs: Sequence[KnobName] | None, plan: ProfilePlan, out: Path) -> None:
    import numpy as np

    from wattgym.agents.config import TrainingConfig
    from wattgym.config import load_config
    from wattgym.envs.config import ActionConfig, PowerShapingConfig
    from wattgym.envs.emulator.emulator import Emulator
    from wattgym.envs.knobs import KNOBS
    from wattgym.envs.profiling import Sweep

    beside = KNOBS[1:] if knobs is None else tuple(knobs)
    env = load_config(TrainingConfig, config).env if config else PowerShapingConfig()
    env = env.model_copy(update={"action": ActionConfig(knobs=("power_limit", *beside))})
    plant = Emulator(env)
    plant.reset([np.random.default_rng(plan.seed)])
    sweep = Sweep(plant, beside, plan)
    _run(sweep, out)
    _save(sweep, plant.profiles, out)


def _live(options: DeployOptions, knobs: Sequence[KnobName] | None, plan: ProfilePlan, out: Path) -> None:
    import tempfile

    import numpy as np

    from wattgym.agents.deploy_plan import plan_jobs, plan_plant
    from wattgym.cli.stopping import terminable
    from wattgym.envs.knobs import KNOBS
    from wattgym.envs.live.calibration import PERIOD_S, RULES
    from wattgym.envs.live.plant import LivePlant
    from wattgym.envs.profiling import Sweep

    with terminable(), tempfile.TemporaryDirectory(prefix="wattgym-profile-") as folder:
        config = plan_plant(options, plan_jobs(options), Path(folder))
        # What is about to be measured must not be presumed.
        config = config.model_copy(update={"profile": None})
        parallel = all(job.training.ranks > 1 for job in config.jobs)
        found = (
            ("micro_batch", "active_gpus", "duty_cycle", "local_steps") if parallel else ("micro_batch", "duty_cycle")
        )
        beside = tuple(name for name in KNOBS if name in (found if knobs is None else knobs))
        with LivePlant(
            config, PERIOD_S, RULES, Path(folder), "wattgym profile", knobs=("power_limit", *beside)
        ) as plant:
            plant.reset([np.random.default_rng(plan.seed)])
            sweep = Sweep(plant, beside, plan)
            typer.echo(f"{sweep.visits} visits, about {sweep.seconds() / 60.0:.0f} minutes")
            _run(sweep, out)
            known = plant.profiles
            switch_s = [status.switch_s / status.switches if status.switches else None for status in plant.job_status]
    _save(sweep, known, out, switch_s)


def _run(sweep: Sweep, out: Path) -> None:
    from tqdm import tqdm

    try:
        with tqdm(total=sweep.visits, unit="visit", desc="profile") as bar:
            for done in sweep.run():
                bar.update(done - bar.n)
    except KeyboardInterrupt:
        if sweep.rows:
            path, _ = _write_table(sweep, out)
            typer.echo(f"interrupted; the visits so far are in {path}, no profile was written", err=True)
        raise typer.Exit(130) from None


def _write_table(sweep: Sweep, out: Path) -> tuple[Path, pd.DataFrame]:
    from wattgym.envs.profiling import table
    from wattgym.files import atomic_path

    found = table(sweep.rows)
    beside = out.with_name(f"{out.stem}.configurations.csv")
    with atomic_path(beside) as temporary:
        found.to_csv(temporary, index=False)
    return beside, found


def _save(
    sweep: Sweep, known: tuple[JobProfile, ...], out: Path, switch_s: Sequence[float | None] | None = None
) -> None:
    from wattgym.agents.knob_figures import profile_figure
    from wattgym.envs.profile import PlantProfile, save_profile
    from wattgym.envs.profile_fit import fitted_jobs
    from wattgym.files import atomic_write_text

    beside, found = _write_table(sweep, out)
    fitted = PlantProfile(made_by=shlex.join(sys.argv), jobs=fitted_jobs(known, found, switch_s))
    titles = [f"job {j}: {job.n_gpus} x {job.device or job.gpu}\n{job.model}" for j, job in enumerate(fitted.jobs)]
    figure = out.with_suffix(".svg")
    atomic_write_text(figure, profile_figure(found, titles))
    save_profile(fitted, out)
    for j, title in enumerate(titles):
        own = found[found["job"] == j]
        name = ", ".join(title.splitlines())
        typer.echo(f"{name}: {len(own)} configurations, {int(own['pareto'].sum())} on the front")
        for _, row in own[own["pareto"]].iterrows():
            typer.echo(
                f"  {row['power_w']:8.0f} ± {row['power_sd_w']:.0f} W  speed {row['throughput']:.3f} ± "
                f"{row['throughput_sd']:.3f}  limit {row['limit_w']:.0f} W, micro-batch {row['micro_batch']:.0f}, "
                f"{row['active_gpus']:.0f} GPU(s), duty {row['duty_cycle']:g}, local steps {row['local_steps']:.0f}"
            )
    typer.echo(f"profile: {out}; table: {beside}; figure: {figure}")
