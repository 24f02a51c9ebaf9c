"""Filling missing samples by a policy that is named and recorded, or refusing them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError


def missing_runs(values: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Runs of NaN as `(first, end)` sample indices, end excluded."""
    missing = np.concatenate([[False], np.isnan(values), [False]])
    edges = np.flatnonzero(missing[1:] != missing[:-1])
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def fill_gaps(
    values: NDArray[np.float64], interval_s: float, policy: str, max_gap_s: float | None, place: str
) -> tuple[NDArray[np.float64], int]:
    """Fills NaN samples of an evenly sampled series.

    Args:
        values: Samples, shape `(n,)`, NaN where missing.
        interval_s: Sample interval, seconds.
        policy: `refuse`, `hold` (the last value stays) or `interpolate` (straight line between neighbours).
        max_gap_s: Longest hole filled, measured between the samples on its two sides, seconds.
        place: File and column for messages.

    Returns:
        The samples without NaN, and how many were filled.

    Raises:
        UserError: A sample is missing and the policy refuses it, a hole is too long or has no sample on one side,
            or the policy is unknown or lacks its longest hole.
    """
    check_policy(policy, max_gap_s)
    runs = missing_runs(values)
    if not runs:
        return values, 0
    for first, end in runs:
        where = f"{place}: {end - first} missing from sample {first} (at {first * interval_s:g} s from the start)"
        if policy == "refuse" or max_gap_s is None:
            raise UserError(f"{where}; fill it, or choose the gap policy hold or interpolate with a longest gap")
        if first == 0 or (end == values.size and policy == "interpolate"):
            raise UserError(f"{where}, with no sample {'before' if first == 0 else 'after'} it to fill it from")
        if (end - first + 1) * interval_s > max_gap_s * (1 + 1e-9):
            raise UserError(
                f"{where}: a hole of {(end - first + 1) * interval_s:g} s; at most {max_gap_s:g} s is filled"
            )
    filled = values.copy()
    position = np.arange(values.size)
    known = ~np.isnan(values)
    if policy == "hold":
        filled = filled[np.maximum.accumulate(np.where(known, position, 0))]
    else:
        filled = np.interp(position, position[known], values[known])
    return filled, int((~known).sum())


def check_policy(policy: str, max_gap_s: float | None) -> None:
    """Refuses an unknown gap policy, and one that fills without a longest gap.

    Raises:
        UserError: As said.
    """
    if policy not in ("refuse", "hold", "interpolate"):
        raise UserError(f"unknown gap policy '{policy}'; policies: refuse, hold, interpolate")
    if policy != "refuse" and not (max_gap_s is not None and np.isfinite(max_gap_s) and max_gap_s > 0):
        raise UserError(f"gap policy '{policy}' needs the longest gap it may fill, in seconds (got {max_gap_s})")
