"""Processes that end with their owner, however it ends, and however deep they were started.

Flower's SuperLink and SuperNodes start processes that start processes, some in sessions of their own, so neither a
process group nor a list of children finds them all. Every process of a family carries the family's mark in its
environment, which children inherit. A keeper, a process of its own, waits for the owner's end of a pipe to close (which
the kernel does even after SIGKILL) and then ends whoever carries the mark.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "WATTGYM_PROCESS_FAMILY"
GRACE_S = 6.0
PATIENCE_S = 30.0
_WATCHDOG = b"wattgym.hw.watchdog"


class ProcessFamily:
    """Starts processes and ends them all, with everything that they started.

    Attributes:
        mark: Value of the environment variable `WATTGYM_PROCESS_FAMILY` that the members carry.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Starts the keeper.

        Args:
            grace_s: Time that members have to end by themselves when asked to, s.
        """
        self._grace_s = grace_s
        self.mark = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "wattgym.federated.flower.keeper", self.mark, str(grace_s)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a member in a session of its own, so that Ctrl-C reaches the owner only.

        Args:
            command: Program and arguments.
            log: File that output and errors are appended to.
            environment: Its environment; the mark is added.
        """
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**environment, MARK: self.mark},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def members(self) -> set[int]:
        """Process ids of all that are alive and carry the mark."""
        for process in self._started:
            process.poll()
        return set(marked(self.mark))

    def close(self) -> None:
        """Ends all members and waits until none is left; safe to call twice."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        while self._keeper.poll() is None:
            for process in self._started:
                process.poll()
            time.sleep(0.05)
        end(self.mark, self._grace_s)  # Nobody is left, unless the keeper itself was killed.
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all members."""
        self.close()


def marked(mark: str) -> dict[int, bool]:
    """The living processes, not zombies, that carry a mark in their environment.

    Returns:
        By process id, whether it is a guard's watchdog.
    """
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # It ended, or it is another user's.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = _WATCHDOG in (folder / "cmdline").read_bytes().split(b"\0")
    return found


def end(mark: str, grace_s: float, patience_s: float = PATIENCE_S) -> None:
    """Ends whoever carries a mark and returns when none is left: SIGTERM, after a grace period SIGKILL.

    A guard's watchdog is left alone: it restores its device when its controller has gone, and then ends by itself.

    Args:
        mark: The mark.
        grace_s: Time between SIGTERM and SIGKILL, s.
        patience_s: Longest wait for watchdogs after that, s.
    """
    begin_s = time.monotonic()
    told: set[int] = set()
    while members := marked(mark):
        spent_s = time.monotonic() - begin_s
        for pid, watchdog in members.items():
            if not watchdog and (spent_s > grace_s or pid not in told):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if spent_s > grace_s else signal.SIGTERM)
                told.add(pid)
        if spent_s > grace_s + patience_s:
            return
        time.sleep(0.05)


def main() -> None:
    """Keeps: waits for the owner's end, then ends the family; arguments are its mark and the grace period, s."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(sys.argv[1], float(sys.argv[2]))


if __name__ == "__main__":
    main()
