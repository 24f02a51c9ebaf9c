"""Energy from a device's readings: by its counter, and by integrating its power; two sensors that may disagree.

The counter is the better one where there is one: integrating samples misses what happens between them, by 39 % on
average for short kernels ("Part-time power measurements", SC'24, doi 10.1109/SC41406.2024.00028). But it starts at an
arbitrary value, falls to 0 when the driver reloads, and boards before Volta and most virtual ones lack it.
"""

from __future__ import annotations

import math

from wattgym.hw.device import DeviceReading


class EnergyMeter:
    """Adds up readings of one device, taken in order.

    Args:
        longest_gap_s: Power is not interpolated over more than this between two samples.

    Attributes:
        resets: How often the counter fell, which a driver reload does. What was drawn between the last reading before
            and the reload is in no counter, so it is missing from the sum.
        unmetered_s: Time that the integral leaves out because samples were too far apart, seconds.
    """

    def __init__(self, longest_gap_s: float = 5.0) -> None:
        self.resets = 0
        self.unmetered_s = 0.0
        self._longest_gap_s = longest_gap_s
        self._counted_j: float | None = None
        self._last_counter_j: float | None = None
        self._integral_j: float | None = None
        self._last_sample: tuple[float, float] | None = None

    def add(self, reading: DeviceReading) -> None:
        """Takes one more reading in; the first one only sets where counting starts."""
        if reading.energy_j is not None:
            self._add_counter(reading.energy_j)
        if reading.power_w is not None:
            # The sample belongs to when the sensor took it, not to when it was read.
            self._add_sample(reading.t_s - (reading.age_s or 0.0), reading.power_w)

    @property
    def counter_j(self) -> float:
        """Energy by the counter since the first reading, J; NaN without two values of it."""
        return math.nan if self._counted_j is None else self._counted_j

    @property
    def integral_j(self) -> float:
        """Energy by the trapezoid rule over the power samples, J; NaN without two of them."""
        return math.nan if self._integral_j is None else self._integral_j

    @property
    def energy_j(self) -> float:
        """The counter's energy where there is a counter, else the integral; NaN, never 0, where nothing is known."""
        return self.integral_j if self._counted_j is None else self._counted_j

    def _add_counter(self, value_j: float) -> None:
        last_j, self._last_counter_j = self._last_counter_j, value_j
        if last_j is None:
            return
        fell = value_j < last_j
        self.resets += fell
        self._counted_j = (self._counted_j or 0.0) + (value_j if fell else value_j - last_j)

    def _add_sample(self, at_s: float, power_w: float) -> None:
        last = self._last_sample
        if last is None:
            self._last_sample = at_s, power_w
            return
        elapsed_s = at_s - last[0]
        if elapsed_s <= 0.0:
            return  # the sensor has not published since
        self._last_sample = at_s, power_w
        if elapsed_s > self._longest_gap_s:
            self.unmetered_s += elapsed_s
            return
        self._integral_j = (self._integral_j or 0.0) + 0.5 * (last[1] + power_w) * elapsed_s
