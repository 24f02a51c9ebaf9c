"""Runs a controller on a live plant: the loop, and the record that its log, its view and its scores are made of."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from wattgym.agents.controller import Controller
from wattgym.agents.fallback import FallbackController
from wattgym.agents.rollout import INTERVENTIONS, Rollout
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.plant import FloatArray
from wattgym.envs.reward import TERMS
from wattgym.envs.shaping import Outcome, PowerShaping
from wattgym.errors import UserError
from wattgym.hw.telemetry import GuardState, GuardTelemetry
from wattgym.metrics.pjm import PjmVariant, pjm_score, pjm_variant

RATE_S = 20.0
"""Tokens per second are a mean over the last while, because a small job makes a micro-batch in seconds."""

SCORE_S = 30.0
"""How often the regulation score so far is worked out anew."""

_EVENTS = ("clipped_low", "clipped_high", "too_soon", "raise_limited", "refused", "rejected", "failed_writes")


@dataclass(frozen=True)
class JobTick:
    """One job in one tick.

    Attributes:
        limit_w: Limit in force, W per GPU.
        sensor_w: Sensed power, W.
        meter_w: Metered power, W.
        throughput: Progress relative to full speed.
        phase: Phase at the period's end.
        state: State of its process.
        steps: Optimiser steps so far.
        samples: Samples so far.
        tokens: Tokens so far.
        loss: Loss of the last step.
        loss_mean: Mean loss over the last steps.
        warning: What its process complains of.
        knobs: Setting in force of each enabled knob beside the limit, in the knob's own unit.
    """

    limit_w: float
    sensor_w: float
    meter_w: float
    throughput: float
    phase: str
    state: str
    steps: int
    samples: int
    tokens: int
    loss: float | None
    loss_mean: float | None
    warning: str
    knobs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tick:
    """One tick of a live run; all but the jobs is a row of the log, and the jobs' fields follow with their number.

    Attributes:
        tick: Its number, from 1; missed periods leave gaps.
        t_s: Time since the start at the period's end, on the monotonic clock.
        signal: Regulation signal of the period.
        target_w: Target, W.
        power_w: Metered power of all jobs, W.
        sensor_w: Sensed power of all jobs, W.
        throughput: Training progress relative to full speed.
        tokens_per_s: Tokens per second over the last while.
        reward: Reward.
        decision_ms: Time that the controller took.
        lateness_ms: How late the period ended.
        missed: Periods missed so far.
        age_s: Age of the telemetry.
        decisions: What the command rules did, all jobs' bits together.
        fallback: Why the policy was not listened to; else empty.
        fallbacks: Periods so far in which it was not.
        guard_state: The worst state of the guards; empty without any.
        guard_events: Commands altered, refused or failed so far.
        failed_commands: Commands that could not be carried out so far.
        nrmse: nRMSE so far.
        pjm_composite: Regulation score so far; None where there is none (yet).
        jobs: The jobs.
    """

    tick: int
    t_s: float
    signal: float
    target_w: float
    power_w: float
    sensor_w: float
    throughput: float
    tokens_per_s: float
    reward: float
    decision_ms: float
    lateness_ms: float
    missed: int
    age_s: float
    decisions: int
    fallback: str
    fallbacks: int
    guard_state: str
    guard_events: int
    failed_commands: int
    nrmse: float
    pjm_composite: float | None
    jobs: tuple[JobTick, ...]

    def row(self) -> dict[str, Any]:
        """A row of the log."""
        values = asdict(self)
        for j, job in enumerate(values.pop("jobs")):
            knobs = job.pop("knobs")
            values |= {f"job{j}_{name}": value for name, value in (job | knobs).items()}
        return values


@dataclass(eq=False)
class LiveRun:
    """A controller on a live plant.

    Attributes:
        controller: Who acts.
        env: Environment; its episode is the run.
        plant: The plant; whoever made it closes it.
        variant: Rules of the regulation score.
        ticks: What has happened so far.
    """

    controller: FallbackController | Controller
    env: PowerShapingConfig
    plant: LivePlant
    variant: PjmVariant = field(default_factory=lambda: pjm_variant("legacy"))
    ticks: list[Tick] = field(default_factory=list)

    def run(self, started: Callable[[LiveRun], None], watch: Callable[[Tick], object]) -> None:
        """Runs one episode; what has passed stays in `ticks` however it ends.

        Args:
            started: Called once, when all jobs train.
            watch: Called after each tick.

        Raises:
            UserError: Something that was configured cannot be used, or a job has died.
            KeyboardInterrupt: The run was asked to stop.
        """
        shaping = PowerShaping(self.env, self.plant, self.env.site.jobs)
        observation = shaping.reset([0])
        assert shaping.task is not None
        self.controller.reset(shaping.task)
        self._shaping = shaping
        self._start_s = time.monotonic()
        self._recent: deque[tuple[float, int]] = deque([(0.0, self._tokens())])
        self._terms = np.zeros((self.env.ticks, len(TERMS)))
        self._knobs: list[FloatArray] = []
        self._scored: tuple[int, float | None] = (0, None)
        started(self)
        done = False
        while not done:
            asked_s = time.monotonic()
            action = self.controller.act(observation)
            decision_s = time.monotonic() - asked_s
            outcome = shaping.step(action)
            observation, done = outcome.observation, outcome.truncated
            self.ticks.append(self._tick(outcome, decision_s))
            watch(self.ticks[-1])

    @property
    def control_lost(self) -> str:
        """Why a guard had stopped writing by the last tick; empty where all was well."""
        if not self.ticks or self.ticks[-1].guard_state != GuardState.FROZEN:
            return ""
        # The guards have been closed since; why they froze stays with them.
        return next((guard.why for guard in self.plant.guards if guard.why), "a guard froze")

    def rollout(self) -> Rollout | None:
        """What has passed, as the evaluator's record; None before the first tick.

        A missed period has the values of the tick that reports it: its meter's mean covers both.
        """
        if not self.ticks:
            return None
        shaping, task = self._shaping, self._shaping.task
        assert task is not None
        n = self.ticks[-1].tick
        numbers = np.array([tick.tick for tick in self.ticks])
        source = np.searchsorted(numbers, np.arange(1, n + 1))

        def series(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
            return np.array([[getattr(tick, name) for tick in self.ticks]], dtype=np.float64)[:, source]

        low, high = task.spec.min_limit_w, task.spec.max_limit_w
        limits = np.array([[[job.limit_w for job in tick.jobs] for tick in self.ticks]])[:, source]
        return Rollout(
            period_s=self.env.period_s,
            signal=shaping.signal[:, :n],
            target_w=shaping.targets_w[:, :n],
            power_w=series("power_w"),
            throughput=series("throughput"),
            reward=series("reward"),
            terms={name: self._terms[: len(self.ticks), i].mean(keepdims=True) for i, name in enumerate(TERMS)},
            limit=(limits - low) / np.maximum(high - low, 1e-9),
            knobs=np.stack(self._knobs, axis=1)[:, source],
            changed=((series("decisions").astype(np.int64) & INTERVENTIONS) != 0).astype(np.float64),
            base_w=task.base_w,
            capacity_w=task.capacity_w,
            families=tuple(signal.family for signal in shaping.signals),
            shortfall_w=task.shortfall_w,
        )

    def _tokens(self) -> int:
        return sum(status.tokens for status in self.plant.job_status)

    def _tick(self, outcome: Outcome, decision_s: float) -> Tick:
        telemetry, seen, statistics = outcome.telemetry, self.plant.observations, self.plant.ticks
        assert self._shaping.task is not None
        t_s = time.monotonic() - self._start_s
        tokens = sum(job.status.tokens for job in seen)
        self._recent.append((t_s, tokens))
        while len(self._recent) > 2 and self._recent[1][0] < t_s - RATE_S:
            self._recent.popleft()
        since_s, before = self._recent[0]
        reason, fallbacks = "", 0
        if isinstance(self.controller, FallbackController):
            reason, fallbacks = str(self.controller.reasons[0] or ""), self.controller.total
        self._terms[len(self.ticks)] = outcome.terms[:, 0]
        self._knobs.append(self._shaping.knob_positions)
        number = min(telemetry.tick, self.env.ticks)  # the last periods may have been missed
        capacity_w = float(self._shaping.task.capacity_w[0])
        error = (float(outcome.power_w[0]) - float(outcome.target_w[0])) / capacity_w
        before_n = len(self.ticks)
        square = (self.ticks[-1].nrmse ** 2 * before_n if self.ticks else 0.0) + error**2
        guards, in_force = self.plant.guards, telemetry.in_force
        told = {} if in_force is None else {name: in_force.of(name) for name in self.env.action.beside_limit}
        tick = Tick(
            tick=number,
            t_s=t_s,
            signal=float(self._shaping.signal[0, number - 1]),
            target_w=float(outcome.target_w[0]),
            power_w=float(outcome.power_w[0]),
            sensor_w=float(telemetry.sensor_w.sum()),
            throughput=float(outcome.throughput[0]),
            tokens_per_s=(tokens - before) / max(t_s - since_s, 1e-9),
            reward=float(outcome.reward[0]),
            decision_ms=1000.0 * decision_s,
            lateness_ms=1000.0 * statistics.lateness_s[-1],
            missed=statistics.missed,
            age_s=float(telemetry.age_s[0]),
            decisions=int(np.bitwise_or.reduce(telemetry.decisions[0])),
            fallback=reason,
            fallbacks=fallbacks,
            guard_state=worst_state(guards),
            guard_events=sum(getattr(guard, name) for guard in guards for name in _EVENTS),
            failed_commands=statistics.failed_commands,
            nrmse=math.sqrt(square / (before_n + 1)),
            pjm_composite=self._scored[1],
            jobs=tuple(
                JobTick(
                    limit_w=float(telemetry.limit_w[0, j]),
                    sensor_w=job.sensor_w,
                    meter_w=job.meter_w,
                    throughput=job.speed,
                    phase=job.phase.name.lower(),
                    state=str(job.status.state),
                    steps=job.status.steps,
                    samples=job.status.samples,
                    tokens=job.status.tokens,
                    loss=job.status.loss,
                    loss_mean=job.status.loss_mean,
                    warning=job.status.warning,
                    knobs={name: float(value[0, j]) for name, value in told.items() if value is not None},
                )
                for j, job in enumerate(seen)
            ),
        )
        self._score_so_far(number)
        return tick

    def _score_so_far(self, number: int) -> None:
        """Works the regulation score out now and then; a run of days must not spend its periods on it."""
        every = max(round(SCORE_S / self.env.period_s), number // 50)
        if number - self._scored[0] < every:
            return
        rollout = self.rollout()
        if rollout is not None:
            self._scored = number, composite(rollout, self.variant)


def composite(rollout: Rollout, variant: PjmVariant) -> float | None:
    """The regulation score's composite; None where the run is too short for one, or its period does not fit."""
    try:
        score = pjm_score(rollout.signal, rollout.response, period_s=rollout.period_s, variant=variant)
    except UserError:
        return None
    value = float(score.composite[0])
    return None if math.isnan(value) else value


def worst_state(guards: tuple[GuardTelemetry, ...]) -> str:
    """The worst state of some guards; empty without any."""
    order = (GuardState.FROZEN, GuardState.CLOSED, GuardState.DRY_RUN, GuardState.ARMED)
    states = {guard.state for guard in guards}
    return next((str(state) for state in order if state in states), "")
