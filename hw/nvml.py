"""A real NVIDIA GPU through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from wattgym.hw.device import (
    Device,
    DeviceError,
    DeviceInfo,
    DeviceLostError,
    DeviceReading,
    DriverError,
    NotSupportedError,
    PermissionDeniedError,
    PowerKind,
    checked_clocks_mhz,
    checked_limit_mw,
)
from wattgym.hw.nvml_binding import NvmlLibrary
from wattgym.hw.visible import GpuAddress

FIELD_POWER_AVERAGE = 185
FIELD_POWER_INSTANT = 186
SCOPE_GPU, SCOPE_MODULE = 0, 1
CLOCK_SM, CLOCK_MEMORY = 1, 2
TEMPERATURE_CORE = 0

Value = TypeVar("Value")


def list_gpus() -> list[GpuAddress]:
    """All GPUs that NVML can describe, by index; one that is lost is left out.

    Raises:
        DriverError: No binding, no library, no driver.
    """
    library = NvmlLibrary()
    try:
        gpus = []
        for index in range(library.call("NVML: count devices", "nvmlDeviceGetCount")):
            try:
                gpus.append(_address(library, index))
            except DeviceLostError:
                continue
        return gpus
    finally:
        library.close()


class NvmlDevice(Device):
    """One GPU, by UUID, the only address that stays the same over reboots.

    Power is the instantaneous field where the driver has it, else the default reading, whose kind depends on the
    architecture. Each getter is tried once at opening; `info().capabilities` says `ok` or why not. Only the first
    version of the limit setter is used: the binding's second one reports success whatever the driver answered.

    Args:
        uuid: `GPU-…`, in full.

    Raises:
        DriverError: No binding, no library, no driver.
        DeviceNotFoundError: No GPU has this UUID.
        DeviceLostError: It is there but does not answer.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._library = NvmlLibrary()
        self._handle_pid = -1
        self._handle: Any = None
        self._readers: dict[str, Callable[[], Any]] = {
            "power_instant": self._power_instant,
            "power_usage": lambda: self._get("nvmlDeviceGetPowerUsage"),
            "energy": lambda: self._get("nvmlDeviceGetTotalEnergyConsumption"),
            "sm_clock": lambda: self._get("nvmlDeviceGetClockInfo", CLOCK_SM),
            "memory_clock": lambda: self._get("nvmlDeviceGetClockInfo", CLOCK_MEMORY),
            "temperature": self._temperature,
            "utilisation": lambda: self._get("nvmlDeviceGetUtilizationRates").gpu,
            "throttle_reasons": self._throttle_reasons,
            "requested_limit": lambda: self._get("nvmlDeviceGetPowerManagementLimit"),
            "enforced_limit": lambda: self._get("nvmlDeviceGetEnforcedPowerLimit"),
        }
        self._capabilities: dict[str, str] = {}
        try:
            self._info = self._probe()
        except BaseException:
            self._library.close()
            raise

    # --- Device

    def info(self) -> DeviceInfo:
        """See `Device.info`."""
        return self._info

    def read(self) -> DeviceReading:
        """See `Device.read`.

        Raises:
            DeviceLostError: The GPU is gone, or the container lost it.
            DriverError: The driver was changed or unloaded.
        """
        power_mw, age_s = self._power()
        energy_mj = self._value("energy")
        utilisation = self._value("utilisation")
        return DeviceReading(
            t_s=time.monotonic(),
            age_s=age_s,
            power_w=None if power_mw is None else power_mw / 1000.0,
            power_kind=self._info.power_kind,
            energy_j=None if energy_mj is None else energy_mj / 1000.0,
            sm_clock_mhz=_as_float(self._value("sm_clock")),
            memory_clock_mhz=_as_float(self._value("memory_clock")),
            temperature_c=_as_float(self._value("temperature")),
            utilisation=None if utilisation is None else utilisation / 100.0,
            throttle_reasons=self._value("throttle_reasons"),
            requested_limit_mw=self._value("requested_limit"),
            enforced_limit_mw=self._value("enforced_limit"),
        )

    def set_power_limit_mw(self, limit_mw: int) -> None:
        """See `Device.set_power_limit_mw`."""
        wanted_mw = checked_limit_mw(limit_mw, self._uuid)
        lowest, highest = self._info.min_limit_mw, self._info.max_limit_mw
        if lowest is not None and highest is not None and not lowest <= wanted_mw <= highest:
            raise DeviceError(f"{self._uuid}: power limit {wanted_mw} mW is outside {lowest} … {highest} mW")
        self._get("nvmlDeviceSetPowerManagementLimit", wanted_mw, action=f"set power limit {wanted_mw} mW")

    def requested_limit_mw(self) -> int:
        """See `Device.requested_limit_mw`.

        Raises:
            NotSupportedError: Some laptops only tell the enforced limit.
        """
        return int(self._get("nvmlDeviceGetPowerManagementLimit"))

    def enforced_limit_mw(self) -> int:
        """See `Device.enforced_limit_mw`."""
        return int(self._get("nvmlDeviceGetEnforcedPowerLimit"))

    def lock_clocks_mhz(self, *, min_mhz: int, max_mhz: int) -> None:
        """See `Device.lock_clocks_mhz`; the minimum is not guaranteed, power and thermal limits win over it."""
        lowest, highest = checked_clocks_mhz(min_mhz, max_mhz, self._uuid)
        self._get("nvmlDeviceSetGpuLockedClocks", lowest, highest, action=f"lock clocks {lowest}-{highest} MHz")

    def reset_clocks(self) -> None:
        """See `Device.reset_clocks`."""
        self._get("nvmlDeviceResetGpuLockedClocks", action="reset clocks")

    def close(self) -> None:
        """See `Device.close`."""
        self._library.close()

    # --- single getters

    def _get(self, function: str, *arguments: Any, action: str | None = None) -> Any:
        what = f"{self._uuid}: {action or function.removeprefix('nvmlDevice')}"
        pid = self._library.pid
        if self._handle_pid != pid:
            self._handle = self._library.call(self._uuid, "nvmlDeviceGetHandleByUUID", self._uuid)
            self._handle_pid = pid
        return self._library.call(what, function, self._handle, *arguments)

    def _field(self, field_id: int, scope: int = SCOPE_GPU) -> tuple[float | int, int]:
        if self._handle_pid != self._library.pid:
            self._get("nvmlDeviceGetIndex")
        return self._library.field(f"{self._uuid}: field {field_id}", self._handle, field_id, scope)

    def _power_instant(self) -> tuple[float, float | None]:
        value, taken_us = self._field(FIELD_POWER_INSTANT)
        age_s = time.time() - taken_us / 1e6 if taken_us > 0 else None
        # A wall clock that was set back would give a negative age.
        return float(value), None if age_s is None or age_s < -1.0 else max(age_s, 0.0)

    def _power(self) -> tuple[float | None, float | None]:
        if self._capabilities["power_instant"] == "ok":
            instant: tuple[float, float | None] | None = self._value("power_instant")
            return (None, None) if instant is None else instant
        return self._value("power_usage"), None

    def _temperature(self) -> Any:
        try:
            return self._get("nvmlDeviceGetTemperature", TEMPERATURE_CORE)
        except NotSupportedError:
            return self._get("nvmlDeviceGetTemperatureV", TEMPERATURE_CORE)

    def _throttle_reasons(self) -> Any:
        try:
            return self._get("nvmlDeviceGetCurrentClocksEventReasons")
        except NotSupportedError:  # drivers before 535 know the older name only
            return self._get("nvmlDeviceGetCurrentClocksThrottleReasons")

    def _value(self, name: str) -> Any:
        """One reading, or `None` where the device does not offer it now."""
        if self._capabilities[name] != "ok":
            return None
        try:
            return self._readers[name]()
        except (DeviceLostError, DriverError):
            raise
        except DeviceError:
            return None

    # --- probing

    def _probe(self) -> DeviceInfo:
        name = str(self._get("nvmlDeviceGetName"))
        index = int(self._get("nvmlDeviceGetIndex"))
        for reading, reader in self._readers.items():
            self._try(reading, reader)
        limits = self._try("limit_constraints", lambda: self._get("nvmlDeviceGetPowerManagementLimitConstraints"))
        default = self._try("default_limit", lambda: self._get("nvmlDeviceGetPowerManagementDefaultLimit"))
        self._try("power_average", lambda: self._field(FIELD_POWER_AVERAGE))
        self._try("power_module", lambda: self._field(FIELD_POWER_INSTANT, SCOPE_MODULE))
        mig = self._try("mig_mode", lambda: self._get("nvmlDeviceGetMigMode"))
        persistence = self._try("persistence", lambda: self._get("nvmlDeviceGetPersistenceMode"))
        compute = self._try("compute_capability", lambda: self._get("nvmlDeviceGetCudaComputeCapability"))
        # Whether this process may write cannot be known without writing; that the platform has a limit can.
        whys = [self._capabilities[name] for name in ("requested_limit", "limit_constraints")]
        self._capabilities["set_power_limit"] = next((why for why in whys if why != "ok"), "ok")
        kind, window_s = self._power_semantics(compute)
        return DeviceInfo(
            uuid=self._uuid,
            name=name,
            index=index,
            backend="nvml",
            pci_bus_id=self._optional(lambda: _text(self._get("nvmlDeviceGetPciInfo").busId)),
            driver_version=self._optional(
                lambda: _text(self._library.call("NVML: driver version", "nvmlSystemGetDriverVersion"))
            ),
            min_limit_mw=None if limits is None else int(limits[0]),
            max_limit_mw=None if limits is None else int(limits[1]),
            default_limit_mw=None if default is None else int(default),
            requested_limit_mw=self._value("requested_limit"),
            enforced_limit_mw=self._value("enforced_limit"),
            power_kind=kind,
            power_window_s=window_s,
            capabilities=dict(self._capabilities),
            is_mig=mig is not None and mig[0] == 1,
            persistence=None if persistence is None else persistence == 1,
        )

    def _try(self, name: str, reader: Callable[[], Value]) -> Value | None:
        try:
            value = reader()
        except (DeviceLostError, DriverError):
            raise
        except DeviceError as error:
            self._capabilities[name] = str(error).removeprefix(f"{self._uuid}: ")
            return None
        self._capabilities[name] = "ok"
        return value

    @staticmethod
    def _optional(reader: Callable[[], Value]) -> Value | None:
        try:
            return reader()
        except (NotSupportedError, PermissionDeniedError):
            return None

    def _power_semantics(self, compute: Any) -> tuple[PowerKind, float | None]:
        """What the power reading is.

        nvml.h: GetPowerUsage is a 1-s average on Ampere other than GA100 and newer, instantaneous before. Windows as
        measured in "Part-time power measurements" (SC'24, doi 10.1109/SC41406.2024.00028).
        """
        capability = None if compute is None else (int(compute[0]), int(compute[1]))
        window_s = _instant_window_s(capability)
        if self._capabilities["power_instant"] == "ok":
            return PowerKind.INSTANT, window_s
        if self._capabilities["power_usage"] != "ok" or capability is None:
            return PowerKind.UNKNOWN, None
        return (PowerKind.AVERAGE, 1.0) if capability > (8, 0) else (PowerKind.INSTANT, window_s)


def _instant_window_s(capability: tuple[int, int] | None) -> float | None:
    """Averaging window of the instantaneous reading by compute capability; `None` where nobody has measured it."""
    if capability is None or capability < (6, 0) or capability >= (10, 0):
        return None
    if capability < (7, 5):
        return 0.010  # Pascal, Volta
    return 0.025 if capability in ((8, 0), (9, 0)) else 0.100  # GA100 and Hopper; Turing, GA10x and Ada


def _address(library: NvmlLibrary, index: int) -> GpuAddress:
    what = f"NVML index {index}"
    handle = library.call(what, "nvmlDeviceGetHandleByIndex", index)
    is_mig, instances = False, []
    try:
        is_mig = library.call(what, "nvmlDeviceGetMigMode", handle)[0] == 1
        count = library.call(what, "nvmlDeviceGetMaxMigDeviceCount", handle) if is_mig else 0
        for instance in range(count):
            child = library.call(what, "nvmlDeviceGetMigDeviceHandleByIndex", handle, instance)
            instances.append(_text(library.call(what, "nvmlDeviceGetUUID", child)))
    except DeviceLostError:
        raise
    except DeviceError:
        pass  # not split, or no further instance: NVML answers "not found" after the last one
    return GpuAddress(
        uuid=_text(library.call(what, "nvmlDeviceGetUUID", handle)),
        index=index,
        pci_bus_id=_text(library.call(what, "nvmlDeviceGetPciInfo", handle).busId),
        name=_text(library.call(what, "nvmlDeviceGetName", handle)),
        mig_uuids=tuple(instances),
        is_mig=is_mig,
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)
