"""The regulation performance score: correlation, delay and precision of a response to a signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.errors import UserError
from wattgym.metrics.checks import FloatArray, as_floats, positive, same_length
from wattgym.metrics.pjm_variant import PJM_VARIANTS, PjmVariant, pjm_variant
from wattgym.metrics.pjm_windows import lead, score_windows, windows_of

__all__ = ["PJM_VARIANTS", "STATUS", "PjmScore", "PjmVariant", "pjm_score", "pjm_variant", "resample"]

STATUS = ("scored", "low_signal", "missing", "outage", "warmup")
"""Meaning of the codes in `PjmScore.status`; only `scored` and `outage` (which scores 0) count."""
_SCORED, _LOW_SIGNAL, _MISSING, _OUTAGE, _WARMUP = range(len(STATUS))
# Below this mean absolute signal, precision is relative to the capacity instead.
_NO_SIGNAL = 1e-9


@dataclass(frozen=True, eq=False)
class PjmScore:
    """A score with everything it is made of. With a batch, every array has the leading axis `B`.

    Attributes:
        variant: The rules.
        correlation: Mean correlation of the counted windows; NaN when none counts.
        delay: Mean delay score.
        precision: Precision; relative to the interval's mean absolute signal it is that of the interval's samples.
        composite: Weighted sum of the three.
        window_start_s: First sample of each window, seconds, shape `(M,)` (no batch axis).
        window_correlation: Shape `(M,)`; NaN where not counted, as the next ones.
        window_delay: Shape `(M,)`.
        window_precision: Shape `(M,)`, each clipped to [0, 1].
        window_composite: Shape `(M,)`.
        window_shift: Chosen shift, samples of `variant.sample_s`, shape `(M,)`; −1 where not counted or
            without a correlated response.
        counted: Whether the window counts, shape `(M,)`.
        status: Index into `STATUS`, shape `(M,)`.
        interval_start_s: Beginning of each settlement interval, seconds, shape `(I,)` (no batch axis).
        interval_correlation: Shape `(I,)`; NaN where no window counts, as the next ones.
        interval_delay: Shape `(I,)`.
        interval_precision: Shape `(I,)`.
        interval_composite: Shape `(I,)`.
        forfeited: Intervals whose composite is below `variant.forfeit_below`, shape `(I,)`.
    """

    variant: PjmVariant
    correlation: FloatArray
    delay: FloatArray
    precision: FloatArray
    composite: FloatArray
    window_start_s: FloatArray
    window_correlation: FloatArray
    window_delay: FloatArray
    window_precision: FloatArray
    window_composite: FloatArray
    window_shift: NDArray[np.intp]
    counted: NDArray[np.bool_]
    status: NDArray[np.intp]
    interval_start_s: FloatArray
    interval_correlation: FloatArray
    interval_delay: FloatArray
    interval_precision: FloatArray
    interval_composite: FloatArray
    forfeited: NDArray[np.bool_]

    def count(self, status: str) -> int:
        """Number of windows with a status of `STATUS`."""
        return int((self.status == STATUS.index(status)).sum())

    def summary(self) -> dict[str, Any]:
        """The score of one series as plain numbers, ready for JSON; None where nothing counts.

        Raises:
            UserError: The score is of a batch.
        """
        if self.status.ndim != 1:
            raise UserError(f"summary() is of one series; this score is of a batch of {self.status.shape[0]}")
        parts = {name: _number(getattr(self, name)) for name in ("composite", "correlation", "delay", "precision")}
        return {
            "variant": self.variant.name,
            "assumed": self.variant.assumed,
            **parts,
            "windows": int(self.status.size),
            "windows_by_status": {name: self.count(name) for name in STATUS},
            "intervals": int(self.forfeited.size),
            "intervals_forfeited": int(self.forfeited.sum()),
            "interval_composite": [_number(x) for x in self.interval_composite],
        }


def pjm_score(
    signal: ArrayLike,
    response: ArrayLike,
    *,
    period_s: float,
    capacity: float = 1.0,
    variant: PjmVariant = PJM_VARIANTS["legacy"],
) -> PjmScore:
    """Scores how a resource followed a regulation signal.

    Per window of 30 samples (10 s each) and shift `k` of the response, `c_k` is Pearson's correlation and
    `d_k = 1 − k/30`; the shift that maximises `c_k + d_k` gives the correlation and the delay score. Precision is
    `1 − mean|response − request| / mean|request|`. `PjmVariant` documents every choice and its source.

    Args:
        signal: Regulation signal in [-1, 1], shape `(n,)` or `(B, n)`, no NaN.
        response: What was delivered in the signal's sense (`wattgym.signals.response` for a load), in units of
            `capacity`, same shape; NaN = missing.
        period_s: Interval of both, seconds: `variant.sample_s` divided by a whole number.
        capacity: Full response, in the response's unit: a perfect response is `capacity · signal`.
        variant: The rules.

    Raises:
        UserError: Empty, of different length, too short for one window, signal NaN or outside [-1, 1], response
            infinite, capacity not positive, or an interval that does not divide the scoring interval.
    """
    u = as_floats(signal, "signal", low=-1.0, high=1.0)
    r = as_floats(response, "response", missing=True)
    same_length(u, r, "signal", "response")
    if u.ndim > 2:
        raise UserError(f"signal: shape (n,) or (B, n) is scored, got {u.shape}")
    r = r / positive(capacity, "capacity")
    batched = u.ndim == 2
    u, r = (resample(np.atleast_2d(x), period_s, variant) for x in (u, r))
    starts = _starts(u.shape[-1], variant)
    return _assemble(u, r, starts, variant, batched)


def resample(values: FloatArray, period_s: float, v: PjmVariant) -> FloatArray:
    """Brings samples to the scoring interval, as `v.resample` says; NaN (missing) only spoils its own group.

    Args:
        values: Shape `(..., n)`.
        period_s: Their interval, seconds.
        v: Rules.

    Returns:
        Shape `(..., n // ratio)`.

    Raises:
        UserError: The scoring interval is no multiple of the samples'.
    """
    ratio = v.sample_s / positive(period_s, "period_s")
    group = round(ratio)
    if group < 1 or abs(ratio - group) > 1e-6:
        raise UserError(f"samples every {period_s:g} s cannot be scored every {v.sample_s:g} s: not a whole multiple")
    if group == 1:
        return values
    if v.resample == "decimate":
        if v.decimate_offset >= group:
            raise UserError(
                f"decimate_offset {v.decimate_offset} of {group} samples per group; valid: 0 to {group - 1}"
            )
        return values[..., v.decimate_offset :: group]
    whole = values.shape[-1] // group
    grouped = values[..., : whole * group].reshape(*values.shape[:-1], whole, group)
    valid = ~np.isnan(grouped)
    count = valid.sum(axis=-1)
    total = np.where(valid, grouped, 0.0).sum(axis=-1)
    return _ratio(total, count.astype(np.float64))


def _starts(samples: int, v: PjmVariant) -> NDArray[np.intp]:
    look_ahead = v.max_shift if v.tail == "look_ahead" else 0
    scored = samples - look_ahead
    if scored < v.window_samples:
        needed_s = (v.window_samples + look_ahead) * v.sample_s
        raise UserError(
            f"{samples} samples of {v.sample_s:g} s are too few: variant '{v.name}' needs {needed_s:g} s "
            f"(a window of {v.window_s:g} s and {look_ahead * v.sample_s:g} s of response after it)"
        )
    if v.windows == "block":
        return np.arange(scored // v.window_samples) * v.window_samples
    # With look-ahead, every sample that has its full look-ahead begins a window.
    return np.arange(scored if look_ahead else scored - v.window_samples + 1)


def _filled(response: FloatArray, v: PjmVariant) -> FloatArray:
    if v.missing == "zero":
        return np.nan_to_num(response, nan=0.0)
    if v.missing == "hold":
        place = np.where(np.isnan(response), 0, np.arange(response.shape[-1]))
        return np.take_along_axis(response, np.maximum.accumulate(place, axis=-1), axis=-1)
    return response


def _status(u: FloatArray, r: FloatArray, starts: NDArray[np.intp], v: PjmVariant) -> NDArray[np.intp]:
    """Code of each window, shape `(B, M)`, from the signal and the unfilled response."""
    length = v.window_samples
    absent = np.isnan(lead(r, v.grace_samples))
    recorded = 1.0 - windows_of(absent, length)[:, starts].mean(axis=-1)
    status = np.where(recorded < v.min_valid_share - 1e-9, _MISSING, _SCORED)
    run = round(v.outage_s / v.sample_s)
    if absent.shape[-1] >= run:
        long_out = np.zeros_like(absent)
        whole = windows_of(absent, run).all(axis=-1)
        for row, at in np.argwhere(whole):
            long_out[row, at : at + run] = True
        in_outage = windows_of(long_out, length)[:, starts].any(axis=-1)
        status = np.where((status == _MISSING) & in_outage, _OUTAGE, status)
    mean_abs = np.abs(windows_of(u, length)[:, starts]).mean(axis=-1)
    status = np.where(mean_abs < v.low_signal, _LOW_SIGNAL, status)
    early = starts * v.sample_s < v.warmup_s - 1e-9
    return np.where(early, _WARMUP, status).astype(np.intp)


def _assemble(u: FloatArray, r: FloatArray, starts: NDArray[np.intp], v: PjmVariant, batched: bool) -> PjmScore:
    status = _status(u, r, starts, v)
    counted = (status == _SCORED) | (status == _OUTAGE)
    outage = status == _OUTAGE
    filled = _filled(r, v)
    found = score_windows(u, filled, starts, v)
    correlation = np.where(counted, np.where(outage, 0.0, found.correlation), np.nan)
    delay = np.where(counted, np.where(outage, 0.0, found.delay), np.nan)
    idle = (found.correlation <= 0) & (found.delay <= 0)
    shift = np.where(counted & ~outage & ~idle, found.shift, -1)

    interval = starts // v.interval_samples
    count = int(interval[-1]) + 1
    error, size = _pairs(u, filled, v)
    precision, interval_precision = _precision(error, size, starts, interval, counted, outage, v)

    weights = np.array(v.weights)
    windows_counted = _per_interval(counted.astype(np.float64), interval, count)
    interval_correlation = _ratio(_per_interval(correlation, interval, count), windows_counted)
    interval_delay = _ratio(_per_interval(delay, interval, count), windows_counted)
    interval_parts = np.stack([interval_correlation, interval_delay, interval_precision])
    interval_composite = np.tensordot(weights, interval_parts, axes=1)
    all_counted = windows_counted.sum(axis=-1)
    totals = _ratio(np.nansum(interval_parts * windows_counted, axis=-1), all_counted)
    arrays: dict[str, Any] = {
        "correlation": totals[0],
        "delay": totals[1],
        "precision": totals[2],
        "composite": np.tensordot(weights, totals, axes=1),
        "window_correlation": correlation,
        "window_delay": delay,
        "window_precision": precision,
        "window_composite": np.tensordot(weights, np.stack([correlation, delay, precision]), axes=1),
        "window_shift": shift,
        "counted": counted,
        "status": status,
        "interval_correlation": interval_correlation,
        "interval_delay": interval_delay,
        "interval_precision": interval_precision,
        "interval_composite": interval_composite,
        "forfeited": interval_composite < v.forfeit_below - 1e-12,
    }
    if not batched:
        arrays = {name: array[0] for name, array in arrays.items()}
    return PjmScore(
        variant=v,
        window_start_s=np.asarray(starts * v.sample_s, dtype=np.float64),
        interval_start_s=np.arange(count, dtype=np.float64) * v.interval_s,
        **arrays,
    )


def _pairs(u: FloatArray, r: FloatArray, v: PjmVariant) -> tuple[FloatArray, FloatArray]:
    """|error| and |request| of every sample, both NaN where the response is missing, shape `(B, N)`."""
    error = np.abs(lead(r, v.grace_samples) - u)
    return error, np.where(np.isnan(error), np.nan, np.abs(u))


def _precision(
    error: FloatArray,
    size: FloatArray,
    starts: NDArray[np.intp],
    interval: NDArray[np.intp],
    counted: NDArray[np.bool_],
    outage: NDArray[np.bool_],
    v: PjmVariant,
) -> tuple[FloatArray, FloatArray]:
    """Precision of each window `(B, M)` and of each interval `(B, I)`.

    With rolling windows a sample lies in many windows; for the interval's precision each window stands for its first
    sample, so that every sample counts once.
    """
    length = v.window_samples
    count = int(interval[-1]) + 1
    valid = np.where(np.isnan(error), 0.0, 1.0)
    error, size = np.nan_to_num(error), np.nan_to_num(size)

    def over(values: FloatArray, samples: int) -> FloatArray:
        return np.asarray(windows_of(values, samples)[:, starts].sum(axis=-1), dtype=np.float64)

    n = over(valid, length)
    window_error = _ratio(over(error, length), n)
    if v.normaliser == "block":
        scale = _ratio(over(size, length), n)
        windows = np.clip(1.0 - window_error / np.where(scale < _NO_SIGNAL, 1.0, scale), 0.0, 1.0)
        windows = np.where(counted, np.where(outage, 0.0, windows), np.nan)
        return windows, _ratio(
            _per_interval(windows, interval, count), _per_interval(counted.astype(np.float64), interval, count)
        )
    own = length if v.windows == "block" else 1
    share = np.where(counted & ~outage, 1.0, 0.0)
    pairs = _per_interval(over(valid, own) * share, interval, count)
    scale = _ratio(_per_interval(over(size, own) * share, interval, count), pairs)
    scale = np.where(scale < _NO_SIGNAL, 1.0, scale)
    # An outage delivered nothing: its share of the interval has precision 0.
    delivered = _ratio(
        _per_interval(share, interval, count), _per_interval(counted.astype(np.float64), interval, count)
    )
    mean_error = _ratio(_per_interval(over(error, own) * share, interval, count), pairs)
    intervals = np.clip(1.0 - np.where(delivered > 0, mean_error / scale, 1.0), 0.0, 1.0) * delivered
    windows = np.clip(1.0 - window_error / scale[:, interval], 0.0, 1.0)
    return np.where(counted, np.where(outage, 0.0, windows), np.nan), intervals


def _per_interval(values: FloatArray, interval: NDArray[np.intp], count: int) -> FloatArray:
    """Sums over the windows of each interval, NaN left out, shape `(B, I)`; `interval` is sorted."""
    first = np.searchsorted(interval, np.arange(count))
    return np.asarray(np.add.reduceat(np.nan_to_num(values), first, axis=-1), dtype=np.float64)


def _ratio(total: FloatArray, count: FloatArray) -> FloatArray:
    """`total / count`, NaN where there is nothing to average."""
    shape = np.broadcast_shapes(np.shape(total), np.shape(count))
    out: FloatArray = np.full(shape, np.nan)
    np.divide(total, count, out=out, where=np.broadcast_to(count, shape) > 0)
    return out


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
