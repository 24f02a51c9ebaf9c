"""NVML's return codes as this project's exceptions, each with what the user can do about it."""

from __future__ import annotations

from enum import IntEnum

from wattgym.hw.device import (
    DeviceError,
    DeviceLostError,
    DeviceNotFoundError,
    DeviceTimeoutError,
    DriverError,
    NotSupportedError,
    PermissionDeniedError,
)


class NvmlCode(IntEnum):
    """The return codes that need telling apart (nvml.h, `nvmlReturn_t`)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    NO_DATA = 21
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


DRIVER_TOO_OLD = "the driver is older than the binding and lacks this function; update the driver"

_REMEDIES: dict[int, tuple[type[DeviceError], str]] = {
    NvmlCode.UNINITIALIZED: (DriverError, "NVML is not initialised in this process; open the device again"),
    NvmlCode.INVALID_ARGUMENT: (
        DeviceError,
        "NVML calls the argument invalid; limits are milliwatts within the device's own range",
    ),
    NvmlCode.NOT_SUPPORTED: (
        NotSupportedError,
        "not supported on this device or platform; vGPU guests, laptops, Jetson, WSL2 and some MIG set-ups lack it",
    ),
    NvmlCode.NO_PERMISSION: (
        PermissionDeniedError,
        "permission denied; it takes root, and in a container the capability SYS_ADMIN too (docker run --cap-add "
        "SYS_ADMIN); or let a privileged `wattgym hw serve` do the writing",
    ),
    NvmlCode.NOT_FOUND: (DeviceNotFoundError, "not found; `wattgym hw doctor` lists what there is"),
    NvmlCode.INSUFFICIENT_POWER: (DriverError, "a power cable of the board is missing or badly seated"),
    NvmlCode.DRIVER_NOT_LOADED: (
        DriverError,
        "the NVIDIA kernel driver is not loaded; check `nvidia-smi` on the host, and `--gpus` for a container",
    ),
    NvmlCode.TIMEOUT: (DeviceTimeoutError, "the driver did not answer in time"),
    NvmlCode.LIBRARY_NOT_FOUND: (
        DriverError,
        "libnvidia-ml.so.1 was not found; it comes with the NVIDIA driver, in a container with the container toolkit",
    ),
    NvmlCode.FUNCTION_NOT_FOUND: (NotSupportedError, DRIVER_TOO_OLD),
    NvmlCode.GPU_IS_LOST: (
        DeviceLostError,
        "the GPU is lost: it fell off the bus; nothing more is written. See the kernel log for its Xid, then reboot",
    ),
    NvmlCode.RESET_REQUIRED: (DeviceLostError, "the GPU needs a reset before it can be used again"),
    NvmlCode.LIB_RM_VERSION_MISMATCH: (
        DriverError,
        "library and kernel module differ: the driver was changed under running processes; restart, or reboot",
    ),
    NvmlCode.IN_USE: (DeviceError, "the device is in use; stop its other clients (persistence mode is one) first"),
    NvmlCode.NO_DATA: (NotSupportedError, "no data yet; the sensor has not sampled"),
    NvmlCode.ARGUMENT_VERSION_MISMATCH: (
        NotSupportedError,
        "the driver does not know this version of the request; update the driver",
    ),
    NvmlCode.UNKNOWN: (
        DeviceLostError,
        "unknown error: typical of a container that lost its devices when the host's service manager was reloaded; "
        "restart the container (and use the toolkit's CDI mode to prevent it)",
    ),
}


def device_error(code: int, what: str) -> DeviceError:
    """The exception for one return code.

    Args:
        code: NVML's return code.
        what: Device and action, as the message's beginning.
    """
    kind, remedy = _REMEDIES.get(code, (DeviceError, f"NVML returned code {code}"))
    return kind(f"{what}: {remedy}")
