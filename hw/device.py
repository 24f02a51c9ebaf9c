"""What a power-managed device is: its description, its readings, and what can go wrong with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from operator import index

from wattgym.errors import UserError


class DeviceError(UserError):
    """A device refused or failed; the message says which device and what to do about it."""


class PermissionDeniedError(DeviceError):
    """The process may not change this setting (root, and in a container CAP_SYS_ADMIN, is needed)."""


class NotSupportedError(DeviceError):
    """The device or platform does not offer this reading or setting."""


class DeviceNotFoundError(DeviceError):
    """No device has this UUID or index."""


class DeviceLostError(DeviceError):
    """The device fell off the bus or the container lost it: nothing more may be written."""


class DriverError(DeviceError):
    """The driver or its library is missing, too old, or changed under the running process."""


class DeviceTimeoutError(DeviceError):
    """A call into the driver has not come back in time."""


class PowerKind(StrEnum):
    """What a power reading is: an average over about a second hides what a controller just did."""

    INSTANT = "instant"
    AVERAGE = "average"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class DeviceInfo:
    """A device's identity, limits and capabilities, each probed when it was opened.

    Limits are integer milliwatts as NVML has them; `None` means that the device does not tell.

    Attributes:
        uuid: `GPU-…`, stable over reboots; the only address that is.
        name: Marketing name.
        index: NVML index (not the CUDA index).
        backend: `nvml` or `simulated`.
        pci_bus_id: PCI address; `None` for a simulated device.
        driver_version: Version of the driver that answered.
        min_limit_mw: Lowest settable power limit.
        max_limit_mw: Highest settable power limit.
        default_limit_mw: The vendor's default limit.
        requested_limit_mw: The limit that software asked for, when the device was opened.
        enforced_limit_mw: The limit in force, the lowest over all limiters, when the device was opened.
        power_kind: What `DeviceReading.power_w` is.
        power_window_s: Averaging window of that reading; `None` if unknown.
        capabilities: For each getter and setter by name: `ok`, or the reason why not.
        is_mig: The device is split into instances; power and limit belong to the whole of it.
        persistence: Persistence mode; off means that limits are lost when the last client leaves.
    """

    uuid: str
    name: str
    index: int
    backend: str
    pci_bus_id: str | None = None
    driver_version: str | None = None
    min_limit_mw: int | None = None
    max_limit_mw: int | None = None
    default_limit_mw: int | None = None
    requested_limit_mw: int | None = None
    enforced_limit_mw: int | None = None
    power_kind: PowerKind = PowerKind.UNKNOWN
    power_window_s: float | None = None
    capabilities: dict[str, str] = field(default_factory=dict)
    is_mig: bool = False
    persistence: bool | None = None


@dataclass(frozen=True)
class DeviceReading:
    """One sample of a device. A value that could not be read is `None`, never 0.

    Attributes:
        t_s: Time of the reading on the reader's monotonic clock, seconds.
        age_s: Age of the power value when it was read, seconds; `None` if the sensor does not tell.
        power_w: Sensor's power, W.
        power_kind: Which reading `power_w` is.
        energy_j: Energy counter, J since an arbitrary start; falls to 0 when the driver reloads.
        sm_clock_mhz: Streaming-multiprocessor clock, MHz.
        memory_clock_mhz: Memory clock, MHz.
        temperature_c: Core temperature, °C.
        utilisation: Share of the last sample window in which any kernel ran, 0 to 1; not a load.
        throttle_reasons: NVML's clocks-event bit mask (0x4 = software power cap).
        requested_limit_mw: Limit that software asked for.
        enforced_limit_mw: Limit in force.
    """

    t_s: float
    age_s: float | None = None
    power_w: float | None = None
    power_kind: PowerKind = PowerKind.UNKNOWN
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    utilisation: float | None = None
    throttle_reasons: int | None = None
    requested_limit_mw: int | None = None
    enforced_limit_mw: int | None = None


def checked_limit_mw(limit_mw: object, device: str) -> int:
    """A power limit as a plain integer of milliwatts, before it can reach a driver.

    A float is refused because a caller who has one is thinking in watts; a boolean because it is an integer only by
    accident; a negative number because it would wrap to a huge unsigned one.

    Args:
        limit_mw: What the caller gave.
        device: The device's name for the message.

    Raises:
        DeviceError: Not a whole, non-negative number of milliwatts below 2**32.
    """
    return _whole_number(limit_mw, 2**32, f"{device}: power limit {limit_mw!r}", "milliwatts (450 W is 450000)")


def checked_clocks_mhz(min_mhz: object, max_mhz: object, device: str) -> tuple[int, int]:
    """A clock range as plain integers, lowest first.

    Raises:
        DeviceError: Not whole MHz, or the minimum is above the maximum.
    """
    lowest = _whole_number(min_mhz, 100_000, f"{device}: lowest clock {min_mhz!r}", "MHz")
    highest = _whole_number(max_mhz, 100_000, f"{device}: highest clock {max_mhz!r}", "MHz")
    if lowest > highest:
        raise DeviceError(f"{device}: lowest clock {lowest} MHz is above the highest, {highest} MHz")
    return lowest, highest


def _whole_number(value: object, end: int, what: str, unit: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DeviceError(f"{what} is not an integer: give whole {unit}")
    number = index(value)
    if not 0 <= number < end:
        raise DeviceError(f"{what} is out of range: give whole {unit}")
    return number


class Device(ABC):
    """One power-managed device.

    Only a guard may call the setters: everything else in the project reads.
    """

    @abstractmethod
    def info(self) -> DeviceInfo:
        """Identity, limits and capabilities as probed at opening."""

    @abstractmethod
    def read(self) -> DeviceReading:
        """One sample.

        Raises:
            DeviceLostError: The device is gone.
        """

    @abstractmethod
    def set_power_limit_mw(self, limit_mw: int) -> None:
        """Asks for a power limit.

        Args:
            limit_mw: Limit in milliwatts, an integer.

        Raises:
            PermissionDeniedError: The process may not set limits.
            NotSupportedError: The device has no settable limit.
            DeviceError: Out of range, or the device failed.
        """

    @abstractmethod
    def requested_limit_mw(self) -> int:
        """The limit that software asked for last, milliwatts, read now."""

    @abstractmethod
    def enforced_limit_mw(self) -> int:
        """The limit in force, milliwatts, read now."""

    @abstractmethod
    def lock_clocks_mhz(self, *, min_mhz: int, max_mhz: int) -> None:
        """Locks the SM clock to a range, MHz."""

    @abstractmethod
    def reset_clocks(self) -> None:
        """Releases locked clocks."""

    @abstractmethod
    def close(self) -> None:
        """Releases the device; it does not restore limits, a guard does."""
