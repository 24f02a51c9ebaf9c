"""What the micro-batch does to power and throughput, for every surface of a site library.

Measured where the Zeus table (You et al., NSDI 2023) holds the same workload on the same GPU at several batch sizes:
an optimiser step of the surface's own batch size is then made of passes of a smaller measured one. (Each measured pass
ended in an optimiser step, which accumulation saves, so small micro-batches are a little faster than told here.)

Elsewhere an assumption with a form: at a share `u` of the largest micro-batch, a job that no limit holds asks for

    P(u) = idle + (full - idle) (1 - exp(-u / u0)) / (1 - exp(-1 / u0))

and trains at `u^k (1 + h^k) / (u^k + h^k)` of full speed (logistic in the logarithm of the batch, the form of
GPU-to-Grid, arXiv 2602.05116); `u0`, `k` and `h` are fitted to the measured language model of fixed text length, on
four GPUs. A limit holds it as it holds the full job at the limit times `full / P(u)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from wattgym.envs.emulator.library import FINE_POINTS, SiteLibrary
from wattgym.envs.emulator.surfaces import Surface, surface_library
from wattgym.envs.plant import FloatArray, IntArray
from wattgym.hw.presets import gpu_preset

MOST = 6
"""Micro-batches kept of a job: its largest and the five below that divide its samples per update."""

ASSUMED_SAMPLES, ASSUMED_MICRO_BATCH = 64, 16
"""Samples of an optimiser step and largest micro-batch where neither was measured. Assumption."""

FITTED_WORKLOAD = "bert_base_sentiment"


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Micro-batches of `S` surfaces, from the largest down, at most `M`; rows are filled up with their smallest.

    Attributes:
        sizes: Micro-batches, shape `(S, M)`.
        count: How many of them are the surface's own, shape `(S,)`.
        samples_per_update: Samples of one rank in an optimiser step, shape `(S,)`.
        power_w: Power per GPU on the library's cap grid, shape `(S, M, F)`, W.
        throughput: Throughput relative to the largest micro-batch at the highest cap, shape `(S, M, F)`.
    """

    sizes: IntArray
    count: IntArray
    samples_per_update: IntArray
    power_w: FloatArray
    throughput: FloatArray

    @classmethod
    def build(cls, library: SiteLibrary) -> MicroBatches:
        """Works out the tables of every surface of a library."""
        samples, options = zip(*(_options(library, s) for s in range(library.power_w.shape[0])), strict=True)
        sizes = np.array([list(row) + [row[-1]] * (MOST - len(row)) for row in options])
        power = np.empty((*sizes.shape, FINE_POINTS))
        speed = np.empty_like(power)
        for s, row in enumerate(sizes):
            for m, size in enumerate(row):
                if m > 0 and size == row[m - 1]:
                    power[s, m], speed[s, m] = power[s, m - 1], speed[s, m - 1]
                else:
                    power[s, m], speed[s, m] = _response(library, s, int(size), int(row[0]))
        return cls(sizes, np.array([len(row) for row in options]), np.array(samples), power, speed)


def divisors(samples: int, largest: int) -> list[int]:
    """Micro-batches that make up a step of so many samples, from the largest allowed down."""
    return [size for size in range(min(samples, largest), 0, -1) if samples % size == 0]


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
        return np.concatenate([power_form(share, u0) - powers, speed_form(share, k, h) - speeds])

    u0, k, h = np.exp(least_squares(residuals, np.log([0.1, 1.0, 0.1])).x).tolist()
    return u0, k, h


def power_form(u: FloatArray, u0: float) -> FloatArray:
    """Power above idle at a share of the largest micro-batch, relative to that at the whole."""
    form: FloatArray = (1.0 - np.exp(-u / u0)) / (1.0 - np.exp(-1.0 / u0))
    return form


def speed_form(u: FloatArray, k: float, h: float) -> FloatArray:
    """Throughput at a share of the largest micro-batch, relative to that at the whole."""
    form: FloatArray = u**k * (1.0 + h**k) / (u**k + h**k)
    return form


def _options(library: SiteLibrary, index: int) -> tuple[int, list[int]]:
    """Samples per update of a surface and its micro-batches."""
    if library.calibrated is not None:
        samples = int(library.calibrated.samples_per_update[index]) or ASSUMED_SAMPLES
        return samples, _thinned(divisors(samples, samples))
    surface = library.surfaces[index]
    if not surface.measured:
        return ASSUMED_SAMPLES, _thinned(divisors(ASSUMED_SAMPLES, ASSUMED_MICRO_BATCH))
    siblings = _siblings(surface)
    if len(siblings) > 1:
        return surface.batch_size, [s for s in divisors(surface.batch_size, surface.batch_size) if s in siblings][:MOST]
    return surface.batch_size, _thinned(divisors(surface.batch_size, surface.micro_batch))


def _thinned(sizes: list[int]) -> list[int]:
    """At most `MOST` sizes, each at most about half the one before, the largest first."""
    kept = sizes[:1]
    for size in sizes[1:]:
        if size <= kept[-1] / 1.9:
            kept.append(size)
    return kept[:MOST]


def _siblings(surface: Surface) -> dict[int, Surface]:
    """The same workload on the same GPU, by batch size, where an optimiser step was one pass."""
    if surface.micro_batch != surface.batch_size:
        return {}
    return {
        s.batch_size: s
        for s in surface_library().surfaces
        if s.measured and (s.gpu, s.workload, s.source) == (surface.gpu, surface.workload, surface.source)
    }


def _response(library: SiteLibrary, index: int, size: int, largest: int) -> tuple[FloatArray, FloatArray]:
    """Power per GPU and throughput of a surface at one micro-batch, on the library's cap grid."""
    power, speed = library.power_w[index], library.throughput[index]
    if size == largest:
        return power, speed
    caps = np.linspace(*library.cap_w[index], FINE_POINTS)
    if library.calibrated is None:
        surface = library.surfaces[index]
        sibling = _siblings(surface).get(size)
        if sibling is not None:
            within = np.clip(caps, sibling.cap_min_w, sibling.cap_max_w)
            measured_w, relative = sibling.tabulate(within)
            return measured_w, relative * sibling.samples_per_s_full / surface.samples_per_s_full
    u0, k, h = fitted_form()
    u = np.array(size / largest)
    idle_w = library.idle_share[index] * power[-1]
    asked = float((idle_w + (power[-1] - idle_w) * power_form(u, u0)) / power[-1])
    return np.minimum(power, asked * power[-1]), float(speed_form(u, k, h)) * np.interp(caps / asked, caps, speed)
