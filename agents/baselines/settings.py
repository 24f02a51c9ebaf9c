"""Where settings of baselines are searched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Where a setting is searched.

    Attributes:
        low: Least value.
        high: Greatest value.
        log: Whether factors count, not differences.
    """

    low: float
    high: float
    log: bool = False

    def at(self, share: float) -> float:
        """The value at a share of the way from `low` to `high`, to four significant digits."""
        value = self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)
        return float(f"{value:.4g}")
