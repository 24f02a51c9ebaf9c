"""SuperLink and SuperNodes on this machine's loopback, with TLS and node authentication, ended whatever happens.

The same programs with the same options start them on several hosts; `docs/flower.md` lists the commands.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self

from wattgym.errors import UserError
from wattgym.federated.flower.app_folder import Scalar
from wattgym.federated.flower.control import Control, environment, last_line
from wattgym.federated.flower.credentials import Credentials, create
from wattgym.federated.flower.keeper import MARK, ProcessFamily

HOST = "127.0.0.1"
READY_S = 300.0
RESTART_S = 10.0
"""A SuperNode that has ended is started again, at most so often."""

# What a SuperNode's log says when the SuperLink has let it in, or refuses it because its predecessor, if that was
# killed, counts as online until 60 s after its last heartbeat.
_LET_IN, _TAKEN = b"SuperNode ID: ", b"[code: 2004]"


@dataclass(frozen=True)
class _Node:
    """A SuperNode's process and port, when it was started, and how long its log was then."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    started_s: float
    log_bytes: int

    def said(self, what: bytes) -> bool:
        """Whether it has."""
        return what in self.log.read_bytes()[self.log_bytes :]


class Loopback:
    """A SuperLink and one SuperNode per site on this machine.

    Attributes:
        control: Commands to the SuperLink.
        family: All processes that were started, with what they started.
    """

    def __init__(
        self, sites: Mapping[str, Path], folder: Path, port: int | None = None, credentials: Credentials | None = None
    ) -> None:
        """Checks everything that can be wrong before a process is started.

        Args:
            sites: The trainers' sockets by name of the site.
            folder: Private folder for configuration, logs and, unless given, credentials.
            port: The SuperLink's port; a free one if None.
            credentials: Certificates and keys; made for this deployment, valid for 30 days, if None.

        Raises:
            UserError: Flower is missing, the port is taken, or the credentials are incomplete or expired.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._sites = dict(sites)
        self._folder = folder
        self._port = free_port() if port is None else port
        if port is not None:
            check_port(port)
        for socket_path in sites.values():
            if "'" in str(socket_path):
                raise UserError(f"{socket_path}: a path with a quotation mark cannot be told to a SuperNode")
        if credentials is None:
            shutil.rmtree(folder / "credentials", ignore_errors=True)  # An earlier run's, perhaps of other sites.
            credentials = create(folder / "credentials", [HOST, "localhost"], list(sites), timedelta(days=30))
        credentials.check(sites)
        self._credentials = credentials
        self.control = Control(f"{HOST}:{self._port}", credentials.ca_certificate, folder)
        self.family = ProcessFamily()
        self.control.environment[MARK] = self.family.mark
        self._nodes: dict[str, _Node] = {}

    def start(self) -> None:
        """Starts the SuperLink, lets the sites' keys in and starts the SuperNodes.

        Raises:
            UserError: One of them does not start.
        """
        superlink = self.family.start(
            [
                _program("flower-superlink"),
                *("--host", HOST, "--port", str(self._port)),
                *("--ssl-certfile", str(self._credentials.certificate)),
                *("--ssl-keyfile", str(self._credentials.key)),
                *("--ssl-ca-certfile", str(self._credentials.ca_certificate)),
                "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
            ],
            self._folder / "superlink.log",
            self.control.environment,
        )
        _wait_for_port(self._port, superlink, "SuperLink", self._folder / "superlink.log")
        self.control.check()
        self.control.register({site: self._credentials.site_public_key(site) for site in self._sites})
        for site in self._sites:
            self._start_node(site)
        until_s = time.monotonic() + READY_S
        while waiting := [site for site in self._sites if not self.is_let_in(site)]:
            for site in waiting:
                self._check_node(site, time.monotonic() >= until_s)
            self.revive()
            time.sleep(0.1)

    def revive(self) -> None:
        """Starts SuperNodes again that have ended; to be called every second or so.

        A SuperLink refuses a node as long as a predecessor that was killed counts as online, and the node ends: it is
        started again and again until it is let in.
        """
        for site, node in list(self._nodes.items()):
            if node.process.poll() is not None and time.monotonic() >= node.started_s + RESTART_S:
                self._start_node(site)

    def is_let_in(self, site: str) -> bool:
        """Whether a site's SuperNode is there and the SuperLink has let it in."""
        node = self._nodes[site]
        return node.process.poll() is None and node.said(_LET_IN)

    def node_pid(self, site: str) -> int:
        """Process of a site's SuperNode."""
        return self._nodes[site].process.pid

    def close(self) -> None:
        """Ends every process and waits for it; safe to call twice."""
        self.family.close()

    def __enter__(self) -> Self:
        """Starts it, or leaves nothing running."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every process."""
        self.close()

    def _check_node(self, site: str, too_late: bool) -> None:
        """Raises if a SuperNode that the SuperLink has not let in will not be, or it is too late."""
        node = self._nodes[site]
        if node.process.poll() is not None and not (node.said(_LET_IN) or node.said(_TAKEN)):
            said = last_line(node.log.read_text(errors="replace"))
            raise UserError(f"SuperNode of site '{site}' did not start: {said} (see {node.log})")
        if too_late:
            raise UserError(f"SuperNode of site '{site}' is not let in after {READY_S:g} s (see {node.log})")

    def _start_node(self, site: str) -> None:
        taken = {node.port for node in self._nodes.values()}  # It may be a while until they are listened on.
        port = next(port for port in iter(free_port, 0) if port not in taken)
        log = self._folder / f"supernode-{site}.log"
        log_bytes = log.stat().st_size if log.exists() else 0
        process = self.family.start(
            [
                _program("flower-supernode"),
                *("--superlink", self.control.address),
                *("--root-certificates", str(self._credentials.ca_certificate)),
                *("--auth-supernode-private-key", str(self._credentials.site_key(site))),
                *("--host", HOST, "--port", str(port)),
                *("--node-config", f"socket='{self._sites[site]}'"),
            ],
            log,
            environment(self._folder / "nodes" / site),  # Nodes would unpack the app over each other.
        )
        self._nodes[site] = _Node(process, port, log, time.monotonic(), log_bytes)


def run_loopback(
    sites: Mapping[str, Path],
    folder: Path,
    config: Mapping[str, Scalar],
    show: Callable[[str], None],
    watch: Callable[[], object] = lambda: None,
    port: int | None = None,
    credentials: Credentials | None = None,
) -> None:
    """Runs a federation whose trainers are up over SuperLink and SuperNodes on this machine, and ends those.

    Args:
        sites: The trainers' sockets by name of the site.
        folder: Private folder for configuration and logs.
        config: Run configuration, see `app_folder.RUN_CONFIG`; paths are absolute.
        show: Takes each line of the server app's output.
        watch: Called every second; what it raises ends the run.
        port: The SuperLink's port; a free one if None.
        credentials: Certificates and keys; made for this run if None.

    Raises:
        UserError: Something is wrong with what was given, or the run failed, with the server app's own message.
    """
    with Loopback(sites, folder, port, credentials) as loopback:

        def keep() -> None:
            loopback.revive()
            watch()

        loopback.control.run(config, show, keep)


def run_remote(
    address: str, ca_certificate: Path, folder: Path, config: Mapping[str, Scalar], show: Callable[[str], None]
) -> None:
    """Runs a federation over a SuperLink that is up, with its SuperNodes; stops the run if it is interrupted.

    Args:
        address: The SuperLink's `host:port`.
        ca_certificate: Certificate that the SuperLink's is signed with.
        folder: Private folder for Flower's configuration.
        config: Run configuration; its paths are those of the SuperLink's host.
        show: Takes each line of the server app's output.

    Raises:
        UserError: The SuperLink cannot be reached or trusted, or the run failed.
    """
    control = Control(address, ca_certificate, folder)
    control.check()
    try:
        control.run(config, show)
    except (KeyboardInterrupt, SystemExit):
        control.stop()
        raise


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Makes sure that a port can be listened on.

    Raises:
        UserError: It is in use, or no port.
    """
    if not 1 <= port <= 65535:
        raise UserError(f"port {port}: expected 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(f"port {port} on {HOST}: {error.strerror}; choose another or leave it out") from None


def _wait_for_port(port: int, process: subprocess.Popen[bytes], who: str, log: Path) -> None:
    """Waits until a process listens.

    Raises:
        UserError: It ended, or does not within `READY_S`.
    """
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s:
        with suppress(OSError):
            socket.create_connection((HOST, port), timeout=1).close()
            return
        if process.poll() is not None:
            raise UserError(f"{who} did not start: {last_line(log.read_text(errors='replace'))} (see {log})")
        time.sleep(0.1)
    raise UserError(f"{who} does not listen on port {port} after {READY_S:g} s (see {log})")


def _program(name: str) -> str:
    """A program that Flower installs beside this interpreter."""
    return str(Path(sys.executable).parent / name)
