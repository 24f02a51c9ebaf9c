"""Checks of users' arrays that every metric shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.errors import UserError

FloatArray = NDArray[np.float64]


def as_floats(
    values: ArrayLike, name: str, *, missing: bool = False, low: float = -np.inf, high: float = np.inf
) -> FloatArray:
    """Converts to float64 and refuses what no metric can use.

    Args:
        values: Samples along the last axis.
        name: What the values are, for messages.
        missing: Whether NaN marks a missing sample instead of being refused.
        low: Smallest valid value.
        high: Largest valid value.

    Raises:
        UserError: Not numbers, empty, NaN or infinite, or out of range; the message names the first bad sample.
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name}: not an array of numbers") from None
    if array.ndim == 0 or array.size == 0:
        raise UserError(f"{name}: needs at least one sample, got shape {array.shape}")
    absent = np.isnan(array)
    if absent.any() and not missing:
        raise UserError(f"{name}: sample {_first(absent)} is NaN; every sample must be a number")
    bad = ~absent & ~((array >= low) & (array <= high) & np.isfinite(array))
    if bad.any():
        limits = "must be finite" if np.isinf(low) and np.isinf(high) else f"valid: {low:g} to {high:g}"
        raise UserError(f"{name}: sample {_first(bad)} is {array[bad].flat[0]:g}; {limits}")
    return array


def positive(value: float, name: str) -> float:
    """A positive, finite number.

    Raises:
        UserError: It is not.
    """
    if not (np.isfinite(value) and value > 0):
        raise UserError(f"{name} must be positive and finite, got {value}")
    return float(value)


def same_length(first: FloatArray, second: FloatArray, first_name: str, second_name: str) -> None:
    """Refuses two arrays of different shape.

    Raises:
        UserError: States both.
    """
    if first.shape != second.shape:
        raise UserError(
            f"{first_name} has {_shape(first)} and {second_name} has {_shape(second)}; they must be equally long"
        )


def _first(bad: NDArray[np.bool_]) -> str:
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return str(index[0]) if bad.ndim == 1 else str(tuple(int(i) for i in index))


def _shape(array: FloatArray) -> str:
    return f"{array.size} samples" if array.ndim == 1 else f"shape {array.shape}"
