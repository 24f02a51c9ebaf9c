"""What the ranks of a job exchange: sums over all of them, and what rank 0 has."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(days=365)
"""A rank may wait for another as long as a knob holds that; a dead one is noticed by its process."""


class LostContactError(Exception):
    """Another rank is gone."""


class Group:
    """A rank's side of the exchange.

    Attributes:
        rank: This rank.
        size: Ranks in all.
        device: `cpu` (by gloo, over the loopback interface) or `cuda` (by NCCL).
    """

    def __init__(
        self, rank: int, size: int, rendezvous: Path, device: str, wait: Callable[[Callable[[], bool]], None]
    ) -> None:
        """Meets the others, which must all be on their way.

        Args:
            rank: This rank.
            size: Ranks in all.
            rendezvous: File by which they find each other; it must be new.
            device: `cpu` or `cuda`.
            wait: Waits until a condition holds, whenever this rank has to wait for the others.

        Raises:
            LostContactError: Another rank is gone.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self._wait = wait
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        failed: list[Exception] = []

        def connect() -> None:
            backend = "nccl" if device == "cuda" else "gloo"
            store = dist.FileStore(str(rendezvous), size)  # type: ignore[attr-defined]
            try:
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
            except (RuntimeError, ValueError) as error:
                failed.append(error)

        # In a thread of its own, so that signals and the end of another rank are seen meanwhile.
        thread = threading.Thread(target=connect, name="meet-ranks", daemon=True)
        thread.start()
        wait(lambda: not thread.is_alive())
        if failed:
            raise LostContactError(str(failed[0]))

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by its sum over all ranks.

        Raises:
            LostContactError: Another rank is gone.
        """
        self._finish(lambda: dist.all_reduce(tensor, async_op=True))

    def spread(self, tensor: torch.Tensor) -> None:
        """Replaces a tensor by that of rank 0.

        Raises:
            LostContactError: Another rank is gone.
        """
        self._finish(lambda: dist.broadcast(tensor, src=0, async_op=True))

    def leave(self) -> None:
        """Gives the connections back."""
        dist.destroy_process_group()

    def _finish(self, begin: Callable[[], dist.Work | None]) -> None:
        try:
            work = begin()
            assert work is not None
            self._wait(work.is_completed)
            work.wait()
        except RuntimeError as error:
            raise LostContactError(str(error)) from None
