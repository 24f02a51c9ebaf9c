"""Opens devices by address, real or simulated; each backend is imported only when it is asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceNotFoundError

BACKENDS = ("nvml", "simulated")
_STATE_SUFFIX = ".simulated"
_FULL_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def open_device(device: str, backend: str = "nvml", *, state_dir: Path | None = None) -> Device:
    """Opens one device.

    Args:
        device: NVML: UUID or its unique beginning, NVML index, MIG id (opens the parent), or `cuda:N` under this
            process's CUDA_VISIBLE_DEVICES. Simulated: `PRESET`, `PRESET:N`, or the UUID `SIM-PRESET-N`.
        backend: `nvml` or `simulated`.
        state_dir: Folder in which simulated devices keep their state, for all processes that name it; without one, a
            simulated device lives in this process.

    Raises:
        UserError: Unknown backend, preset or device; no driver; device lost.
    """
    return open_devices([device], backend, state_dir=state_dir)[0]


def open_devices(
    devices: Sequence[str] | None, backend: str = "nvml", *, state_dir: Path | None = None
) -> list[Device]:
    """Opens several devices, each once: two MIG instances of one GPU are one device.

    Args:
        devices: Addresses as for `open_device`; `None` or nothing means all: all GPUs of the machine, or all simulated
            devices of the folder (one H100 if there is none).
        backend: `nvml` or `simulated`.
        state_dir: As for `open_device`.

    Raises:
        UserError: As for `open_device`; what was opened by then is closed again.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; valid: {', '.join(BACKENDS)}")
    opened: list[Device] = []
    try:
        if backend == "simulated":
            for preset, index, seed in dict.fromkeys(_simulated_addresses(devices, state_dir)):
                opened.append(_open_simulated(preset, index, seed, state_dir))
        else:
            for uuid in _nvml_uuids(devices):
                opened.append(_open_nvml(uuid))
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened


def _nvml_uuids(devices: Sequence[str] | None) -> list[str]:
    from wattgym.hw.nvml import list_gpus
    from wattgym.hw.visible import resolve, unique

    if devices and all(_FULL_UUID.fullmatch(device) for device in devices):
        return list(dict.fromkeys(devices))  # needs no look at other GPUs, one of which may be lost
    gpus = list_gpus()
    if not gpus:
        raise DeviceNotFoundError("NVML lists no GPU; `wattgym hw doctor` says more")
    wanted = [resolve(device, gpus, os.environ) for device in devices] if devices else gpus
    return [gpu.uuid for gpu in unique(wanted)]


def _open_nvml(uuid: str) -> Device:
    from wattgym.hw.nvml import NvmlDevice

    return NvmlDevice(uuid)


def _simulated_addresses(devices: Sequence[str] | None, state_dir: Path | None) -> list[tuple[str, int, int | None]]:
    if not devices and state_dir is not None and state_dir.is_dir():
        devices = sorted(path.name.removesuffix(_STATE_SUFFIX) for path in state_dir.glob(f"SIM-*{_STATE_SUFFIX}"))
    return [_simulated_address(device) for device in devices or ["h100-sxm"]]


def _simulated_address(device: str) -> tuple[str, int, int | None]:
    from wattgym.hw.presets import load_presets

    address, at, seed = device.partition("@")
    if address.startswith("SIM-"):
        preset, _, number = address.removeprefix("SIM-").rpartition("-")
    else:
        preset, _, number = address.partition(":")
    well_formed = re.fullmatch("[0-9]{0,9}", number) and re.fullmatch("[0-9]{1,18}" if at else "", seed)
    if preset not in load_presets() or not well_formed:
        known = ", ".join(load_presets())
        raise DeviceNotFoundError(
            f"simulated device {device!r}: give PRESET, PRESET:N or SIM-PRESET-N (and @SEED) with one of {known}"
        )
    return preset, int(number or "0"), int(seed) if seed else None


def _open_simulated(preset: str, index: int, seed: int | None, state_dir: Path | None) -> Device:
    from wattgym.hw.simulated import SimulatedDevice

    if state_dir is None:
        return SimulatedDevice(preset, index=index, seed=seed)
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{state_dir}: cannot keep simulated devices there: {error.strerror}") from None
    path = state_dir / f"SIM-{preset}-{index}{_STATE_SUFFIX}"
    if not path.exists():
        return SimulatedDevice(preset, index=index, seed=seed, state_path=path)
    return SimulatedDevice.attach(path, seed)  # its state knows whether it was drawn from a seed
