"""Configuration of a live plant."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.live.config import JobConfig


class LiveJob(FrozenModel):
    """One training job and the devices it runs on.

    Attributes:
        devices: Device addresses (`wattgym.hw.open`): UUID, index or `cuda:N`; simulated: `PRESET:N`.
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
        start_timeout_s: How long jobs may take to load.
    """

    backend: Literal["simulated", "nvml"] = "simulated"
    actuator: Literal["auto", "power_limit", "locked_clocks", "duty_cycle"] = "auto"
    arm: bool = False
    jobs: tuple[LiveJob, ...] = Field(min_length=1)
    profile: str | None = None
    start_timeout_s: float = Field(default=300.0, gt=0.0)
