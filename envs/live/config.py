"""Configuration of a live plant."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.hw.limits import CommandRules
from wattgym.hw.preflight import GuardConfig
from wattgym.live.config import JobConfig


class LiveJob(FrozenModel):
    """One training job and the devices it runs on.

    Attributes:
        devices: Device addresses (`wattgym.hw.open`): UUID, index or `cuda:N`; simulated: `PRESET:N`. With `nvml`
            there is one for each rank of the fine-tune.
        training: The fine-tune.
        surface: Response surface that describes the job until it is calibrated; also how a simulated cap slows it.
        pace: Share of this machine's free speed that counts as the job's full speed. Several jobs on one CPU need a
            pace below 1, so that one job's throttling doesn't speed up another.
    """

    devices: tuple[str, ...] = Field(min_length=1)
    training: JobConfig = Field(default_factory=JobConfig)
    surface: str = "h100-sxm/assumed/compute_bound"
    pace: float = Field(default=1.0, gt=0.0, le=1.0)


class LiveConfig(FrozenModel):
    """A live plant.

    Attributes:
        backend: Where devices live.
        actuator: What carries out commands; `auto` takes the first that this process may use.
        arm: First key to real writes; the second is the environment variable `WATTGYM_ARM=1`. Simulated devices
            need neither.
        jobs: Jobs, in the order of actions.
        profile: Calibrated profile; the jobs' surfaces if None.
        start_timeout_s: How long jobs may take to load and to show their speed.
        state_dir: Folder for locks, saved limits and the audit log, and for simulated devices. None: the default
            folder of `wattgym hw`; simulated devices then live and die with this process.
        guard: How strict the guards are; the command rules are the environment's.
        hold_s: How long the last command is held while nobody controls (a learner updates, say), seconds. After that
            and the guards' lease the devices are given back.
    """

    backend: Literal["simulated", "nvml"] = "simulated"
    actuator: Literal["auto", "power_limit", "locked_clocks", "duty_cycle"] = "auto"
    arm: bool = False
    jobs: tuple[LiveJob, ...] = Field(min_length=1)
    profile: str | None = None
    start_timeout_s: float = Field(default=300.0, gt=0.0)
    state_dir: str | None = None
    guard: GuardConfig = Field(default_factory=GuardConfig)
    hold_s: float = Field(default=120.0, gt=0.0)

    @model_validator(mode="after")
    def _usable(self) -> LiveConfig:
        if self.guard.rules != CommandRules():
            raise ValueError("guard.rules would not be read: the environment's rules are in force")
        if self.backend == "nvml":
            for j, job in enumerate(self.jobs):
                if len(job.devices) != job.training.ranks:
                    raise ValueError(
                        f"job {j} has {len(job.devices)} devices for {job.training.ranks} rank(s), each of which runs "
                        f"on one GPU: set training.ranks to {len(job.devices)}, or make one job per GPU"
                    )
                if job.training.device == "cpu":
                    raise ValueError(f"job {j} trains on the CPU, so the GPU it is given would idle: device 'cuda'")
        return self
