"""An NVML stand-in: a C library with simulated GPUs that processes share, built once per test session."""

# ruff: noqa: N802  (methods are named after the C functions that they stand in for)

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml_standin.c")


def build_standin(folder: Path, *flags: str, name: str = "libnvidia-ml.so.1") -> Path:
    """Compiles the stand-in to `folder`; by its SONAME the dynamic loader takes it for NVML."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the NVML stand-in cannot be built")
    library = folder / name
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC", *flags]
    command += [f"-Wl,-soname,{name}", "-o", str(library), str(SOURCE), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@dataclass
class StandIn:
    """One machine of simulated GPUs: a state file, and hooks to steer it from outside NVML.

    Attributes:
        library: The shared object; its folder goes into LD_LIBRARY_PATH of processes that shall see the GPUs.
        state: State file of this machine.
        gpus: Comma-separated boards: P100, V100, A100, A40, H100, H200.
    """

    library: Path
    state: Path
    gpus: str
    hooks: ctypes.CDLL

    def env(self, **more: str) -> dict[str, str]:
        """Environment of a process that finds these GPUs with the unmodified binding."""
        own = {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STANDIN_STATE": str(self.state)}
        return {**os.environ, **own, "NVML_STANDIN_GPUS": self.gpus, **more}

    def run(self, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs Python code in a process that sees these GPUs."""
        command = [sys.executable, "-W", "error", "-c", code, *args]
        return subprocess.run(command, env=self.env(**env), capture_output=True, text=True, timeout=60)

    def set(self, index: int, key: str, value: float = 1) -> None:
        """Sets a value of a GPU; keys are in `nvml_standin.c` (also `permitted` and `driver_reload`)."""
        if self.hooks.standin_set(index, key.encode(), ctypes.c_double(value)):
            raise KeyError(key)

    def get(self, index: int, key: str) -> float:
        """Reads a value of a GPU, true values included; NaN for an unknown key."""
        return self.hooks.standin_get(index, key.encode())

    def advance(self, seconds: float) -> None:
        """Moves virtual time on."""
        self.hooks.standin_advance(ctypes.c_double(seconds))

    @staticmethod
    def uuid(index: int) -> str:
        return f"GPU-{0xFA4E0000 + index:08x}-0000-4000-8000-{index:012x}"


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_standin(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def old_standin_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver from before the clocks-event functions got their present names."""
    return build_standin(tmp_path_factory.mktemp("old"), "-DOLD_DRIVER")


@pytest.fixture(scope="session")
def standin_hooks(standin_library: Path, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    # A copy without NVML's SONAME, so that this process does not find "NVML" from now on.
    library = build_standin(tmp_path_factory.mktemp("hooks"), name="standin_hooks.so")
    hooks = ctypes.CDLL(str(library))
    hooks.standin_get.restype = ctypes.c_double
    hooks.standin_sizeof.restype = ctypes.c_size_t
    return hooks


@pytest.fixture
def make_standin(standin_library: Path, standin_hooks: ctypes.CDLL, tmp_path, monkeypatch):
    """Makes a machine with given boards on the real clock, or on a virtual one that the test moves."""

    def make(gpus: str = "H100,A100", *, virtual: bool = False) -> StandIn:
        monkeypatch.setenv("NVML_STANDIN_CLOCK", "virtual" if virtual else "real")
        state = tmp_path / "gpus.state"
        if standin_hooks.standin_open(str(state).encode(), gpus.encode()):
            raise OSError(f"cannot map {state}")
        return StandIn(standin_library, state, gpus, standin_hooks)

    return make


@pytest.fixture
def standin(make_standin) -> StandIn:
    """Two boards, an H100 and an A100, on the real clock."""
    return make_standin()


class _Function:
    """A library function as the binding expects it: callable, and open to attributes such as `restype`."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        return self._call(*arguments)


class SlotLibrary:
    """Simulated devices behind NVML's C functions, as a Python object for the binding's library slot.

    Attributes:
        devices: The GPUs; a device's place here is its NVML index.
        missing: Functions that this "driver" lacks.
        calls: Names of the functions that were called.
    """

    def __init__(self, devices, missing=()):
        self.devices = devices
        self.missing = set(missing)
        self.calls = []
        self._handles = {}

    def __getattr__(self, name):
        if not name.startswith("nvml"):
            raise AttributeError(name)
        method = getattr(type(self), "_" + name, None)
        if method is None or name in self.missing:
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            return self._as_code(method, arguments)

        return _Function(call)

    def _as_code(self, method, arguments):
        from wattgym.hw import device as errors

        try:
            return method(self, *arguments) or 0
        except errors.PermissionDeniedError:
            return 4
        except errors.NotSupportedError:
            return 3
        except errors.DeviceLostError as error:
            return 15 if "is lost" in str(error) else 999
        except errors.DeviceError:
            return 2

    def _device(self, handle):
        return self.devices[self._handles[ctypes.addressof(handle.contents)][0]]

    def _reading(self, handle):
        return self._device(handle).read()

    def _give(self, index, to):
        import pynvml

        to._obj.contents = pynvml.struct_c_nvmlDevice_t()
        self._handles[ctypes.addressof(to._obj.contents)] = (index, to._obj.contents)

    def _nvmlInitWithFlags(self, flags):
        return 0

    def _nvmlShutdown(self):
        return 0

    def _nvmlErrorString(self, code):
        return b"simulated error"

    def _nvmlSystemGetDriverVersion(self, to, size):
        to.value = b"580.00.slot"

    def _nvmlDeviceGetCount_v2(self, to):
        to._obj.value = len(self.devices)

    def _nvmlDeviceGetHandleByIndex_v2(self, index, to):
        if index.value >= len(self.devices):
            return 2
        self.devices[index.value].read()
        return self._give(index.value, to)

    def _nvmlDeviceGetHandleByUUID(self, uuid, to):
        for index, device in enumerate(self.devices):
            if device.info().uuid.encode() == uuid.value:
                device.read()
                return self._give(index, to)
        return 6

    def _nvmlDeviceGetIndex(self, handle, to):
        to._obj.value = self.devices.index(self._device(handle))

    def _nvmlDeviceGetName(self, handle, to, size):
        to.value = self._device(handle).info().name.encode()

    def _nvmlDeviceGetUUID(self, handle, to, size):
        to.value = self._device(handle).info().uuid.encode()

    def _nvmlDeviceGetPciInfo_v3(self, handle, to):
        to._obj.busId = b"00000000:%02X:00.0" % (0x10 + self.devices.index(self._device(handle)))

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = (8, 6) if "a40" in self._device(handle).info().name else (9, 0)

    def _nvmlDeviceGetMigMode(self, handle, current, pending):
        current._obj.value = pending._obj.value = int(self._device(handle).faults().mig)

    def _nvmlDeviceGetPersistenceMode(self, handle, to):
        to._obj.value = int(not self._device(handle).faults().persistence_off)

    def _nvmlDeviceGetPowerUsage(self, handle, to):
        to._obj.value = round(1000 * self._reading(handle).power_w)

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle, to):
        energy_j = self._reading(handle).energy_j
        if energy_j is None:
            return 3
        to._obj.value = round(1000 * energy_j)

    def _nvmlDeviceGetFieldValues(self, handle, count, fields):
        reading = self._reading(handle)
        for field in fields._obj:
            field.nvmlReturn, field.valueType, field.value.ullVal = 0, 1, 0xDEADBEEF
            if field.fieldId == 186 and field.scopeId == 0:
                field.value.uiVal = round(1000 * reading.power_w)
            else:
                field.nvmlReturn = 3

    def _nvmlDeviceGetClockInfo(self, handle, kind, to):
        reading = self._reading(handle)
        to._obj.value = int(reading.memory_clock_mhz if kind.value == 2 else reading.sm_clock_mhz)

    def _nvmlDeviceGetTemperature(self, handle, sensor, to):
        to._obj.value = int(self._reading(handle).temperature_c)

    def _nvmlDeviceGetUtilizationRates(self, handle, to):
        utilisation = self._reading(handle).utilisation
        if utilisation is None:
            return 3
        to._obj.gpu = round(100 * utilisation)

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle, to):
        to._obj.value = self._reading(handle).throttle_reasons

    def _nvmlDeviceGetPowerManagementLimit(self, handle, to):
        to._obj.value = self._device(handle).requested_limit_mw()

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle, to):
        to._obj.value = self._device(handle).enforced_limit_mw()

    def _nvmlDeviceGetPowerManagementLimitConstraints(self, handle, lowest, highest):
        faults, info = self._device(handle).faults(), self._device(handle).info()
        lowest._obj.value = faults.min_limit_mw or info.min_limit_mw
        highest._obj.value = faults.max_limit_mw or info.max_limit_mw

    def _nvmlDeviceGetPowerManagementDefaultLimit(self, handle, to):
        to._obj.value = self._device(handle).info().default_limit_mw

    def _nvmlDeviceSetPowerManagementLimit(self, handle, limit):
        self._device(handle).set_power_limit_mw(limit.value)

    def _nvmlDeviceSetGpuLockedClocks(self, handle, lowest, highest):
        self._device(handle).lock_clocks_mhz(min_mhz=lowest.value, max_mhz=highest.value)

    def _nvmlDeviceResetGpuLockedClocks(self, handle):
        self._device(handle).reset_clocks()


@pytest.fixture
def use_library(monkeypatch):
    """Puts a library object into the unmodified binding's slot for one test."""
    import pynvml

    def use(library):
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return library

    return use


@pytest.fixture
def slot_library(use_library):
    """Makes a slot library over simulated devices and puts it in place."""
    return lambda devices, missing=(): use_library(SlotLibrary(devices, missing))
