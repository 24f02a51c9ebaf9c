"""Which GPU an address means: UUID, NVML index, MIG id, or a CUDA index under CUDA_VISIBLE_DEVICES.

CUDA and NVML count differently: NVML in PCI order, CUDA by default "fastest first", and CUDA counts only what
CUDA_VISIBLE_DEVICES lets through. A CUDA index is therefore resolved only where its meaning is certain; where it is
not, the message says what to use instead. Power and its limit belong to the whole GPU, so a MIG id means its parent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from wattgym.hw.device import DeviceNotFoundError

_INDEX = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class GpuAddress:
    """One physical GPU as the driver lists it.

    Attributes:
        uuid: `GPU-…`.
        index: NVML index.
        pci_bus_id: PCI address, comparable as text.
        name: Marketing name.
        mig_uuids: `MIG-…` ids of its instances; empty when it is not split.
        is_mig: MIG mode is on (it may have no instance yet).
    """

    uuid: str
    index: int
    pci_bus_id: str
    name: str
    mig_uuids: tuple[str, ...] = ()
    is_mig: bool = False


def resolve(spec: str, gpus: Sequence[GpuAddress], environment: Mapping[str, str]) -> GpuAddress:
    """The GPU that one address means.

    Args:
        spec: `GPU-…` or its unique beginning, `MIG-…`, an NVML index, or `cuda:N`.
        gpus: All GPUs of the machine.
        environment: Where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are looked up for `cuda:N`.

    Raises:
        DeviceNotFoundError: Nothing, or more than one, answers to it; the message lists what there is.
    """
    text = spec.strip()
    if text.startswith("cuda:"):
        return _by_cuda_index(text, gpus, environment)
    if _INDEX.fullmatch(text):
        return _by_index(text, sorted(gpus, key=lambda gpu: gpu.index), "NVML index")
    if text.upper().startswith("MIG-GPU-"):
        # Drivers before R470 wrote MIG-GPU-<uuid>/<gpu instance>/<compute instance>: the parent is in the name.
        return _by_prefix(text[len("MIG-") :].split("/")[0], gpus, lambda gpu: (gpu.uuid,))
    if text.upper().startswith("MIG-"):
        return _by_prefix(text, gpus, lambda gpu: gpu.mig_uuids)
    if text.upper().startswith("GPU-"):
        return _by_prefix(text, gpus, lambda gpu: (gpu.uuid,))
    raise DeviceNotFoundError(f"device {spec!r}: give a UUID or its beginning (GPU-…), an NVML index, MIG-… or cuda:N")


def cuda_visible(gpus: Sequence[GpuAddress], environment: Mapping[str, str]) -> list[GpuAddress]:
    """The GPUs that a CUDA program with this environment sees, in its order; a split GPU once per visible instance.

    As CUDA does, the list ends at the first entry that names nothing, and an empty list hides everything.

    Raises:
        DeviceNotFoundError: The order is uncertain: integers (or no mask at all) while different models are counted
            "fastest first", or while some GPU is split by MIG.
    """
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return list(_cuda_order(gpus, environment))
    visible: list[GpuAddress] = []
    for entry in (part.strip() for part in mask.split(",")):
        if _INDEX.fullmatch(entry):
            ordered = _cuda_order(gpus, environment)
            if int(entry) >= len(ordered):
                break
            visible.append(ordered[int(entry)])
        elif entry.upper().startswith(("GPU-", "MIG-")):
            try:
                visible.append(resolve(entry, gpus, environment))
            except DeviceNotFoundError:
                break
        else:  # -1, an empty entry, a word: CUDA ignores the rest
            break
    return visible


def unique(gpus: Sequence[GpuAddress]) -> list[GpuAddress]:
    """Each GPU once, in order of first mention, so that no power is counted twice."""
    return list({gpu.uuid: gpu for gpu in gpus}.values())


def _by_cuda_index(text: str, gpus: Sequence[GpuAddress], environment: Mapping[str, str]) -> GpuAddress:
    number = text.removeprefix("cuda:")
    if not _INDEX.fullmatch(number):
        raise DeviceNotFoundError(f"device {text!r}: after 'cuda:' goes a CUDA index, 0 for the first")
    visible = cuda_visible(gpus, environment)
    mask = environment.get("CUDA_VISIBLE_DEVICES")
    stated = "unset" if mask is None else repr(mask)
    return _by_index(number, visible, f"CUDA index (CUDA_VISIBLE_DEVICES {stated})")


def _by_index(number: str, ordered: Sequence[GpuAddress], kind: str) -> GpuAddress:
    if int(number) < len(ordered):
        return ordered[int(number)]
    valid = f"0 … {len(ordered) - 1}" if ordered else "none, no GPU is visible"
    raise DeviceNotFoundError(f"device {kind} {number} does not exist; valid: {valid}")


def _by_prefix(text: str, gpus: Sequence[GpuAddress], names: Callable[[GpuAddress], Sequence[str]]) -> GpuAddress:
    wanted = text.lower()
    found = {gpu.uuid: gpu for gpu in gpus for name in names(gpu) if name.lower().startswith(wanted)}
    exact = [gpu for gpu in gpus if wanted in (name.lower() for name in names(gpu))]
    if exact or len(found) == 1:
        return exact[0] if exact else next(iter(found.values()))
    known = ", ".join(name for gpu in gpus for name in names(gpu)) or "none"
    problem = f"means {len(found)} GPUs, give more of it" if found else "does not exist"
    raise DeviceNotFoundError(f"device {text!r} {problem}; there is: {known}")


def _cuda_order(gpus: Sequence[GpuAddress], environment: Mapping[str, str]) -> Sequence[GpuAddress]:
    by_bus = sorted(gpus, key=lambda gpu: gpu.pci_bus_id)
    order = environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if any(gpu.is_mig for gpu in gpus):
        raise DeviceNotFoundError(
            "CUDA's numbering is uncertain while a GPU is split by MIG; name GPUs by UUID (GPU-…) or instance (MIG-…)"
        )
    if order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        raise DeviceNotFoundError(
            "CUDA's numbering is uncertain: different models are counted fastest first; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
        )
    return by_bus
