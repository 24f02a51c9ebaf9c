"""Calibration: a sweep of a live plant's limits while its jobs train, from which its profile is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd
from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.live.response import DEAD_BAND, fit_job, held_out_error
from wattgym.envs.live.sample import JobSample
from wattgym.envs.plant import Command, FloatArray, PlantSpec, Telemetry
from wattgym.envs.profile import JobProfile, PlantProfile, save_profile
from wattgym.errors import UserError
from wattgym.files import atomic_path
from wattgym.hw.limits import CommandRules
from wattgym.phase import Phase

PERIOD_S = 1.0
"""Control period of a calibrating plant."""

RULES = CommandRules(interval_s=0.5, raise_window_s=PERIOD_S)
"""Its command rules: a period always outlasts the least time between writes, even when a tick comes a little early."""

SAMPLE_S = 0.1
"""Time between samples; sensors of most boards publish as often, and the plant polls no faster."""

SETTLE_S = 1.5
"""Time after a limit has come into force, beyond the period in which it did, that is not measured."""

MEASURE_S = 3.0
"""Least time that a limit is measured for."""

MIN_STEPS = 2
"""Least whole optimiser steps that a limit is measured over."""

_TYPICAL_DWELL_S = 10.0
_LONGEST_DWELLS = 10.0
_MIN_RANGE = 0.05


class CalibratablePlant(Protocol):
    """What a sweep needs of a live plant; see `wattgym.envs.live.plant.LivePlant`."""

    @property
    def spec(self) -> PlantSpec:
        """Limits of the jobs."""
        ...

    @property
    def profiles(self) -> tuple[JobProfile, ...]:
        """What is known of the jobs before."""
        ...

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Starts the jobs."""
        ...

    def apply(self, command: Command) -> None:
        """Commands limits, shape `(1, J)`, W per GPU."""
        ...

    def advance(self) -> Telemetry:
        """Waits for the end of the control period."""
        ...

    def sample(self) -> tuple[JobSample, ...]:
        """Looks at every job."""
        ...


class CalibrationPlan(FrozenModel):
    """How limits are swept.

    Attributes:
        minutes: Length of the sweep; a slow job may stretch it.
        limits: Limits per job, evenly spaced over its range.
        seed: Draws the order of limits and the moments of commands.
    """

    minutes: float = Field(default=5.0, gt=0.0, le=1440.0)
    limits: int = Field(default=8, ge=2, le=64)
    seed: int = Field(default=0, ge=0)

    @property
    def repeats(self) -> int:
        """How often each limit is visited: at least twice, so that its spread is known."""
        return max(2, round(self.minutes * 60.0 / (self.limits * _TYPICAL_DWELL_S)))

    @property
    def dwell_s(self) -> float:
        """Time for one limit, settling included.

        Raises:
            UserError: Too short to measure anything.
        """
        dwell_s = self.minutes * 60.0 / (self.limits * self.repeats)
        if dwell_s < SETTLE_S + MEASURE_S:
            least = self.limits * self.repeats * (SETTLE_S + MEASURE_S) / 60.0
            raise UserError(
                f"{self.minutes:g} minutes are too short for {self.limits} limits, each twice; "
                f"take at least {np.ceil(10 * least) / 10:g} minutes, or fewer limits"
            )
        return dwell_s


@dataclass(frozen=True, eq=False)
class Calibration:
    """A finished sweep.

    Attributes:
        profile: What was measured.
        samples: Every sample, a row per job and moment.
    """

    profile: PlantProfile
    samples: pd.DataFrame

    def save(self, path: Path) -> Path:
        """Writes the profile, and the samples beside it; returns the samples' path.

        Raises:
            UserError: A file cannot be written; each is either whole or as it was.
        """
        beside = path.with_name(f"{path.stem}.samples.csv")
        with atomic_path(beside) as temporary:
            self.samples.to_csv(temporary, index=False)
        save_profile(self.profile, path)
        return beside


def calibrate(
    plant: CalibratablePlant,
    plan: CalibrationPlan,
    *,
    command: str = "",
    progress: Callable[[int, int], object] = lambda done, of: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Calibration:
    """Sweeps a plant's limits and fits its profile.

    Args:
        plant: The plant, of period `PERIOD_S`; it is started here and left to the caller to close.
        plan: The sweep.
        command: Recorded as the profile's origin.
        progress: Told how many of the dwells are done.
        clock: Monotonic time, seconds.
        sleep: Waits.

    Raises:
        UserError: The plan is too short, limits cannot be moved, or a job ends, fails or makes no progress.
    """
    dwell_s = plan.dwell_s
    sweep = _Sweep(plant, np.random.default_rng(plan.seed), clock, sleep)
    sweep.start()
    order = _orders(sweep.limits(plan.limits), plan.repeats, sweep.rng)
    for number, targets in enumerate(order):
        progress(number, len(order))
        sweep.dwell(number, targets, dwell_s)
    progress(len(order), len(order))
    samples = pd.DataFrame(sweep.rows)
    by_job = [samples[samples["job"] == j].reset_index(drop=True) for j in range(len(plant.profiles))]
    jobs = [fit_job(nominal, rows) for nominal, rows in zip(plant.profiles, by_job, strict=True)]
    held_out = held_out_error(by_job)
    return Calibration(PlantProfile(made_by=command, held_out=held_out, jobs=tuple(jobs)), samples)


def _orders(limits_w: FloatArray, repeats: int, rng: np.random.Generator) -> FloatArray:
    """Limits of each dwell, shape `(dwells, J)`: every job's own random order, over and over, without standing still.

    Args:
        limits_w: Limits of each job, shape `(J, L)`.
        repeats: Visits of each limit.
        rng: Draws the order.
    """
    columns = []
    for limits in limits_w:
        order: list[float] = []
        for _ in range(repeats):
            block = rng.permutation(limits)
            if order and block[0] == order[-1]:
                block = np.roll(block, 1)
            order += block.tolist()
        columns.append(order)
    return np.array(columns).T


@dataclass(eq=False)
class _Sweep:
    plant: CalibratablePlant
    rng: np.random.Generator
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    rows: list[dict[str, float]] = field(default_factory=list)
    begun_s: float = 0.0
    tick_start_s: float = 0.0

    def start(self) -> None:
        self.plant.reset([self.rng])
        self.begun_s = self.tick_start_s = self.clock()

    def limits(self, n: int) -> FloatArray:
        """`n` limits of each job, shape `(J, n)`.

        Raises:
            UserError: A job's limits span too little to tell anything.
        """
        spec = self.plant.spec
        low, high = spec.min_limit_w[0], spec.max_limit_w[0]
        stuck = np.flatnonzero(high - low < _MIN_RANGE * high)
        if stuck.size:
            j = stuck[0]
            raise UserError(
                f"job {j}: limits cannot be moved: lowest {low[j]:g} W, highest {high[j]:g} W per GPU; "
                "a calibration needs a range of at least 5 %"
            )
        return np.linspace(low, high, n, axis=1)

    def dwell(self, number: int, targets: FloatArray, dwell_s: float) -> None:
        """Moves to limits, lets the plant settle, measures."""
        # Commands come at any phase of the sensor's period, so that the delay can be told more finely than that.
        self._sample_until(self.clock() + self.rng.uniform(0.0, 2.0 * SAMPLE_S), number, targets, np.nan, False)
        started_s = commanded_s = self.clock()
        self.plant.apply(Command(targets[None]))
        self._finish_tick(number, targets, commanded_s, False)
        self._reach(number, targets, commanded_s)
        measure_from_s = self.clock() + SETTLE_S
        while self.clock() < measure_from_s - 1e-6:
            self._finish_tick(number, targets, commanded_s, False)
        first = len(self.rows)
        begun_s = self.clock()
        # Deadlines add up, so that what one dwell takes too long the next makes good.
        end_s = max(self.begun_s + (number + 1) * dwell_s - 0.5 * PERIOD_S, begun_s + MEASURE_S)
        while self.clock() < end_s or not self._enough(first):
            if self.clock() - started_s > _LONGEST_DWELLS * dwell_s:
                raise UserError(
                    f"a job makes fewer than {MIN_STEPS} optimiser steps, or computes less than {MEASURE_S:g} s, in "
                    f"{_LONGEST_DWELLS * dwell_s:.0f} s at {', '.join(f'{t:.0f} W' for t in targets)}; raise the "
                    "calibration's minutes, or lower training.samples_per_update"
                )
            self._finish_tick(number, targets, commanded_s, True)

    def _reach(self, number: int, targets: FloatArray, commanded_s: float) -> None:
        """Repeats a command until it is in force: raises take several periods."""
        # A raise of the whole range at the rules' rate, and some periods for slow setters.
        patience = 5 + int(np.ceil(1.0 / (RULES.raise_fraction_per_s * RULES.raise_window_s)))
        for _ in range(patience):
            limit = np.array([sample.limit_w for sample in self.plant.sample()])
            off = np.abs(limit - targets) > np.maximum(DEAD_BAND * targets, RULES.dead_band_w)
            if not off.any():
                return
            self.plant.apply(Command(targets[None]))
            self._finish_tick(number, targets, commanded_s, False)
        j = int(np.flatnonzero(off)[0])
        raise UserError(
            f"job {j}: limits cannot be moved: {limit[j]:.0f} W per GPU is in force {patience} periods after "
            f"{targets[j]:.0f} W was commanded"
        )

    def _finish_tick(self, number: int, targets: FloatArray, commanded_s: float, measuring: bool) -> None:
        self._sample_until(self.tick_start_s + PERIOD_S - 0.5 * SAMPLE_S, number, targets, commanded_s, measuring)
        self.plant.advance()
        self.tick_start_s = self.clock()

    def _sample_until(
        self, end_s: float, number: int, targets: FloatArray, commanded_s: float, measuring: bool
    ) -> None:
        while (now_s := self.clock()) < end_s - 1e-9:
            for j, sample in enumerate(self.plant.sample()):
                self.rows.append(_row(j, sample, number, float(targets[j]), commanded_s, measuring))
            self.sleep(min(max(SAMPLE_S - (self.clock() - now_s), 0.0), max(end_s - self.clock(), 0.0)))

    def _enough(self, first: int) -> bool:
        """Whether every job has computed for long enough, and made enough whole steps, since a row."""
        jobs = len(self.plant.profiles)
        if len(self.rows) <= first + jobs:
            return False
        for before, after in zip(self.rows[first : first + jobs], self.rows[-jobs:], strict=True):
            # The first step that ends only begins the measurement.
            if after["steps"] - before["steps"] - 1 < MIN_STEPS or after["compute_s"] - before["compute_s"] < MEASURE_S:
                return False
        return True


def _row(
    j: int, sample: JobSample, dwell: int, wanted_w: float, commanded_s: float, measuring: bool
) -> dict[str, float]:
    status = sample.status
    if status.state.final:
        raise UserError(
            f"job {j} is {status.state} after {status.steps} steps, before the calibration was over"
            + (f": {status.error}" if status.error else "; raise training.max_steps")
        )
    return {
        "job": j,
        "dwell": dwell,
        "t_s": sample.t_s,
        "commanded_s": commanded_s,
        "measuring": measuring,
        "wanted_w": wanted_w,
        "limit_w": sample.limit_w,
        "sensor_w": sample.sensor_w,
        "published_s": sample.t_s - sample.age_s,
        "energy_j": sample.energy_j,
        "metered_s": sample.metered_s,
        "phase": int(status.phase),
        "steps": status.steps,
        "samples": status.samples,
        "tokens": status.tokens,
        "checkpoint_step": -1 if status.checkpoint_step is None else status.checkpoint_step,
        "eval_step": -1 if status.eval_step is None else status.eval_step,
        **{f"{phase.name.lower()}_s": status.phase_s[phase] for phase in Phase},
    }
