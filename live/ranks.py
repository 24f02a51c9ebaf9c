"""The processes of a job's other ranks, as rank 0 sees them: started with it, told what to do, gone with it.

Each is `python -m wattgym.live.follower`. Orders go down a pipe, so that a rank sees its end when rank 0 dies; the
kernel's death signal ends it even in the middle of its work. What a rank has to say comes up another pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from wattgym.errors import UserError

READY = b"ready\n"
LOST_CONTACT = 3
"""Exit code of a rank that lost contact with another: not the cause of a failure."""

_GRACE_S = 10.0
_POLL_S = 0.02


class Followers:
    """The ranks 1 to n - 1."""

    def __init__(self, count: int, hello: Mapping[str, Any], gpus: int | None) -> None:
        """Starts them; they load in the background.

        Args:
            count: How many.
            hello: What all of them are told first.
            gpus: GPUs that this process sees, of which the first is its own; None if no rank needs one.

        Raises:
            UserError: There are fewer GPUs than ranks, or the operating system refused.
        """
        if gpus is not None and gpus <= count:
            raise UserError(f"ranks {count + 1}, but GPUs visible here: {gpus}; each rank needs one of its own")
        self._stopped = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._said = [b""] * count
        try:
            for rank in range(1, count + 1):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "wattgym.live.follower", str(rank), str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, **({} if gpus is None else _own_gpu(rank))},
                    start_new_session=True,  # Ctrl-C reaches rank 0, which decides what becomes of the others
                )
                self._processes.append(process)
            self.tell(hello)
        except OSError as error:
            self.kill()
            raise UserError(f"cannot start rank {len(self._processes) + 1}: {error.strerror}") from None
        except UserError:
            self.kill()
            raise

    def tell(self, order: Mapping[str, Any]) -> None:
        """Gives all of them an order.

        Raises:
            UserError: A rank has ended.
        """
        line = json.dumps(order).encode("ascii") + b"\n"
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
        except OSError:
            self.blame()

    def all_ready(self) -> bool:
        """Whether all of them have loaded.

        Raises:
            UserError: A rank has ended.
        """
        self.check()
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            if select.select([process.stdout], [], [], 0)[0]:
                self._said[number] += os.read(process.stdout.fileno(), 4096)
        return all(said.startswith(READY) for said in self._said)

    def check(self) -> None:
        """Looks whether all of them live.

        Raises:
            UserError: A rank has ended; the message is its own as far as it left one.
        """
        if any(process.poll() is not None for process in self._processes):
            self.blame()

    def blame(self) -> NoReturn:
        """Finds the rank whose end made the others lose contact.

        Raises:
            UserError: Always.
        """
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes, start=1):
                if process.poll() not in (None, LOST_CONTACT):
                    words = _last_words(process, self._said[rank - 1])
                    raise UserError(f"rank {rank} of {len(self._processes) + 1} failed: {words}")
            time.sleep(_POLL_S)
        raise UserError("the ranks of the job have lost contact with each other")

    def stop(self) -> None:
        """Lets them break off what they do; they go on to take orders."""
        if not self._stopped:
            self._stopped = True
            for process in self._processes:
                process.terminate()

    def close(self) -> None:
        """Ends them: by the end of their orders, by force where that takes long."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def kill(self) -> None:
        """Ends them at once."""
        for process in self._processes:
            process.kill()
        self.close()


def _own_gpu(rank: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": str(rank) if visible is None else visible.split(",")[rank].strip()}


def _last_words(process: subprocess.Popen[bytes], said: bytes) -> str:
    assert process.stdout is not None
    words = (said + process.stdout.read()).removeprefix(READY).decode("utf-8", "replace").strip()
    if words:
        return words
    code = process.returncode
    if code < 0:
        hint = " (often the kernel's work when memory runs out)" if code == -signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-code).name}{hint}"
    return f"its process ended with exit code {code}"
