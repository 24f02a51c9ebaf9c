"""Network namespaces joined by shaped veth pairs, and what carries a Unix socket's bytes over them. Linux, root.

    python benchmarks/wan_links.py unix:PATH|tcp:HOST:PORT unix:PATH|tcp:HOST:PORT

forwards connections from the first address to the second until its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "wattgym-wan"
"""Namespaces are called so, with the process that made them and what is in them."""

PORT = 7070
_QUEUE_PACKETS = 100_000
_QUEUE_BYTES = 1 << 26
_LEAST_BURST_BYTES = 16_384
_BURST_S = 0.004
"""What tbf lets through at once; the kernel's timers are a good deal finer."""


class LinkError(Exception):
    """A command that sets up links failed; the message is its own."""


@dataclass(frozen=True)
class Shape:
    """A link as the kernel is to shape it; packets wait in queues long enough that none is dropped.

    Attributes:
        rtt_s: Round-trip time, half of it each way, s; None: bandwidth only (tbf instead of netem).
        down_bytes_per_s: Rate to the site, bytes/s.
        up_bytes_per_s: Rate from the site, bytes/s.
    """

    rtt_s: float | None
    down_bytes_per_s: float
    up_bytes_per_s: float

    def qdisc(self, bytes_per_s: float) -> list[str]:
        """Arguments of tc for one direction."""
        rate = f"{8.0 * bytes_per_s:.0f}bit"
        if self.rtt_s is None:
            burst = max(_LEAST_BURST_BYTES, round(_BURST_S * bytes_per_s))
            return ["tbf", "rate", rate, "burst", str(burst), "limit", str(_QUEUE_BYTES)]
        return ["netem", "delay", f"{500_000.0 * self.rtt_s:.0f}us", "rate", rate, "limit", str(_QUEUE_PACKETS)]


def missing(rate_only: bool) -> list[str]:
    """What this machine lacks to shape links; what is tried for that is gone when the call returns."""
    lacks = [] if os.geteuid() == 0 else ["root"]
    lacks += [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if lacks:
        return lacks
    probe = f"{PREFIX}-{os.getpid()}-probe"
    qdisc = Shape(None if rate_only else 0.01, 1e6, 1e6).qdisc(1e6)
    try:
        with namespaces([probe]):
            try:
                command("ip", "-n", probe, "link", "add", "name", "a", "type", "veth", "peer", "name", "b")
            except LinkError as error:
                return [f"veth ({error})"]
            try:
                command("tc", "-n", probe, "qdisc", "add", "dev", "a", "root", *qdisc)
            except LinkError as error:
                return [f"sch_{qdisc[0]} ({error})"]
    except LinkError as error:
        return [f"network namespaces ({error})"]
    return []


def command(*words: str) -> str:
    """Runs a command to its end, whoever presses Ctrl-C meanwhile.

    Raises:
        LinkError: It failed.
    """
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise LinkError(" ".join((done.stderr or done.stdout).split()) or f"{words[0]} ended with {done.returncode}")
    return done.stdout


@contextlib.contextmanager
def namespaces(names: Sequence[str]) -> Iterator[None]:
    """Network namespaces for the length of the block; the kernel removes their links with them."""
    try:
        for name in names:
            command("ip", "netns", "add", name)
        yield
    finally:
        with undisturbed():
            for name in set(names) & set(existing()):
                command("ip", "netns", "del", name)


def existing() -> list[str]:
    """Names of all network namespaces."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def remove_leftovers() -> list[str]:
    """Removes namespaces of earlier runs that were killed outright; those of processes that live stay.

    Returns:
        What was removed.
    """
    removed = []
    for name in existing():
        made, _, rest = name.removeprefix(f"{PREFIX}-").partition("-")
        if name.startswith(f"{PREFIX}-") and rest and made.isdigit() and not Path(f"/proc/{made}").exists():
            command("ip", "netns", "del", name)
            removed.append(name)
    return removed


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end the program wait for the end of the block."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


class ShapedLinks:
    """Sites in network namespaces of their own, each joined to the aggregator's by a shaped link.

    The links are reached over Unix sockets, as sites are: `carry` puts what goes through one over TCP.

    Attributes:
        hub: The aggregator's namespace.
        sites: Namespaces by site.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        mine = f"{PREFIX}-{os.getpid()}"
        self.hub = f"{mine}-hub"
        self.sites = {name: f"{mine}-site{k}" for k, name in enumerate(shapes)}
        self._shapes = dict(shapes)
        self._addresses = {name: f"10.77.{k}" for k, name in enumerate(shapes)}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ShapedLinks:
        """Makes namespaces and links.

        Raises:
            LinkError: The system refused; nothing is left.
        """
        try:
            self._stack.enter_context(namespaces([self.hub, *self.sites.values()]))
            for k, (name, namespace) in enumerate(self.sites.items()):
                shape, near, far = self._shapes[name], f"site{k}", "hub"
                peer = ("type", "veth", "peer", "name", far, "netns", namespace)
                command("ip", "-n", self.hub, "link", "add", "name", near, *peer)
                self._end(self.hub, near, f"{self._addresses[name]}.1", shape.qdisc(shape.down_bytes_per_s))
                self._end(namespace, far, f"{self._addresses[name]}.2", shape.qdisc(shape.up_bytes_per_s))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Ends forwarders and removes namespaces and links."""
        with undisturbed():
            self._stack.close()

    def carry(self, name: str, near: Path, far: Path) -> None:
        """Offers a site's socket at another path, over the site's link.

        Args:
            name: The site.
            near: The path to offer it at; its folder exists.
            far: The site's socket.
        """
        address = f"tcp:{self._addresses[name]}.2:{PORT}"
        self._forward(self.sites[name], address, f"unix:{far}")
        self._forward(self.hub, f"unix:{near}", address)

    def _end(self, namespace: str, device: str, address: str, qdisc: Sequence[str]) -> None:
        command("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device)
        command("ip", "-n", namespace, "link", "set", device, "up")
        command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *qdisc)

    def _forward(self, namespace: str, listen: str, to: str) -> None:
        words = ["ip", "netns", "exec", namespace, sys.executable, "-P", __file__, listen, to]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        self._stack.callback(_ended, process)
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise LinkError(f"nothing forwards from {listen}")


def _ended(process: subprocess.Popen[str]) -> None:
    """Closes a forwarder's input, on which it ends."""
    with process:
        if process.stdin is not None:
            process.stdin.close()
        process.kill()


def forward(listen: str, to: str) -> None:
    """Forwards connections until standard input ends, which it does with whoever started this, however that ends."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    listener, address = _socket(listen)
    listener.bind(address)
    listener.listen(16)
    print("ready", flush=True)
    while True:
        threading.Thread(target=_serve, args=(listener.accept()[0], to), daemon=True).start()


def _serve(near: socket.socket, to: str) -> None:
    """Copies one connection both ways; each way ends by itself."""
    far, address = _socket(to)
    with near, far, contextlib.suppress(OSError):
        far.connect(address)
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        _copy(near, far)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(1 << 16):
            target.sendall(part)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _socket(address: str) -> tuple[socket.socket, str | tuple[str, int]]:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), rest
    host, _, port = rest.partition(":")
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made, (host, int(port))


if __name__ == "__main__":
    forward(*sys.argv[1:3])
