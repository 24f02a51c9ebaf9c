"""What carries out a job's power command: power limits, locked clocks, or the share of time the job works."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from wattgym.envs.profile import ActuatorKind, JobProfile
from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceError, PermissionDeniedError
from wattgym.hw.guard import Guard
from wattgym.hw.limits import CommandRules, Decision, ShapedLimits
from wattgym.hw.presets import gpu_preset
from wattgym.hw.telemetry import GuardState
from wattgym.hw.voltage import PowerCurve
from wattgym.live.channel import JobStatus
from wattgym.live.handle import JobHandle

MIN_DUTY = 0.1
"""A job is never slowed further: below this its status would grow stale between steps."""


class JobKnobs:
    """A job's speed and duty, which two threads change.

    Attributes:
        full_samples_per_s: Speed that counts as full, once it is known.
    """

    def __init__(self, handle: JobHandle, pace: float) -> None:
        self.full_samples_per_s: float | None = None
        self._handle = handle
        self._pace = pace
        self._lock = threading.Lock()

    @property
    def duty(self) -> float:
        """Share of time the job works."""
        return self._handle.knobs.duty

    def slow_to(self, speed: float, status: JobStatus) -> None:
        """Sets the speed as a share of the job's full speed.

        Args:
            speed: Wanted share.
            status: The job's status; its speed without waiting tells how much waiting that takes just now, on a machine
                whose other work comes and goes.
        """
        full = self._pace
        if self.full_samples_per_s is not None and status.free_step_time_s is not None:
            full = self.full_samples_per_s * status.free_step_time_s / status.samples_per_update
        wanted = min(max(min(speed, 1.0), MIN_DUTY) * full, 1.0)
        with self._lock:
            if abs(wanted - self._handle.knobs.speed) > 1e-3:
                self._handle.set_knobs(speed=wanted)

    def work_for(self, duty: float) -> None:
        """Sets the share of time the job works."""
        with self._lock:
            self._handle.set_knobs(duty=max(min(duty, 1.0), MIN_DUTY))


class Actuator(Protocol):
    """Carries out one job's commands; limits are watts per GPU."""

    kind: ActuatorKind
    low_w: float
    high_w: float
    limit_w: float

    def apply(self, limit_w: float) -> int:
        """Commands a limit; sets `limit_w` to the one in force and returns the rules' decisions."""
        ...


class PowerLimitActuator:
    """Writes power limits through guards, the same to every device of the job."""

    kind: ActuatorKind = "power_limit"

    def __init__(self, guards: Sequence[Guard], profile: JobProfile) -> None:
        self._guards = guards
        self.low_w = max(max(guard.lowest_w for guard in guards), profile.limit_w[0])
        self.high_w = min(min(guard.highest_w for guard in guards), profile.limit_w[-1])
        self.limit_w = min(guards[0].telemetry.limit_mw / 1000.0, self.high_w)

    def apply(self, limit_w: float) -> int:
        """See `Actuator.apply`."""
        decisions = Decision.NONE
        limits = []
        for guard in self._guards:
            result = guard.set_limit_w(limit_w)
            decisions |= result.decisions
            limits.append(result.limit_w)
        # The slowest device sets the pace of a synchronous job, so the lowest limit is the job's.
        self.limit_w = min(limits)
        return int(decisions)


class _ShapedActuator:
    """An actuator whose commands are shaped here, because no guard sees them."""

    def __init__(self, profile: JobProfile, rules: CommandRules, period_s: float) -> None:
        self.low_w, self.high_w = profile.limit_w[0], profile.limit_w[-1]
        self._shaped = ShapedLimits(self.low_w, self.high_w, self.high_w, rules)
        self.low_w = float(self._shaped.low_w)
        self._period_s = period_s
        self.limit_w = self.high_w

    def apply(self, limit_w: float) -> int:
        """See `Actuator.apply`."""
        command, decisions = self._shaped.shape(np.asarray(limit_w), np.asarray(self.limit_w), self._period_s)
        if float(command) != self.limit_w:
            self._write(float(command))
            self.limit_w = float(command)
        return int(decisions)

    def _write(self, limit_w: float) -> None:
        raise AssertionError("subclasses write")


class ClockActuator(_ShapedActuator):
    """Locks the SM clock below the value that draws about the commanded power."""

    kind: ActuatorKind = "locked_clocks"

    def __init__(self, guards: Sequence[Guard], profile: JobProfile, rules: CommandRules, period_s: float) -> None:
        super().__init__(profile, rules, period_s)
        self._guards = guards
        preset = gpu_preset(profile.gpu)
        self._clock, self._idle_w = preset.clock_mhz, preset.context_idle_w.value
        self._curve = PowerCurve(
            preset.voltage.static_share.value, preset.voltage.knee.value, preset.voltage.floor.value
        )

    def _write(self, limit_w: float) -> None:
        share = self._curve.clock_share((limit_w - self._idle_w) / (self.high_w - self._idle_w))
        steps = round(max(share * self._clock.max, self._clock.min) / self._clock.step)
        for guard in self._guards:
            guard.lock_clocks_mhz(min_mhz=round(self._clock.min), max_mhz=round(steps * self._clock.step))


class DutyActuator(_ShapedActuator):
    """Lets the job wait between micro-batches; needs no permission on any device."""

    kind: ActuatorKind = "duty_cycle"

    def __init__(self, knobs: JobKnobs, profile: JobProfile, rules: CommandRules, period_s: float) -> None:
        super().__init__(profile, rules, period_s)
        self._knobs = knobs
        self._profile = profile

    def _write(self, limit_w: float) -> None:
        self._knobs.work_for(float(self._profile.throughput_at(np.asarray(limit_w))))


def choose_actuator(wanted: str, guards: Sequence[Guard]) -> tuple[ActuatorKind, str]:
    """Takes the first actuator that may be used.

    Args:
        wanted: `auto`, or one kind.
        guards: Guards of all devices.

    Returns:
        The kind, and why.

    Raises:
        UserError: The wanted kind cannot be used; the message says why.
    """
    unarmed = next((guard for guard in guards if guard.telemetry.state is not GuardState.ARMED), None)
    reasons = {}
    for kind, capability in (("power_limit", "set_power_limit"), ("locked_clocks", "lock_clocks")):
        missing = [g.info.capabilities.get(capability, "unknown") for g in guards]
        lacking = next((why for why in missing if why != "ok"), None)
        reasons[kind] = lacking or (unarmed.telemetry.why if unarmed else "")
    if wanted == "auto":
        for kind in ("power_limit", "locked_clocks"):
            if not reasons[kind]:
                return kind, "the devices allow it and it is the finest control"  # type: ignore[return-value]
        return "duty_cycle", f"no power limits ({reasons['power_limit']}) and no clocks ({reasons['locked_clocks']})"
    if reasons.get(wanted):
        raise UserError(f"actuator {wanted}: {reasons[wanted]}; 'duty_cycle' needs no permission")
    return wanted, "as configured"  # type: ignore[return-value]


def open_guards(
    devices: Sequence[Device], *, arm: bool, simulated: bool, rules: CommandRules, policy: str
) -> list[Guard]:
    """A guard for each device; simulated ones need no second key. All are closed again if one fails.

    Raises:
        DeviceError: A device is not fit to be controlled; a device that only may not be written to is left unarmed.
    """
    from wattgym.hw.guard import ARM_VARIABLE
    from wattgym.hw.preflight import GuardConfig

    environ = {ARM_VARIABLE: "1"} if simulated else None
    guards: list[Guard] = []
    try:
        for device in devices:
            try:
                guard = Guard(
                    device, arm=arm or simulated, config=GuardConfig(rules=rules), policy=policy, environ=environ
                )
            except PermissionDeniedError as error:
                guard = Guard(device, arm=False, config=GuardConfig(rules=rules), policy=policy)
                guard.telemetry.why = str(error)
            guards.append(guard)
    except DeviceError:
        for guard in guards:
            guard.close()
        raise
    return guards
