"""The official NVML binding (`nvidia-ml-py`, imported as `pynvml`), with its defects kept away from the rest.

Errors become this project's exceptions at once: the binding's own compare badly, cannot be hashed, and older ones
cannot be pickled. A process that was forked initialises NVML anew, because its parent's initialisation is not its own.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from wattgym.hw.device import DriverError
from wattgym.hw.remedies import NvmlCode, device_error

_OFFICIAL = ("_nvmlGetFunctionPointer", "nvmlDeviceGetFieldValues", "nvmlDeviceSetGpuLockedClocks", "nvmlInitWithFlags")
"""Names that the official module has. The old fork re-exports public names only; the dead port lacks the newer ones."""

_FIELD_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Union member by `nvmlValueType_t`."""


def load_binding() -> ModuleType:
    """Imports the official binding.

    Raises:
        DriverError: It is missing, or another package of the same import name hides it.
    """
    try:
        with warnings.catch_warnings():
            # The deprecated `pynvml` distribution from 12 on is harmless, it only warns about itself.
            warnings.simplefilter("ignore", FutureWarning)
            module = import_module("pynvml")
    except ImportError as error:
        raise DriverError(f"NVML binding: cannot import ({error}); run: pip install nvidia-ml-py") from None
    missing = [name for name in _OFFICIAL if not hasattr(module, name)]
    if missing:
        where = getattr(module, "__file__", "unknown place")
        raise DriverError(
            f"NVML binding: {where} is the old unofficial 'pynvml' or 'nvidia-ml-py3', not NVIDIA's; "
            "run: pip uninstall pynvml nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py"
        )
    return module


class NvmlLibrary:
    """One initialised reference to the NVML library; references are counted by the library itself.

    Raises:
        DriverError: No binding, no library, no driver.
    """

    def __init__(self) -> None:
        self._binding = load_binding()
        self._pid = -1
        self._initialise()

    def _initialise(self) -> None:
        try:
            self._binding.nvmlInit()
        except self._binding.NVMLError as error:
            raise device_error(error.value, "NVML") from None
        self._pid = os.getpid()

    @property
    def pid(self) -> int:
        """The process in which the library is initialised; initialises it in a process that was forked since."""
        if self._pid != os.getpid():
            self._initialise()
        return self._pid

    def has(self, function: str) -> bool:
        """Whether the binding knows a function; the driver may still lack it."""
        return hasattr(self._binding, function)

    def call(self, what: str, function: str, *arguments: Any) -> Any:
        """Calls one function of the binding.

        Args:
            what: Device and action for messages.
            function: Name, `nvml…`.
            arguments: As the binding takes them.

        Raises:
            DeviceError: The subclass says which kind of failure, the message what to do.
        """
        call = getattr(self._binding, function, None)
        if call is None:
            raise device_error(NvmlCode.FUNCTION_NOT_FOUND, what)
        try:
            return call(*arguments)
        except self._binding.NVMLError as error:
            raise device_error(error.value, what) from None

    def field(self, what: str, handle: Any, field_id: int, scope: int = 0) -> tuple[float | int, int]:
        """One field value, its own return code checked and its union member chosen by its type.

        Args:
            what: Device and action for messages.
            handle: NVML handle.
            field_id: `NVML_FI_…`.
            scope: Power scope, 0 for the GPU itself.

        Returns:
            The value, and the time at which the driver took it, microseconds since 1970 (0: it does not say).

        Raises:
            DeviceError: The call failed, or this entry of it.
        """
        entry = self.call(what, "nvmlDeviceGetFieldValues", handle, [(field_id, scope)])[0]
        if entry.nvmlReturn != NvmlCode.SUCCESS:
            raise device_error(entry.nvmlReturn, what)
        member = _FIELD_MEMBERS.get(entry.valueType)
        if member is None:
            raise device_error(NvmlCode.ARGUMENT_VERSION_MISMATCH, f"{what}: value type {entry.valueType}")
        return getattr(entry.value, member), int(entry.timestamp)

    def close(self) -> None:
        """Gives the reference back; harmless after a fork or a second time."""
        if self._pid == os.getpid():
            self._pid = -1
            try:
                self._binding.nvmlShutdown()
            except self._binding.NVMLError:
                return  # already down: nothing is held
