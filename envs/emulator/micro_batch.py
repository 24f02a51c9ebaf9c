"""What the micro-batch does to power and throughput, for every surface of a site library.

Measured where the Zeus table (You et al., NSDI 2023) holds the same workload on the same GPU at several batch sizes: a
pass of the surface's own batch size is the largest, and the smaller measured ones that divide an optimiser step are the
others. The step itself is an assumption: the least common multiple of the surface's batch size and the largest power
of two within it, so that most measured sizes divide it. (Each measured pass ended in an optimiser step, which
accumulation saves, so small micro-batches are a little faster than told here.) Elsewhere the fitted form of
`wattgym.envs.emulator.batch_form`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wattgym.envs.emulator.batch_form import (
    ASSUMED_MICRO_BATCH,
    ASSUMED_SAMPLES,
    MOST,
    divisors,
    formed,
    spaced,
    spaced_divisors,
)
from wattgym.envs.emulator.library import FINE_POINTS, SiteLibrary
from wattgym.envs.emulator.surfaces import Surface, surface_library
from wattgym.envs.plant import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Micro-batches of `S` surfaces, from the largest down, at most `M`; rows are filled up with their smallest.

    Attributes:
        sizes: Micro-batches, shape `(S, M)`.
        count: How many of them are the surface's own, shape `(S,)`.
        samples_per_update: Samples of an optimiser step, which micro-batches divide, shape `(S,)`.
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


def _options(library: SiteLibrary, index: int) -> tuple[int, list[int]]:
    """Samples per update of a surface and its micro-batches."""
    if library.calibrated is not None:
        profile = library.calibrated.profiles[index]
        return profile.samples_per_update or ASSUMED_SAMPLES, list(profile.micro_batches)
    surface = library.surfaces[index]
    if not surface.measured:
        return ASSUMED_SAMPLES, spaced_divisors(ASSUMED_SAMPLES, ASSUMED_MICRO_BATCH)
    own, siblings = surface.batch_size, _siblings(surface)
    if len(siblings) > 1:
        samples = math.lcm(own, 2 ** (own.bit_length() - 1))
        return samples, spaced(size for size in divisors(samples, own) if size in siblings)
    return own, spaced_divisors(own, surface.micro_batch)


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
    low_w, high_w = library.cap_w[index].tolist()
    caps = np.linspace(low_w, high_w, FINE_POINTS)
    if library.calibrated is not None:
        return library.calibrated.profiles[index].at_micro_batch(size, caps)
    surface = library.surfaces[index]
    sibling = _siblings(surface).get(size)
    if sibling is None:
        return formed(size / largest, library.idle_share[index] * power[-1], caps, power, speed)
    measured_w, relative = sibling.tabulate(np.clip(caps, sibling.cap_min_w, sibling.cap_max_w))
    return measured_w, relative * sibling.samples_per_s_full / surface.samples_per_s_full
