"""Power and throughput at a share of the largest micro-batch, where nobody measured them: a form fitted to Zeus.

At a share `u` of the largest micro-batch, a job that no limit holds asks for

    P(u) = idle + (full - idle) (1 - exp(-u / u0)) / (1 - exp(-1 / u0))

and trains at `u^k (1 + h^k) / (u^k + h^k)` of full speed (logistic in the logarithm of the batch, the form of
GPU-to-Grid, arXiv 2602.05116). `u0`, `k` and `h` are fitted to the one language model of the Zeus table (You et al.,
NSDI 2023) whose texts are of nearly fixed length, BERT on Sentiment140, on four GPUs. That other models behave so is
an assumption; that a limit holds the job as it holds the full one at the limit times `full / P(u)`, another.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.emulator.surfaces import surface_library
from wattgym.hw.presets import gpu_preset

FloatArray = NDArray[np.float64]

MOST = 6
"""Micro-batches kept of a job: its largest and at most five below."""

ASSUMED_SAMPLES, ASSUMED_MICRO_BATCH = 64, 16
"""Samples of an optimiser step and largest micro-batch where neither is known. Assumption."""

FITTED_WORKLOAD = "bert_base_sentiment"


def divisors(samples: int, largest: int) -> list[int]:
    """Micro-batches that make up a step of so many samples, from the largest allowed down."""
    return [size for size in range(min(samples, largest), 0, -1) if samples % size == 0]


def spaced(sizes: Iterable[int], ratio: float = 1.4) -> list[int]:
    """At most `MOST` of some descending sizes, each smaller than the one before by at least a ratio."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size * ratio <= kept[-1]:
            kept.append(size)
    return kept[:MOST]


def spaced_divisors(samples: int, largest: int) -> list[int]:
    """At most `MOST` micro-batches, the largest first, each clearly smaller than the one before."""
    return spaced(divisors(samples, largest))


@cache
def fitted_form() -> tuple[float, float, float]:
    """`u0`, `k` and `h`, fitted to the measured shares of power above idle and of throughput at the highest cap."""
    from scipy.optimize import least_squares

    u, power, speed = [], [], []
    surfaces = [s for s in surface_library().surfaces if s.workload == FITTED_WORKLOAD]
    for gpu in sorted({s.gpu for s in surfaces}):
        own = sorted((s for s in surfaces if s.gpu == gpu), key=lambda s: s.batch_size)
        idle_w = gpu_preset(gpu).context_idle_w.value
        for s in own[:-1]:
            u.append(s.batch_size / own[-1].batch_size)
            power.append((s.power_w[-1] - idle_w) / (own[-1].power_w[-1] - idle_w))
            speed.append(s.samples_per_s_full / own[-1].samples_per_s_full)
    share, powers, speeds = np.array(u), np.array(power), np.array(speed)

    def residuals(log: FloatArray) -> FloatArray:
        u0, k, h = np.exp(log)
        return np.concatenate([_power(share, u0) - powers, _speed(share, k, h) - speeds])

    u0, k, h = np.exp(least_squares(residuals, np.log([0.1, 1.0, 0.1])).x).tolist()
    return u0, k, h


def power_form(u: FloatArray) -> FloatArray:
    """Power above idle at a share of the largest micro-batch, relative to that at the whole."""
    return _power(u, fitted_form()[0])


def speed_form(u: FloatArray) -> FloatArray:
    """Throughput at a share of the largest micro-batch, relative to that at the whole."""
    return _speed(u, *fitted_form()[1:])


def formed(
    u: float, idle_w: float, limit_w: FloatArray, power_w: FloatArray, throughput: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """A job's response to limits at a share of its largest micro-batch.

    Args:
        u: The share.
        idle_w: Power while nothing works, of what `power_w` is of, W.
        limit_w: Ascending limits, shape `(K,)`, W; the last binds nothing.
        power_w: Power at them at the largest micro-batch, shape `(K,)`, W.
        throughput: Throughput likewise.

    Returns:
        Power and throughput at the same limits.
    """
    full_w = power_w[-1]
    asked = float((idle_w + (full_w - idle_w) * power_form(np.array(u))) / full_w)
    held = np.interp(limit_w / asked, limit_w, throughput)
    return np.minimum(power_w, asked * full_w), float(speed_form(np.array(u))) * held


def _power(u: FloatArray, u0: float) -> FloatArray:
    form: FloatArray = (1.0 - np.exp(-u / u0)) / (1.0 - np.exp(-1.0 / u0))
    return form


def _speed(u: FloatArray, k: float, h: float) -> FloatArray:
    form: FloatArray = u**k * (1.0 + h**k) / (u**k + h**k)
    return form
