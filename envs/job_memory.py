"""What a predictive loop has seen of each job so far, as features: what tells how it will draw in the coming period."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.plant import FloatArray, IntArray, Phase, PlantSpec
from wattgym.envs.predictive import PredictiveLoop

_LEVELS = (0.75, 0.85, 0.93)
"""Shares of nominal full power that part low, middle, high and full draw."""

_BANDS = (("low", "below 75 %"), ("middle", "75 to 85 %"), ("high", "85 to 93 %"), ("full", "more than 93 %"))

_FIRST = 3.0
"""Periods that the assumption of a true nominal model counts for, in each of these bands."""

_MISFIT = 0.05
"""Unit of a misfit."""

_MINUTES = 2.0
"""Unit of the time between pauses."""

JOB_MEMORY = (
    ("loop_limit", "half limit range", "limit that the loop would command"),
    ("loop_power", "half nominal full power", "power that it reckons with there, minus 1"),
    ("draw", "1", "sensed over expected power in the last period, minus 1"),
    ("follows", "1", "+1 while the job draws what its limit allows, -1 while it does not"),
    *(
        (f"misfit_{name}", "5 %", f"mean of it while the job computed at {what} of nominal full power")
        for name, what in _BANDS
    ),
    ("seen", "1", "share of the bands that were seen"),
    ("prompt", "half a period", "learnt share of a command that acts within its period, minus 1/2"),
    ("evaluating", "1", "+1 while the job evaluates, else -1"),
    ("saving", "1", "+1 while the job writes a checkpoint, else -1"),
    ("last_run", "2 minutes", "length of the last stretch of computing that was seen from its beginning"),
    ("run", "2 minutes", "length of the present one"),
    ("last_pause", "20 seconds", "length of the last pause"),
    ("floor", "1", "nominal power at the lowest limit over full"),
)
"""Name, unit and meaning of each feature of a job."""


class JobMemory:
    """Sensed over expected power by band of nominal power, and how long jobs compute and pause.

    A sensor's gain shows in all bands alike, a job that asks for less than its board allows in the upper ones alone:
    the difference tells the two apart, which one mean ratio cannot.
    """

    def __init__(self, spec: PlantSpec) -> None:
        """Starts without having seen anything."""
        shape = spec.min_limit_w.shape
        self._period_s = spec.period_s
        self._full = spec.power_table_w.max(axis=2)
        self._floor = spec.power_table_w[:, :, 0] / self._full
        self._sum, self._count = np.zeros((4, *shape)), np.zeros((4, *shape))
        self._run, self._pause = np.zeros(shape), np.zeros(shape)
        self._last_run, self._last_pause = np.zeros(shape), np.zeros(shape)
        self._whole: NDArray[np.bool_] = np.zeros(shape, dtype=np.bool_)
        self._computed: NDArray[np.bool_] = np.ones(shape, dtype=np.bool_)

    def see(self, loop: PredictiveLoop, phase: IntArray) -> FloatArray:
        """Takes in the period that the loop saw last.

        Args:
            loop: It has just seen it.
            phase: `Phase` of each job at its end, shape `(B, J)`.

        Returns:
            Features in the order of `JOB_MEMORY`, shape `(F, B, J)`.
        """
        jobs = loop.jobs
        assert jobs is not None
        computing = phase == Phase.COMPUTE
        level = jobs.expected_w / self._full
        band = np.searchsorted(np.array(_LEVELS), level.ravel()).reshape(level.shape)
        usable = computing & self._computed & jobs.follows
        for k in range(4):
            here = usable & (band == k)
            self._sum[k] += np.where(here, jobs.draw - 1.0, 0.0)
            self._count[k] += here
        # A stretch that was under way at the start has no length that could be told.
        began, ended = computing & ~self._computed, ~computing & self._computed
        self._last_run = np.where(ended & self._whole, self._run, self._last_run)
        self._last_pause = np.where(began, self._pause, self._last_pause)
        self._whole |= began
        self._run = np.where(computing, np.where(began, 0.0, self._run) + self._period_s, self._run)
        self._pause = np.where(computing, 0.0, self._pause + self._period_s)
        self._computed = computing
        limit = loop.advised(np.zeros_like(level))
        misfit = self._sum / (self._count + _FIRST) / _MISFIT
        return np.stack(
            [
                2.0 * limit - 1.0,
                2.0 * loop.reckoned_w(limit) / self._full - 1.0,
                jobs.draw - 1.0,
                2.0 * jobs.follows - 1.0,
                *misfit,
                (self._count > 0).mean(axis=0),
                2.0 * jobs.share - 1.0,
                2.0 * (phase == Phase.EVALUATE) - 1.0,
                2.0 * (phase == Phase.CHECKPOINT) - 1.0,
                self._last_run / (60.0 * _MINUTES),
                self._run / (60.0 * _MINUTES),
                self._last_pause / 20.0,
                self._floor,
            ]
        )
