"""Profiling a plant's knobs: every configuration is visited several times, the table tells power and throughput.

The same sweep runs on an emulated and on a live plant: it uses commands and telemetry only. Jobs are swept side by
side, each through its own configurations in random order, so that slow drifts (temperature, other work) average out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.envs.knobs import MIN_DUTY, Command, KnobName
from wattgym.envs.plant import FloatArray, IntArray, Phase, PlantSpec, Telemetry
from wattgym.envs.profile import JobProfile
from wattgym.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

REACH_S = 120.0
"""A configuration that is not in force after so long cannot be had."""

LONGEST_DWELLS = 10
"""A job that does not compute for a dwell within so many is given up."""

TOLERANCE = 0.005
"""Relative difference of power, and difference of throughput relative to the highest, that says nothing."""

SETTING = ("limit_w", "micro_batch", "active_gpus", "duty_cycle", "local_steps")
"""Columns that name a configuration."""


class ProfilePlan(FrozenModel):
    """What is visited, and for how long.

    Attributes:
        limits: Power limits per job, evenly spaced over its range.
        duties: Duties below 1; 0 is a pause.
        active_shares: Shares of a job's GPUs, each rounded to whole ones.
        local_steps: Numbers of local steps above 1.
        cross: Cross all knobs; else limits with micro-batches, and each other setting at the highest limit alone.
        repeats: Visits of each configuration.
        settle_s: Time after a configuration has come into force that is not measured, seconds.
        dwell_s: Time measured at each visit while the job computes, seconds.
        seed: Seed of the order of visits.
    """

    limits: int = Field(default=5, ge=2, le=64)
    duties: tuple[float, ...] = (0.5, 0.0)
    active_shares: tuple[float, ...] = (0.75, 0.5, 0.25)
    local_steps: tuple[int, ...] = (4,)
    cross: bool = False
    repeats: int = Field(default=3, ge=2, le=100)
    settle_s: float = Field(default=4.0, ge=0.0)
    dwell_s: float = Field(default=20.0, gt=0.0)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _in_range(self) -> ProfilePlan:
        refused = [
            *(("duties", v) for v in self.duties if not (v == 0.0 or MIN_DUTY <= v < 1.0)),
            *(("active_shares", v) for v in self.active_shares if not 0.0 < v < 1.0),
            *(("local_steps", v) for v in self.local_steps if v < 2),
        ]
        if refused:
            valid = {
                "duties": f"0 (pause) or {MIN_DUTY:g} to below 1",
                "active_shares": "above 0 and below 1",
                "local_steps": "2 or more",
            }
            name, value = refused[0]
            raise ValueError(f"{name}: {value:g} cannot be visited; valid: {valid[name]}")
        return self


@dataclass(frozen=True)
class Configuration:
    """One setting of one job."""

    limit_w: float
    micro_batch: int
    active_gpus: int
    duty_cycle: float
    local_steps: int


class ProfiledPlant(Protocol):
    """What a sweep needs of a plant of one site."""

    @property
    def spec(self) -> PlantSpec:
        """Nominal description."""
        ...

    @property
    def profiles(self) -> tuple[JobProfile, ...]:
        """What is known of each job."""
        ...

    def apply(self, command: Command) -> None:
        """Commands a setting."""
        ...

    def advance(self) -> Telemetry:
        """Lets one control period pass."""
        ...


def configurations(spec: PlantSpec, j: int, knobs: tuple[KnobName, ...], plan: ProfilePlan) -> list[Configuration]:
    """Every configuration of job `j` that a plan visits, the neutral one first.

    Args:
        spec: The plant, with a knob table.
        j: Number of the job.
        knobs: Knobs to sweep beside the limit.
        plan: The plan.

    Raises:
        UserError: The job's limits span too little to tell anything.
    """
    table = spec.knobs
    assert table is not None
    low, high, gpus = float(spec.min_limit_w[0, j]), float(spec.max_limit_w[0, j]), int(spec.n_gpus[0, j])
    if high - low < 0.05 * high:
        raise UserError(
            f"job {j}: limits cannot be moved: lowest {low:g} W, highest {high:g} W per GPU; a profile needs a range "
            "of at least 5 %"
        )
    own = table.micro_batch[0, j, : table.micro_batches[0, j]].tolist()
    fewer = sorted({max(round(share * gpus), 1) for share in plan.active_shares} - {gpus}, reverse=True)
    most = int(table.max_local_steps[0, j])
    limits = np.linspace(high, low, plan.limits).tolist()
    micro = own if "micro_batch" in knobs else own[:1]
    active = [gpus, *(fewer if "active_gpus" in knobs else [])]
    duties = [1.0, *(plan.duties if "duty_cycle" in knobs else [])]
    steps = [1, *([n for n in plan.local_steps if n <= most] if "local_steps" in knobs else [])]
    if plan.cross:
        working = [duty for duty in duties if duty > 0.0]
        found = [Configuration(*setting) for setting in itertools.product(limits, micro, active, working, steps)]
        found += [Configuration(high, own[0], gpus, 0.0, 1) for duty in duties if duty == 0.0]
    else:
        found = [Configuration(limit, m, gpus, 1.0, 1) for limit in limits for m in micro]
        found += [Configuration(high, own[0], a, 1.0, 1) for a in active[1:]]
        found += [Configuration(high, own[0], gpus, duty, 1) for duty in duties[1:]]
        found += [Configuration(high, own[0], gpus, 1.0, n) for n in steps[1:]]
    return found


@dataclass(eq=False)
class Sweep:
    """A sweep under way; its rows are good at any time.

    Attributes:
        plant: The plant, just reset.
        knobs: Knobs to sweep beside the limit.
        plan: The plan.
        rows: One row for each finished visit of a job to a configuration.
    """

    plant: ProfiledPlant
    knobs: tuple[KnobName, ...]
    plan: ProfilePlan
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec, plan = self.plant.spec, self.plan
        rng = np.random.default_rng(plan.seed)
        settings = [configurations(spec, j, self.knobs, plan) for j in range(spec.n_gpus.shape[1])]
        longest = max(len(own) for own in settings)
        self._orders: list[list[Configuration]] = []
        for own in settings:
            # Jobs with fewer configurations visit some of theirs more often.
            turn = np.resize(np.arange(len(own)), longest)
            self._orders.append([own[i] for _ in range(plan.repeats) for i in rng.permutation(turn)])

    @property
    def visits(self) -> int:
        """Visits of the whole sweep."""
        return len(self._orders[0])

    def seconds(self) -> float:
        """About how long the sweep takes on a live plant."""
        return self.visits * (self.plan.settle_s + self.plan.dwell_s + 2.0 * self.plant.spec.period_s)

    def run(self) -> Iterator[int]:
        """Makes the visits; yields how many are done after each.

        Raises:
            UserError: A configuration cannot be had, or a job does not compute.
        """
        for visit in range(self.visits):
            wanted = [order[visit] for order in self._orders]
            command = _command(wanted)
            self._reach(command)
            period_s = self.plant.spec.period_s
            for _ in range(int(np.ceil(self.plan.settle_s / period_s))):
                self._tick(command)
            self._measure(visit, wanted, command)
            yield visit + 1

    def _tick(self, command: Command) -> Telemetry:
        # The whole setting again and again: a lost command is made good, and raises take several periods.
        self.plant.apply(command)
        return self.plant.advance()

    def _reach(self, command: Command) -> None:
        rules_dead_band = 0.006 * self.plant.spec.max_limit_w + 2.0
        for _ in range(max(int(REACH_S / self.plant.spec.period_s), 20)):
            telemetry = self._tick(command)
            found = telemetry.in_force
            assert found is not None
            assert command.duty is not None
            late = {"limit_w": np.abs(telemetry.limit_w - command.limit_w) > rules_dead_band}
            for name in ("duty", "micro_batch", "active_gpus", "local_steps"):
                # A paused job takes nothing else up until it goes on.
                works = True if name == "duty" else command.duty > 0.0
                late[name] = (np.abs(getattr(found, name) - getattr(command, name)) > 1e-6) & works
            if not any(wrong.any() for wrong in late.values()):
                return
        name, wrong = next((name, wrong) for name, wrong in late.items() if wrong.any())
        j = int(np.flatnonzero(wrong[0])[0])
        shown = telemetry if name == "limit_w" else found
        raise UserError(
            f"job {j}: {name} cannot be set: {getattr(shown, name)[0, j]:g} is in force {REACH_S:g} s after "
            f"{getattr(command, name)[0, j]:g} was commanded"
        )

    def _measure(self, visit: int, wanted: list[Configuration], command: Command) -> None:
        """Averages over the periods in which a job computed from end to end."""
        need = max(round(self.plan.dwell_s / self.plant.spec.period_s), 1)
        jobs = len(wanted)
        power, speed, count = np.zeros(jobs), np.zeros(jobs), np.zeros(jobs, dtype=np.int64)
        paused = np.array([own.duty_cycle == 0.0 for own in wanted])
        before = paused | (self._tick(command).phase[0] == Phase.COMPUTE)
        for _ in range(LONGEST_DWELLS * need):
            telemetry = self._tick(command)
            now = paused | (telemetry.phase[0] == Phase.COMPUTE)
            counts = before & now & np.isfinite(telemetry.meter_w[0]) & (count < need)
            power += np.where(counts, telemetry.meter_w[0], 0.0)
            speed += np.where(counts, telemetry.throughput[0], 0.0)
            count += counts
            before = now
            if (count >= need).all():
                break
        else:
            j = int(np.argmin(count))
            raise UserError(
                f"job {j} computed for {count[j] * self.plant.spec.period_s:g} s only within {LONGEST_DWELLS} dwells; "
                "lower the dwell, or let it evaluate and save less often"
            )
        for j, own in enumerate(wanted):
            setting = {"job": j, "visit": visit, **vars(own)}
            self.rows.append({**setting, "power_w": power[j] / count[j], "throughput": speed[j] / count[j]})


def table(rows: list[dict[str, float]]) -> pd.DataFrame:
    """One line for each job and configuration: means over visits, their spread, and whether it is on the Pareto front.

    Columns: `job`, `SETTING`, `power_w`, `power_sd_w`, `throughput`, `throughput_sd`, `visits`, `pareto`; sorted by job
    and power.
    """
    import pandas as pd

    visits = pd.DataFrame(rows)
    grouped = visits.groupby(["job", *SETTING], as_index=False)
    found = grouped.agg(
        power_w=("power_w", "mean"),
        power_sd_w=("power_w", "std"),
        throughput=("throughput", "mean"),
        throughput_sd=("throughput", "std"),
        visits=("visit", "size"),
    )
    found = found.fillna({"power_sd_w": 0.0, "throughput_sd": 0.0}).sort_values(["job", "power_w"])
    found["pareto"] = False
    for _, own in found.groupby("job"):
        found.loc[own.index, "pareto"] = pareto(own["power_w"].to_numpy(), own["throughput"].to_numpy())
    return found.reset_index(drop=True)


def pareto(power_w: FloatArray, throughput: FloatArray) -> NDArray[np.bool_]:
    """Which configurations no other one beats: by less power at as much throughput, or by more at as little power.

    Differences of less than `TOLERANCE` are no less and no more; of two configurations that differ by no more than
    that in both, the faster one stays.

    Args:
        power_w: Power of each, shape `(n,)`, W.
        throughput: Throughput of each, shape `(n,)`.
    """
    cheaper = power_w[None, :] < power_w[:, None] * (1.0 - TOLERANCE)
    as_cheap = power_w[None, :] <= power_w[:, None] * (1.0 + TOLERANCE)
    # Pairs within the tolerance in both are settled by speed, then power, then place, so that one of them stays.
    rank = np.empty(power_w.size)
    rank[np.lexsort((power_w, -throughput))] = np.arange(power_w.size)
    slack = TOLERANCE * throughput.max(initial=0.0)
    faster = throughput[None, :] > throughput[:, None] + slack
    as_fast = throughput[None, :] >= throughput[:, None] - slack
    alike = as_cheap & ~cheaper & as_fast & ~faster & (rank[None, :] < rank[:, None])
    beaten = (as_cheap & faster) | (cheaper & as_fast) | alike
    front: NDArray[np.bool_] = ~beaten.any(axis=1)
    return front


def _command(wanted: list[Configuration]) -> Command:
    def floats(values: list[float]) -> FloatArray:
        return np.array([values], dtype=np.float64)

    def whole(values: list[int]) -> IntArray:
        return np.array([values], dtype=np.int64)

    return Command(
        limit_w=floats([own.limit_w for own in wanted]),
        micro_batch=whole([own.micro_batch for own in wanted]),
        active_gpus=whole([own.active_gpus for own in wanted]),
        duty=floats([own.duty_cycle for own in wanted]),
        local_steps=whole([own.local_steps for own in wanted]),
    )
