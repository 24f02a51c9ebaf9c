"""Filling missing samples by a policy that is named and recorded, or refusing them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError

POLICIES = ("refuse", "hold", "interpolate")


def missing_runs(values: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Runs of NaN as `(first, end)` sample indices, end excluded."""
    missing = np.concatenate([[False], np.isnan(values), [False]])
    edges = np.flatnonzero(missing[1:] != missing[:-1])
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def hole_problem(
    first: int, end: int, size: int, interval_s: float, policy: str, max_gap_s: float | None
) -> str | None:
    """Says why a hole cannot be filled, or `None` where the policy fills it.

    Args:
        first: First missing sample.
        end: First sample after the hole.
        size: Samples in the whole series.
        interval_s: Sample interval, seconds.
        policy: Gap policy.
        max_gap_s: Longest hole filled, from the sample before it to the one after it, seconds.
    """
    if policy == "refuse" or max_gap_s is None:
        return "fill it, or choose the gap policy hold or interpolate with a longest gap"
    if first == 0:
        return "there is no sample before it to fill it from"
    if end == size and policy == "interpolate":
        return "there is no sample after it to interpolate to"
    hole_s = (end - first + 1) * interval_s
    if hole_s > max_gap_s * (1 + 1e-9):
        return f"the hole is {hole_s:g} s long and at most {max_gap_s:g} s is filled"
    return None


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
    for first, end in runs:
        problem = hole_problem(first, end, values.size, interval_s, policy, max_gap_s)
        if problem:
            at = f"from sample {first}, {first * interval_s:g} s after the start"
            raise UserError(f"{place}: {end - first} missing {at}; {problem}")
    if not runs:
        return values, 0
    position = np.arange(values.size)
    known = ~np.isnan(values)
    if policy == "hold":
        filled = values[np.maximum.accumulate(np.where(known, position, 0))]
    else:
        filled = np.interp(position, position[known], values[known])
    return filled, int((~known).sum())


def check_policy(policy: str, max_gap_s: float | None) -> None:
    """Refuses an unknown gap policy, and one that fills without a longest gap.

    Raises:
        UserError: As said.
    """
    if policy not in POLICIES:
        raise UserError(f"unknown gap policy '{policy}'; policies: {', '.join(POLICIES)}")
    if policy != "refuse" and not (max_gap_s is not None and np.isfinite(max_gap_s) and max_gap_s > 0):
        raise UserError(f"gap policy '{policy}' needs the longest gap it may fill, in seconds (got {max_gap_s})")
