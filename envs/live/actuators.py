"""What carries out a job's power command: power limits, locked clocks, or the share of time the job works."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wattgym.envs.live.pace import JobKnobs
from wattgym.envs.profile import ActuatorKind, JobProfile
from wattgym.errors import UserError
from wattgym.hw.guard import Guard
from wattgym.hw.limits import CommandRules, Decision, ShapedLimits
from wattgym.hw.presets import gpu_preset
from wattgym.hw.voltage import PowerCurve


class Actuator(Protocol):
    """Carries out one job's commands; limits are watts per GPU.

    Attributes:
        kind: What it is.
        low_w: Lowest limit.
        high_w: Highest limit.
        limit_w: The limit in force.
    """

    kind: ActuatorKind
    low_w: float
    high_w: float
    limit_w: float

    def apply(self, limit_w: float) -> int:
        """Commands a limit; sets `limit_w` to the one in force and returns the rules' decisions.

        Raises:
            UserError: It could not be carried out; what was in force before may still be.
        """
        ...


class PowerLimitActuator:
    """Writes power limits through guards, the same to every device of the job."""

    kind: ActuatorKind = "power_limit"

    def __init__(self, guards: Sequence[Guard], profile: JobProfile) -> None:
        """Works out the range that both the devices and the profile cover.

        Raises:
            UserError: There is none.
        """
        self._guards = guards
        self.low_w = max(*(guard.lowest_w for guard in guards), profile.limit_w[0])
        self.high_w = min(*(guard.highest_w for guard in guards), profile.limit_w[-1])
        if self.low_w >= self.high_w:
            raise UserError(
                f"{guards[0].info.uuid} takes limits of {guards[0].lowest_w:g} to {guards[0].highest_w:g} W, the job's "
                f"profile covers {profile.limit_w[0]:g} to {profile.limit_w[-1]:g} W; choose a surface of this GPU, or "
                "calibrate"
            )
        self.limit_w = self._in_force()

    def apply(self, limit_w: float) -> int:
        """See `Actuator.apply`."""
        decisions = Decision.NONE
        try:
            for guard in self._guards:
                decisions |= guard.set_limit_w(limit_w).decisions
        finally:
            self.limit_w = self._in_force()
        return int(decisions)

    def _in_force(self) -> float:
        # The slowest device sets the pace of a synchronous job, so the lowest limit is the job's.
        lowest_w = min(guard.telemetry.limit_mw for guard in self._guards) / 1000.0
        return min(lowest_w, self.high_w)


class _ShapedActuator(ABC):
    """An actuator whose commands are shaped here, because no guard sees them."""

    def __init__(self, profile: JobProfile, rules: CommandRules) -> None:
        self.high_w = profile.limit_w[-1]
        self._shaped = ShapedLimits(profile.limit_w[0], self.high_w, self.high_w, rules)
        self.low_w = float(self._shaped.low_w)
        self.limit_w = self.high_w
        self._written_s = -np.inf

    def apply(self, limit_w: float) -> int:
        """See `Actuator.apply`."""
        now_s = time.monotonic()
        shaped, decisions = self._shaped.shape(np.asarray(limit_w), np.asarray(self.limit_w), now_s - self._written_s)
        command_w = float(shaped)
        if command_w != self.limit_w:
            self._write(command_w)
            self.limit_w, self._written_s = command_w, now_s
        return int(decisions)

    @abstractmethod
    def _write(self, limit_w: float) -> None:
        """Carries out a command, W per GPU."""


class ClockActuator(_ShapedActuator):
    """Locks the SM clock below the value that draws about the commanded power."""

    kind: ActuatorKind = "locked_clocks"

    def __init__(self, guards: Sequence[Guard], profile: JobProfile, rules: CommandRules) -> None:
        super().__init__(profile, rules)
        self._guards = guards
        preset = gpu_preset(profile.gpu)
        self._clock, self._idle_w = preset.clock_mhz, preset.context_idle_w.value
        self._curve = PowerCurve(
            preset.voltage.static_share.value, preset.voltage.knee.value, preset.voltage.floor.value
        )

    def _write(self, limit_w: float) -> None:
        share = self._curve.clock_share((limit_w - self._idle_w) / (self.high_w - self._idle_w))
        steps = round(max(share * self._clock.max, self._clock.min) / self._clock.step)
        highest_mhz = round(min(steps * self._clock.step, self._clock.max))
        for guard in self._guards:
            if not guard.lock_clocks_mhz(min_mhz=round(self._clock.min), max_mhz=highest_mhz):
                raise UserError(f"{guard.info.uuid}: clocks were not locked: {guard.telemetry.why}")


class DutyActuator(_ShapedActuator):
    """Lets the job wait between micro-batches; needs no permission on any device."""

    kind: ActuatorKind = "duty_cycle"

    def __init__(self, knobs: JobKnobs, profile: JobProfile, rules: CommandRules) -> None:
        super().__init__(profile, rules)
        self._knobs = knobs
        self._profile = profile

    def _write(self, limit_w: float) -> None:
        self._knobs.work_for(float(self._profile.throughput_at(np.asarray(limit_w))))
