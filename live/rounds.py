"""Who trains on which samples between two meetings of the ranks: the same samples in the same order, however shared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MicroBatch = range
"""Positions of its samples, counted from the round's first sample."""


@dataclass(frozen=True)
class Round:
    """Work between two meetings of the ranks.

    Attributes:
        updates: Updates' worth of samples in it.
        shares: Per rank its local optimiser steps, each the micro-batches that its gradient is accumulated over; an
            idle rank has none.
        averaged: The ranks step by themselves and average their weights; else they add their gradients up and take
            one step together.
    """

    updates: int
    shares: tuple[tuple[tuple[MicroBatch, ...], ...], ...]
    averaged: bool

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(sum(len(batch) for step in share for batch in step) for share in self.shares)

    def keeping_pace(self) -> Iterator[list[int]]:
        """For each micro-batch of rank 0, the samples that all ranks do meanwhile if they run evenly."""
        own = [len(batch) for step in self.shares[0] for batch in step]
        positions = [[i for step in share for batch in step for i in batch] for share in self.shares]
        done = 0
        for size in own:
            before, done = done, done + size
            yield [i for mine in positions for i in mine[len(mine) * before // sum(own) : len(mine) * done // sum(own)]]


def plan_round(
    samples_per_update: int, micro_batch: int, ranks: int, rank_steps: Sequence[int], updates_left: int | None = None
) -> Round:
    """Shares the next samples among the ranks as evenly as possible.

    If all active ranks take one step, the round is one update that they take together. Otherwise it has as many updates
    as the largest count: the busiest rank takes as many optimiser steps as it would together with the others. All
    local steps have the same number of samples but for one, and those that come at the same part of the round take
    samples that lie together in the order of the data.

    Args:
        samples_per_update: Samples of an update.
        micro_batch: Most samples of one pass.
        ranks: Ranks of the job.
        rank_steps: Optimiser steps of each active rank until they meet; the others are idle.
        updates_left: The round has no more updates than this; its steps shrink in proportion.
    """
    counts = list(rank_steps)
    updates = max(counts)
    averaged = updates > 1 and len(counts) > 1
    if not averaged:
        counts, updates = [1] * len(counts), 1
    elif updates_left is not None and updates_left < updates:
        counts = [-(-count * updates_left // updates) for count in counts]
        updates = updates_left
    in_time = sorted(((k + 0.5) / count, rank) for rank, count in enumerate(counts) for k in range(count))
    shares: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(ranks)]
    total = updates * samples_per_update
    for number, (_, rank) in enumerate(in_time):
        first, end = total * number // len(in_time), total * (number + 1) // len(in_time)
        shares[rank].append(tuple(range(i, min(i + micro_batch, end)) for i in range(first, end, micro_batch)))
    return Round(updates, tuple(tuple(share) for share in shares), averaged)


def steps_by_speed(local_steps: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Optimiser steps of each rank that take equally long: the fastest takes all, the others their proportion.

    Args:
        local_steps: Steps of the fastest.
        speeds: Samples per second of each active rank, 0 where unknown: such a rank takes all.
    """
    fastest = max(speeds)
    return tuple(max(1, round(local_steps * speed / fastest)) if speed else local_steps for speed in speeds)
