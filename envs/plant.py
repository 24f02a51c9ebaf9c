"""The plant: what an environment controls, emulated or live.

A plant takes commands (power limits, and other knobs where a configuration enables them) and gives telemetry. It
computes neither observation nor reward; those are shared by all plants. Every array has a leading batch axis `B` (1 for
a live plant) and, where it says so, a job axis `J`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.knobs import Command as Command
from wattgym.envs.knobs import KnobTable, active_speed, working_share
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
        knobs: Nominal effect of the other knobs; None where the power limit is the only one.
    """

    period_s: float
    n_gpus: IntArray
    min_limit_w: FloatArray
    max_limit_w: FloatArray
    limit_grid: FloatArray
    power_table_w: FloatArray
    throughput_table: FloatArray
    host_w: FloatArray
    knobs: KnobTable | None = None

    @property
    def floor_w(self) -> FloatArray:
        """Lowest nominal site power while every job computes on all its GPUs, shape `(B,)`, W.

        The limits' floor: other knobs reach lower. Offers are relative to it whatever the knobs, so that results with
        and without them compare at equal targets.
        """
        floor: FloatArray = self.power_table_w[:, :, 0].sum(axis=1) + self.host_w
        return floor

    @property
    def full_w(self) -> FloatArray:
        """Nominal site power with no limit binding, shape `(B,)`, W."""
        full: FloatArray = self.power_table_w[:, :, -1].sum(axis=1) + self.host_w
        return full

    def response(self, command: Command) -> tuple[FloatArray, FloatArray]:
        """Nominal power and throughput of each job, computing, under a command.

        Args:
            command: Limits beyond a job's range count as its nearest end.

        Returns:
            Power, W, and throughput relative to the neutral setting, both `(B, J)`.

        Raises:
            UserError: A job cannot have the commanded micro-batch.
        """
        span = np.maximum(self.max_limit_w - self.min_limit_w, 1e-9)
        x = np.clip((command.limit_w - self.min_limit_w) / span, 0.0, 1.0) * (self.limit_grid.size - 1)
        index = np.minimum(x.astype(np.intp), self.limit_grid.size - 2)

        def at(table: FloatArray) -> FloatArray:
            left = np.take_along_axis(table, index[..., None], axis=2)[..., 0]
            right = np.take_along_axis(table, index[..., None] + 1, axis=2)[..., 0]
            return left + (x - index) * (right - left)

        power_w, throughput = self.tables(command)
        return at(power_w), at(throughput)

    def tables(self, setting: Command) -> tuple[FloatArray, FloatArray]:
        """The tables under a setting of the other knobs; at the neutral one exactly those of the limit alone.

        Args:
            setting: Its limits do not matter.

        Returns:
            Power, W, and throughput relative to the neutral setting, over `limit_grid`, both `(B, J, K)`.

        Raises:
            UserError: A job cannot have the micro-batch.
        """
        power, speed, knobs = self.power_table_w, self.throughput_table, self.knobs
        if knobs is None:
            return power, speed
        if setting.micro_batch is not None:
            row = knobs.micro_index(setting.micro_batch)[..., None, None]
            power = np.take_along_axis(knobs.power_w, row, axis=2)[:, :, 0]
            speed = np.take_along_axis(knobs.throughput, row, axis=2)[:, :, 0]
        active = self.n_gpus if setting.active_gpus is None else setting.active_gpus
        duty = np.ones(self.n_gpus.shape) if setting.duty is None else setting.duty
        steps = np.ones_like(self.n_gpus) if setting.local_steps is None else setting.local_steps
        idle = 1.0 - working_share(self.n_gpus, active, duty)
        scaling = duty * active_speed(self.n_gpus, active, steps, knobs.comm_share, knobs.straggler_share)
        return power - idle[..., None] * (power - knobs.idle_w[..., None]), speed * scaling[..., None]


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
        in_force: Setting that the jobs work under at the end of the period, every knob filled in; None where the power
            limit is the only knob.
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
    in_force: Command | None = None


class Plant(Protocol):
    """A site of jobs under power limits and knobs."""

    @property
    def spec(self) -> PlantSpec:
        """Nominal description, valid from reset to reset."""
        ...

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Starts an episode; generators drive whatever the plant draws, one for each of the batch."""
        ...

    def apply(self, command: Command) -> None:
        """Commands limits and knobs; the command rules have the last word on limits.

        Knobs other than the limit change at a job's next optimiser step, and may cost it some time.
        """
        ...

    def advance(self) -> Telemetry:
        """Lets one control period pass."""
        ...

    def close(self) -> None:
        """Releases the plant; a live one restores its hardware."""
        ...
