"""One running job of a live plant: its process, its devices, and what both did since they were last looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.live.actuators import Actuator
from wattgym.envs.live.meters import MeteredDevice
from wattgym.envs.live.pace import JobKnobs, compute_work_s
from wattgym.envs.live.sample import JobSample
from wattgym.envs.profile import JobProfile
from wattgym.errors import UserError
from wattgym.live.channel import JobState, JobStatus
from wattgym.live.handle import JobHandle
from wattgym.phase import Phase

MEASURED_BATCHES, MEASURED_S = 3, 1.0
"""A job's speed is measured over at least so many micro-batches and so long a time."""

SENSED_SHARE = 0.25
"""A job's power is what its sensors published, by the median, in the last quarter of the control period: limits that
were written at its start are in force by then, and what is shorter than that is no matter for the controller."""


class JobDiedError(UserError):
    """A training process ended while it was controlled; the devices have been given back."""


@dataclass(frozen=True)
class JobObservation:
    """What a job and its devices did since the last observation.

    Attributes:
        sensor_w: Power by the sensors at the end of the period, W (`SENSED_SHARE`).
        meter_w: Mean power by the meters, W.
        samples: Samples trained on; the parts of a micro-batch that is under way count.
        speed: Samples per second as a share of the job's full speed.
        tokens: Tokens trained on.
        phase: Phase now.
        age_s: Age of the oldest sensor value.
        status: The job's status.
    """

    sensor_w: float
    meter_w: float
    samples: float
    speed: float
    tokens: int
    phase: Phase
    age_s: float
    status: JobStatus


class RunningJob:
    """A job under control.

    Attributes:
        handle: The training process.
        knobs: Its speed and duty.
        profile: What is known of it.
        actuator: What carries out its commands.
        full_samples_per_s: The speed that counts as full.
    """

    def __init__(
        self, handle: JobHandle, knobs: JobKnobs, profile: JobProfile, devices: list[MeteredDevice], actuator: Actuator
    ) -> None:
        self.handle = handle
        self.knobs = knobs
        self.profile = profile
        self.actuator = actuator
        self.full_samples_per_s = profile.full_samples_per_s or 0.0
        self._devices = devices
        self._status = handle.status()
        self._samples = 0.0
        self._seen_s = time.monotonic()
        self._metered = (0.0, 0.0)

    @property
    def sensed(self) -> bool:
        """Every device has been read at least once."""
        return all(device.sample is not None for device in self._devices)

    def check_alive(self, index: int) -> None:
        """Refuses to go on with a job that has ended without having finished.

        Raises:
            JobDiedError: The training process failed, or somebody stopped it.
        """
        status = self.handle.status()
        if status.state is JobState.FAILED:
            raise JobDiedError(f"job {index} died: {status.error}")
        if status.state is JobState.STOPPED:
            raise JobDiedError(f"job {index} was stopped from outside after {status.steps} steps")

    def observe(self) -> JobObservation:
        """Looks at job and devices; what is told as a mean is since the last look."""
        now_s = time.monotonic()
        samples = [device.sample for device in self._devices]
        taken = [sample for sample in samples if sample is not None]
        elapsed_s = max(now_s - self._seen_s, 1e-3)
        readings = [device.steady_w(elapsed_s * SENSED_SHARE) for device in self._devices]
        sensor_w = sum(reading for reading in readings if reading is not None)
        oldest_s = min((sample.taken_s for sample in taken), default=now_s)
        meter_w = self._meter(sum(sample.energy_j for sample in taken), oldest_s, sensor_w)
        status = self.handle.status()
        # A process that was replaced would count from 0; a job never runs backwards.
        done = max(_samples_done(status, now_s), self._samples)
        trained = done - self._samples
        observation = JobObservation(
            sensor_w=sensor_w,
            meter_w=meter_w,
            samples=trained,
            speed=trained / elapsed_s / max(self.full_samples_per_s, 1e-9),
            tokens=status.tokens - self._status.tokens,
            phase=status.phase,
            age_s=max(now_s - oldest_s, 0.0),
            status=status,
        )
        self._status, self._samples, self._seen_s = status, done, now_s
        return observation

    def sample(self) -> JobSample:
        """Job and devices as they are now; changes nothing, so that `observe` misses nothing."""
        now_s = time.monotonic()
        samples = [device.sample for device in self._devices]
        taken = [sample for sample in samples if sample is not None]
        taken_s = [sample.taken_s for sample in taken] or [now_s]
        return JobSample(
            t_s=now_s,
            age_s=max(now_s - min(taken_s), 0.0),
            sensor_w=sum(sample.power_w for sample in taken),
            energy_j=sum(sample.energy_j for sample in taken),
            # Devices publish at times of their own; what they drew together belongs to the middle of those.
            metered_s=sum(taken_s) / len(taken_s),
            limit_w=self.actuator.limit_w,
            status=self.handle.status(),
        )

    def _meter(self, energy_j: float, taken_s: float, sensor_w: float) -> float:
        """Mean power since the last look; where no meter tells, the sensor stands in."""
        before_j, before_s = self._metered
        self._metered = energy_j, taken_s
        if taken_s <= before_s:
            return sensor_w  # nothing was published since
        mean_w = (energy_j - before_j) / (taken_s - before_s)
        return mean_w if np.isfinite(mean_w) else sensor_w


def measure_full_speeds(
    jobs: Sequence[RunningJob], paces: Sequence[float], timeout_s: float, check: Callable[[], None]
) -> None:
    """Waits until every job trains, and takes the speed of those without a known one as their full speed.

    All are measured at the same time, because jobs of one machine slow each other.

    Args:
        jobs: The jobs.
        paces: Share of its free speed that counts as full, for each job.
        timeout_s: How long it may take.
        check: Raises when waiting has become pointless.

    Raises:
        UserError: A job finished, or did not come so far in time.
    """
    deadline_s = time.monotonic() + timeout_s

    def wait_for(job: RunningJob, index: int, samples: int, until_s: float = 0.0) -> JobStatus:
        while True:
            check()
            status = job.handle.status()
            now_s = time.monotonic()
            if status.samples >= samples and status.free_step_time_s is not None and now_s >= until_s and job.sensed:
                return status
            if status.state is JobState.FINISHED:
                raise UserError(
                    f"job {index} finished after {status.steps} steps, before control began; raise its max_steps"
                )
            if now_s > deadline_s:
                raise UserError(
                    f"job {index} trained on {status.samples} samples within {timeout_s:g} s (phase "
                    f"{status.phase.name.lower()}); raise start_timeout_s or take a smaller model"
                )
            time.sleep(0.02)

    for j, job in enumerate(jobs):
        wait_for(job, j, 1)  # its first step is over by then
    begun_s = time.monotonic()
    # From the end of one micro-batch to the end of another: half of one would count as all of its time.
    first = [wait_for(job, j, job.handle.status().samples + 1) for j, job in enumerate(jobs)]
    for j, (job, before, pace) in enumerate(zip(jobs, first, paces, strict=True)):
        if not job.full_samples_per_s:
            after = wait_for(job, j, before.samples + MEASURED_BATCHES * before.micro_batch, begun_s + MEASURED_S)
            job.full_samples_per_s = pace * _free_samples_per_s(before, after)


def _free_samples_per_s(before: JobStatus, after: JobStatus) -> float:
    """Speed without waiting between two readings that are some steps apart."""
    work_s = compute_work_s(before, after)
    assert after.free_step_time_s is not None
    if work_s <= 0.0:
        return after.samples_per_update / after.free_step_time_s
    return (after.samples - before.samples) / work_s


def _samples_done(status: JobStatus, now_s: float) -> float:
    """Samples trained on, with the share of the micro-batch under way that its usual time suggests."""
    under_way = status.state is JobState.RUNNING and status.phase is Phase.COMPUTE
    if not under_way or not status.free_step_time_s or not status.samples_per_update:
        return float(status.samples)
    unit_s = status.free_step_time_s * status.micro_batch / status.samples_per_update
    share = min(max(now_s - status.heartbeat_s, 0.0) / max(unit_s, 1e-9), 0.99)
    return status.samples + status.micro_batch * share
