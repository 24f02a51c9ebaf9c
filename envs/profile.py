"""What is known of a plant's jobs: measured by a calibration, or nominal from a response surface.

The same profile describes a live plant to its controller and builds an emulator of it.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from wattgym.config import FrozenModel, parse_config, read_yaml
from wattgym.envs.emulator.batch_form import ASSUMED_MICRO_BATCH, ASSUMED_SAMPLES, formed, spaced_divisors
from wattgym.envs.emulator.phases import PhaseFamily
from wattgym.envs.plant import FloatArray
from wattgym.errors import UserError
from wattgym.files import atomic_write_text
from wattgym.hw.presets import gpu_preset

SCHEMA_VERSION = 1

ActuatorKind = Literal["power_limit", "locked_clocks", "duty_cycle"]


class MeasuredKnobs(FrozenModel):
    """What knobs beside the limit were measured to do (`wattgym profile`).

    Attributes:
        micro_batch: Micro-batches, from the largest (neutral) down.
        power_w: Mean power per GPU at each micro-batch and each limit of the profile, W.
        throughput: Training speed likewise, relative to the largest micro-batch at the highest limit.
        idle_w: Power per GPU while the job is paused, W; the board's preset if None.
        comm_share: Share of a synchronous step spent in communication; an assumption stands in if None.
        straggler_share: Share of a synchronous step that ranks wait for the slowest, likewise.
        switch_s: Training time that a change of micro-batch, active GPUs or local steps costs, seconds; what the
            emulator is configured with stands in if None.
    """

    micro_batch: tuple[int, ...] = Field(min_length=1)
    power_w: tuple[tuple[float, ...], ...]
    throughput: tuple[tuple[float, ...], ...]
    idle_w: float | None = Field(default=None, ge=0.0)
    comm_share: float | None = Field(default=None, ge=0.0, le=0.9)
    straggler_share: float | None = Field(default=None, ge=0.0, le=0.9)
    switch_s: float | None = Field(default=None, ge=0.0)

    @model_validator(mode="after")
    def _consistent(self) -> MeasuredKnobs:
        sizes = self.micro_batch
        if min(sizes) < 1 or any(b >= a for a, b in itertools.pairwise(sizes)):
            raise ValueError(f"micro_batch must descend and be at least 1, got {sizes}")
        for name in ("power_w", "throughput"):
            table = getattr(self, name)
            if len(table) != len(sizes) or any(min(row, default=0.0) <= 0.0 for row in table):
                raise ValueError(f"{name} needs a row of values above 0 for each of the {len(sizes)} micro-batches")
        return self


class JobProfile(FrozenModel):
    """One job on its devices.

    A limit is what the controller commands, in watts per GPU, whatever the actuator makes of it: a power limit is
    written as it is; clocks and duty are set to what draws about as much.

    Attributes:
        gpu: Preset of the board (`wattgym.hw.presets`).
        n_gpus: GPUs of the job.
        actuator: What carries out commands.
        device: Name that the devices report; empty where nothing was measured.
        model: Model that was trained; empty where nothing was measured.
        samples_per_update: Samples of an optimiser step of that training.
        default_limit_w: Limit that the command rules' fractions are of, W per GPU; the highest if None.
        limit_w: Limits at which the job was measured, ascending, W per GPU.
        power_w: Mean power per GPU while computing, W.
        throughput: Training speed relative to the highest limit.
        power_sd_w: Standard deviation of the power at each limit, W; how far a plant may be off.
        throughput_sd: Standard deviation of the throughput, likewise.
        full_samples_per_s: Training speed at the highest limit, samples/s of the whole job.
        delay_s: Time from a command until the draw has moved half-way.
        sensor_period_s: Time between publications of the sensor.
        sensor_window_s: Time that a reading is the mean of.
        sensor_gain: Sensor's power over the meter's.
        phases: Phases measured on the job; the fitted families are used if None.
        micro_batch: Samples of one pass that the job was measured with; all of the update if None.
        knobs: What other knobs do; assumptions with a form stand in if None.
    """

    gpu: str
    n_gpus: int = Field(ge=1)
    actuator: ActuatorKind = "power_limit"
    device: str = ""
    model: str = ""
    samples_per_update: int | None = Field(default=None, ge=1)
    default_limit_w: float | None = Field(default=None, gt=0.0)
    limit_w: tuple[float, ...] = Field(min_length=2)
    power_w: tuple[float, ...]
    throughput: tuple[float, ...]
    power_sd_w: tuple[float, ...] = ()
    throughput_sd: tuple[float, ...] = ()
    full_samples_per_s: float | None = Field(default=None, gt=0.0)
    delay_s: float = Field(default=0.0, ge=0.0)
    sensor_period_s: float = Field(default=0.1, gt=0.0)
    sensor_window_s: float = Field(default=0.1, gt=0.0)
    sensor_gain: float = Field(default=1.0, gt=0.0)
    phases: PhaseFamily | None = None
    micro_batch: int | None = Field(default=None, ge=1)
    knobs: MeasuredKnobs | None = None

    @model_validator(mode="after")
    def _consistent(self) -> JobProfile:
        n = len(self.limit_w)
        for name in ("power_w", "throughput", "power_sd_w", "throughput_sd"):
            values = getattr(self, name)
            if len(values) not in ((0, n) if name.endswith(("sd", "sd_w")) else (n,)):
                raise ValueError(f"{name} has {len(values)} values for {n} limits")
            if any(v < 0 for v in values):
                raise ValueError(f"{name} holds a negative value")
        for name in ("limit_w", "power_w", "throughput"):
            if not min(getattr(self, name)) > 0:
                raise ValueError(f"{name} must be above 0 throughout")
        gpu_preset(self.gpu)
        if any(b <= a for a, b in zip(self.limit_w, self.limit_w[1:], strict=False)):
            raise ValueError(f"limit_w must ascend, got {self.limit_w}")
        if self.knobs is not None:
            self._knobs_fit(self.knobs)
        return self

    def _knobs_fit(self, knobs: MeasuredKnobs) -> None:
        for name in ("power_w", "throughput"):
            if any(len(row) != len(self.limit_w) for row in getattr(knobs, name)):
                raise ValueError(f"knobs.{name} needs {len(self.limit_w)} values a row, one for each limit")
        samples = self.samples_per_update
        if samples is not None and (wrong := [size for size in knobs.micro_batch if samples % size]):
            raise ValueError(f"knobs.micro_batch {wrong[0]} does not divide samples_per_update {samples}")

    @property
    def idle_w(self) -> float:
        """Power per GPU while nothing works but the job is loaded, W."""
        if self.knobs is not None and self.knobs.idle_w is not None:
            return self.knobs.idle_w
        return gpu_preset(self.gpu).context_idle_w.value

    @property
    def full_power_w(self) -> float:
        """Power per GPU at the highest limit, W."""
        return self.power_w[-1]

    @property
    def rules_default_w(self) -> float:
        """Limit that the command rules' fractions are of, W per GPU."""
        return self.limit_w[-1] if self.default_limit_w is None else self.default_limit_w

    def check_fits(self, where: str, **found: object) -> None:
        """Refuses a profile that was measured on something else.

        Args:
            where: The profile's place, for the message.
            found: What the plant has by the name of the profile's field; fields that the profile leaves empty fit.

        Raises:
            UserError: A field differs; the message names it.
        """
        for name, value in found.items():
            measured = getattr(self, name)
            if measured not in ("", None) and measured != value:
                raise UserError(f"{where}: {name} is {measured!r}, the plant's is {value!r}; calibrate again")

    def power_at(self, limit_w: FloatArray) -> FloatArray:
        """Power of the whole job at limits per GPU, linear between the measured ones, W."""
        return self.n_gpus * np.interp(limit_w, self.limit_w, self.power_w)

    def throughput_at(self, limit_w: FloatArray) -> FloatArray:
        """Throughput at limits per GPU, linear between the measured ones."""
        return np.interp(limit_w, self.limit_w, self.throughput)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Micro-batches that the job may have, from the largest (neutral) down."""
        if self.knobs is not None:
            return self.knobs.micro_batch
        samples = self.samples_per_update
        if samples is None:
            return tuple(spaced_divisors(ASSUMED_SAMPLES, ASSUMED_MICRO_BATCH))
        return tuple(spaced_divisors(samples, self.micro_batch or samples))

    def at_micro_batch(self, size: int, limit_w: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Power per GPU and throughput at limits per GPU with one of the micro-batches."""
        sizes = self.micro_batches
        if self.knobs is not None:
            row = sizes.index(size)
            power, speed = np.array(self.knobs.power_w[row]), np.array(self.knobs.throughput[row])
        elif size == sizes[0]:
            power, speed = np.array(self.power_w), np.array(self.throughput)
        else:
            own = (np.array(values) for values in (self.limit_w, self.power_w, self.throughput))
            power, speed = formed(size / sizes[0], self.idle_w, *own)
        return np.interp(limit_w, self.limit_w, power), np.interp(limit_w, self.limit_w, speed)


class HeldOut(FrozenModel):
    """Mean absolute error of predicted measurements, as a share of the measured value.

    Attributes:
        dwells: Measurements predicted, over all jobs.
        power: Error of the power.
        throughput: Error of the throughput.
    """

    dwells: int = Field(ge=1)
    power: float = Field(ge=0.0)
    throughput: float = Field(ge=0.0)


class PlantProfile(FrozenModel):
    """All jobs of a plant.

    Attributes:
        schema_version: Version of this form.
        made_by: Command that wrote it.
        held_out: How well a fit of some of the measurements predicts the others.
        jobs: The jobs, in the order of actions.
    """

    schema_version: int = SCHEMA_VERSION
    made_by: str = ""
    held_out: HeldOut | None = None
    jobs: tuple[JobProfile, ...] = Field(min_length=1)


def load_profile(path: str | Path) -> PlantProfile:
    """Reads a profile.

    Raises:
        UserError: The file is missing, of another schema version, or does not fit.
    """
    data = read_yaml(path)
    if isinstance(data, dict) and data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {data.get('schema_version')!r}, this WattGym reads version {SCHEMA_VERSION}"
        )
    return parse_config(PlantProfile, data, str(path))


def save_profile(profile: PlantProfile, path: str | Path) -> None:
    """Writes a profile, or leaves an old file untouched.

    Raises:
        UserError: The operating system refused.
    """
    import yaml

    atomic_write_text(path, yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))


def nominal_profile(surface_id: str, n_gpus: int, actuator: ActuatorKind = "power_limit") -> JobProfile:
    """A job as its response surface describes it; for a duty cycle, between idle and full power.

    Raises:
        UserError: The surface is unknown.
    """
    from wattgym.envs.emulator.surfaces import surface_library

    surface = surface_library().get(surface_id)
    preset = gpu_preset(surface.gpu)
    if actuator == "power_limit":
        default_w: float | None = preset.limits_w.default
        low = max(surface.cap_min_w, preset.limits_w.min)
        limit = np.linspace(low, min(surface.cap_max_w, preset.limits_w.max), 17)
        power, throughput = surface.tabulate(limit)
    else:
        default_w = None
        full, idle = float(surface.power_w[-1]), preset.context_idle_w.value
        share = np.linspace(0.2, 1.0, 9)
        limit = idle + share * (full - idle)
        power, throughput = limit, share
    return JobProfile(
        gpu=surface.gpu,
        n_gpus=n_gpus,
        actuator=actuator,
        default_limit_w=default_w,
        limit_w=tuple(limit.tolist()),
        power_w=tuple(power.tolist()),
        throughput=tuple(throughput.tolist()),
    )
