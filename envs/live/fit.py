"""Which profile describes a live job: a calibrated one that must be of this job, or a nominal one."""

from __future__ import annotations

from wattgym.envs.live.config import LiveConfig, LiveJob
from wattgym.envs.profile import ActuatorKind, JobProfile, load_profile, nominal_profile
from wattgym.errors import UserError
from wattgym.hw.device import DeviceInfo


def fitted_profile(config: LiveConfig, j: int, info: DeviceInfo, kind: ActuatorKind) -> JobProfile:
    """The profile of job `j`.

    Args:
        config: The live plant.
        j: Number of the job.
        info: The job's first device.
        kind: What carries out its commands.

    Raises:
        UserError: The configured profile cannot be read or was measured on something else; the message names the field.
    """
    job = config.jobs[j]
    nominal = nominal_profile(job.surface, len(job.devices), kind)
    identity = _identity(job, nominal, info)
    if config.profile is not None:
        jobs = load_profile(config.profile).jobs
        if len(jobs) != len(config.jobs):
            raise UserError(f"{config.profile}: jobs: describes {len(jobs)} jobs, the plant has {len(config.jobs)}")
        jobs[j].check_fits(f"{config.profile}: jobs.{j}", **identity)
        return jobs[j]
    if kind == "power_limit" and info.default_limit_mw is not None:
        identity["default_limit_w"] = info.default_limit_mw / 1000.0
    if info.power_window_s is not None:
        identity["sensor_window_s"] = info.power_window_s
    return nominal.model_copy(update=identity)


def _identity(job: LiveJob, nominal: JobProfile, info: DeviceInfo) -> dict[str, object]:
    """What a profile says of the job that it was measured on."""
    return {
        "gpu": nominal.gpu,
        "n_gpus": len(job.devices),
        "actuator": nominal.actuator,
        "device": info.name,
        "model": job.training.model.title,
        "samples_per_update": job.training.samples_per_update,
        "micro_batch": job.training.micro_batch,
    }
