"""What a regulation service earns: mileage, credit and forfeit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray, as_floats, positive


@dataclass(frozen=True, eq=False)
class Settlement:
    """Credit of each settlement interval.

    Attributes:
        credit_usd: US dollars, shape `(I,)`; 0 where forfeited or not scored.
        forfeited: Whether the score was below the limit, shape `(I,)`.
    """

    credit_usd: FloatArray
    forfeited: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

    @property
    def total_usd(self) -> float:
        """Sum over the intervals, US dollars."""
        return float(self.credit_usd.sum())


def regulation_credit(
    score: ArrayLike,
    *,
    capacity_mw: float,
    capability_price: ArrayLike,
    performance_price: ArrayLike,
    mileage_ratio: ArrayLike = 1.0,
    interval_s: float = 3600.0,
    forfeit_below: float = 0.25,
) -> Settlement:
    """PJM's regulation credit: `MW · score · (RMCCP + mileage_ratio · RMPCP) · interval / 1 h`.

    Hourly until September 2025, five-minute since (Manual 28 as reimplemented by the national laboratories' battery
    interface and by an open back-testing engine). An interval below the limit forfeits; exactly the limit is paid.

    Args:
        score: Composite score of each interval, shape `(I,)`; NaN = not scored, which earns nothing here although
            the operator substitutes the resource's historical score.
        capacity_mw: Assigned regulation.
        capability_price: RMCCP, USD per MW and hour, scalar or `(I,)`.
        performance_price: RMPCP (the mileage price since 2025), USD per MW and hour, scalar or `(I,)`.
        mileage_ratio: Scalar or `(I,)`.
        interval_s: 3600 or 300.
        forfeit_below: Limit.

    Raises:
        UserError: A score outside [0, 1], a capacity or interval that is not positive, or shapes that do not fit.
    """
    scores = as_floats(score, "score", missing=True, low=0.0, high=1.0)
    positive(capacity_mw, "capacity_mw")
    positive(interval_s, "interval_s")
    prices = []
    for name, value in (
        ("capability_price", capability_price),
        ("performance_price", performance_price),
        ("mileage_ratio", mileage_ratio),
    ):
        array = as_floats(np.atleast_1d(np.asarray(value)), name)
        if array.size != 1 and array.shape != scores.shape:
            raise UserError(f"{name} has {array.size} values for {scores.size} intervals; give one or as many")
        prices.append(array)
    rate = capacity_mw * (prices[0] + prices[2] * prices[1]) * interval_s / 3600.0
    forfeited = scores < forfeit_below - 1e-12
    credit = np.where(np.isnan(scores) | forfeited, 0.0, scores * rate)
    return Settlement(credit, forfeited)


def mileage(signal: ArrayLike) -> FloatArray:
    """Sum of the absolute steps of a signal along its last axis, in units of capacity.

    Raises:
        UserError: NaN, empty, or outside [-1, 1].
    """
    values = as_floats(signal, "signal", low=-1.0, high=1.0)
    return np.asarray(np.abs(np.diff(values, axis=-1)).sum(axis=-1), dtype=np.float64)


def mileage_ratio(signal: ArrayLike, reference: ArrayLike) -> float:
    """Mileage of a signal over that of a reference of the same time span.

    Legacy settlement pays the fast signal this multiple of the slow one; since 2025 the reference is the
    resource's own 30-day average, for which pass the average's mileage per interval through `regulation_credit`.

    Raises:
        UserError: The reference never moves.
    """
    own, base = float(mileage(signal)), float(mileage(reference))
    if base <= 0:
        raise UserError("reference signal never moves: its mileage is 0, so a ratio is not defined")
    return own / base
