"""What goes over a site's Unix socket: frames of a JSON header and a body of bytes. Needs NumPy and safetensors only.

A frame is `WGS1`, the lengths of header (32 bits) and body (64 bits), both big-endian, then header and body. A
connection carries one request and one answer. The header's `kind` says what it is; adapters are the body.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.messages import (
    Adapter,
    Assignment,
    Evaluation,
    Fate,
    SiteFailure,
    SiteInfo,
    SiteMetrics,
    TrainReply,
    TrainRequest,
)

_FRAME = struct.Struct(">4sIQ")
_MAGIC = b"WGS1"
_MAX_HEADER = 1 << 20
MAX_BODY = 8 << 30
"""Longest body, bytes; more than the adapter of any model that fits a machine."""

_ADDRESS_BYTES = 100


class WireError(UserError):
    """The other side ended the connection, or does not speak this protocol."""


def send(connection: socket.socket, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Sends one frame.

    Raises:
        OSError: The connection is gone or timed out.
    """
    text = json.dumps(_plain(header), allow_nan=False).encode("utf-8")
    connection.sendall(_FRAME.pack(_MAGIC, len(text), len(body)) + text)
    if body:  # Nothing more to a peer that may have answered and gone by now would be a broken pipe.
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receives one frame.

    Raises:
        WireError: The connection ended before it was whole, or it is no frame.
        OSError: The connection is gone or timed out.
    """
    magic, header_bytes, body_bytes = _FRAME.unpack(_exactly(connection, _FRAME.size))
    if magic != _MAGIC or header_bytes > _MAX_HEADER or body_bytes > MAX_BODY:
        raise WireError("the other side does not speak the site protocol, version 1")
    try:
        header = json.loads(_exactly(connection, header_bytes))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise WireError("the other side sent a header that is no JSON") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise WireError("the other side sent a header without a kind")
    return header, _exactly(connection, body_bytes)


@contextmanager
def address(path: Path) -> Iterator[str]:
    """A socket's address; one whose path is longer than the system allows is named by its folder's descriptor."""
    text = str(path)
    if len(os.fsencode(text)) <= _ADDRESS_BYTES:
        yield text
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def request_header(request: TrainRequest) -> dict[str, Any]:
    """A training request without its adapter."""
    return {
        "kind": "train",
        "run_id": request.run_id,
        "round": request.round,
        "assignment": asdict(request.assignment),
        "link_s": list(request.link_s),
    }


def request_from(header: Mapping[str, Any], adapter: Adapter) -> TrainRequest:
    """A training request from its header.

    Raises:
        WireError: A field is missing or of another type.
    """
    try:
        down_s, up_s = header["link_s"]
        assignment = Assignment(**header["assignment"])
        return TrainRequest(
            str(header["run_id"]), int(header["round"]), adapter, assignment, (float(down_s), float(up_s))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"no training request: {error!r}") from None


def reply_header(reply: TrainReply) -> dict[str, Any]:
    """A reply without its adapter."""
    return {
        "kind": "reply",
        "run_id": reply.run_id,
        "round": reply.round,
        "site": reply.site,
        "metrics": asdict(reply.metrics),
    }


def reply_from(header: Mapping[str, Any], adapter: Adapter) -> TrainReply:
    """A reply from its header.

    Raises:
        WireError: A field is missing or of another type.
    """
    try:
        metrics = SiteMetrics(**_numbers(header["metrics"]))
        return TrainReply(str(header["run_id"]), int(header["round"]), str(header["site"]), adapter, metrics)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"no reply: {error!r}") from None


def info_header(info: SiteInfo) -> dict[str, Any]:
    """A site's introduction."""
    return {"kind": "info", "info": asdict(info)}


def info_from(header: Mapping[str, Any]) -> SiteInfo:
    """A site's introduction from its header.

    Raises:
        WireError: A field is missing or of another type.
    """
    try:
        fields = dict(header["info"])
        fields["shapes"] = {name: tuple(int(n) for n in shape) for name, shape in fields["shapes"].items()}
        return SiteInfo(**fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"no introduction of a site: {error!r}") from None


def evaluation_header(evaluation: Evaluation) -> dict[str, Any]:
    """An evaluation."""
    return {"kind": "evaluation", "evaluation": asdict(evaluation)}


def evaluation_from(header: Mapping[str, Any]) -> Evaluation:
    """An evaluation from its header.

    Raises:
        WireError: A field is missing or of another type.
    """
    try:
        fields = _numbers(header["evaluation"])
        return Evaluation(**{**fields, "domain_loss": _numbers(fields["domain_loss"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"no evaluation: {error!r}") from None


def failure_header(failure: SiteFailure) -> dict[str, Any]:
    """A failure."""
    return {"kind": "failure", "fate": str(failure.fate), "reason": failure.reason}


def failure_from(header: Mapping[str, Any]) -> SiteFailure:
    """A failure from its header."""
    fate = str(header.get("fate"))
    known = fate in {str(each) for each in Fate}
    return SiteFailure(Fate(fate) if known else Fate.FAILED, str(header.get("reason", "no reason given")))


def _plain(value: Any) -> Any:
    """JSON has no word for NaN and infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: float("nan") if value is None else value for name, value in values.items()}


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise WireError("the connection ended in the middle of a message")
        parts += part
    return bytes(parts)
