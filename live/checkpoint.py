"""Checkpoints of a job: adapter, optimiser, random state and position, whole or not at all.

A checkpoint is a folder `step-00000120` that is written under a temporary name, flushed and renamed:

- `adapter/`: the adapter in peft's format, usable by itself (`PeftModel.from_pretrained`);
- `state.safetensors`: the optimiser's moments and the random generators' states;
- `checkpoint.json`: counters, the last losses, and the checksum of every other file.

No file is read by executing anything from it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from wattgym.config import FrozenModel, parse_config
from wattgym.errors import UserError
from wattgym.files import atomic_write_json, flush, newest_whole, read_json_object, sha256

SCHEMA_VERSION = 1
MANIFEST, STATE, ADAPTER = "checkpoint.json", "state.safetensors", "adapter"
_WEIGHTS = f"{ADAPTER}/adapter_model.safetensors"
_PREFIX, _TEMPORARY = "step-", ".writing-"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Manifest(FrozenModel):
    """Content of `checkpoint.json`.

    Attributes:
        schema_version: Version of the folder's layout.
        steps: Optimiser steps done.
        samples: Samples trained on; also the position in the data.
        tokens: Tokens of those samples.
        data: Digest of the tokenised records; they must be the same when the job is resumed.
        evaluated_step: Step of the last evaluation.
        eval_loss: Its loss.
        losses: Losses of the last steps, oldest first.
        sha256: Checksum of each other file, by its path in the folder.
    """

    schema_version: int = SCHEMA_VERSION
    steps: int
    samples: int
    tokens: int
    data: str
    evaluated_step: int | None
    eval_loss: float | None
    losses: tuple[float, ...]
    sha256: dict[str, str]


def save_checkpoint(root: Path, manifest: Manifest, model: Any, optimiser: Any, rng: dict[str, Any], keep: int) -> Path:
    """Writes a checkpoint and drops all but the newest `keep`.

    Args:
        root: Folder of all checkpoints of the job.
        manifest: Counters; the checksums are filled in.
        model: The peft model.
        optimiser: AdamW over its trainable parameters.
        rng: Generators' states by name, byte tensors.
        keep: How many stay.

    Raises:
        UserError: It could not be written; the earlier ones are as they were.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    tensors = {f"rng.{name}": state for name, state in rng.items()}
    for name, parameter in _trainable(model):
        moments = optimiser.state.get(parameter, {})
        tensors |= {f"{kind}.{name}": moments[kind].detach().cpu().contiguous() for kind in moments}
    adapter = {name: t.detach().cpu().contiguous() for name, t in get_peft_model_state_dict(model).items()}
    final = root / f"{_PREFIX}{manifest.steps:08d}"
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / ADAPTER).mkdir(parents=True)
        # Serialised in memory first: the operating system's refusal then has one form, not one for each library.
        (temporary / STATE).write_bytes(save(tensors))
        (temporary / _WEIGHTS).write_bytes(save(adapter, metadata={"format": "pt"}))
        model.peft_config["default"].save_pretrained(temporary / ADAPTER)
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        sums = {str(path.relative_to(temporary)): sha256(path) for path in files}
        for path in [*files, temporary / ADAPTER]:
            flush(path)
        atomic_write_json(temporary / MANIFEST, manifest.model_copy(update={"sha256": sums}).model_dump(mode="json"))
        if final.exists():
            shutil.rmtree(final)
        temporary.replace(final)
        flush(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{final}: cannot write the checkpoint: {error.strerror or error}") from None
    except UserError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{final}: cannot write the checkpoint: {error}") from None
    for old in _folders(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_checkpoint(root: Path) -> tuple[Path, Manifest] | None:
    """The newest whole checkpoint; a damaged one is passed over for the one before.

    Raises:
        UserError: There are checkpoints, but none is whole.
    """
    return newest_whole(root, _folders(root), lambda folder: (folder, _verified(folder)))


def load_checkpoint(folder: Path, model: Any, optimiser: Any) -> dict[str, Any]:
    """Puts a verified checkpoint's adapter and optimiser state in place.

    Returns:
        Generators' states by name, byte tensors.

    Raises:
        UserError: The checkpoint is of another adapter.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(folder / STATE)
    adapter = load_file(folder / _WEIGHTS)
    try:
        outcome = set_peft_model_state_dict(model, adapter)
    except RuntimeError:
        raise UserError(f"{folder}: the adapter there has other shapes than this job's") from None
    if outcome.unexpected_keys:
        raise UserError(f"{folder}: the adapter there has other layers than this job's")
    for name, parameter in _trainable(model):
        moments = {kind: tensors[f"{kind}.{name}"] for kind in _MOMENTS if f"{kind}.{name}" in tensors}
        if moments:
            # AdamW counts its steps on the CPU and keeps its moments beside the parameter.
            optimiser.state[parameter] = {
                kind: value if kind == "step" else value.to(parameter.device) for kind, value in moments.items()
            }
    return {name.removeprefix("rng."): state for name, state in tensors.items() if name.startswith("rng.")}


def _verified(folder: Path) -> Manifest:
    data = read_json_object(folder / MANIFEST)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder}: schema version {data.get('schema_version')!r}, this WattGym reads version {SCHEMA_VERSION}"
        )
    manifest = parse_config(Manifest, data, str(folder / MANIFEST))
    if not {STATE, _WEIGHTS} <= manifest.sha256.keys():
        raise UserError(f"{folder / MANIFEST}: no checksum of {STATE} and {_WEIGHTS}")
    for name, expected in manifest.sha256.items():
        try:
            found = sha256(folder / name)
        except OSError as error:
            raise UserError(f"{folder / name}: cannot read: {error.strerror or error}") from None
        if found != expected:
            raise UserError(f"{folder / name}: damaged (checksum differs)")
    return manifest


def _trainable(model: Any) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def _folders(root: Path) -> list[Path]:
    return sorted((path for path in root.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)
