"""The binding's own defects, its imitations, and NVML's error codes."""

import ctypes
import os
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest

from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import (
    DeviceError,
    DeviceLostError,
    DeviceNotFoundError,
    DeviceTimeoutError,
    DriverError,
    NotSupportedError,
    PermissionDeniedError,
    PowerKind,
    checked_limit_mw,
)
from wattgym.hw.nvml import NvmlDevice, list_gpus
from wattgym.hw.nvml_binding import NvmlLibrary, load_binding
from wattgym.hw.remedies import NvmlCode, device_error
from wattgym.hw.simulated import SimulatedDevice


@pytest.fixture
def gpu():
    return SimulatedDevice("h100-sxm", clock=VirtualClock(100.0))


def python(code, *, path=None, **env):
    environment = {**os.environ, **env}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


# --- codes

EXPECTED = {
    1: (DriverError, "open the device again"),
    2: (DeviceError, "milliwatts"),
    3: (NotSupportedError, "vGPU"),
    4: (PermissionDeniedError, "SYS_ADMIN"),
    6: (DeviceNotFoundError, "doctor"),
    9: (DriverError, "kernel driver"),
    10: (DeviceTimeoutError, "in time"),
    12: (DriverError, "libnvidia-ml.so.1"),
    13: (NotSupportedError, "update the driver"),
    15: (DeviceLostError, "nothing more is written"),
    16: (DeviceLostError, "reset"),
    18: (DriverError, "restart"),
    19: (DeviceError, "persistence"),
    21: (NotSupportedError, "no data"),
    25: (NotSupportedError, "update the driver"),
    999: (DeviceLostError, "container"),
    4711: (DeviceError, "4711"),
}


@pytest.mark.parametrize("code", list(EXPECTED))
def test_each_code_names_its_remedy_and_survives_pickling(code):
    kind, words = EXPECTED[code]
    error = device_error(code, "GPU-1: do it")
    assert type(error) is kind
    assert words in str(error)
    assert str(error).startswith("GPU-1: do it")
    assert "\n" not in str(error)
    assert type(pickle.loads(pickle.dumps(error))) is kind


def test_codes_are_the_bindings():
    import pynvml

    for code in NvmlCode:
        name = "NVML_SUCCESS" if code == 0 else f"NVML_ERROR_{code.name}"
        assert getattr(pynvml, name) == code


@pytest.mark.parametrize("code", [code for code in EXPECTED if code != 1])
def test_the_setter_reports_every_code(slot_library, gpu, code):
    library = slot_library([gpu])
    device = NvmlDevice(gpu.info().uuid)
    library._as_code = lambda method, arguments: code
    kind, words = EXPECTED[code]
    with pytest.raises(kind, match=words):
        device.set_power_limit_mw(400_000)
    assert gpu.requested_limit_mw() == 700_000


# --- imitations of the binding


def test_the_old_fork_is_refused_by_name(tmp_path):
    # pynvml up to 11.5: a package that re-exports the public names of its inner module.
    package = tmp_path / "pynvml"
    package.mkdir()
    (package / "__init__.py").write_text("from .nvml import *\n")
    (package / "nvml.py").write_text(
        "def _nvmlGetFunctionPointer(name): pass\n"
        "def nvmlInitWithFlags(flags): pass\ndef nvmlDeviceGetFieldValues(): pass\n"
        "def nvmlDeviceSetGpuLockedClocks(): pass\n"
    )
    result = python(
        "from wattgym.hw.nvml_binding import load_binding\nfrom wattgym.hw.device import DriverError\n"
        "try: load_binding()\nexcept DriverError as error: print(error)",
        path=tmp_path,
    )
    assert "unofficial" in result.stdout
    assert "pip uninstall pynvml" in result.stdout
    assert str(package) in result.stdout


def test_the_dead_port_is_refused(tmp_path):
    # nvidia-ml-py3 7.352 is one module from the time before field values and locked clocks.
    (tmp_path / "pynvml.py").write_text("def _nvmlGetFunctionPointer(name): pass\ndef nvmlInit(): pass\n")
    code = "from wattgym.hw.open import open_devices\nopen_devices(None)"
    result = python(code, path=tmp_path)
    assert result.stderr.strip().splitlines()[-1].startswith("wattgym.hw.device.DriverError: NVML binding")


def test_the_deprecated_shim_only_warns_and_is_kept_quiet(tmp_path):
    real = load_binding().__file__
    (tmp_path / "pynvml.py").write_text(
        f"import warnings; warnings.warn('deprecated', FutureWarning)\nexec(open({real!r}).read())\n"
    )
    code = "import warnings; warnings.simplefilter('error')\nfrom wattgym.hw.nvml_binding import load_binding\n"
    result = python(code + "print(load_binding().__file__)", path=tmp_path)
    assert result.stdout.strip() == str(tmp_path / "pynvml.py"), result.stderr


def test_no_binding_says_what_to_install(tmp_path):
    (tmp_path / "pynvml.py").write_text("raise ImportError('no module')\n")
    result = python("from wattgym.hw.nvml_binding import load_binding\nload_binding()", path=tmp_path)
    assert "pip install nvidia-ml-py" in result.stderr.splitlines()[-1]


def test_no_library_says_where_it_comes_from():
    result = python("from wattgym.hw.nvml import list_gpus\nlist_gpus()", LD_LIBRARY_PATH="")
    last = result.stderr.strip().splitlines()[-1]
    if result.returncode == 0:
        pytest.skip("this machine has an NVIDIA driver")
    assert "DriverError" in last
    assert "libnvidia-ml.so.1" in last or "driver is not loaded" in last


# --- defects


def test_the_second_setter_of_the_binding_is_never_called(slot_library, gpu):
    library = slot_library([gpu])
    device = NvmlDevice(gpu.info().uuid)
    device.set_power_limit_mw(400_000)
    assert "nvmlDeviceSetPowerManagementLimit" in library.calls
    assert "nvmlDeviceSetPowerManagementLimit_v2" not in library.calls


def test_the_second_setter_does_hide_failures(make_standin, use_library):
    # The reason for the test above: without permission it raises nothing. Bindings of API 12 return the code, those of
    # API 13 return 0, success.
    import pynvml

    machine = make_standin("H100", virtual=True)
    use_library(machine.hooks)
    machine.set(0, "permitted", 0)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    code = pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle, 0, 400_000)
    assert code in (0, NvmlCode.NO_PERMISSION)
    assert machine.get(0, "requested_mw") == 700_000


def test_one_failed_field_is_not_taken_for_a_value(make_standin, use_library):
    machine = make_standin("H100", virtual=True)
    use_library(machine.hooks)
    library = NvmlLibrary()
    handle = library.call("test", "nvmlDeviceGetHandleByIndex", 0)
    with pytest.raises(NotSupportedError):  # the union then holds 0xdeadbeef, some 3.7 million watts
        library.field("test", handle, 186, scope=1)
    assert library.field("test", handle, 187)[0] == 200_000


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 6])
def test_the_union_member_follows_the_value_type(slot_library, gpu, kind):
    import pynvml

    library = slot_library([gpu])
    member = ["dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"][kind]
    if not hasattr(pynvml.c_nvmlValue_t, member):
        pytest.skip("this binding has no such member")

    def fill(fields):
        for field in fields._obj:
            field.value.ullVal = 0xFFFFFFFFFFFFFFFF
            setattr(field.value, member, 12_345)
            field.nvmlReturn, field.valueType = 0, kind

    type_ = type(library)
    binding = NvmlLibrary()
    handle = binding.call("test", "nvmlDeviceGetHandleByIndex", 0)
    original = type_._nvmlDeviceGetFieldValues
    type_._nvmlDeviceGetFieldValues = lambda self, handle, count, fields: fill(fields)
    try:
        assert binding.field("test", handle, 186)[0] == 12_345
    finally:
        type_._nvmlDeviceGetFieldValues = original


def test_structures_have_the_bindings_sizes(standin_hooks):
    import pynvml

    sizes = {
        "pci": ctypes.sizeof(pynvml.nvmlPciInfo_t),
        "field": ctypes.sizeof(pynvml.c_nvmlFieldValue_t),
        "field_value_offset": pynvml.c_nvmlFieldValue_t.value.offset,
        "utilization": ctypes.sizeof(pynvml.c_nvmlUtilization_t),
    }
    if hasattr(pynvml, "c_nvmlPowerValue_v2_t"):
        sizes["power_value"] = ctypes.sizeof(pynvml.c_nvmlPowerValue_v2_t)
    for name, size in sizes.items():
        assert standin_hooks.standin_sizeof(name.encode()) == size, name


# --- capabilities, getter by getter


@pytest.mark.parametrize(
    ("function", "capability", "field"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "energy", "energy_j"),
        ("nvmlDeviceGetUtilizationRates", "utilisation", "utilisation"),
        ("nvmlDeviceGetTemperature", "temperature", "temperature_c"),
        ("nvmlDeviceGetPowerManagementLimit", "requested_limit", "requested_limit_mw"),
        ("nvmlDeviceGetEnforcedPowerLimit", "enforced_limit", "enforced_limit_mw"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle_reasons", "throttle_reasons"),
    ],
)
def test_one_missing_getter_costs_one_value(slot_library, gpu, function, capability, field):
    slot_library([gpu], missing=[function])
    device = NvmlDevice(gpu.info().uuid)
    info, reading = device.info(), device.read()
    assert "driver is older" in info.capabilities[capability]
    assert getattr(reading, field) is None
    others = {"power_w", "energy_j", "temperature_c", "enforced_limit_mw", "sm_clock_mhz"} - {field}
    assert all(getattr(reading, name) is not None for name in others)


def test_a_laptop_tells_only_the_enforced_limit(slot_library, gpu):
    slot_library([gpu], missing=["nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetPowerManagementLimitConstraints"])
    device = NvmlDevice(gpu.info().uuid)
    assert device.info().enforced_limit_mw == 700_000
    assert device.info().requested_limit_mw is None
    assert device.info().capabilities["set_power_limit"] != "ok"
    assert device.read().enforced_limit_mw == 700_000
    with pytest.raises(NotSupportedError):
        device.requested_limit_mw()


def test_a_board_that_can_only_be_counted_still_opens(slot_library, gpu):
    # Jetson: initialisation works and one device is listed, but almost every getter is missing.
    keep = {"GetHandleByUUID", "GetName", "GetIndex", "GetUUID", "GetCount_v2", "GetHandleByIndex_v2", "GetPciInfo_v3"}
    missing = [
        name[1:] for name in dir(type(slot_library([gpu]))) if name.startswith("_nvmlDevice") and name[11:] not in keep
    ]
    slot_library([gpu], missing=missing)
    device = NvmlDevice(gpu.info().uuid)
    reading = device.read()
    assert device.info().power_kind == PowerKind.UNKNOWN
    assert {name for name, reason in device.info().capabilities.items() if reason == "ok"} == set()
    assert reading.power_w is None
    assert reading.energy_j is None
    assert reading.requested_limit_mw is None


def test_what_the_driver_loses_later_is_unknown_not_zero(slot_library, gpu):
    library = slot_library([gpu])
    device = NvmlDevice(gpu.info().uuid)
    original = library._as_code
    library._as_code = lambda method, arguments: 3 if "Energy" in method.__name__ else original(method, arguments)
    reading = device.read()
    assert reading.energy_j is None
    assert reading.power_w is not None


# --- which power reading


@pytest.mark.parametrize(
    ("board", "instant", "kind", "window_s"),
    [
        ("H100", 1, PowerKind.INSTANT, 0.025),
        ("H100", 0, PowerKind.AVERAGE, 1.0),
        ("A40", 1, PowerKind.INSTANT, 0.100),
        ("A40", 0, PowerKind.AVERAGE, 1.0),
        ("A100", 0, PowerKind.INSTANT, 0.025),
        ("V100", 0, PowerKind.INSTANT, 0.010),
        ("P100", 0, PowerKind.INSTANT, 0.010),
    ],
)
def test_the_kind_of_reading_is_recorded(make_standin, use_library, board, instant, kind, window_s):
    machine = make_standin(board, virtual=True)
    use_library(machine.hooks)
    machine.set(0, "instant_supported", instant)
    device = NvmlDevice(machine.uuid(0))
    assert (device.info().power_kind, device.info().power_window_s) == (kind, window_s)
    assert device.read().power_kind == kind
    assert device.info().capabilities["power_module"] != "ok"  # module power is never mixed in


def test_the_default_reading_of_the_stand_in_is_a_linear_ramp(make_standin, use_library):
    machine = make_standin("H100", virtual=True)
    use_library(machine.hooks)
    machine.set(0, "instant_supported", 0)
    machine.set(0, "load", 1)
    machine.advance(5.0)
    device = NvmlDevice(machine.uuid(0))
    high_w = device.read().power_w
    device.set_power_limit_mw(400_000)
    readings = []
    for _ in range(14):
        machine.advance(0.1)
        readings.append(device.read().power_w)
    low_w = readings[-1]
    shares = [(high_w - watts) / (high_w - low_w) for watts in readings]
    steps = [later - earlier for earlier, later in pairwise(shares)]
    assert shares[4] == pytest.approx(0.45, abs=0.12)  # an exponential would be at 0.65 or more
    assert all(0.05 < step < 0.14 for step in steps[1:8])
    assert machine.get(0, "power_w") == pytest.approx(low_w, rel=0.02)


# --- limits as numbers


@pytest.mark.parametrize("limit", [0, 1, 450_000, 2**32 - 1])
def test_whole_numbers_pass(limit):
    assert checked_limit_mw(limit, "GPU") == limit


def test_numpy_integers_pass_and_numpy_floats_do_not():
    import numpy as np

    value = checked_limit_mw(np.int64(450_000), "GPU")
    assert (value, type(value)) == (450_000, int)
    for wrong in (np.float64(450_000), np.bool_(True)):
        with pytest.raises(DeviceError):
            checked_limit_mw(wrong, "GPU")


def test_listing_gpus_leaves_out_the_lost_one(make_standin, use_library):
    machine = make_standin("H100,A100,V100", virtual=True)
    use_library(machine.hooks)
    machine.set(1, "lost", 1)
    assert [gpu.index for gpu in list_gpus()] == [0, 2]
