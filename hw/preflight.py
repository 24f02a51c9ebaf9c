"""Checks before a device may be written to, and on what is asked of it."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.hw.device import Device, DeviceError, DeviceInfo, DeviceReading, checked_limit_mw
from wattgym.hw.limits import CommandRules

SANE_MAX_LIMIT_MW = 3_000_000
"""No board has a limit above 1.6 kW; a stub library once reported 3.7 kW with success (MangoHud #2144)."""
PLAUSIBLE_POWER = 1.6
"""Highest believable power as a multiple of the maximum limit; short excesses over a limit stay far below."""


class GuardConfig(FrozenModel):
    """How strict a guard is.

    Attributes:
        rules: How fast and how far limits may move.
        lease_s: Silence after which the watchdog takes the device away; a few control periods.
        retry_s: How long the watchdog tries to restore a device that fails.
        read_back_s: How long a written limit may take to show.
        max_failures: Failed reads, or failed writes, in a row before the guard freezes.
        max_temperature_c: A higher reading is not believed.
        audit_max_bytes: Size at which the audit log is rotated.
        audit_keep: Number of rotated files.
        allow_persistence_off: Accept that the driver forgets limits when its last client leaves.
        allow_mig: Accept that the limit acts on every instance of a split device.
        allow_enforced_below: Accept a device that something else (its BMC, heat) limits further.
    """

    rules: CommandRules = CommandRules()
    lease_s: float = Field(default=10.0, gt=0.0)
    retry_s: float = Field(default=5.0, ge=0.0)
    read_back_s: float = Field(default=0.5, ge=0.0)
    max_failures: int = Field(default=3, ge=1)
    max_temperature_c: float = Field(default=120.0, gt=0.0)
    audit_max_bytes: int = Field(default=10_000_000, ge=1000)
    audit_keep: int = Field(default=5, ge=0)
    allow_persistence_off: bool = False
    allow_mig: bool = False
    allow_enforced_below: bool = False


@dataclass(frozen=True)
class Constraints:
    """A device's settable range and default, mW, known and sane."""

    uuid: str
    min_mw: int
    max_mw: int
    default_mw: int


def checked_constraints(info: DeviceInfo) -> Constraints:
    """The device's limits, if it has usable ones.

    Raises:
        DeviceError: They are unknown or make no sense, so no command can be judged.
    """
    low, high, default = info.min_limit_mw, info.max_limit_mw, info.default_limit_mw
    if low is None or high is None or default is None:
        why = info.capabilities.get("set_power_limit", "ok")
        why = "the device does not tell its limits" if why == "ok" else why
        raise DeviceError(f"{info.uuid}: the power limit cannot be controlled: {why}")
    if not 0 < low <= default <= high <= SANE_MAX_LIMIT_MW:
        raise DeviceError(
            f"{info.uuid}: implausible limits (min {low}, default {default}, max {high} mW): "
            "is this a stub library or a broken driver? Nothing was changed"
        )
    return Constraints(info.uuid, low, high, default)


def preflight(device: Device, info: DeviceInfo, config: GuardConfig) -> None:
    """Everything that must hold before the first write and can be known by reading.

    Raises:
        DeviceError: What is wrong and how to put it right or allow it.
    """
    limits = checked_constraints(info)
    if info.is_mig and not config.allow_mig:
        raise DeviceError(
            f"{info.uuid}: MIG is on, so the limit would act on every instance of the board; turn MIG off "
            "(nvidia-smi -mig 0) or set allow_mig"
        )
    if info.persistence is False and not config.allow_persistence_off:
        raise DeviceError(
            f"{info.uuid}: persistence mode is off, so limits would be lost silently; turn it on "
            "(nvidia-smi -pm 1) or set allow_persistence_off"
        )
    requested, enforced = device.requested_limit_mw(), device.enforced_limit_mw()
    if not limits.min_mw <= requested <= limits.max_mw:
        raise DeviceError(
            f"{info.uuid}: the present limit of {requested} mW is outside {limits.min_mw} to {limits.max_mw} mW, "
            "so it could not be given back; set a valid one first"
        )
    if enforced != requested and not config.allow_enforced_below:
        raise DeviceError(
            f"{info.uuid}: {enforced} mW are enforced though {requested} mW are requested: something else (BMC, "
            "thermal) limits this board; clear that or set allow_enforced_below"
        )


def checked_watts_mw(watts: object, limits: Constraints) -> int:
    """A request in watts as milliwatts within the device's range.

    Raises:
        DeviceError: Not a finite number, or out of range.
    """
    if isinstance(watts, bool) or not isinstance(watts, numbers.Real) or not math.isfinite(watts):
        raise DeviceError(f"{limits.uuid}: power limit {watts!r} is not a finite number of watts")
    limit_mw = round(float(watts) * 1000)
    if limits.min_mw <= limit_mw <= limits.max_mw:
        return limit_mw
    hint = ""
    if limits.min_mw <= float(watts) <= limits.max_mw:
        hint = f"; {watts:g} looks like milliwatts, did you mean {float(watts) / 1000:g} W?"
    raise DeviceError(
        f"{limits.uuid}: power limit {watts:g} W is outside {limits.min_mw / 1000:g} to "
        f"{limits.max_mw / 1000:g} W{hint}"
    )


def checked_milliwatts(limit_mw: object, limits: Constraints) -> int:
    """A request in milliwatts, within the device's range.

    Raises:
        DeviceError: Not an integer, or out of range.
    """
    value = checked_limit_mw(limit_mw, limits.uuid)
    if limits.min_mw <= value <= limits.max_mw:
        return value
    hint = ""
    if limits.min_mw <= 1000 * value <= limits.max_mw:
        hint = f"; {value} looks like watts, did you mean {1000 * value} mW?"
    raise DeviceError(
        f"{limits.uuid}: power limit {value} mW ({value / 1000:g} W) is outside {limits.min_mw} to "
        f"{limits.max_mw} mW{hint}"
    )


def implausible(reading: DeviceReading, limits: Constraints | None, max_temperature_c: float) -> dict[str, float]:
    """Values of a reading that cannot be true, by field name."""
    found: dict[str, float] = {}
    ceiling_w = PLAUSIBLE_POWER * (limits.max_mw if limits else SANE_MAX_LIMIT_MW) / 1000
    if reading.power_w is not None and not 0.0 < reading.power_w < ceiling_w:
        found["power_w"] = reading.power_w
    if reading.temperature_c is not None and not 0.0 <= reading.temperature_c < max_temperature_c:
        found["temperature_c"] = reading.temperature_c
    if reading.energy_j is not None and not 0.0 <= reading.energy_j < math.inf:
        found["energy_j"] = reading.energy_j
    return found
