"""Correlation, delay and slope of many windows at once: the array code under the regulation performance score.

Shapes: `B` series of `N` samples; `M` windows of `W` samples that begin at `starts`; shifts `0 … K`. Values are per
unit of capacity; NaN marks a missing response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from wattgym.metrics.checks import FloatArray
from wattgym.metrics.pjm_variant import PjmVariant

ScalarT = TypeVar("ScalarT", bound=np.generic)

# A response whose standard deviation is below this (relative to 1 + |mean|) is constant up to rounding.
_CONSTANT = 1e-12
# Correlations are rounded so that mathematically equal ones compare equal.
_DECIMALS = 12


@dataclass(frozen=True, eq=False)
class WindowScores:
    """Correlation and delay score of each window, shapes `(B, M)`; `shift` counts samples."""

    correlation: FloatArray
    delay: FloatArray
    shift: NDArray[np.intp]


def score_windows(signal: FloatArray, response: FloatArray, starts: NDArray[np.intp], v: PjmVariant) -> WindowScores:
    """Scores correlation and delay of each window by the variant's rules.

    Args:
        signal: Shape `(B, N)`, finite.
        response: Shape `(B, N)`, NaN where missing.
        starts: First sample of each window, shape `(M,)`.
        v: Rules.
    """
    grace = v.grace_samples
    by_shift, constant = shifted_correlation(signal, response, starts, v)
    delay_of = 1.0 - np.maximum(0, np.arange(v.max_shift + 1) - grace) / v.max_shift
    objective = by_shift + delay_of if v.shift_rule == "joint" else by_shift
    objective = np.where(np.isnan(objective), -np.inf, objective)
    near_best = objective >= objective.max(axis=-1, keepdims=True) - v.tie_tolerance
    shift = near_best.argmax(axis=-1)
    correlation = np.take_along_axis(by_shift, shift[..., None], axis=-1)[..., 0]
    idle = np.take_along_axis(constant, shift[..., None], axis=-1)[..., 0]
    correlation = np.nan_to_num(correlation)
    delay = delay_of[shift]
    if v.zero_delay == "not_positive":
        delay = np.where(correlation > 0, delay, 0.0)
    elif v.zero_delay == "constant_response":
        delay = np.where(idle, 0.0, delay)
    if v.clip_correlation:
        correlation = np.maximum(correlation, 0.0)
    if v.constant_std > 0:
        flat = windows_of(signal, v.window_samples)[:, starts].std(axis=-1) < v.constant_std
        by_slope = slope_correlation(signal, response, starts, v)
        correlation = np.where(flat, by_slope, correlation)
        delay = np.where(flat, 1.0, delay)
        shift = np.where(flat, 0, shift)
    return WindowScores(correlation, delay, shift)


def windows_of(values: NDArray[ScalarT], length: int) -> NDArray[ScalarT]:
    """Read-only view of every window, shape `(B, N − length + 1, length)`."""
    return sliding_window_view(values, length, axis=-1)


def shifted_correlation(
    signal: FloatArray, response: FloatArray, starts: NDArray[np.intp], v: PjmVariant
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Pearson correlation of each window with the response after each shift, by pairwise deletion.

    Returns:
        Correlations, shape `(B, M, K + 1)`: 0 where the response is constant, NaN where the shift runs past the end or
        leaves too few pairs; and where the response is constant, same shape.
    """
    length, last = v.window_samples, signal.shape[-1] - v.window_samples
    s = windows_of(signal, length)[:, starts]
    s = s - s.mean(axis=-1, keepdims=True)
    valid = ~np.isnan(response)
    complete = bool(valid.all())
    m = windows_of(valid.astype(np.float64), length)
    count = m.sum(axis=-1)
    r = windows_of(np.where(valid, response, 0.0), length)
    mean = r.sum(axis=-1) / np.maximum(count, 1.0)
    r = (r - mean[..., None]) * m
    spread_r = np.einsum("bwt,bwt->bw", r, r)
    still = spread_r <= count * (_CONSTANT * (1.0 + np.abs(mean))) ** 2
    usable = count >= v.min_valid_share * length - 1e-9
    shape = (*s.shape[:2], v.max_shift + 1)
    found = np.full(shape, np.nan)
    constant = np.zeros(shape, dtype=bool)
    spread_s = np.einsum("bwt,bwt->bw", s, s)
    for k in range(v.max_shift + 1):
        inside = starts + k <= last
        if not inside.any():
            break
        at = starts[inside] + k
        own = s[:, inside]
        spread = spread_s[:, inside]
        if not complete:
            total = np.einsum("bwt,bwt->bw", own, m[:, at])
            spread = np.einsum("bwt,bwt,bwt->bw", own, own, m[:, at]) - total**2 / np.maximum(count[:, at], 1.0)
        both = np.sqrt(np.maximum(spread, 0.0)) * np.sqrt(spread_r[:, at])
        product = np.einsum("bwt,bwt->bw", own, r[:, at])
        none = still[:, at] | (both <= 0)
        c = np.divide(product, both, out=np.zeros_like(product), where=~none)
        c = np.clip(np.round(c, _DECIMALS), -1.0, 1.0)
        found[:, inside, k] = np.where(usable[:, at], c, np.nan)
        constant[:, inside, k] = none
    return found, constant


def slope_correlation(signal: FloatArray, response: FloatArray, starts: NDArray[np.intp], v: PjmVariant) -> FloatArray:
    """Correlation of a constant request: `max(0, 1 − |slope_s − slope_r|)`, slopes per sample by least squares.

    The response is taken after the grace allowance; missing pairs are left out.

    Returns:
        Shape `(B, M)`.
    """
    s = windows_of(signal, v.window_samples)[:, starts]
    r = windows_of(lead(response, v.grace_samples), v.window_samples)[:, starts]
    error = s - r  # slope_s - slope_r over common samples is the slope of the difference
    valid = ~np.isnan(error)
    error = np.where(valid, error, 0.0)
    count = np.maximum(valid.sum(axis=-1, keepdims=True), 1)
    t = np.arange(v.window_samples, dtype=np.float64)
    t = np.where(valid, t - (t * valid).sum(axis=-1, keepdims=True) / count, 0.0)
    spread = (t * t).sum(axis=-1)
    slope = np.divide((t * error).sum(axis=-1), spread, out=np.zeros_like(spread), where=spread > 0)
    return np.asarray(np.maximum(0.0, 1.0 - np.abs(slope)), dtype=np.float64)


def lead(values: FloatArray, samples: int) -> FloatArray:
    """`values[t + samples]` at place `t`; NaN past the end."""
    if samples == 0:
        return values
    out = np.full_like(values, np.nan)
    out[..., :-samples] = values[..., samples:]
    return out
