"""Adapters on the wire and on disk: safetensors bytes, read without executing anything, and checked before use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wattgym.errors import UserError
from wattgym.federated.messages import Adapter
from wattgym.files import atomic_write_bytes, atomic_write_json
from wattgym.live.config import LoraSettings, ModelConfig

FACTOR_A, FACTOR_B = "lora_A.weight", "lora_B.weight"
"""How the names of a LoRA layer's two factors end in peft's state dict; the layer adds `scale · B @ A`."""


class AdapterError(UserError):
    """An adapter that must not be used."""


def to_bytes(adapter: Adapter) -> bytes:
    """An adapter as safetensors; equal adapters give equal bytes."""
    from safetensors.numpy import save

    data: bytes = save(
        {name: np.ascontiguousarray(adapter[name]) for name in sorted(adapter)}, metadata={"format": "pt"}
    )
    return data


def from_bytes(data: bytes) -> Adapter:
    """Reads an adapter.

    Raises:
        AdapterError: The bytes are no safetensors, or hold arrays that are not float32.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Adapter = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise AdapterError(f"adapter: no safetensors: {' '.join(str(error).split())}") from None
    for name, array in arrays.items():
        if array.dtype != np.float32:
            raise AdapterError(f"adapter: '{name}' is {array.dtype}, expected float32")
    return arrays


def digest(adapter: Adapter) -> str:
    """Identifies an adapter by its names, shapes and bits."""
    return hashlib.sha256(to_bytes(adapter)).hexdigest()


def shapes(adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Shapes of its arrays."""
    return {name: array.shape for name, array in adapter.items()}


def size_bytes(adapter: Adapter) -> int:
    """Bytes of its weights."""
    return sum(array.nbytes for array in adapter.values())


def initial(forms: Mapping[str, tuple[int, ...]], seed: int) -> Adapter:
    """A fresh adapter: A uniform within `1 / sqrt(inputs)`, B zero, as peft begins (Kaiming with slope sqrt(5)).

    Args:
        forms: Shapes of the arrays.
        seed: Equal seeds give equal adapters.
    """
    rng = np.random.default_rng([seed, 13])
    adapter: Adapter = {}
    for name in sorted(forms):
        shape = tuple(forms[name])
        bound = 1.0 / np.sqrt(shape[-1])
        values = rng.uniform(-bound, bound, shape) if name.endswith(FACTOR_A) else np.zeros(shape)
        adapter[name] = values.astype(np.float32)
    return adapter


def check_form(adapter: Adapter, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses an adapter that is not of the expected layers, shapes and type, or is not finite.

    Raises:
        AdapterError: Names the first array that is wrong.
    """
    missing, extra = sorted(expected.keys() - adapter.keys()), sorted(adapter.keys() - expected.keys())
    if missing or extra:
        what = f"has no '{missing[0]}'" if missing else f"has an unknown '{extra[0]}'"
        raise AdapterError(f"adapter {what}")
    for name in sorted(expected):
        array = adapter[name]
        if array.shape != tuple(expected[name]):
            raise AdapterError(f"'{name}' has shape {array.shape}, expected {tuple(expected[name])}")
        if array.dtype != np.float32:
            raise AdapterError(f"'{name}' is {array.dtype}, expected float32")
        if not np.isfinite(array).all():
            raise AdapterError(f"'{name}' holds a value that is no finite number")


def difference(adapter: Adapter, reference: Adapter) -> Adapter:
    """What was added to a reference of the same form."""
    return {name: array - reference[name] for name, array in adapter.items()}


def norm(adapter: Adapter) -> float:
    """Euclidean norm of all weights, in double precision."""
    return float(np.sqrt(sum(float(np.sum(np.square(adapter[n], dtype=np.float64))) for n in sorted(adapter))))


def save_peft(folder: Path, adapter: Adapter, lora: LoraSettings, model: ModelConfig) -> None:
    """Writes an adapter as peft does; `PeftModel.from_pretrained` loads it.

    Args:
        folder: Folder of the two files; made if need be.
        adapter: The adapter.
        lora: Its settings.
        model: The model that it belongs to.

    Raises:
        UserError: It cannot be written.
    """
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    atomic_write_bytes(folder / "adapter_model.safetensors", to_bytes(adapter))
    atomic_write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": model.path or model.title,
            "inference_mode": True,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "target_modules": targets,
            "bias": "none",
        },
    )
