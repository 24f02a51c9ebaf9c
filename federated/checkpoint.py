"""The aggregator's state on disk after every round, whole or not at all, in files that execute nothing.

A checkpoint is a folder `round-00000012-0000` (rounds complete, vain attempts since) that is written under another
name, flushed and renamed: `adapter/` in peft's format, and `state.json` with everything else and its checksum.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from wattgym.config import FrozenModel, parse_config
from wattgym.errors import UserError
from wattgym.federated.adapters import from_bytes, save_peft
from wattgym.federated.messages import Adapter
from wattgym.files import atomic_write_json, flush, newest_whole, read_json_object, sha256
from wattgym.live.config import LoraSettings, ModelConfig

SCHEMA_VERSION = 1
KEPT = 2
ADAPTER, STATE = "adapter", "state.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX, _TEMPORARY = "round-", ".writing-"


class FederationState(FrozenModel):
    """Content of `state.json`.

    Attributes:
        schema_version: Version of the layout.
        run_id: The run.
        round: Rounds that are complete.
        attempt: Vain attempts at the next one.
        time_s: Time since the run began, s.
        history: Changes per step of the replies that counted lately.
        model_hash: The sites' model.
        record: Record of the last round, as in the round log.
        rng: State of the generator that policies and the federation draw from.
        sha256: Checksum of the adapter's file.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    round: int
    attempt: int
    time_s: float
    history: tuple[float, ...]
    model_hash: str
    record: dict[str, Any]
    rng: dict[str, Any]
    sha256: str = ""


def save(root: Path, state: FederationState, adapter: Adapter, lora: LoraSettings, model: ModelConfig) -> Path:
    """Writes a checkpoint and drops all but the newest.

    Raises:
        UserError: It could not be written; the earlier ones are as they were.
    """
    final = root / f"{_PREFIX}{state.round:08d}-{state.attempt:04d}"
    temporary = root / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / ADAPTER).mkdir(parents=True)
        save_peft(temporary / ADAPTER, adapter, lora, model)
        state = state.model_copy(update={"sha256": sha256(temporary / ADAPTER / _WEIGHTS)})
        atomic_write_json(temporary / STATE, state.model_dump(mode="json"))
        if final.exists():  # damaged, or the run would have gone on from it
            shutil.rmtree(final)
        temporary.replace(final)
        flush(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{final}: cannot write the checkpoint: {error.strerror or error}") from None
    for stale in _folders(root)[KEPT:]:
        shutil.rmtree(stale, ignore_errors=True)
    return final


def load_newest(root: Path) -> tuple[FederationState, Adapter] | None:
    """The newest whole checkpoint; a damaged one is passed over for the one before.

    Raises:
        UserError: There are checkpoints, but none is whole.
    """
    return newest_whole(root, _folders(root), _read)


def _read(folder: Path) -> tuple[FederationState, Adapter]:
    data = read_json_object(folder / STATE)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{folder}: schema version {data.get('schema_version')!r}, this WattGym reads version {SCHEMA_VERSION}"
        )
    state = parse_config(FederationState, data, str(folder / STATE))
    path = folder / ADAPTER / _WEIGHTS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from None
    if hashlib.sha256(content).hexdigest() != state.sha256:
        raise UserError(f"{path}: damaged (checksum differs)")
    return state, from_bytes(content)


def _folders(root: Path) -> list[Path]:
    return sorted((path for path in root.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)
