"""What devices there are, what each can do, and what stands in the way; reads only, never writes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from wattgym.hw.device import DeviceError, DeviceInfo, DeviceLostError, PowerKind
from wattgym.hw.nvml import NvmlDevice
from wattgym.hw.nvml_binding import NvmlLibrary, load_binding
from wattgym.hw.presets import load_presets
from wattgym.hw.privileges import Privileges, read_privileges
from wattgym.hw.remedies import DRIVER_TOO_OLD

ESSENTIAL = ("requested_limit", "enforced_limit", "limit_constraints", "default_limit", "set_power_limit")
"""Capabilities without which a device cannot be capped."""


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way, and what to do about it.

    Attributes:
        device: UUID, or `machine`.
        problem: What was found.
        remedy: What to do; empty where there is nothing to do.
    """

    device: str
    problem: str
    remedy: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """The whole picture.

    Attributes:
        binding: Version of `nvidia-ml-py`; `None` if it is not usable.
        driver: Version of the driver; `None` without one.
        cuda_visible_devices: That variable; `None` if unset.
        privileges: What this process is.
        devices: Real devices that answered.
        findings: What stands in the way, worst first.
        simulated_presets: GPUs that the simulated backend offers, always.
    """

    binding: str | None
    driver: str | None
    cuda_visible_devices: str | None
    privileges: Privileges
    devices: list[DeviceInfo] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    simulated_presets: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One JSON object with the attributes of this class."""
        return json.dumps(asdict(self), indent=2)


def examine() -> DoctorReport:
    """Looks at the binding, the driver, the process's rights and every device."""
    findings: list[Finding] = []
    privileges = read_privileges()
    binding = _binding_version(findings)
    driver, devices = _nvml_devices(findings) if binding is not None else (None, [])
    for info in devices:
        findings += device_findings(info)
    why_not = privileges.why_no_writes()
    if devices and why_not is not None:
        findings.append(Finding("machine", "power limits cannot be set by this process", why_not))
    return DoctorReport(
        binding=binding,
        driver=driver,
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        privileges=privileges,
        devices=devices,
        findings=findings,
        simulated_presets=list(load_presets()),
    )


def device_findings(info: DeviceInfo) -> list[Finding]:
    """What speaks against controlling one device."""
    found: list[Finding] = []

    def add(problem: str, remedy: str) -> None:
        found.append(Finding(info.uuid, problem, remedy))

    old = [name for name, reason in info.capabilities.items() if reason.endswith(DRIVER_TOO_OLD)]
    if old:
        add(f"the driver lacks functions for: {', '.join(old)}", DRIVER_TOO_OLD)
    for name in ESSENTIAL:
        reason = info.capabilities.get(name, "ok")
        if reason != "ok":
            add(f"{name}: {reason}", "it can be watched, not capped")
    requested, enforced = info.requested_limit_mw, info.enforced_limit_mw
    if requested is not None and enforced is not None and enforced < requested:
        add(
            f"enforced limit {enforced / 1000:g} W is below the requested {requested / 1000:g} W",
            "another limiter is at work (management controller, power brake, heat); find it before controlling",
        )
    if info.persistence is False:
        add(
            "persistence mode is off: limits are lost when the last client leaves",
            "start nvidia-persistenced, or run: nvidia-smi -pm 1",
        )
    if info.is_mig:
        add(
            "split by MIG: power and its limit belong to the whole GPU and act on every instance",
            "control it only if all instances are yours; nvidia-smi -mig 0 ends MIG mode",
        )
    if info.power_kind == PowerKind.AVERAGE:
        add(
            "the power reading is an average over about 1 s, not the instantaneous power",
            "update the driver for the instantaneous field; control no faster than every 2 s meanwhile",
        )
    if info.capabilities.get("energy", "ok") != "ok":
        add(f"no energy counter: {info.capabilities['energy']}", "energy is integrated from power samples instead")
    return found


def _binding_version(findings: list[Finding]) -> str | None:
    try:
        load_binding()
    except DeviceError as error:
        findings.append(_from_error("machine", error))
        return None
    if _installed("pynvml"):
        findings.append(
            Finding(
                "machine",
                "the deprecated package 'pynvml' is installed beside nvidia-ml-py",
                "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
            )
        )
    return _installed("nvidia-ml-py") or "unknown"


def _nvml_devices(findings: list[Finding]) -> tuple[str | None, list[DeviceInfo]]:
    try:
        library = NvmlLibrary()
    except DeviceError as error:
        findings.append(_from_error("machine", error))
        return None, []
    try:
        driver = str(library.call("NVML: driver version", "nvmlSystemGetDriverVersion"))
        count = int(library.call("NVML: count devices", "nvmlDeviceGetCount"))
        if count == 0:
            findings.append(Finding("machine", "NVML works but lists no GPU", "in a container, pass GPUs (--gpus all)"))
        return driver, [info for index in range(count) if (info := _describe(library, index, findings)) is not None]
    except DeviceError as error:
        findings.append(_from_error("machine", error))
        return None, []
    finally:
        library.close()


def _describe(library: NvmlLibrary, index: int, findings: list[Finding]) -> DeviceInfo | None:
    what = f"NVML index {index}"
    try:
        handle = library.call(what, "nvmlDeviceGetHandleByIndex", index)
        device = NvmlDevice(str(library.call(what, "nvmlDeviceGetUUID", handle)))
        try:
            return device.info()
        finally:
            device.close()
    except DeviceError as error:
        kind = "does not answer" if isinstance(error, DeviceLostError) else "cannot be opened"
        findings.append(Finding(what, kind, str(error)))
        return None


def _from_error(device: str, error: DeviceError) -> Finding:
    problem, _, remedy = str(error).partition("; ")
    return Finding(device, problem, remedy)


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
