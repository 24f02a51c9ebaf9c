"""The process of a rank other than 0: `python -m wattgym.live.follower RANK LEADER`, started by rank 0 alone.

It takes its orders from standard input, trains its share of each round, writes nothing into the run folder and ends
with rank 0: at the end of its orders, and by the kernel's hand if rank 0 dies while it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wattgym.config import parse_config
from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobStatus, Knobs
from wattgym.live.config import JobConfig
from wattgym.live.handle import first_status, offline_environment
from wattgym.live.pacing import Reporter, StopFlag
from wattgym.live.ranks import LOST_CONTACT, READY
from wattgym.live.records import read_examples

_PR_SET_PDEATHSIG = 1


class Listener:
    """A rank's side of the job's channel: reads the knobs, leaves the status to rank 0."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.path = channel.path

    def read_knobs(self) -> tuple[int, Knobs]:
        """The newest knobs with their sequence number."""
        return self._channel.read_knobs()

    def write_status(self, status: JobStatus) -> None:
        """Does nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a rank to its end.

    Returns:
        0 when rank 0 needs it no more, `LOST_CONTACT` when another rank is gone, 1 after telling rank 0 what is wrong.
    """
    rank, leader = map(int, sys.argv[1:] if arguments is None else arguments)
    _die_with(leader)
    # What libraries print goes to the log; the pipe is for what rank 0 must know.
    voice = os.dup(1)
    os.dup2(2, 1)
    stop = StopFlag()
    stop.on_signals()
    try:
        return _follow(rank, stop, voice)
    except UserError as error:
        os.write(voice, str(error).encode("utf-8", "replace"))
    except BaseException as error:
        traceback.print_exc()
        os.write(voice, " ".join(f"{type(error).__name__}: {error}".split()).encode("utf-8", "replace"))
    return 1


def _follow(rank: int, stop: StopFlag, voice: int) -> int:
    hello = _order()
    if hello is None:
        return 0
    config = parse_config(JobConfig, hello["config"], "job")
    config = config.model_copy(update={"device": hello["device"]})
    os.environ |= offline_environment(config.threads)
    status = replace(first_status(config), pid=os.getpid())
    reporter = Reporter(Listener(Channel.open(Path(hello["channel"]))), stop, status)

    import torch

    from wattgym.live.group import Group, LostContactError
    from wattgym.live.learner import Learner, LoadedModel
    from wattgym.live.parallel import Share
    from wattgym.live.rounds import plan_round
    from wattgym.live.text import Order, tokenise

    loaded = LoadedModel(config)
    data = tokenise(read_examples(config.data), loaded.tokeniser, config.data.max_tokens)
    order = Order(len(data.ids), config.data.holdout, config.seed)
    torch.manual_seed(config.seed)
    learner = Learner(config, loaded, data, reporter)
    os.write(voice, READY)
    start = _order()
    if start is None:
        return 0
    if start["digest"] != data.digest():
        raise UserError("the records changed while the job was loading")
    with contextlib.suppress(LostContactError):
        group = Group(rank, config.ranks, Path(hello["rendezvous"]), loaded.device, reporter.wait_for)
        share = Share(config, learner, order, group, reporter)
        share.synchronise(start["steps"])
        while (order_ := _order()) is not None:
            reporter.begin_share()
            share.train(plan_round(*order_["shape"]), order_["first"], order_["steps"])
        group.leave()
        return 0
    return LOST_CONTACT


def _order() -> dict[str, Any] | None:
    """The next order; None when there are no more."""
    line = sys.stdin.buffer.readline()
    return json.loads(line) if line else None


def _die_with(leader: int) -> None:
    """Asks the kernel to end this process with rank 0, whose main thread has started it and lives as long."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(LOST_CONTACT)


if __name__ == "__main__":
    sys.exit(main())
