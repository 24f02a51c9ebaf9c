"""The live plant: training jobs in processes of their own, on devices behind guards, in wall-clock time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from wattgym.envs.emulator.draw import GRID
from wattgym.envs.knobs import KnobName
from wattgym.envs.live.access import Access, close_guards, open_access
from wattgym.envs.live.actuators import Actuator, ClockActuator, DutyActuator, PowerLimitActuator
from wattgym.envs.live.config import LiveConfig, LiveJob
from wattgym.envs.live.coupling import CoupledJob, Coupling
from wattgym.envs.live.fit import fitted_profile
from wattgym.envs.live.job import JobDiedError as JobDiedError
from wattgym.envs.live.job import JobObservation, RunningJob, measure_full_speeds
from wattgym.envs.live.knobs import check_knobs, in_force, live_table, set_knobs
from wattgym.envs.live.meters import MeteredDevice
from wattgym.envs.live.pace import JobKnobs
from wattgym.envs.live.sample import JobSample
from wattgym.envs.plant import Command, FloatArray, PlantSpec, Telemetry
from wattgym.envs.profile import ActuatorKind, JobProfile, nominal_profile
from wattgym.errors import UserError
from wattgym.hw.guard import Guard
from wattgym.hw.limits import CommandRules
from wattgym.hw.poller import DevicePoller
from wattgym.hw.simulated import SimulatedDevice
from wattgym.hw.telemetry import GuardTelemetry
from wattgym.live.channel import JobStatus
from wattgym.live.handle import JobHandle

LOOK_S = 0.1
"""While a period passes, the plant looks this often whether it is to stop or a job has died."""


@dataclass
class TickStatistics:
    """How punctual the plant was.

    Attributes:
        lateness_s: How much after its due time each period ended, seconds.
        missed: Whole periods that passed unobserved.
        failed_commands: Commands that could not be carried out.
        last_failure: Why the last of them could not.
    """

    lateness_s: list[float] = field(default_factory=list)
    missed: int = 0
    failed_commands: int = 0
    last_failure: str = ""


class LivePlant:
    """Real training jobs under power control; a batch of one site. Use it as a context manager.

    Commands are carried out by a thread of their own, so that a slow setter never delays a period; the last command
    that was carried out stays in force until the next. A period ends on the grid of the monotonic clock, which no
    change of the date moves; if the controller came late, the lateness is recorded, and whole periods that passed
    meanwhile are counted and skipped.

    Attributes:
        ticks: How punctual it was.
        actuator: What carries out commands, and why that; None before the first reset.
        observations: What each job did in the last period.
    """

    def __init__(
        self,
        config: LiveConfig,
        period_s: float,
        rules: CommandRules,
        folder: Path,
        policy: str = "",
        knobs: Sequence[KnobName] = ("power_limit",),
    ) -> None:
        """Prepares; nothing is started or written before the first reset.

        Args:
            config: Jobs and devices.
            period_s: Control period, seconds.
            rules: Command rules of the guards.
            folder: Run folder of the jobs (one sub-folder each).
            policy: Who commands, for the guards' log.
            knobs: Knobs that commands set; the others are left as they are.

        Raises:
            UserError: A job does not have one of the knobs.
        """
        check_knobs(config, knobs)
        self._knobs = tuple(name for name in knobs if name != "power_limit")
        self._config = config
        self._period_s = period_s
        self._rules = rules
        self._folder = folder
        self._policy = policy
        self._access: Access | None = None
        self._handles: list[JobHandle] = []
        self._jobs: list[RunningJob] = []
        self._guards: tuple[Guard, ...] = ()
        self._poller: DevicePoller | None = None
        self._coupling: Coupling | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._no_decisions = np.zeros((1, len(config.jobs)), dtype=np.uint8)
        self._decisions = self._no_decisions
        self._spec: PlantSpec | None = None
        self._stop_reason = ""
        self._start_s = self._controlled_s = 0.0
        self._tick = 0
        self.ticks = TickStatistics()
        self.actuator: tuple[ActuatorKind, str] | None = None
        self.observations: tuple[JobObservation, ...] = ()

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
        """Telemetry of every guard; those of a closed plant stay."""
        return tuple(guard.telemetry for guard in self._guards)

    @property
    def job_status(self) -> tuple[JobStatus, ...]:
        """Status of every job, as it is now."""
        return tuple(job.handle.status() for job in self._jobs)

    @property
    def profiles(self) -> tuple[JobProfile, ...]:
        """What is known of each job: calibrated, or nominal; with the speed that counts as its full one."""
        return tuple(
            job.profile.model_copy(update={"full_samples_per_s": job.full_samples_per_s or None}) for job in self._jobs
        )

    def sample(self) -> tuple[JobSample, ...]:
        """Every job as it is now, between control periods; does not wait and changes nothing."""
        return tuple(job.sample() for job in self._jobs)

    def interrupt(self, reason: str) -> None:
        """Makes the call that waits for a period's end (or for jobs to load) raise `KeyboardInterrupt` soon.

        May be called from another thread or from a signal handler.
        """
        self._stop_reason = reason

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
        self._start_s = self._controlled_s = time.monotonic()
        self._decisions = self._no_decisions
        return self._telemetry()

    def apply(self, command: Command) -> None:
        """Hands a command to the worker; a command that is still waiting is replaced by it.

        Raises:
            UserError: A job cannot have the setting of a knob.
            JobDiedError: A training process has ended; the devices have been given back.
        """
        self._check()
        command = replace(command, limit_w=command.limit_w.copy())
        if self.spec.knobs is not None:
            command = self.spec.knobs.filled(command, self.spec.n_gpus)
        self._decisions = self._no_decisions
        try:
            while True:
                self._commands.get_nowait()
        except queue.Empty:
            self._commands.put(command)

    def advance(self) -> Telemetry:
        """Waits for the period's end and reports it.

        Raises:
            JobDiedError: A training process has ended; the devices have been given back.
            KeyboardInterrupt: `interrupt` was called.
        """
        late_s = time.monotonic() - (self._start_s + (self._tick + 1) * self._period_s)
        missed = int(max(late_s, 0.0) // self._period_s)
        self._tick += 1 + missed
        self.ticks.missed += missed
        due_s = self._start_s + self._tick * self._period_s
        self._check()
        while (left_s := due_s - time.monotonic()) > 0.0:
            time.sleep(min(left_s, LOOK_S))
            self._check()
        self.ticks.lateness_s.append(time.monotonic() - due_s)
        return self._telemetry()

    def close(self) -> None:
        """Gives the devices back and stops the jobs; harmless when repeated.

        Raises:
            UserError: A device could not be given back; everything else was closed all the same.
        """
        if self._worker is not None:
            self._commands.put(None)
            self._worker.join(timeout=5.0)
            self._worker = None
        if self._coupling is not None:
            self._coupling.stop()
            self._coupling = None
        access, self._access = self._access, None
        failures = [close_guards([guard for guards in access.guards for guard in guards])] if access else []
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        handles, self._handles = self._handles, []
        if handles:
            # Side by side: each saves its state first, and the last one should not train on meanwhile.
            with ThreadPoolExecutor(len(handles)) as pool:
                failures += pool.map(_closed, handles)
        if access is not None:
            for device in (device for devices in access.devices for device in devices):
                device.close()
        self._jobs = []
        for failure in failures:
            if failure is not None:
                raise failure

    def _start(self) -> None:
        config = self._config
        self._access = access = open_access(config, self._rules, self._policy)
        self._guards = tuple(guard for guards in access.guards for guard in guards)
        self.actuator = access.kind, access.why
        metered = [
            [MeteredDevice(source, self._in_control) for source in (guards or devices)]
            for guards, devices in zip(access.guards, access.devices, strict=True)
        ]
        # The poller is also the guards' sign of life to their watchdogs, as long as somebody controls.
        self._poller = DevicePoller([device for devices in metered for device in devices])  # type: ignore[misc]
        self._poller.start()
        for j, job in enumerate(config.jobs):
            self._handles.append(self._open_job(job, j, job_environment(config, access, j)))
        coupled: list[CoupledJob] = []
        for j, (job, handle, devices) in enumerate(zip(config.jobs, self._handles, access.devices, strict=True)):
            knobs = JobKnobs(handle, job.pace)
            profile = fitted_profile(config, j, metered[j][0].info(), access.kind)
            actuator = self._actuator(access.kind, access.guards[j], knobs, profile)
            self._jobs.append(RunningJob(handle, knobs, profile, metered[j], actuator))
            boards = [device for device in devices if isinstance(device, SimulatedDevice)]
            if boards:
                surface = nominal_profile(job.surface, len(devices))
                coupled.append(CoupledJob(handle, knobs, boards, surface, access.kind, job.training.micro_batch))
        if coupled:
            self._coupling = Coupling(coupled)
            self._coupling.start()
        measure_full_speeds(self._jobs, [job.pace for job in config.jobs], config.start_timeout_s, self._check)
        for running in self._jobs:
            running.knobs.full_samples_per_s = running.full_samples_per_s
        self._spec = self._describe()
        self._worker = threading.Thread(target=self._carry_out, name="wattgym-actuator", daemon=True)
        self._worker.start()

    def _open_job(self, job: LiveJob, index: int, environment: dict[str, str]) -> JobHandle:
        """The training process of a job; a plant of jobs that somebody else has started attaches to them."""
        return JobHandle.start(job.training, self._folder / f"job{index}", environment=environment)

    def _actuator(self, kind: ActuatorKind, guards: list[Guard], knobs: JobKnobs, profile: JobProfile) -> Actuator:
        if kind == "power_limit":
            return PowerLimitActuator(guards, profile)
        if kind == "locked_clocks":
            return ClockActuator(guards, profile, self._rules)
        return DutyActuator(knobs, profile, self._rules)

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
            knobs=live_table(self.profiles, limits) if self._knobs else None,
        )

    def _carry_out(self) -> None:
        """The actuator thread: carries out the newest command, one at a time."""
        while (command := self._commands.get()) is not None:
            decisions = self._no_decisions.copy()
            for j, (job, limit_w) in enumerate(zip(self._jobs, command.limit_w[0], strict=True)):
                try:
                    decisions[0, j] = job.actuator.apply(float(limit_w))
                    if self._knobs:
                        set_knobs(job, command, j)
                except UserError as error:  # a device that fails must not end the control of the others
                    self.ticks.failed_commands += 1
                    self.ticks.last_failure = str(error)
            self._decisions = decisions

    def _telemetry(self) -> Telemetry:
        self.observations = tuple(job.observe() for job in self._jobs)

        def row(value: Callable[[JobObservation], float]) -> FloatArray:
            return np.array([[value(seen) for seen in self.observations]], dtype=np.float64)

        # An episode's first look has no period behind it: what jobs did since some earlier one says nothing.
        started = self._tick > 0
        limit_w = np.array([[job.actuator.limit_w for job in self._jobs]])
        return Telemetry(
            tick=self._tick,
            sensor_w=row(lambda seen: seen.sensor_w),
            meter_w=row(lambda seen: seen.meter_w if started else seen.sensor_w),
            host_w=np.zeros(1),
            throughput=row(lambda seen: seen.speed) if started else self._expected_speed(),
            phase=row(lambda seen: seen.phase).astype(np.int64),
            limit_w=limit_w,
            age_s=row(lambda seen: seen.age_s).max(axis=1),
            decisions=self._decisions,
            in_force=in_force(self._jobs, limit_w) if self._knobs else None,
        )

    def _expected_speed(self) -> FloatArray:
        """What the limits in force let through, where nothing has been measured yet."""
        return np.array([[float(job.profile.throughput_at(np.asarray(job.actuator.limit_w))) for job in self._jobs]])

    def _in_control(self) -> bool:
        """Whether the control loop has shown itself within the time that the last command may be held."""
        starting = self._spec is None
        return starting or time.monotonic() - self._controlled_s <= self._config.hold_s

    def _check(self) -> None:
        """Ends the run when it was asked to, or when a job has died; the devices are given back first.

        Raises:
            JobDiedError: A training process has ended.
            KeyboardInterrupt: `interrupt` was called.
        """
        self._controlled_s = time.monotonic()
        if self._stop_reason:
            raise KeyboardInterrupt(self._stop_reason)
        try:
            for j, job in enumerate(self._jobs):
                job.check_alive(j)
        except JobDiedError:
            self.close()
            raise


def _closed(handle: JobHandle) -> UserError | None:
    """Stops a job; a failure is returned, so that the others are stopped all the same."""
    try:
        handle.close()
    except UserError as error:
        return error
    return None


def job_environment(config: LiveConfig, access: Access, index: int) -> dict[str, str]:
    """Variables that tie a job's process to its own GPU."""
    if config.backend != "nvml":
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(device.info().uuid for device in access.devices[index])}
