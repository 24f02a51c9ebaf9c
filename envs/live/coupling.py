"""Closes the loop where a GPU is only simulated: the job's phases drive its draw, its limit slows the job."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.emulator.batch_form import formed, power_form, speed_form
from wattgym.envs.knobs import ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE, active_speed
from wattgym.envs.live.pace import JobKnobs
from wattgym.envs.plant import FloatArray
from wattgym.envs.profile import ActuatorKind, JobProfile
from wattgym.errors import UserError
from wattgym.hw.presets import gpu_preset
from wattgym.hw.simulated import SimulatedDevice
from wattgym.live.handle import JobHandle
from wattgym.phase import Phase

INTERVAL_S = 0.05
"""How often phases and limits are looked at; well below a control period."""

DEMAND = {Phase.LOAD: 0.3, Phase.COMPUTE: 1.0, Phase.EVALUATE: 0.95, Phase.CHECKPOINT: 0.35, Phase.IDLE: 0.0}
"""Load by phase, between idle with a context (0) and full training (1): levels of the measured 8xH100 runs
(loading 0.39 and evaluating 1.0 of node power; checkpoints are an assumption)."""


@dataclass(frozen=True, eq=False)
class CoupledJob:
    """One job with its simulated devices.

    Attributes:
        handle: The training process.
        knobs: Its knobs.
        devices: Its devices.
        surface: How a limit slows the job.
        actuator: What carries out commands.
        micro_batch: Samples of one pass at full speed.
    """

    handle: JobHandle
    knobs: JobKnobs
    devices: Sequence[SimulatedDevice]
    surface: JobProfile
    actuator: ActuatorKind
    micro_batch: int

    def share_of_pass(self, micro_batch: int) -> FloatArray:
        """A micro-batch as a share of the largest one."""
        return np.asarray(min(micro_batch / self.micro_batch, 1.0) if micro_batch else 1.0)


class Coupling:
    """A thread that couples jobs and devices until it is stopped."""

    def __init__(self, jobs: Sequence[CoupledJob]) -> None:
        self._jobs = jobs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wattgym-coupling", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and takes the load off the devices."""
        self._stop.set()
        self._thread.join()
        for device in (device for job in self._jobs for device in job.devices):
            with contextlib.suppress(UserError):
                device.set_demand(0.0)

    def couple_once(self) -> None:
        """Brings devices and jobs in line with each other."""
        for job in self._jobs:
            # A device or channel that fails (and says so to whoever reads it) must not end the coupling of the others.
            with contextlib.suppress(UserError):
                self._couple(job)

    def _couple(self, job: CoupledJob) -> None:
        status = job.handle.status()
        demand = 0.0 if status.state.final else DEMAND[status.phase] * job.knobs.duty
        n = len(job.devices)
        active = max(n * status.active_ranks // status.ranks, 1)
        works = status.phase in (Phase.COMPUTE, Phase.EVALUATE)
        u = job.share_of_pass(status.micro_batch)
        for i, device in enumerate(job.devices):
            idle = works and i >= active
            device.set_demand(0.0 if idle else demand * float(power_form(u)) if works else demand)
        # A simulated GPU is slow by what the setting does to a real one, whatever this machine does with it.
        scaling = active_speed(n, active, status.local_steps, ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE)
        speed = min(self._speed(device, job, u) for device in job.devices[:active])
        job.knobs.slow_to(speed * float(scaling), status)

    def _speed(self, device: SimulatedDevice, job: CoupledJob, u: FloatArray) -> float:
        """Speed that the device leaves the job, as a share of full speed, at a share of the largest micro-batch."""
        surface = job.surface
        if job.actuator == "power_limit":
            own = (np.array(values) for values in (surface.limit_w, surface.power_w, surface.throughput))
            limits, *tables = own
            _, speeds = formed(float(u), surface.idle_w, limits, *tables)
            return float(np.interp(device.enforced_limit_mw() / 1000.0, limits, speeds))
        if job.actuator == "locked_clocks":
            clock_mhz = device.read().sm_clock_mhz or 0.0
            return clock_mhz / gpu_preset(job.surface.gpu).clock_mhz.max * float(speed_form(u))
        return float(speed_form(u))

    def _run(self) -> None:
        while not self._stop.is_set():
            started_s = time.monotonic()
            self.couple_once()
            self._stop.wait(max(INTERVAL_S - (time.monotonic() - started_s), INTERVAL_S / 5))
