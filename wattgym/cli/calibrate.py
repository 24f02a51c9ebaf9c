"""`wattgym hw calibrate`: a plant profile from a sweep of the limits while the jobs train."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wattgym.envs.profile import JobProfile


def calibrate(
    out: Annotated[Path, typer.Option(help="File for the profile, YAML; the samples go beside it, CSV.")],
    backend: Annotated[str | None, typer.Option(help="simulated or nvml; default: simulated.")] = None,
    device: Annotated[
        list[str] | None, typer.Option(help="One per job: UUID, index, cuda:N; simulated: PRESET:N, PRESET:N@SEED.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Training jobs; default: one per device, else 2.")] = None,
    job: Annotated[str | None, typer.Option(help="lora (SmolLM2), tiny, or a job's YAML file; default: lora.")] = None,
    live: Annotated[Path | None, typer.Option(help="The whole live plant as YAML (see configs/live).")] = None,
    actuator: Annotated[
        str | None, typer.Option(help="auto, power_limit, locked_clocks or duty_cycle; default: auto.")
    ] = None,
    arm: Annotated[bool, typer.Option("--arm", help="Really write to GPUs; WATTGYM_ARM=1 is needed too.")] = False,
    minutes: Annotated[float, typer.Option(help="Length of the sweep.")] = 5.0,
    limits: Annotated[int, typer.Option(help="Limits per job, evenly spaced.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the order of limits.")] = 0,
) -> None:
    """Measure power and speed at each limit, delay, sensor and phases of the jobs; write a profile of the plant.

    Moves the devices' limits, so real ones need --arm. They are given back at the end, on Ctrl-C too; an interrupted
    calibration writes nothing.
    """
    import tempfile

    from tqdm import tqdm

    from wattgym.agents.deploy_plan import DeployOptions, plan_jobs, plan_plant
    from wattgym.cli.stopping import terminable
    from wattgym.config import parse_config
    from wattgym.envs.live.calibration import PERIOD_S, RULES, CalibrationPlan
    from wattgym.envs.live.calibration import calibrate as run_calibration
    from wattgym.envs.live.plant import LivePlant
    from wattgym.files import check_folder

    plan = parse_config(CalibrationPlan, {"minutes": minutes, "limits": limits, "seed": seed}, "calibrate")
    _ = plan.dwell_s  # a plan that is too short shows before jobs have loaded
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
    with terminable(), tempfile.TemporaryDirectory(prefix="wattgym-calibrate-") as folder:
        config = plan_plant(options, plan_jobs(options), Path(folder))
        # What is about to be measured must not be presumed.
        config = config.model_copy(update={"profile": None})
        with (
            LivePlant(config, PERIOD_S, RULES, Path(folder), "wattgym hw calibrate") as plant,
            tqdm(total=plan.repeats * plan.limits, unit="limit", desc="calibrate") as bar,
        ):
            result = run_calibration(
                plant, plan, command=shlex.join(sys.argv), progress=lambda done, _: bar.update(done - bar.n)
            )
    samples = result.save(out)
    for j, measured in enumerate(result.profile.jobs):
        typer.echo(f"job {j}: {_summary(measured)}")
        for limit, power, power_sd, speed, speed_sd in zip(
            measured.limit_w,
            measured.power_w,
            measured.power_sd_w,
            measured.throughput,
            measured.throughput_sd,
            strict=True,
        ):
            typer.echo(f"  {limit:7.1f} W limit  {power:7.1f} ± {power_sd:.1f} W  speed {speed:.3f} ± {speed_sd:.3f}")
    error = result.profile.held_out
    if error is not None:
        typer.echo(
            f"held-out error over {error.dwells} dwells: power {100 * error.power:.2f} %, "
            f"throughput {100 * error.throughput:.2f} %"
        )
    typer.echo(f"profile: {out}; samples: {samples}")


def _summary(job: JobProfile) -> str:
    return (
        f"{job.n_gpus} x {job.device or job.gpu}, {job.model}, by {job.actuator}: "
        f"{job.full_samples_per_s:.2f} samples/s at full speed, half-way {1000 * job.delay_s:.0f} ms after a command, "
        f"sensor every {1000 * job.sensor_period_s:.0f} ms with gain {job.sensor_gain:.3f}"
    )
