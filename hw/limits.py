"""The rules that a power-limit command passes before it reaches a device, as pure array code.

The guard applies them to one device and the emulator to a whole batch of jobs, so a policy is trained under
exactly the rules that it will meet on hardware.
"""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from wattgym.config import FrozenModel

MIN_INTERVAL_S = 0.2
"""Shortest time between writes, s. A V100's own power loop ticks about every 168 ms, so faster is pointless."""

FloatArray = NDArray[np.float64]
ByteArray = NDArray[np.uint8]


class Decision(IntFlag):
    """What the rules did to a request; several may hold at once."""

    NONE = 0
    CLIPPED_LOW = 1
    CLIPPED_HIGH = 2
    TOO_SOON = 4
    DEAD_BANDED = 8
    RAISE_LIMITED = 16


_BITS = len(Decision)


class CommandRules(FrozenModel):
    """How fast and how far a power limit may be moved. Fractions are of the device's default limit.

    Cuts are never slowed: they are the safe direction. Raises are, because the power that comes back all at once is
    what breakers and grids feel.

    Attributes:
        interval_s: Least time between writes. The default reading of newer boards is a mean over 1 s, so faster
            feedback means little.
        dead_band_w: Changes smaller than this many watts are not worth a write.
        dead_band_fraction: The same as a fraction; the larger of the two counts.
        raise_fraction_per_s: How much the limit may rise per second. An assumption: no vendor states a rate.
        raise_window_s: A raise allowance adds up over at most this long, so that a long hold is not followed by a
            jump. Best set to the control period.
        floor_fraction: Lowest commanded limit. Boards cannot always hold caps near their nominal minimum: an A40
            told 100 of 300 W draws 107 to 119 W.
        ceiling_fraction: Highest commanded limit.
    """

    interval_s: float = Field(default=1.0, ge=MIN_INTERVAL_S)
    dead_band_w: float = Field(default=2.0, ge=0.0)
    dead_band_fraction: float = Field(default=0.005, ge=0.0, lt=1.0)
    raise_fraction_per_s: float = Field(default=0.2, gt=0.0)
    raise_window_s: float = Field(default=2.0, gt=0.0)
    floor_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    ceiling_fraction: float = Field(default=1.0, gt=0.0)

    @model_validator(mode="after")
    def _ordered(self) -> CommandRules:
        if self.floor_fraction > self.ceiling_fraction:
            raise ValueError(f"floor_fraction {self.floor_fraction} exceeds ceiling_fraction {self.ceiling_fraction}")
        if self.raise_window_s < self.interval_s:
            raise ValueError(f"raise_window_s {self.raise_window_s} is below interval_s {self.interval_s}")
        return self


class ShapedLimits:
    """The rules worked out for given devices: bounds, dead bands and raise rates as arrays.

    Args:
        min_w: Lowest settable limit, W, any shape.
        max_w: Highest settable limit, W, same shape.
        default_w: Default limit, W, same shape.
        rules: The rules.

    Attributes:
        low_w: Lowest command, W: the device's minimum or the floor, whichever is higher.
        high_w: Highest command, W: the device's maximum or the ceiling, whichever is lower.
        dead_band_w: Smallest change that is passed on, W.
        raise_w_per_s: Fastest rise, W/s.
    """

    def __init__(self, min_w: ArrayLike, max_w: ArrayLike, default_w: ArrayLike, rules: CommandRules) -> None:
        minimum, maximum, default = (np.asarray(v, dtype=np.float64) for v in (min_w, max_w, default_w))
        self.rules = rules
        self.high_w: FloatArray = np.minimum(maximum, rules.ceiling_fraction * default)
        # A default below the floor's reach (or a ceiling below the minimum) must not turn the range inside out.
        self.high_w = np.maximum(self.high_w, minimum)
        self.low_w: FloatArray = np.minimum(np.maximum(minimum, rules.floor_fraction * default), self.high_w)
        self.dead_band_w: FloatArray = np.maximum(rules.dead_band_w, rules.dead_band_fraction * default)
        self.raise_w_per_s: FloatArray = rules.raise_fraction_per_s * default

    def command_w(self, requested_w: FloatArray, last_w: FloatArray, elapsed_s: Any) -> FloatArray:
        """The limit to command.

        Args:
            requested_w: What the policy wants, W, finite: a NaN must be refused before, it would pass through here.
            last_w: The limit in force, W, same shape.
            elapsed_s: Time since the last write, s; a number, or an array of the same shape.

        Returns:
            The command, W; equal to `last_w` where nothing is to be written.
        """
        return self._shape(requested_w, last_w, elapsed_s)[0]

    def shape(self, requested_w: FloatArray, last_w: FloatArray, elapsed_s: Any) -> tuple[FloatArray, ByteArray]:
        """The limit to command, and why.

        Args:
            requested_w: As for `command_w`.
            last_w: As for `command_w`.
            elapsed_s: As for `command_w`.

        Returns:
            The command, W, and a bit mask of `Decision` values, both of the arguments' shape.
        """
        command, target, held, early = self._shape(requested_w, last_w, elapsed_s)
        flags = np.empty((_BITS, *command.shape), dtype=np.bool_)  # a row for each bit, lowest first
        np.greater(target, requested_w, out=flags[0, ...])
        np.less(target, requested_w, out=flags[1, ...])
        flags[2] = early
        np.greater(held, early, out=flags[3, ...])
        np.greater(command < target, held | early, out=flags[4, ...])
        decisions: ByteArray = np.packbits(flags, axis=0, bitorder="little")[0]
        return command, decisions

    def _shape(
        self, requested_w: FloatArray, last_w: FloatArray, elapsed_s: Any
    ) -> tuple[FloatArray, FloatArray, Any, Any]:
        """The command, what it heads for, and whether the dead band or the interval holds it back."""
        counted_s = np.minimum(elapsed_s, self.rules.raise_window_s)
        # The hair's breadth keeps ten ticks of 0.1 s from counting as less than one second.
        early = np.less(elapsed_s, self.rules.interval_s - 1e-9)
        target = np.minimum(np.maximum(requested_w, self.low_w), self.high_w)
        held = np.abs(target - last_w) < self.dead_band_w
        raised = np.minimum(target, last_w + self.raise_w_per_s * counted_s)
        return np.where(held | early, last_w, raised), target, held, early


def shape_command_w(
    requested_w: ArrayLike,
    last_w: ArrayLike,
    *,
    min_w: ArrayLike,
    max_w: ArrayLike,
    default_w: ArrayLike,
    elapsed_s: ArrayLike,
    rules: CommandRules,
) -> tuple[FloatArray, ByteArray]:
    """Shapes commands once; code that does so every step builds a `ShapedLimits` and keeps it.

    Args:
        requested_w: What is wanted, W, finite, any shape.
        last_w: The limit in force, W.
        min_w: Lowest settable limit, W.
        max_w: Highest settable limit, W.
        default_w: Default limit, W.
        elapsed_s: Time since the last write, s.
        rules: The rules.

    Returns:
        The command, W, and a bit mask of `Decision` values.
    """
    limits = ShapedLimits(min_w, max_w, default_w, rules)
    requested, last = (np.asarray(v, dtype=np.float64) for v in (requested_w, last_w))
    return limits.shape(requested, last, elapsed_s)
