"""The privileged helper: it owns all writes, so that training need not run as root."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog
from wattgym.hw.device import Device, DeviceError, DeviceNotFoundError, PermissionDeniedError
from wattgym.hw.guard import Guard
from wattgym.hw.limits import MIN_INTERVAL_S, CommandRules
from wattgym.hw.preflight import GuardConfig
from wattgym.hw.state import StateDir
from wattgym.hw.telemetry import GuardState
from wattgym.hw.wire import MAX_REQUEST, PROTOCOL, LineSocket, OversizedError, error_message, pack

MAX_CLIENTS = 32
SERVER_CONFIG = GuardConfig(
    rules=CommandRules(interval_s=MIN_INTERVAL_S, dead_band_w=0.0, dead_band_fraction=0.0, raise_fraction_per_s=0.5)
)
"""Outer bounds: the client's own guard shapes within them, and what exceeds them is refused, not altered."""


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Asks the kernel (SO_PEERCRED)."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return cls(*struct.unpack("3i", raw))

    def groups(self) -> set[int]:
        """All groups of the user, not only the one in force."""
        try:
            return {self.gid, *os.getgrouplist(pwd.getpwuid(self.uid).pw_name, self.gid)}
        except KeyError:
            return {self.gid}


@dataclass(frozen=True)
class Access:
    """Who may connect: root, the helper's own user, and these.

    Attributes:
        mode: Permission bits of the socket.
        group: Group that owns the socket; `None` keeps the helper's.
        uids: Further users.
        gids: Further groups.
    """

    mode: int = 0o600
    group: int | None = None
    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def admits(self, peer: Peer) -> bool:
        """Whether a peer may use the helper."""
        return peer.uid in {0, os.geteuid(), *self.uids} or bool(self.gids & peer.groups())


def user_id(name: str) -> int:
    """A user's number, by name or number.

    Raises:
        UserError: No such user.
    """
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError:
        raise UserError(f"no user '{name}' on this machine") from None


def group_id(name: str) -> int:
    """A group's number, by name or number.

    Raises:
        UserError: No such group.
    """
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise UserError(f"no group '{name}' on this machine") from None


@dataclass
class _Client:
    """One connection and the devices that it controls."""

    line: LineSocket
    connection: socket.socket
    peer: Peer
    guards: dict[str, Guard] = field(default_factory=dict)


class GuardServer:
    """Serves devices on a Unix socket, each write through a guard of its own.

    Args:
        devices: What it serves; it does not close them.
        socket_path: Where it listens.
        access: Who may connect.
        arm: First key of its guards; unarmed it serves readings and refuses writes.
        config: How strict its guards are.
        state_dir: Their state folder.
        environ: Where the guards' second key is looked up.

    Raises:
        UserError: The socket cannot be made, or another helper serves there.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        socket_path: str | Path,
        *,
        access: Access | None = None,
        arm: bool = False,
        config: GuardConfig = SERVER_CONFIG,
        state_dir: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._devices = {device.info().uuid: device for device in devices}
        self._mutexes = {uuid: threading.Lock() for uuid in self._devices}
        self._path = Path(socket_path)
        self._access = access or Access()
        self._arm, self._config, self._environ = arm, config, environ
        self._state_dir = StateDir(state_dir)
        self._state_dir.make()
        self._audit = AuditLog(self._state_dir.audit_path)
        self._threads: dict[threading.Thread, _Client] = {}
        self._listener = _listen(self._path, self._access)
        self._wake, self._woken = socket.socketpair()
        self._operations: dict[str, Callable[[_Client, dict[str, Any]], dict[str, Any]]] = {
            "hello": self._hello,
            "info": lambda client, request: {"info": pack(self._device(request).info())},
            "read": self._read,
            "requested": lambda client, request: {"limit_mw": self._asked(client, request).requested_limit_mw()},
            "enforced": lambda client, request: {"limit_mw": self._asked(client, request).enforced_limit_mw()},
            "set": self._set,
            "lock_clocks": self._lock_clocks,
            "release": self._release,
        }

    def serve(self) -> None:
        """Serves until `stop`; then gives every device back and removes the socket."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._woken, selectors.EVENT_READ)
                while all(key.fileobj is self._listener for key, _ in selector.select()):
                    self._accept()
        finally:
            self._listener.close()
            self._path.unlink(missing_ok=True)
            for thread, client in list(self._threads.items()):
                with contextlib.suppress(OSError):
                    client.connection.shutdown(socket.SHUT_RDWR)
                thread.join()
            self._wake.close()
            self._woken.close()

    def stop(self) -> None:
        """Ends `serve`; safe from a signal handler or another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        client = _Client(LineSocket(connection, MAX_REQUEST), connection, Peer.of(connection))
        self._threads = {t: c for t, c in self._threads.items() if t.is_alive()}
        why = None
        if not self._access.admits(client.peer):
            why = f"user {client.peer.uid} may not use this helper; its administrator can add --allow-user"
        elif len(self._threads) >= MAX_CLIENTS:
            why = f"the helper already has {MAX_CLIENTS} clients"
        if why is not None:
            self._refuse(client, PermissionDeniedError(why))
            client.line.close()
            return
        thread = threading.Thread(target=self._attend, args=(client,), daemon=True)
        self._threads[thread] = client
        thread.start()

    def _attend(self, client: _Client) -> None:
        """One client's conversation; whatever ends it, its devices are given back."""
        try:
            while (line := client.line.receive()) is not None:
                self._answer(client, line)
        except OversizedError as error:
            self._refuse(client, error)
        except OSError:
            pass  # the client is gone
        finally:
            for guard in client.guards.values():
                with contextlib.suppress(UserError):  # logged; its watchdog goes on trying
                    guard.close()
            client.line.close()

    def _answer(self, client: _Client, line: bytes) -> None:
        try:
            request = json.loads(line)
            operation = self._operations[request["op"]]
        except (ValueError, TypeError, KeyError, RecursionError):
            known = ", ".join(self._operations)
            self._refuse(client, DeviceError(f"malformed request; a JSON object with op one of: {known}"))
            return
        try:
            answer = operation(client, request)
        except UserError as error:
            self._refuse(client, error)
        else:
            client.line.send({"ok": True, **answer})

    def _refuse(self, client: _Client, error: Exception) -> None:
        peer = client.peer
        self._audit.record("refused", "-", peer_pid=peer.pid, peer_uid=peer.uid, why=str(error))
        with contextlib.suppress(OSError):
            client.line.send(error_message(error))

    def _hello(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("protocol") != PROTOCOL:
            raise DeviceError(f"this helper speaks protocol {PROTOCOL}; install the same version on both sides")
        return {"protocol": PROTOCOL, "devices": list(self._devices)}

    def _device(self, request: dict[str, Any]) -> Device:
        device = self._devices.get(str(request.get("uuid")))
        if device is None:
            raise DeviceNotFoundError(f"no device {request.get('uuid')!r}; served: {', '.join(self._devices)}")
        return device

    def _asked(self, client: _Client, request: dict[str, Any]) -> Device:
        """The device of a request, which is a sign of life for the guard that the client has on it."""
        device = self._device(request)
        if (guard := client.guards.get(device.info().uuid)) is not None:
            guard.heartbeat()
        return device

    def _read(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        device = self._device(request)
        guard = client.guards.get(device.info().uuid)
        return {"reading": pack(device.read() if guard is None else guard.read())}

    def _guard(self, client: _Client, request: dict[str, Any]) -> Guard:
        """The client's guard on a device, taken up at its first write."""
        device = self._device(request)
        uuid = device.info().uuid
        guard = client.guards.get(uuid)
        if guard is None:
            policy = f"client PID {client.peer.pid}, user {client.peer.uid}"
            with self._mutexes[uuid]:
                guard = Guard(
                    device,
                    arm=self._arm,
                    config=self._config,
                    state_dir=self._state_dir.path,
                    policy=policy,
                    environ=self._environ,
                    exit_hooks=False,
                )
            if guard.telemetry.state is GuardState.DRY_RUN:
                raise PermissionDeniedError(f"{uuid}: the privileged helper is {guard.telemetry.why}")
            client.guards[uuid] = guard
        return guard

    def _set(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        guard = self._guard(client, request)
        result = guard.set_limit_mw(request.get("limit_mw"), exact=True)  # type: ignore[arg-type]  # it is checked there
        if not result.written and guard.telemetry.state is not GuardState.ARMED:
            raise PermissionDeniedError(f"{guard.info.uuid}: {guard.telemetry.state}: {guard.telemetry.why}")
        if result.limit_w != result.requested_w:
            raise DeviceError(f"{guard.info.uuid}: the limit is {result.limit_w:g} W, not {result.requested_w:g} W")
        return {"limit_mw": round(result.limit_w * 1000)}

    def _lock_clocks(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        guard = self._guard(client, request)
        if not guard.lock_clocks_mhz(min_mhz=request.get("min_mhz"), max_mhz=request.get("max_mhz")):  # type: ignore[arg-type]
            raise PermissionDeniedError(f"{guard.info.uuid}: {guard.telemetry.state}: {guard.telemetry.why}")
        return {}

    def _release(self, client: _Client, request: dict[str, Any]) -> dict[str, Any]:
        guard = client.guards.pop(self._device(request).info().uuid, None)
        given = None if guard is None else guard.close()
        return {"outcome": None if given is None else given.outcome.name.lower()}


def _listen(path: Path, access: Access) -> socket.socket:
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise UserError(f"{path}: exists and is not a socket; name another path")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()  # its helper is dead
                else:
                    raise UserError(f"{path}: another helper serves there")
        before = os.umask(0o177)  # nobody may connect before the mode is set
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if access.group is not None:
            os.chown(path, -1, access.group)
        path.chmod(access.mode)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise UserError(f"{path}: cannot listen there: {error.strerror or error}") from None
    except BaseException:
        listener.close()
        raise
    return listener
