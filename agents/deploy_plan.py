"""What a deployment is made of, settled and looked at before anything is started or written."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wattgym.agents.baselines import (
    BASELINES,
    ENERGY_MATCHED,
    LIMIT_ONLY,
    ORACLES,
    make_baseline,
    needs,
    usable,
)
from wattgym.agents.bundle import Bundle, BundleController, Contract, is_bundle, load_bundle
from wattgym.agents.fallback import FallbackConfig, FallbackController
from wattgym.config import load_config, parse_config
from wattgym.envs.config import ActionConfig, PowerShapingConfig
from wattgym.envs.knobs import KnobName
from wattgym.envs.live.access import check_devices
from wattgym.envs.live.config import LiveConfig, LiveJob
from wattgym.envs.live.knobs import check_knobs
from wattgym.envs.observation import ObservationLayout
from wattgym.envs.shaping import configured_signal
from wattgym.errors import UserError
from wattgym.files import check_folder
from wattgym.live.config import DataConfig, JobConfig, ModelConfig
from wattgym.live.handle import preflight
from wattgym.runs import RUN_FILE

CPU_SHARE = 0.9
"""Simulated devices: all jobs at full speed together need this much of one CPU core."""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_UNIT_S = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class DeployOptions:
    """What the command line says; see `wattgym deploy --help`."""

    policy: str
    signal: str = "regd"
    duration: str = "10m"
    start_s: float = 0.0
    backend: str | None = None
    devices: tuple[str, ...] = ()
    jobs: int | None = None
    job: str | None = None
    live: Path | None = None
    actuator: str | None = None
    arm: bool = False
    period_s: float | None = None
    knobs: tuple[KnobName, ...] = ()
    compare: bool = False
    reference: str | None = None
    log: str = "csv"
    out: Path | None = None
    state_dir: Path | None = None


@dataclass(frozen=True, eq=False)
class Deployment:
    """A settled deployment.

    Attributes:
        controller: Who acts, with its fallback.
        env: Environment; its episode is the run.
        live: The plant.
        folder: Run folder.
        reference: Where losses of an uncontrolled run come from: `run`, a folder, or None.
        log: Form of the log.
        policy: What was asked for.
    """

    controller: FallbackController
    env: PowerShapingConfig
    live: LiveConfig
    folder: Path
    reference: str | None
    log: Literal["csv", "parquet"]
    policy: str

    def config(self) -> dict[str, Any]:
        """Plain values for the run folder."""
        return {
            "policy": self.policy,
            "env": self.env.model_dump(mode="json"),
            "live": self.live.model_dump(mode="json"),
            "fallback": FallbackConfig().model_dump(mode="json"),
        }

    def uncapped(self) -> FallbackController:
        """The controller that never limits anything."""
        return FallbackController(make_baseline("uncapped"))

    def env_for(self, controller: FallbackController) -> PowerShapingConfig:
        """The environment; a baseline commands limits directly, whatever actions mean to the policy."""
        return self.env if controller is self.controller else self.env.model_copy(update={"action": ActionConfig()})


def plan_deployment(options: DeployOptions) -> Deployment:
    """Settles a deployment and looks at everything that can be looked at before it starts; writes nothing.

    Raises:
        UserError: Something is missing or cannot be used; the message says what.
    """
    seconds = duration_s(options.duration)
    bundle = _bundle(options.policy, options.knobs)
    env = _environment(options, bundle, seconds)
    folder = options.out or Path("runs") / f"deploy-{_slug(options.policy)}-{time.strftime('%Y%m%d-%H%M%S')}"
    live = plan_plant(options, env.site.jobs, folder)
    if len(live.jobs) != env.site.jobs:
        owner = f"{options.policy} controls" if bundle else "--jobs asks for"
        raise UserError(f"{options.live}: has {len(live.jobs)} jobs, {owner} {env.site.jobs}")
    if bundle is not None:
        _check_contract(bundle, env)
    check_knobs(live, env.action.knobs)
    if options.log not in ("csv", "parquet"):
        raise UserError(f"--log {options.log}: valid are csv and parquet")
    if options.reference not in (None, "run") and not Path(options.reference or "").is_dir():
        raise UserError(f"--reference {options.reference}: neither 'run' nor a folder of an earlier deployment")
    configured_signal(env)
    for job in live.jobs:
        preflight(job.training)
    check_devices(live)
    check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder}: folder is not empty; choose another one")
    controller = BundleController(bundle) if bundle is not None else make_baseline(options.policy)
    log: Literal["csv", "parquet"] = "parquet" if options.log == "parquet" else "csv"
    return Deployment(FallbackController(controller), env, live, folder, options.reference, log, options.policy)


def duration_s(text: str) -> float:
    """Seconds of `90s`, `10m`, `2h` or plain seconds.

    Raises:
        UserError: It is none of these.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNIT_S[found[2]] if found else 0.0
    if seconds <= 0.0:
        raise UserError(f"--duration {text}: expected a positive time such as 90s, 10m or 2h")
    return seconds


def _bundle(policy: str, beside: tuple[KnobName, ...]) -> Bundle | None:
    """The bundle, or None for a baseline, which may set some knobs beside the limit."""
    if policy in BASELINES:
        if policy == ENERGY_MATCHED:
            raise UserError(f"'{policy}' needs a controller to match, which a live run does not have")
        if policy in ORACLES:
            raise UserError(f"'{policy}' must be told the future, which nobody knows of a live run")
        if not usable(policy, (*LIMIT_ONLY, *beside)):
            raise UserError(f"'{policy}' needs {' and '.join(needs(policy))}; name it with --knobs")
        return None
    if beside:
        raise UserError(f"--knobs is for baselines; {policy} sets the knobs that it was trained with")
    if is_bundle(policy):
        return load_bundle(policy)
    if (Path(policy) / RUN_FILE).is_file():
        raise UserError(f"{policy}: a training run; make a bundle of it first: wattgym export {policy} --out bundle")
    known = ", ".join(name for name in BASELINES if name not in (ENERGY_MATCHED, *ORACLES))
    raise UserError(f"{policy}: neither a policy bundle nor a baseline; baselines: {known}")


def _environment(options: DeployOptions, bundle: Bundle | None, seconds: float) -> PowerShapingConfig:
    signal: dict[str, Any] = {"trace": options.signal, "start_s": options.start_s}
    if bundle is not None:
        if options.period_s not in (None, bundle.manifest.contract.period_s):
            raise UserError(
                f"--period {options.period_s:g}: {options.policy} was trained for {bundle.manifest.contract.period_s:g}"
            )
        if options.jobs not in (None, bundle.manifest.contract.jobs):
            raise UserError(f"--jobs {options.jobs}: {options.policy} controls {bundle.manifest.contract.jobs} jobs")
        trained = dict(bundle.manifest.training.config.get("env", {}))
        offers = trained.get("signal", {}).get("offers", {})
        data = trained | {"signal": signal | {"offers": offers}, "episode_s": seconds}
        return parse_config(PowerShapingConfig, data, options.policy)
    jobs = plan_jobs(options)
    action = {"knobs": (*LIMIT_ONLY, *options.knobs)}
    site, period_s = {"jobs": jobs}, options.period_s or 2.0
    data = {"signal": signal, "episode_s": seconds, "site": site, "period_s": period_s, "action": action}
    return parse_config(PowerShapingConfig, data, "deploy")


def plan_jobs(options: DeployOptions) -> int:
    """How many jobs the options ask for, where no bundle says it.

    Raises:
        UserError: The plant's file cannot be used.
    """
    if options.jobs is not None:
        return options.jobs
    return len(load_config(LiveConfig, options.live).jobs) if options.live else max(len(options.devices), 2)


def plan_plant(options: DeployOptions, jobs: int, folder: Path) -> LiveConfig:
    """The live plant that the options describe.

    Args:
        options: What the command line says.
        jobs: Jobs of the plant, where no file says it.
        folder: Run folder, beside which simulated devices keep their state.

    Raises:
        UserError: The options exclude each other, or a file cannot be used.
    """
    if options.live is not None:
        if options.job or options.devices:
            raise UserError("--live says everything about the jobs; it excludes --job and --device")
        data = load_config(LiveConfig, options.live).model_dump(mode="json")
    else:
        backend = options.backend or "simulated"
        devices = options.devices or tuple(
            f"h100-sxm:{j}" if backend == "simulated" else f"cuda:{j}" for j in range(jobs)
        )
        if len(devices) != jobs:
            raise UserError(f"{len(devices)} devices for {jobs} jobs: give --device once for each job")
        training = _training(options.job or "lora", small=backend == "simulated")
        pace = min(CPU_SHARE / jobs, 1.0) if backend == "simulated" else 1.0
        data = {
            "jobs": [
                LiveJob(devices=(name,), training=training.model_copy(update={"seed": j}), pace=pace).model_dump(
                    mode="json"
                )
                for j, name in enumerate(devices)
            ]
        }
    for key, value in (("backend", options.backend), ("actuator", options.actuator)):
        if value is not None:
            data[key] = value
    if options.arm:
        data["arm"] = True
    if options.state_dir is not None:
        data["state_dir"] = str(options.state_dir)
    elif data.get("state_dir") is None and data.get("backend", "simulated") == "simulated":
        # Beside the run, so that watchdog, audit log and `wattgym hw restore` work as they do on real devices.
        data["state_dir"] = str(folder / "devices")
    return parse_config(LiveConfig, data, str(options.live or "deploy"))


def _training(name: str, *, small: bool) -> JobConfig:
    if name == "tiny":
        # A step takes some hundredths of a second: evaluation and checkpoint come about once a minute, as in real jobs.
        return JobConfig(
            model=ModelConfig(source="tiny"),
            samples_per_update=4,
            micro_batch=1,
            evaluate_every=1000,
            checkpoint_every=1000,
        )
    if name == "lora":
        if not small:
            return JobConfig(samples_per_update=32, micro_batch=8, evaluate_every=100)
        data = DataConfig(max_tokens=128, holdout=4)
        return JobConfig(data=data, samples_per_update=4, micro_batch=1, evaluate_every=25, checkpoint_every=25)
    if not Path(name).suffix:
        raise UserError(f"--job {name}: expected lora, tiny or a YAML file")
    return load_config(JobConfig, name)


def _check_contract(bundle: Bundle, env: PowerShapingConfig) -> None:
    contract = Contract.of(env, ObservationLayout.of(env))
    found = bundle.manifest.contract.difference(contract)
    if found is not None:
        field, wanted, shown = found
        raise UserError(f"{bundle.folder}: the plant's {field} is {shown!r}, the policy needs {wanted!r}")


def _slug(policy: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(policy).name).strip("-").lower()
