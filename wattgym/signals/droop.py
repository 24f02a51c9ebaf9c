"""Droop-type regulation: the signal a load derives from the frequency it measures."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, field_validator

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.signals.signal import Signal, check_inside, tick_times
from wattgym.traces.trace import Trace


class DroopOptions(FrozenModel):
    """Frequency-to-response curve, symmetric about the nominal frequency.

    Attributes:
        nominal_hz: Nominal frequency; the one that the record states when None.
        curve: Pairs (deviation in Hz, response), both rising; linear between them, 0 below the first deviation
            (the dead band) and level after the last. `DROOP_CURVES` has those of real services.
    """

    nominal_hz: float | None = Field(None, gt=0)
    curve: tuple[tuple[float, float], ...] = ((0.015, 0.0), (0.05, 1.0))

    @field_validator("curve")
    @classmethod
    def _rising(cls, curve: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        deviations = [point[0] for point in curve]
        responses = [point[1] for point in curve]
        rising = all(a < b for a, b in pairwise(deviations))
        level = all(a <= b for a, b in pairwise(responses))
        if len(curve) < 2 or not rising or not level or deviations[0] < 0 or responses[0] != 0 or responses[-1] > 1:
            raise ValueError(
                "needs two or more pairs, deviations rising from >= 0, responses from 0 to <= 1 and never falling"
            )
        return curve


DROOP_CURVES: dict[str, DroopOptions] = {
    # Our scenario: the dead band of GB dynamic services, full response at 50 mHz, so that an ordinary day on a
    # large interconnection (standard deviation 16 mHz) exercises the whole range.
    "tight": DroopOptions(),
    # NESO Dynamic Containment: 15 mHz dead band, 5 % at 0.2 Hz, 100 % at 0.5 Hz.
    "dynamic_containment": DroopOptions(curve=((0.015, 0.0), (0.2, 0.05), (0.5, 1.0))),
    # NESO Dynamic Regulation: 15 mHz dead band, 100 % at 0.2 Hz.
    "dynamic_regulation": DroopOptions(curve=((0.015, 0.0), (0.2, 1.0))),
    # North American governors: 36 mHz dead band, 5 % droop (3 Hz for the whole rating).
    "governor": DroopOptions(curve=((0.036, 0.0), (3.036, 1.0))),
}
"""Curves by name; each works around the nominal frequency of the record it is used on."""


def droop_response(
    frequency_hz: ArrayLike, nominal_hz: float, curve: tuple[tuple[float, float], ...]
) -> NDArray[np.float64]:
    """Signal for a measured frequency: low frequency gives `r > 0`, so the load falls.

    Args:
        frequency_hz: Frequency, any shape.
        nominal_hz: Nominal frequency.
        curve: As in `DroopOptions`.

    Returns:
        `r` in [-1, 1], same shape.
    """
    shortfall = nominal_hz - np.asarray(frequency_hz, dtype=np.float64)
    deviations, responses = zip(*curve, strict=True)
    size = np.interp(np.abs(shortfall), deviations, responses)
    return np.asarray(np.sign(shortfall) * size, dtype=np.float64)


def droop_signal(
    trace: Trace, start_s: float, duration_s: float, period_s: float, options: DroopOptions, split: str | None = None
) -> Signal:
    """Droop signal over a part of a frequency record; the last measured frequency holds until the next.

    Raises:
        UserError: The window is not inside the record, or no nominal frequency is known.
    """
    check_inside(trace, start_s, duration_s)
    nominal_hz = options.nominal_hz or trace.meta.get("nominal_hz")
    if nominal_hz is None:
        raise UserError(f"trace '{trace.id}' states no nominal frequency; set the droop option nominal_hz")
    frequency_hz = trace.at(start_s + tick_times(duration_s, period_s))
    values = droop_response(frequency_hz, float(nominal_hz), options.curve)
    return Signal("droop", "droop", period_s, values, trace.id, start_s, split, {"options": options.model_dump()})
