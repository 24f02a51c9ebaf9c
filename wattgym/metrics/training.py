"""What following a signal cost the training, and how hard it worked the actuators."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray, as_floats, positive


def throughput_retained(tokens: float, uncapped_tokens: float) -> float:
    """Tokens under control over tokens of the uncapped run in the same wall-clock time.

    Raises:
        UserError: The uncapped run has no tokens, or a count is negative.
    """
    positive(uncapped_tokens, "uncapped_tokens")
    if not (np.isfinite(tokens) and tokens >= 0):
        raise UserError(f"tokens must be >= 0 and finite, got {tokens}")
    return tokens / uncapped_tokens


def energy_per_token_j(power_w: ArrayLike, *, period_s: float, tokens: float) -> float:
    """Energy over tokens, joules: mean power of each period times its length, summed.

    Args:
        power_w: Mean power of each period, shape `(n,)`.
        period_s: Length of a period.
        tokens: Tokens trained on in all of them.

    Raises:
        UserError: NaN or negative power, empty, or no tokens.
    """
    power = as_floats(power_w, "power", low=0.0)
    return float(power.sum()) * positive(period_s, "period_s") / positive(tokens, "tokens")


def actuations_per_hour(
    cap_w: ArrayLike, *, period_s: float, range_w: float, threshold: float = 0.01, reference_w: ArrayLike | None = None
) -> FloatArray:
    """Changes of a power cap that exceed a share of its range, per hour and device.

    Args:
        cap_w: Cap in force in each period, shape `(..., n)`, time last.
        period_s: Control period.
        range_w: Largest minus smallest possible cap.
        threshold: Share of the range; a change must exceed it to count.
        reference_w: Cap before the first period, shape `(...)`; the first cap is no change when None.

    Returns:
        Actuations per hour, shape `(...)`.

    Raises:
        UserError: NaN, empty, or a period or range that is not positive.
    """
    cap = as_floats(cap_w, "cap")
    positive(range_w, "range_w")
    hours = cap.shape[-1] * positive(period_s, "period_s") / 3600.0
    if reference_w is not None:
        before = as_floats(np.atleast_1d(np.asarray(reference_w)), "reference").reshape(*cap.shape[:-1], 1)
        cap = np.concatenate([before, cap], axis=-1)
    changes = np.abs(np.diff(cap, axis=-1)) > threshold * range_w * (1 + 1e-9)
    return np.asarray(changes.sum(axis=-1) / hours, dtype=np.float64)
