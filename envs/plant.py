"""The plant: what an environment controls, emulated or live.

A plant takes power limits and gives telemetry. It computes neither observation nor reward; those are shared by all
plants. Every array has a leading batch axis `B` (1 for a live plant) and, where it says so, a job axis `J`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.phase import Phase as Phase

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PlantSpec:
    """What a controller may know of a plant before it runs: the calibrated, nominal description.

    Attributes:
        period_s: Control period, seconds.
        n_gpus: GPUs of each job, shape `(B, J)`.
        min_limit_w: Lowest power limit per GPU, shape `(B, J)`, W.
        max_limit_w: Highest power limit per GPU, shape `(B, J)`, W.
        limit_grid: Fractions of the limit range at which the tables are given, shape `(K,)`, 0 to 1.
        power_table_w: Nominal power of each job, computing, at those limits, shape `(B, J, K)`, W.
        throughput_table: Nominal throughput relative to the highest limit, shape `(B, J, K)`.
        host_w: Power of hosts that no limit changes, shape `(B,)`, W.
    """

    period_s: float
    n_gpus: IntArray
    min_limit_w: FloatArray
    max_limit_w: FloatArray
    limit_grid: FloatArray
    power_table_w: FloatArray
    throughput_table: FloatArray
    host_w: FloatArray

    @property
    def floor_w(self) -> FloatArray:
        """Lowest nominal site power while every job computes, shape `(B,)`, W."""
        floor: FloatArray = self.power_table_w[:, :, 0].sum(axis=1) + self.host_w
        return floor

    @property
    def full_w(self) -> FloatArray:
        """Nominal site power with no limit binding, shape `(B,)`, W."""
        full: FloatArray = self.power_table_w[:, :, -1].sum(axis=1) + self.host_w
        return full


@dataclass(eq=False, slots=True)
class Telemetry:
    """What a plant reports at the end of a control period.

    A plant may reuse the arrays of the previous tick; copy what must be kept.

    Attributes:
        tick: Control periods since reset; 0 directly after it.
        sensor_w: Power of each job as its sensors report it, shape `(B, J)`, W. What policies see.
        meter_w: Mean power of each job over the period by its energy meter, shape `(B, J)`, W. What scores use.
        host_w: Power of the hosts beside the jobs, shape `(B,)`, W.
        throughput: Training progress over the period relative to the job's nominal full speed, shape `(B, J)`.
        phase: `Phase` of each job at the end of the period, shape `(B, J)`.
        limit_w: Power limit per GPU that was written last, shape `(B, J)`, W.
        age_s: Age of the telemetry, shape `(B,)`, seconds.
        decisions: Bits of `wattgym.hw.limits.Decision`, what the command rules changed, shape `(B, J)`.
    """

    tick: int
    sensor_w: FloatArray
    meter_w: FloatArray
    host_w: FloatArray
    throughput: FloatArray
    phase: IntArray
    limit_w: FloatArray
    age_s: FloatArray
    decisions: NDArray[np.uint8]


class Plant(Protocol):
    """A site of jobs under power limits."""

    @property
    def spec(self) -> PlantSpec:
        """Nominal description, valid from reset to reset."""
        ...

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Starts an episode; generators drive whatever the plant draws, one for each of the batch."""
        ...

    def apply(self, limit_w: FloatArray) -> None:
        """Commands power limits per GPU, shape `(B, J)`, W; the command rules have the last word."""
        ...

    def advance(self) -> Telemetry:
        """Lets one control period pass."""
        ...

    def close(self) -> None:
        """Releases the plant; a live one restores its hardware."""
        ...
