"""A device behind the privileged helper: the same interface, without any privilege in this process."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceInfo, DeviceLostError, DeviceNotFoundError, DeviceReading
from wattgym.hw.wire import MAX_ANSWER, PROTOCOL, LineSocket, raised, unpack_info, unpack_reading

ANSWER_S = 10.0
"""How long an answer may take, s; a limit setter can block for half a second."""


class RemoteDevice(Device):
    """One device of a running `wattgym hw serve`.

    The helper guards it: it holds lock, saved limit and watchdog, judges every write, and gives the device back when
    this connection ends. A guard in front of it in this process shapes commands as for any other device.

    Args:
        socket_path: The helper's socket.
        uuid: Full UUID, or its unique beginning.

    Raises:
        UserError: No helper there, or it refuses this user.
        DeviceNotFoundError: The helper has no such device.
    """

    def __init__(self, socket_path: str | Path, uuid: str) -> None:
        self._mutex = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_S)
        self._line = LineSocket(connection, MAX_ANSWER)
        try:
            try:
                connection.connect(str(socket_path))
            except OSError as error:
                raise UserError(
                    f"{socket_path}: no privileged helper answers ({error.strerror}); start `wattgym hw serve` there"
                ) from None
            hello = self._ask("hello", protocol=PROTOCOL)
            found = [known for known in hello["devices"] if known.startswith(uuid)]
            if len(found) != 1:
                names = ", ".join(hello["devices"])
                raise DeviceNotFoundError(f"'{uuid}' is not one device of {socket_path}; it serves: {names}")
            self._uuid = str(found[0])
            self._info = replace(unpack_info(self._ask("info")["info"]), backend="remote")
        except BaseException:
            self._line.close()
            raise

    def info(self) -> DeviceInfo:
        """See `Device.info`."""
        return self._info

    def read(self) -> DeviceReading:
        """See `Device.read`."""
        return unpack_reading(self._ask("read")["reading"])

    def set_power_limit_mw(self, limit_mw: int) -> None:
        """See `Device.set_power_limit_mw`; the helper refuses what its own guard would alter."""
        self._ask("set", limit_mw=limit_mw)

    def requested_limit_mw(self) -> int:
        """See `Device.requested_limit_mw`."""
        return int(self._ask("requested")["limit_mw"])

    def enforced_limit_mw(self) -> int:
        """See `Device.enforced_limit_mw`."""
        return int(self._ask("enforced")["limit_mw"])

    def lock_clocks_mhz(self, *, min_mhz: int, max_mhz: int) -> None:
        """See `Device.lock_clocks_mhz`."""
        self._ask("lock_clocks", min_mhz=min_mhz, max_mhz=max_mhz)

    def reset_clocks(self) -> None:
        """See `Device.reset_clocks`; the helper gives back limit and clocks together."""
        self._ask("release")

    def close(self) -> None:
        """Ends the connection; the helper gives the device back."""
        with contextlib.suppress(OSError):
            self._line.close()

    def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        if op != "hello":
            arguments["uuid"] = self._uuid
        try:
            with self._mutex:
                with contextlib.suppress(BrokenPipeError):  # it hung up; why may be there to read
                    self._line.send({"op": op, **arguments})
                line = self._line.receive()
            answer = json.loads(line) if line is not None else None
        except (OSError, ValueError) as error:
            raise DeviceLostError(f"the privileged helper does not answer: {error}") from None
        if answer is None:
            raise DeviceLostError("the privileged helper ended the connection")
        if not answer.get("ok"):
            raise raised(answer)
        return dict(answer)
