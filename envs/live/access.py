"""Which devices a live plant may use, and what it may do to them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from wattgym.envs.live.config import LiveConfig
from wattgym.envs.profile import ActuatorKind
from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceError, DeviceLostError, DriverError
from wattgym.hw.guard import ARM_VARIABLE, Guard
from wattgym.hw.limits import CommandRules
from wattgym.hw.open import open_devices
from wattgym.hw.state import StateDir, is_alive, read_holder
from wattgym.hw.telemetry import GuardState

SETTERS: dict[ActuatorKind, str] = {"power_limit": "set_power_limit", "locked_clocks": "lock_clocks"}
"""Actuators that need the right to write, finest control first, and the device's capability that each needs."""

_OPEN_KEY = {ARM_VARIABLE: "1"}


@dataclass(eq=False)
class Access:
    """Opened devices and the rights to them.

    Attributes:
        devices: Devices of each job.
        guards: Guards of each job's devices, armed; empty lists where nothing is written.
        kind: What carries out commands.
        why: Why this actuator.
    """

    devices: list[list[Device]]
    guards: list[list[Guard]] = field(default_factory=list)
    kind: ActuatorKind = "duty_cycle"
    why: str = "as configured"


def open_access(config: LiveConfig, rules: CommandRules, policy: str) -> Access:
    """Opens all devices and takes the first actuator that may be used.

    Args:
        config: Jobs, backend and wanted actuator.
        rules: Command rules of the guards.
        policy: Who commands, for the guards' log.

    Raises:
        UserError: A device is not there or is named twice, another controller owns it, or the wanted actuator cannot
            be used; everything is closed again.
    """
    folder = None
    if config.state_dir is not None:
        folder = StateDir(config.state_dir).path
    access = Access([])
    try:
        for job in config.jobs:
            access.devices.append(
                open_devices(job.devices, config.backend, state_dir=folder if config.backend == "simulated" else None)
            )
        _check_distinct(access.devices)
        access.guards = [[] for _ in access.devices]
        if config.actuator != "duty_cycle":
            _arm(access, config, rules, policy)
    except BaseException:
        close_guards([guard for guards in access.guards for guard in guards])
        for device in (device for devices in access.devices for device in devices):
            device.close()
        raise
    return access


def check_devices(config: LiveConfig) -> None:
    """Opens all devices for reading, once, and closes them again; nothing is written.

    Raises:
        UserError: A device is not there, is named twice, or is owned by another controller.
    """
    opened: list[list[Device]] = []
    try:
        for job in config.jobs:
            opened.append(open_devices(job.devices, config.backend))
        _check_distinct(opened)
        if config.backend == "simulated" and config.state_dir is None:
            return
        locks = StateDir(config.state_dir)
        for device in (device for devices in opened for device in devices):
            holder = read_holder(locks.lock_path(device.info().uuid))
            if holder is not None and is_alive(holder.pid):
                raise UserError(
                    f"{device.info().uuid}: PID {holder.pid} ({holder.program}) already controls this device; "
                    "stop it first"
                )
    finally:
        for device in (device for devices in opened for device in devices):
            device.close()


def close_guards(guards: Sequence[Guard]) -> UserError | None:
    """Gives every device back, whatever happens to the others; returns the first failure."""
    failures = []
    for guard in guards:
        try:
            guard.close()
        except UserError as error:
            failures.append(error)
    return failures[0] if failures else None


def _check_distinct(devices: list[list[Device]]) -> None:
    owner: dict[str, int] = {}
    for j, own in enumerate(devices):
        for device in own:
            uuid = device.info().uuid
            if uuid in owner:
                raise UserError(f"jobs {owner[uuid]} and {j} share the device {uuid}; each device serves one job")
            owner[uuid] = j


def _arm(access: Access, config: LiveConfig, rules: CommandRules, policy: str) -> None:
    """Takes an actuator that writes, if there is one that may; else leaves the duty cycle, with the reasons."""
    flat = [device for devices in access.devices for device in devices]
    wanted = [kind for kind in SETTERS if config.actuator in ("auto", kind)]
    reasons: dict[ActuatorKind, str] = {}
    for kind in wanted:
        states = (device.info().capabilities.get(SETTERS[kind], "unknown") for device in flat)
        reasons[kind] = next((state for state in states if state != "ok"), "")
    usable = [kind for kind in wanted if not reasons[kind]]
    if usable:
        guards, refusal = _armed_guards(flat, config, rules, policy)
        if not refusal:
            access.kind = usable[0]
            access.why = "as configured" if config.actuator != "auto" else "the finest control that the devices allow"
            by_device = iter(guards)
            access.guards = [[next(by_device) for _ in devices] for devices in access.devices]
            return
        reasons = dict.fromkeys(wanted, refusal)
    if config.actuator != "auto":
        raise UserError(f"actuator {config.actuator}: {reasons[wanted[0]]}; 'duty_cycle' needs no permission")
    access.why = "; ".join(dict.fromkeys(reasons.values()))


def _armed_guards(
    devices: Sequence[Device], config: LiveConfig, rules: CommandRules, policy: str
) -> tuple[list[Guard], str]:
    """An armed guard for each device, or none and the reason."""
    simulated = config.backend == "simulated"
    guards: list[Guard] = []
    refusal = ""
    try:
        for device in devices:
            guard = Guard(
                device,
                arm=config.arm or simulated,
                config=config.guard.model_copy(update={"rules": rules}),
                state_dir=config.state_dir,
                policy=policy,
                environ=_OPEN_KEY if simulated else None,
            )
            guards.append(guard)
            if guard.telemetry.state is not GuardState.ARMED:
                refusal = guard.telemetry.why
                break
            for earlier in guards:  # starting a watchdog takes a while, and leases run meanwhile
                earlier.heartbeat()
    except (DeviceLostError, DriverError):
        close_guards(guards)
        raise
    except DeviceError as error:  # not fit to be written to, or no permission; it may still be read
        refusal = str(error)
    except BaseException:
        close_guards(guards)
        raise
    if refusal:
        with contextlib.suppress(UserError):
            close_guards(guards)
        return [], refusal
    return guards, ""
