"""Time as devices, pollers and guards see it: the machine's, or one that a simulation moves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that can also wait."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment, never falling."""

    def sleep(self, seconds: float) -> None:
        """Returns when that much time has passed."""


class MonotonicClock:
    """The machine's monotonic clock, the same for all its processes."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment, usually boot."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Blocks."""
        time.sleep(seconds)


class VirtualClock:
    """A clock that only moves when told: `sleep` advances it and returns at once."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Seconds since the simulation's start."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Advances the clock.

        Raises:
            ValueError: Negative; a clock never runs backwards.
        """
        if not seconds >= 0.0:
            raise ValueError(f"a clock cannot run by {seconds} s")
        self._now_s += seconds
