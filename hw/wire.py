"""What the privileged helper and its clients say to each other: bounded JSON lines on a Unix socket."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from typing import Any

from wattgym.hw import device as devices
from wattgym.hw.device import DeviceError, DeviceInfo, DeviceReading, PowerKind

PROTOCOL = 1
MAX_REQUEST = 4096
"""Longest request in bytes; the longest honest one is far shorter."""
MAX_ANSWER = 65536


class OversizedError(DeviceError):
    """A line longer than the protocol allows."""


class LineSocket:
    """Sends and receives lines over a connected socket.

    Args:
        connection: The socket.
        max_line: Longest line that is accepted, bytes.
    """

    def __init__(self, connection: socket.socket, max_line: int) -> None:
        self._socket = connection
        self._max_line = max_line
        self._buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> bytes | None:
        """The next line, or `None` when the other side has gone.

        Raises:
            OversizedError: The line exceeds the bound; the rest of the stream is of no use.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._max_line:
                raise OversizedError(f"a line of more than {self._max_line} bytes was refused")
            chunk = self._socket.recv(4096)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        if len(line) > self._max_line:
            raise OversizedError(f"a line of more than {self._max_line} bytes was refused")
        return line

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def error_message(error: Exception) -> dict[str, Any]:
    """An answer that says what went wrong, by exception name."""
    return {"ok": False, "error": type(error).__name__, "message": str(error)}


def raised(answer: dict[str, Any]) -> DeviceError:
    """The exception that an answer stands for."""
    kind = getattr(devices, str(answer.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, DeviceError)):
        kind = DeviceError
    return kind(str(answer.get("message")))


def pack(value: DeviceInfo | DeviceReading) -> dict[str, Any]:
    """A description or reading as plain values."""
    return asdict(value)


def unpack_info(data: dict[str, Any]) -> DeviceInfo:
    """The reverse of `pack`."""
    return DeviceInfo(**{**data, "power_kind": PowerKind(data["power_kind"])})


def unpack_reading(data: dict[str, Any]) -> DeviceReading:
    """The reverse of `pack`."""
    return DeviceReading(**{**data, "power_kind": PowerKind(data["power_kind"])})
