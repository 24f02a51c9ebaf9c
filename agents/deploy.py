"""`wattgym deploy`, step by step: settle everything, look at everything, run, give back, report."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from wattgym.agents.deploy_plan import Deployment, DeployOptions, plan_deployment
from wattgym.agents.deploy_report import REPORT, compare_losses, write_losses, write_reports
from wattgym.agents.deployment import LiveRun, Tick, composite
from wattgym.agents.fallback import FallbackController
from wattgym.agents.live_view import live_view
from wattgym.agents.tick_log import TickLog, convert_to_parquet
from wattgym.envs.live.plant import LivePlant
from wattgym.errors import UserError
from wattgym.live.handle import JobHandle
from wattgym.runs import RunFolder

KIND = "deployment"
TICKS = "ticks.csv"
UNCAPPED, REFERENCE = "uncapped", "reference"

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Ending:
    """How a run ended.

    Attributes:
        code: Exit code.
        signal: The signal that ended it.
        error: The error that ended it.
    """

    code: int = 0
    signal: int = 0
    error: UserError | None = None


def deploy(options: DeployOptions) -> int:
    """Runs a controller on a live plant from beginning to end.

    Args:
        options: What the command line says.

    Returns:
        Exit code: 0 where all went well, 1 where control was lost on the way, 128 + N after signal N.

    Raises:
        UserError: Something cannot be used (nothing was written then), or a job died; what had been logged by then
            stays, the report is of it, and the run is marked as failed.
    """
    deployment = plan_deployment(options)
    folder = RunFolder.create(deployment.folder, deployment.config(), KIND, seed=0)
    ending = Ending()
    uncapped = None
    try:
        run = _controlled(deployment, deployment.controller, deployment.folder, ending, deployment.controller.name)
        if options.compare and not ending.code and ending.error is None:
            print("now the same jobs uncapped, for as long", flush=True)
            uncapped = _controlled(deployment, deployment.uncapped(), deployment.folder / UNCAPPED, ending, "uncapped")
    except BaseException:
        folder.set_status("failed")
        raise
    lost = run.control_lost
    if ending.error is None and not ending.code and lost:
        ending.code = 1
    folder.set_status("failed" if ending.error or ending.code == 1 else "interrupted" if ending.code else "finished")
    try:
        _report(deployment, run, uncapped, ending)
    except UserError as error:
        ending.error = ending.error or error  # what ended the run matters more than what could not be told of it
    if lost:
        print(f"control was lost: {lost}", file=sys.stderr)
    if ending.error is not None:
        raise ending.error
    return ending.code


def _controlled(
    deployment: Deployment, controller: FallbackController, folder: Path, ending: Ending, name: str
) -> LiveRun:
    """One run of all jobs under one controller; however it ends, the devices are given back and the log is whole."""
    env, live = deployment.env_for(controller), deployment.live
    folder.mkdir(parents=True, exist_ok=True)
    plant = LivePlant(live, env.period_s, env.rules, folder, name, env.action.knobs)
    run = LiveRun(controller, env, plant)
    title = f"{name} on {len(live.jobs)} job(s), {live.backend} devices"
    print(f"{title}: loading", flush=True)
    with TickLog(folder / TICKS) as log, stoppable(plant, ending):
        try:
            with live_view(title, env.ticks) as show:

                def watch(tick: Tick) -> None:
                    log.write(tick.row())
                    show(tick)

                run.run(_announce, watch)
        except UserError as error:
            ending.error = error
        except KeyboardInterrupt:
            ending.code = 128 + (ending.signal or signal.SIGINT)
        finally:
            try:
                plant.close()
            except UserError as error:
                ending.error = ending.error or error
    if log.lost:
        print(f"{log.lost} rows of {folder / TICKS} were lost: the disk refused them", file=sys.stderr)
    return run


def _announce(run: LiveRun) -> None:
    kind, why = run.plant.actuator or ("", "")
    print(f"actuator: {kind} ({why})")
    spec = run.plant.spec
    print(
        f"site: {spec.floor_w[0]:.0f} to {spec.full_w[0]:.0f} W, {run.env.ticks} periods of {run.env.period_s:g} s",
        flush=True,
    )


@contextlib.contextmanager
def stoppable(plant: LivePlant, ending: Ending) -> Iterator[None]:
    """Lets the first signal end the run in good order; the second one doesn't wait for that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if ending.signal:
            raise KeyboardInterrupt
        ending.signal = number
        plant.interrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(deployment: Deployment, run: LiveRun, uncapped: LiveRun | None, ending: Ending) -> None:
    """Everything that is worked out after the devices have been given back."""
    folder, jobs = deployment.folder, len(deployment.live.jobs)
    provenance = _provenance(deployment, run, ending)
    if run.ticks and ending.error is None:
        reference = _reference(deployment, run, uncapped)
        if reference is not None:
            comparisons = compare_losses(folder, reference, jobs)
            write_losses(comparisons, folder)
            provenance["training loss beside an uncontrolled run's"] = [found.summary() for found in comparisons]
            for found in comparisons:
                print(_loss_line(found.summary()))
    if deployment.log == "parquet" and run.ticks:
        convert_to_parquet(folder / TICKS)
    if write_reports(deployment.controller.name, run, uncapped, folder, provenance):
        last = run.ticks[-1]
        print(f"{last.tick} of {run.env.ticks} periods, nRMSE {last.nrmse:.3f}, {_score(run)}")
        print(f"fallbacks: {_fallbacks(run)}; late by {_lateness(run)}; {last.missed} periods missed")
        print(f"report: {folder / REPORT}")
    if ending.code > 1:
        print("interrupted; the devices have been given back", file=sys.stderr)


def _reference(deployment: Deployment, run: LiveRun, uncapped: LiveRun | None) -> Path | None:
    """Folder of an uncontrolled run of the same jobs, made now if that was asked for."""
    if deployment.reference == "run":
        folder = deployment.folder / REFERENCE
        print("training the same samples without control", flush=True)
        handles: list[JobHandle] = []
        try:
            for j, (job, tick) in enumerate(zip(deployment.live.jobs, run.ticks[-1].jobs, strict=True)):
                if tick.steps:
                    training = job.training.model_copy(update={"max_steps": tick.steps})
                    handles.append(JobHandle.start(training, folder / f"job{j}"))
            for handle in handles:
                handle.wait()
        finally:
            for handle in handles:
                handle.close()
        return folder
    if deployment.reference is not None:
        return Path(deployment.reference)
    return deployment.folder / UNCAPPED if uncapped is not None and uncapped.ticks else None


def _score(run: LiveRun) -> str:
    rollout = run.rollout()
    value = composite(rollout, run.variant) if rollout is not None else None
    return "no PJM score (the run is too short)" if value is None else f"PJM composite {value:.3f}"


def _loss_line(found: dict[str, Any]) -> str:
    if not found["samples"]:
        return f"job {found['job']}: no step that both runs have made"
    return (
        f"job {found['job']}: loss {found['loss']:.4f} after {found['samples']} samples, uncontrolled "
        f"{found['uncontrolled']:.4f}, largest difference {found['largest_difference']:.2g}"
    )


def _fallbacks(run: LiveRun) -> str:
    counts = run.controller.counts if isinstance(run.controller, FallbackController) else {}
    return ", ".join(f"{reason} {count}" for reason, count in counts.items()) or "none"


def _lateness(run: LiveRun) -> str:
    ordered = sorted(tick.lateness_ms for tick in run.ticks)
    return f"{ordered[int(0.99 * (len(ordered) - 1))]:.1f} ms at most in 99 % of periods"


def _provenance(deployment: Deployment, run: LiveRun, ending: Ending) -> dict[str, Any]:
    from wattgym.runs import git_state, installed_versions

    git = git_state()
    kind, why = run.plant.actuator or ("none", "the plant did not start")
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "ended": str(ending.error or ("interrupted" if ending.code else "as planned")),
        "machine": f"{os.uname().sysname} {os.uname().machine}, {os.cpu_count()} CPUs",
        "finished at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "actuator": f"{kind} ({why})",
        "control lost": run.control_lost or "never",
        "fallbacks": _fallbacks(run),
        "missed periods": run.plant.ticks.missed,
        "failed commands": run.plant.ticks.failed_commands,
        "guards": [guard.as_dict() for guard in run.plant.guards],
        "jobs": [vars(job) for job in run.ticks[-1].jobs] if run.ticks else [],
        "deployment": deployment.config(),
        "versions": installed_versions(),
    }
