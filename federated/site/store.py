"""A site's memory over restarts: how far it is in its data, its optimiser, and its newest replies.

The newest replies are files `round-N.safetensors` in the site's folder: the adapter, the optimiser's state if it is
kept, and as metadata the request's digest, what was measured, and the position in the data after that round. A file is
written whole or not at all, so a round either counts with its reply or has not happened.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.adapters import digest, from_bytes
from wattgym.federated.messages import Adapter, TrainReply, TrainRequest
from wattgym.federated.site.wire import reply_from, reply_header
from wattgym.files import atomic_write_bytes

REPLIES = "replies"
"""Name of the store in a site's folder."""

KEPT = 2
"""Replies that stay: of the round that the aggregator may ask for again, and of the one before."""

_SCHEMA = "1"
_OPTIMISER = "optimiser/"


@dataclass(frozen=True, eq=False)
class _Kept:
    digest: str
    position: int
    reply: TrainReply
    optimiser: Adapter


class ReplyStore:
    """Newest replies of the newest run by round."""

    def __init__(self, folder: Path | None, site: str, data: str) -> None:
        """Takes up what the folder holds.

        Args:
            folder: Where replies are kept; None: only in memory.
            site: The site's name.
            data: Digest of its records.

        Raises:
            UserError: The folder belongs to another site, or the site's records have changed.
        """
        self._folder = folder
        self._site = site
        self._data = data
        self._kept: dict[tuple[str, int], _Kept] = {}
        for path in sorted(folder.glob("round-*.safetensors")) if folder is not None and folder.is_dir() else []:
            kept = self._read(path)
            self._kept[kept.reply.run_id, kept.reply.round] = kept

    def position(self, run_id: str) -> int:
        """Optimiser steps that the site has made in all rounds of a run; says which samples come next."""
        return max((kept.position for (run, _), kept in self._kept.items() if run == run_id), default=0)

    def optimiser(self, run_id: str) -> Adapter:
        """The optimiser's state after the newest round of a run; empty where none is kept."""
        rounds = [number for run, number in self._kept if run == run_id]
        return self._kept[run_id, max(rounds)].optimiser if rounds else {}

    def find(self, request: TrainRequest) -> TrainReply | None:
        """The reply to this very request: the same run, round, adapter and assignment.

        Raises:
            UserError: The round is past and its reply is not kept any more.
        """
        kept = self._kept.get((request.run_id, request.round))
        if kept is not None and kept.digest == request_digest(request):
            return kept.reply
        newest = max((number for run, number in self._kept if run == request.run_id), default=0)
        if request.round < newest:
            raise UserError(f"round {request.round} is past; this site is at round {newest}")
        return None

    def keep(self, request: TrainRequest, reply: TrainReply, optimiser: Adapter | None = None) -> None:
        """Stores a reply and moves the position on.

        Args:
            request: What was asked for.
            reply: The answer.
            optimiser: State of the optimiser after it, if that is kept.

        Raises:
            UserError: It could not be written; nothing has changed.
        """
        from safetensors.numpy import save

        position = self.position(reply.run_id) + reply.metrics.steps
        kept = _Kept(request_digest(request), position, reply, optimiser or {})
        if self._folder is not None:
            metadata = {
                "schema": _SCHEMA,
                "site": self._site,
                "data": self._data,
                "digest": kept.digest,
                "position": str(kept.position),
                "reply": json.dumps(_without_nan(reply_header(reply))),
            }
            moments = {f"{_OPTIMISER}{name}": array for name, array in kept.optimiser.items()}
            atomic_write_bytes(self._path(kept), save({**reply.adapter, **moments}, metadata=metadata))
        # Of another run nothing is kept: an aggregator that begins anew asks for round 1 again.
        mine = {key: old for key, old in self._kept.items() if key[0] == reply.run_id}
        mine[reply.run_id, reply.round] = kept
        newest = sorted(mine, key=lambda key: key[1])[-KEPT:]
        dropped = [old for key, old in self._kept.items() if key not in newest]
        self._kept = {key: mine[key] for key in newest}
        if self._folder is not None:
            for old in dropped:
                if self._path(old) != self._path(kept):
                    self._path(old).unlink(missing_ok=True)

    def _path(self, kept: _Kept) -> Path:
        assert self._folder is not None
        return self._folder / f"round-{kept.reply.round:08d}.safetensors"

    def _read(self, path: Path) -> _Kept:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="numpy") as file:
                metadata: dict[str, Any] = file.metadata() or {}
            arrays = from_bytes(path.read_bytes())
            if metadata.get("schema") != _SCHEMA:
                raise UserError(f"{path}: no reply of a site, or of another version")
            if metadata["site"] != self._site:
                raise UserError(f"{path}: belongs to site '{metadata['site']}', not to '{self._site}'")
            if metadata["data"] != self._data:
                raise UserError(f"{path}: the records of site '{self._site}' have changed; start it in a new folder")
            adapter = {name: array for name, array in arrays.items() if not name.startswith(_OPTIMISER)}
            moments = {name.removeprefix(_OPTIMISER): arrays[name] for name in arrays.keys() - adapter.keys()}
            reply = reply_from(json.loads(metadata["reply"]), adapter)
            return _Kept(metadata["digest"], int(metadata["position"]), reply, moments)
        except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise UserError(f"{path}: cannot be read as a site's reply: {error}") from None


def request_digest(request: TrainRequest) -> str:
    """Identifies what a request asks for; an emulated link is no part of it."""
    asked = json.dumps([request.run_id, request.round, asdict(request.assignment), digest(request.adapter)])
    return hashlib.sha256(asked.encode()).hexdigest()


def _without_nan(header: dict[str, Any]) -> dict[str, Any]:
    metrics = {name: None if value != value else value for name, value in header["metrics"].items()}
    return {**header, "metrics": metrics}
