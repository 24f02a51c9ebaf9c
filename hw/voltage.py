"""Power against clock: `P(x) = V(x)^2 (s + (1 - s) x)` with `x` the clock's share of the highest.

The voltage is flat at `floor` below the knee and rises linearly to 1. Fitted to V100-SXM2 power at locked clocks
(GridPilot's raw data, arXiv 2605.26384), it reproduces 60 to 279 W within 4 %.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PowerCurve:
    """The curve of one board at one load.

    Attributes:
        static_share: Share of full power that does not scale with the clock.
        knee: Clock share up to which the voltage stays at its floor, below 1.
        floor: Voltage there, as a share of the highest.
    """

    static_share: float
    knee: float
    floor: float

    def power_share(self, clock_share: float) -> float:
        """Power at a clock, as a share of that at the highest clock."""
        rise = max(clock_share - self.knee, 0.0) / (1.0 - self.knee)
        voltage = self.floor + (1.0 - self.floor) * rise
        return voltage**2 * (self.static_share + (1.0 - self.static_share) * clock_share)

    def clock_share(self, power_share: float) -> float:
        """Highest clock share in [0, 1] whose power does not exceed `power_share`; the inverse, by bisection."""
        low, high = 0.0, 1.0
        if power_share >= 1.0:
            return 1.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.power_share(middle) <= power_share else (low, middle)
        return low
