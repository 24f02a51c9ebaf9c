"""The sequence of phases that each job goes through, drawn ahead of the episode.

Lengths of compute are work (seconds at full speed), so a capped job reaches its next evaluation later; the sequence
itself doesn't depend on what a controller does, so every controller meets the same one under the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.emulator.phases import PhaseFamily, Spread
from wattgym.envs.plant import FloatArray, IntArray, Phase

CYCLES = 24
"""Evaluation cycles drawn per job; a longer episode repeats them."""

_CYCLE = (Phase.COMPUTE, Phase.CHECKPOINT, Phase.COMPUTE, Phase.LOAD, Phase.EVALUATE)
SEGMENTS = CYCLES * len(_CYCLE)


@dataclass(frozen=True, eq=False)
class Segments:
    """Phases of `N` jobs.

    Attributes:
        phase: `Phase` of each segment, shape `(5,)` repeated: segment `k` has `phase[k % 5]`.
        length_s: Work (compute, evaluate) or time (others), shape `(N, SEGMENTS)`, seconds; 0 = left out.
        level: GPU power relative to the job's demand, shape `(N, SEGMENTS)`.
        first_left_s: What is left of the segment 0 at the start of the episode, shape `(N,)`, seconds.
    """

    phase: IntArray
    length_s: FloatArray
    level: FloatArray
    first_left_s: FloatArray


def draw_segments(
    families: Sequence[PhaseFamily],
    family: IntArray,
    idle_share: FloatArray,
    start: FloatArray,
    rngs: Sequence[np.random.Generator],
) -> Segments:
    """Draws the phases of all jobs.

    Args:
        families: What `family` indexes.
        family: Phase family of each job, shape `(B, J)`.
        idle_share: Power of idle boards as a share of the job's demand, shape `(B, J)`.
        start: Uniform position of the episode's start in the first stretch of compute, shape `(B, J)`.
        rngs: One generator per environment.
    """
    jobs = family.shape[1]
    n = family.size
    # Rows: compute work, checkpoint length, checkpoint due, checkpoint position, stall, evaluation, checkpoint level.
    u = np.stack([rng.random((jobs, 7, CYCLES)) for rng in rngs]).reshape(n, 7, CYCLES)
    member = family.reshape(n)
    table = _FamilyTable.of(families)

    work = _log_normal(table.work[member], u[:, 0])
    checkpoint_s = _between(table.checkpoint_s[member], u[:, 1])
    interval = _between(table.checkpoint_work[member], np.repeat(u[:, 2, :1], CYCLES, axis=1))
    due = u[:, 2] * interval < work
    split = np.where(due, u[:, 3], 1.0)
    stall = _log_normal(table.stall[member], u[:, 4])
    evaluate = _log_normal(table.evaluate[member], u[:, 5])

    length = np.stack([work * split, np.where(due, checkpoint_s, 0.0), work * (1.0 - split), stall, evaluate], axis=2)
    level = np.ones_like(length)
    level[:, :, 1] = _between(table.checkpoint_level[member], u[:, 6])
    level[:, :, 3] = table.load_level[member, None]
    level[:, :, 4] = table.evaluate_level[member, None]
    floor = idle_share.reshape(n, 1, 1)
    level = np.maximum(1.0 - (1.0 - level) * table.gain[member, None, None], floor)

    length = length.reshape(n, SEGMENTS)
    return Segments(
        phase=np.array(_CYCLE, dtype=np.int64),
        length_s=length,
        level=level.reshape(n, SEGMENTS),
        first_left_s=length[:, 0] * (1.0 - start.reshape(n)),
    )


@dataclass(frozen=True, eq=False)
class _FamilyTable:
    """Phase families as arrays; rows are families, pairs are (mean, sd) or (low, high)."""

    work: FloatArray
    stall: FloatArray
    evaluate: FloatArray
    checkpoint_s: FloatArray
    checkpoint_work: FloatArray
    checkpoint_level: FloatArray
    load_level: FloatArray
    evaluate_level: FloatArray
    gain: FloatArray

    @classmethod
    def of(cls, families: Sequence[PhaseFamily]) -> _FamilyTable:
        return cls(
            work=_pairs(f.compute_work_s for f in families),
            stall=_pairs(f.evaluate_stall_s for f in families),
            evaluate=_pairs(f.evaluate_s for f in families),
            checkpoint_s=np.array([f.checkpoint.duration_s for f in families]),
            checkpoint_work=np.array([f.checkpoint.compute_work_s for f in families]),
            checkpoint_level=np.array([f.checkpoint.level for f in families]),
            load_level=np.array([f.load_level for f in families]),
            evaluate_level=np.array([f.evaluate_level for f in families]),
            gain=np.array([f.gpu_gain for f in families]),
        )


def _pairs(spreads: object) -> FloatArray:
    items: list[Spread] = list(spreads)  # type: ignore[call-overload]
    return np.array([(s.mean, s.sd) for s in items])


def _between(pair: FloatArray, u: FloatArray) -> FloatArray:
    between: FloatArray = pair[:, :1] + u * (pair[:, 1:] - pair[:, :1])
    return between


def _log_normal(pair: FloatArray, u: FloatArray) -> FloatArray:
    """Log-normal with the given mean and standard deviation at the quantiles `u`; 0 where the mean is 0."""
    from scipy.special import ndtri

    mean, sd = pair[:, :1], pair[:, 1:]
    safe = np.maximum(mean, 1e-12)
    variance = np.log1p((sd / safe) ** 2)
    # The quantile is bounded so that one draw cannot stop a job for the whole episode.
    z = ndtri(np.clip(u, 0.001, 0.999))
    drawn: FloatArray = np.where(mean > 0, safe * np.exp(np.sqrt(variance) * z - variance / 2), 0.0)
    return drawn
