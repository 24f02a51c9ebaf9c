"""One evenly sampled series that refuses to be read outside its range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.errors import UserError


@dataclass(frozen=True, eq=False)
class Trace:
    """An evenly sampled series with its unit and provenance.

    Sample `i` holds on `[start_s + i * interval_s, start_s + (i + 1) * interval_s)` (zero-order hold), so the
    trace covers `[start_s, end_s)`.

    Attributes:
        id: Catalogue id, or the file name of a user's trace.
        kind: What it measures, for example `regulation`, `frequency`, `power_utilisation`.
        unit: Unit of `values`, for example `1`, `Hz`, `W`.
        interval_s: Sample interval, seconds.
        values: Samples, shape `(n,)`, float64, finite, read-only.
        start_s: Time of the first sample, seconds on the trace's own clock.
        meta: Provenance: source, licence, fill policy, and whatever else the loader recorded.
    """

    id: str
    kind: str
    unit: str
    interval_s: float
    values: NDArray[np.float64]
    start_s: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.array(self.values, dtype=np.float64)
        if values.ndim != 1 or values.size == 0:
            raise UserError(f"trace '{self.id}': needs at least one sample in one dimension, got shape {values.shape}")
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UserError(f"trace '{self.id}': sample {bad} is {values[bad]}; every sample must be finite")
        if not (np.isfinite(self.interval_s) and self.interval_s > 0):
            raise UserError(f"trace '{self.id}': interval must be positive, got {self.interval_s} s")
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    @property
    def end_s(self) -> float:
        """End of the covered range (exclusive), seconds."""
        return self.start_s + self.values.size * self.interval_s

    @property
    def duration_s(self) -> float:
        """Length of the covered range, seconds."""
        return self.values.size * self.interval_s

    def at(self, t_s: ArrayLike) -> NDArray[np.float64]:
        """Values at the given times, by zero-order hold.

        Args:
            t_s: Times in seconds, any shape.

        Returns:
            Values in the trace's unit, same shape as `t_s`.

        Raises:
            UserError: A time lies outside `[start_s, end_s)`; the message states the range.
        """
        times = np.asarray(t_s, dtype=np.float64)
        # A tick of k * period_s may fall a rounding error below its sample's start; 1e-6 of an interval absorbs it.
        position = np.floor((times - self.start_s) / self.interval_s + 1e-6)
        outside = ~((position >= 0) & (position < self.values.size))
        if outside.any():
            first = times[outside].flat[0]
            raise UserError(
                f"trace '{self.id}' covers {self.start_s:g} s to {self.end_s:g} s (end excluded); "
                f"{first:g} s is outside"
            )
        return self.values[position.astype(np.intp)]

    def window(self, start_s: float, duration_s: float) -> Trace:
        """The part that covers `[start_s, start_s + duration_s)`, on the same clock.

        Raises:
            UserError: The window is empty or not inside the trace.
        """
        if not duration_s > 0:
            raise UserError(f"trace '{self.id}': window length must be positive, got {duration_s} s")
        first = int(np.floor((start_s - self.start_s) / self.interval_s + 1e-6))
        last = int(np.ceil((start_s + duration_s - self.start_s) / self.interval_s - 1e-6))
        if first < 0 or last > self.values.size:
            raise UserError(
                f"trace '{self.id}' covers {self.start_s:g} s to {self.end_s:g} s; "
                f"the window {start_s:g} s to {start_s + duration_s:g} s is not inside"
            )
        return Trace(
            self.id, self.kind, self.unit, self.interval_s, self.values[first:last],
            self.start_s + first * self.interval_s, self.meta,
        )  # fmt: skip
