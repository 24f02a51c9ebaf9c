"""Where a split lets a signal begin, and a fair draw among those places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from wattgym.errors import UserError
from wattgym.traces import load_trace, split_windows
from wattgym.traces.catalogue import find_trace
from wattgym.traces.trace import Trace

SPLITS = ("train", "validation", "test")
_SLACK = 1e-6


@dataclass(frozen=True)
class Window:
    """A stretch `[start_s, end_s)` of a recording that belongs to one split."""

    trace: Trace
    start_s: float
    end_s: float

    def starts(self, duration_s: float) -> int:
        """Number of places, one trace interval apart, where a signal of this length fits."""
        room = self.end_s - self.start_s - duration_s
        return max(0, int(np.floor(room / self.trace.interval_s + _SLACK)) + 1)


@lru_cache(maxsize=64)
def recorded_windows(trace_ids: tuple[str, ...], split: str) -> tuple[Window, ...]:
    """Windows of the named recordings that belong to a split; read once per process.

    Returns:
        The windows, in the order of the ids and of time.

    Raises:
        UserError: No such recording, or none of them has this split; the message says which splits there are.
    """
    found: list[Window] = []
    for trace_id in trace_ids:
        if split in find_trace(trace_id).splits:
            bounds = split_windows(trace_id, split)
            trace = cached_trace(trace_id)
            found += [Window(trace, start_s, end_s) for start_s, end_s in bounds]
    if not found:
        held = sorted({name for trace_id in trace_ids for name in find_trace(trace_id).splits})
        hint = "; synthetic_regd is the fast signal for training" if split == "train" else ""
        raise UserError(f"{', '.join(trace_ids)}: nothing in the {split} split, only in: {', '.join(held)}{hint}")
    return tuple(found)


@lru_cache(maxsize=64)
def cached_trace(trace_id: str) -> Trace:
    """A catalogued recording, read once per process.

    Raises:
        UserError: No such recording.
    """
    return load_trace(trace_id)


def draw_start(
    windows: Sequence[Window], duration_s: float, rng: np.random.Generator, *, what: str
) -> tuple[Trace, float]:
    """Draws a recording and a beginning so that `duration_s` fits; every possible beginning is equally likely.

    Args:
        windows: Where to draw.
        duration_s: Length that must fit into one window, seconds.
        rng: Source of randomness; one integer is drawn.
        what: Family and split, for messages.

    Returns:
        The recording and the beginning on its clock, seconds.

    Raises:
        UserError: No window is long enough; the message states the longest.
    """
    counts = [window.starts(duration_s) for window in windows]
    total = sum(counts)
    if total == 0:
        raise no_room(windows, duration_s, what)
    place = int(rng.integers(total))
    index = 0
    while place >= counts[index]:
        place -= counts[index]
        index += 1
    window = windows[index]
    return window.trace, window.start_s + place * window.trace.interval_s


def no_room(windows: Sequence[Window], duration_s: float, what: str) -> UserError:
    """The error for a window that is longer than anything recorded."""
    longest = max(windows, key=lambda w: w.end_s - w.start_s)
    return UserError(
        f"{what}: {duration_s:g} s asked, the longest recorded window is {longest.end_s - longest.start_s:g} s "
        f"({longest.trace.id}, {longest.start_s:g} s to {longest.end_s:g} s)"
    )
