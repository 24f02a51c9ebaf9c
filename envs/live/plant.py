"""The live plant: training jobs in processes of their own, on devices behind guards, in wall-clock time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wattgym.envs.emulator.draw import GRID
from wattgym.envs.live.actuators import (
    Actuator,
    ClockActuator,
    DutyActuator,
    JobKnobs,
    PowerLimitActuator,
    choose_actuator,
    open_guards,
)
from wattgym.envs.live.config import LiveConfig, LiveJob
from wattgym.envs.live.coupling import CoupledJob, Coupling
from wattgym.envs.live.fit import fitted_profile
from wattgym.envs.live.sample import JobSample
from wattgym.envs.plant import FloatArray, PlantSpec, Telemetry
from wattgym.envs.profile import ActuatorKind, JobProfile, nominal_profile
from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceReading
from wattgym.hw.energy import EnergyMeter
from wattgym.hw.guard import Guard
from wattgym.hw.limits import CommandRules
from wattgym.hw.open import open_devices
from wattgym.hw.poller import DevicePoller
from wattgym.hw.simulated import SimulatedDevice
from wattgym.hw.telemetry import GuardTelemetry
from wattgym.live.channel import JobState, JobStatus, progress
from wattgym.live.handle import JobHandle

WARM_UP_STEPS = 3
"""Optimiser steps after which a job's free speed is taken as known."""


class JobDiedError(UserError):
    """A training process ended while it was controlled; the devices have been given back."""


@dataclass
class TickStatistics:
    """How punctual the plant was.

    Attributes:
        lateness_s: How much after its due time each period ended, seconds.
        missed: Whole periods that passed unobserved.
    """

    lateness_s: list[float]
    missed: int = 0


class _MeteredDevice:
    """A guarded device whose every reading also goes into an energy meter; what the poller reads."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.meter = EnergyMeter()
        self._lock = threading.Lock()
        self._metered = float("nan"), -float("inf")

    def info(self) -> object:
        return self.guard.info

    def read(self) -> DeviceReading:
        reading = self.guard.read()
        with self._lock:
            self.meter.add(reading)
            # The counter advances when the sensor publishes, not when it is read.
            self._metered = self.meter.energy_j, reading.t_s - (reading.age_s or 0.0)
        return reading

    def metered(self) -> tuple[float, float]:
        """Energy since the first reading (J), and the time up to which it counts (s)."""
        with self._lock:
            return self._metered


@dataclass(eq=False)
class _Job:
    """One running job with everything around it."""

    config: LiveJob
    handle: JobHandle
    knobs: JobKnobs
    profile: JobProfile
    devices: list[_MeteredDevice]
    actuator: Actuator
    full_samples_per_s: float
    status: JobStatus
    energy_j: float = 0.0
    read_at_s: float = 0.0


class LivePlant:
    """Real training jobs under power control; a batch of one site. Use it as a context manager.

    Commands are carried out by a thread of their own, so that a slow setter never delays a period; the last command
    that a guard let through stays in force until the next. A period ends on the wall clock's grid; if the controller
    came late, the lateness is recorded, and whole periods that passed meanwhile are counted and skipped.
    """

    def __init__(
        self, config: LiveConfig, period_s: float, rules: CommandRules, folder: Path, policy: str = ""
    ) -> None:
        """Prepares; nothing is started or written before the first reset.

        Args:
            config: Jobs and devices.
            period_s: Control period, seconds.
            rules: Command rules of the guards.
            folder: Run folder of the jobs (one sub-folder each).
            policy: Who commands, for the guards' log.
        """
        self._config = config
        self._period_s = period_s
        self._rules = rules
        self._folder = folder
        self._policy = policy
        self._jobs: list[_Job] = []
        self._guards: list[Guard] = []
        self._opened: list[Device] = []
        self._poller: DevicePoller | None = None
        self._coupling: Coupling | None = None
        self._commands: queue.Queue[FloatArray | None] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._decisions = np.zeros((1, len(config.jobs)), dtype=np.int64)
        self._spec: PlantSpec | None = None
        self._start_s = 0.0
        self._tick = 0
        self.ticks = TickStatistics([])
        self.actuator: tuple[ActuatorKind, str] | None = None

    def __enter__(self) -> LivePlant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spec(self) -> PlantSpec:
        """Nominal description: the calibrated profile, or the jobs' response surfaces."""
        if self._spec is None:
            raise RuntimeError("the plant has not been started; call reset first")
        return self._spec

    @property
    def guards(self) -> tuple[GuardTelemetry, ...]:
        """Telemetry of every guard."""
        return tuple(guard.telemetry for guard in self._guards)

    @property
    def job_status(self) -> tuple[JobStatus, ...]:
        """Status of every job, as it is now."""
        return tuple(job.handle.status() for job in self._jobs)

    @property
    def profiles(self) -> tuple[JobProfile, ...]:
        """What is known of each job: calibrated, or nominal."""
        return tuple(job.profile for job in self._jobs)

    def sample(self) -> tuple[JobSample, ...]:
        """Every job as it is now; does not wait and changes nothing."""
        return tuple(self._sample(job) for job in self._jobs)

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Starts jobs and devices the first time; every time, a new episode begins at the present moment.

        Args:
            rngs: One generator; a live plant draws nothing from it.

        Raises:
            UserError: A device, model or data file cannot be used; whatever was started is stopped again.
        """
        if len(rngs) != 1:
            raise UserError(f"a live plant is one site; got {len(rngs)} seeds")
        if not self._jobs:
            try:
                self._start()
            except BaseException:
                self.close()
                raise
        self._tick = 0
        self._start_s = time.monotonic()
        for job in self._jobs:
            self._observe(job)
        return self._telemetry([self._observe(job) for job in self._jobs])

    def apply(self, limit_w: FloatArray) -> None:
        """Hands a command to the worker; a command that is still waiting is replaced by it."""
        self._check_alive()
        try:
            while True:
                self._commands.get_nowait()
        except queue.Empty:
            self._commands.put(limit_w[0].copy())

    def advance(self) -> Telemetry:
        """Waits for the period's end and reports it.

        Raises:
            JobDiedError: A training process has ended; the devices have been given back.
        """
        now_s = time.monotonic()
        due_s = self._start_s + (self._tick + 1) * self._period_s
        missed = int(max(now_s - due_s, 0.0) // self._period_s)
        self._tick += 1 + missed
        self.ticks.missed += missed
        due_s += missed * self._period_s
        # A job's death ends the wait; so does nothing else, because meters are read on the grid.
        while (left_s := due_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, 0.1))
            self._check_alive()
        self.ticks.lateness_s.append(time.monotonic() - due_s)
        for guard in self._guards:
            guard.heartbeat()
        return self._telemetry([self._observe(job) for job in self._jobs])

    def close(self) -> None:
        """Gives the devices back and stops the jobs; harmless when repeated."""
        if self._worker is not None:
            self._commands.put(None)
            self._worker.join(timeout=5.0)
            self._worker = None
        if self._coupling is not None:
            self._coupling.stop()
            self._coupling = None
        errors: list[UserError] = []
        for guard in self._guards:
            try:
                guard.close()
            except UserError as error:
                errors.append(error)
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        for job in self._jobs:
            job.handle.close()
        for device in self._opened:
            device.close()
        self._jobs, self._guards, self._opened = [], [], []
        if errors:
            raise errors[0]

    def _start(self) -> None:
        config = self._config
        simulated = config.backend == "simulated"
        by_job: list[list[Device]] = []
        for job in config.jobs:
            devices = open_devices(job.devices, config.backend)
            self._opened += devices
            by_job.append(devices)
        self._guards = open_guards(
            self._opened, arm=config.arm, simulated=simulated, rules=self._rules, policy=self._policy
        )
        kind, why = choose_actuator(config.actuator, self._guards)
        self.actuator = kind, why
        guards = iter(self._guards)
        coupled: list[CoupledJob] = []
        handles = [JobHandle.start(job.training, self._folder / f"job{j}") for j, job in enumerate(config.jobs)]
        for j, (job, handle, devices) in enumerate(zip(config.jobs, handles, by_job, strict=True)):
            own = [next(guards) for _ in devices]
            knobs = JobKnobs(handle, job.pace)
            profile = fitted_profile(config, j, own[0].info, kind)
            self._jobs.append(
                _Job(
                    config=job,
                    handle=handle,
                    knobs=knobs,
                    profile=profile,
                    devices=[_MeteredDevice(guard) for guard in own],
                    actuator=self._actuator(kind, own, knobs, profile),
                    full_samples_per_s=0.0,
                    status=handle.status(),
                )
            )
            if simulated:
                boards = [device for device in devices if isinstance(device, SimulatedDevice)]
                surface = nominal_profile(job.surface, len(devices))
                coupled.append(CoupledJob(handle, knobs, boards, surface, kind))
        if coupled:
            self._coupling = Coupling(coupled)
            self._coupling.start()
        metered: list[object] = [device for job in self._jobs for device in job.devices]
        self._poller = DevicePoller(metered)  # type: ignore[arg-type]
        self._poller.poll_once()
        self._poller.start()
        self._wait_for_speed()
        self._spec = self._describe()
        self._worker = threading.Thread(target=self._carry_out, name="wattgym-actuator", daemon=True)
        self._worker.start()

    def _actuator(self, kind: ActuatorKind, guards: list[Guard], knobs: JobKnobs, profile: JobProfile) -> Actuator:
        if kind == "power_limit":
            return PowerLimitActuator(guards, profile)
        if kind == "locked_clocks":
            return ClockActuator(guards, profile, self._rules, self._period_s)
        return DutyActuator(knobs, profile, self._rules, self._period_s)

    def _wait_for_speed(self) -> None:
        """Waits until every job trains, and takes its speed without waiting as the one to compare with."""
        deadline_s = time.monotonic() + self._config.start_timeout_s
        for j, job in enumerate(self._jobs):
            while (status := job.handle.status()).steps < WARM_UP_STEPS or status.free_step_time_s is None:
                self._check_alive()
                if time.monotonic() > deadline_s:
                    raise UserError(
                        f"job {j} made {status.steps} steps within {self._config.start_timeout_s:g} s (phase "
                        f"{status.phase.name.lower()}); raise start_timeout_s or take a smaller model"
                    )
                for guard in self._guards:
                    guard.heartbeat()
                time.sleep(0.05)
            free = status.samples_per_update / status.free_step_time_s * job.config.pace
            job.full_samples_per_s = job.knobs.full_samples_per_s = job.profile.full_samples_per_s or free

    def _describe(self) -> PlantSpec:
        grid = np.linspace(0.0, 1.0, GRID)
        low = np.array([job.actuator.low_w for job in self._jobs])
        high = np.array([job.actuator.high_w for job in self._jobs])
        limits = low[:, None] + grid * (high - low)[:, None]
        power = np.stack([job.profile.power_at(row) for job, row in zip(self._jobs, limits, strict=True)])
        speed = np.stack([job.profile.throughput_at(row) for job, row in zip(self._jobs, limits, strict=True)])
        return PlantSpec(
            period_s=self._period_s,
            n_gpus=np.array([[job.profile.n_gpus for job in self._jobs]]),
            min_limit_w=low[None],
            max_limit_w=high[None],
            limit_grid=grid,
            power_table_w=power[None],
            throughput_table=speed[None],
            host_w=np.zeros(1),
        )

    def _carry_out(self) -> None:
        """The actuator thread: carries out the newest command, one at a time."""
        while (command := self._commands.get()) is not None:
            decisions = [job.actuator.apply(float(watts)) for job, watts in zip(self._jobs, command, strict=True)]
            self._decisions = np.array([decisions])

    def _observe(self, job: _Job) -> tuple[float, float, float, int, float]:
        """Sensor power (W), meter power (W), progress, phase and age (s) since the last observation."""
        sample = self._sample(job)
        status, sensor_w, energy_j = sample.status, sample.sensor_w, sample.energy_j
        done = progress(job.status, status)
        elapsed_s = max(status.heartbeat_s - job.status.heartbeat_s, 1e-3)
        metered_s = sample.metered_s - job.read_at_s
        meter_w = (energy_j - job.energy_j) / metered_s if metered_s > 0 else sensor_w
        job.status, job.energy_j, job.read_at_s = status, energy_j, sample.metered_s
        speed = done.samples / elapsed_s / max(job.full_samples_per_s, 1e-9)
        return sensor_w, meter_w, speed, int(status.phase), sample.age_s

    def _sample(self, job: _Job) -> JobSample:
        assert self._poller is not None
        now_s = time.monotonic()
        metered = [device.metered() for device in job.devices]
        readings = [self._poller.latest(device.guard.info.uuid).reading for device in job.devices]
        watts = [reading.power_w if reading else None for reading in readings]
        published_s = [at_s for _, at_s in metered]
        return JobSample(
            t_s=now_s,
            age_s=now_s - min(published_s),
            sensor_w=sum(np.nan if power_w is None else power_w for power_w in watts),
            energy_j=sum(energy_j for energy_j, _ in metered),
            # Devices publish at times of their own; what they drew together belongs to the middle of those.
            metered_s=sum(published_s) / len(published_s),
            limit_w=job.actuator.limit_w,
            status=job.handle.status(),
        )

    def _telemetry(self, rows: list[tuple[float, float, float, int, float]]) -> Telemetry:
        sensor, meter, speed, phase, age = (np.array([column]) for column in zip(*rows, strict=True))
        return Telemetry(
            tick=self._tick,
            sensor_w=sensor,
            # Where no meter tells (a board without a counter, before two samples), the sensor stands in.
            meter_w=np.where(np.isfinite(meter), meter, sensor),
            host_w=np.zeros(1),
            throughput=speed,
            phase=phase.astype(np.int64),
            limit_w=np.array([[job.actuator.limit_w for job in self._jobs]]),
            age_s=age.max(axis=1),
            decisions=self._decisions,
        )

    def _check_alive(self) -> None:
        for j, job in enumerate(self._jobs):
            status = job.handle.status()
            if status.state is JobState.FAILED:
                self.close()
                raise JobDiedError(f"job {j} died: {status.error}; the devices have been given back")
