"""Power shaping over a batch of sites: signals, actions, observations and rewards around one plant.

The single and the batched environment, emulated or live, are thin shells around this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.config import OFFERS, PowerShapingConfig, SignalConfig
from wattgym.envs.feedback import FeedbackLoop, IdentifiedModel
from wattgym.envs.job_memory import JobMemory
from wattgym.envs.knob_actions import KnobSettings, reachable_w
from wattgym.envs.knobs import Command, KnobName
from wattgym.envs.observation import ObservationBuilder, ObservationLayout, common_limit
from wattgym.envs.plant import FloatArray, Plant, PlantSpec, Telemetry
from wattgym.envs.reward import reward_terms
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError
from wattgym.signals import Signal, draw_signal, named_signal, signal_from_trace, target_w

MIN_BAND = 0.01
"""Least share of full power between a site's floor and full power: what a power meter can tell apart."""


@dataclass(eq=False, slots=True)
class Outcome:
    """One period of a batch.

    Attributes:
        observation: Shape `(B, D)`, float32.
        reward: Shape `(B,)`.
        terms: Reward terms in the order of `wattgym.envs.reward.TERMS`, shape `(4, B)`.
        truncated: Whether the episode has reached its end.
        target_w: Target of the period, shape `(B,)`, W.
        power_w: Metered site power, shape `(B,)`, W.
        throughput: Site's progress relative to full speed, shape `(B,)`.
        telemetry: The plant's telemetry.
    """

    observation: NDArray[np.float32]
    reward: FloatArray
    terms: FloatArray
    truncated: bool
    target_w: FloatArray
    power_w: FloatArray
    throughput: FloatArray
    telemetry: Telemetry


class PowerShaping:
    """A batch of power-shaping episodes that start and end together."""

    def __init__(self, config: PowerShapingConfig, plant: Plant, jobs: int) -> None:
        """Wraps a plant.

        Args:
            config: Signals, action meaning, observation, reward, period and episode length.
            plant: Emulated or live.
            jobs: Jobs J of the plant.
        """
        self.config = config
        self.plant = plant
        self.layout = ObservationLayout.of(config, jobs)
        self._builder = ObservationBuilder(self.layout)
        self._loop_columns = [self.layout.site("feed_forward"), self.layout.site("error_1")]
        self._families = tuple(sorted(config.signal.families))
        weights = np.array([config.signal.families[name] for name in self._families])
        self._shares = weights / weights.sum()
        self.task: ControlTask | None = None
        self.signals: tuple[Signal, ...] = ()
        self._settings: KnobSettings | None = None
        self._identified: IdentifiedModel | None = None
        self._memory: JobMemory | None = None

    def reset(self, seeds: Sequence[int]) -> NDArray[np.float32]:
        """Starts one episode per seed; equal seeds give equal episodes, alone or in any batch.

        Returns:
            First observations, shape `(B, D)`.

        Raises:
            UserError: The offered capacity does not fit the drawn site, or the signal is too short.
        """
        config = self.config
        self.task = None
        rngs = [np.random.default_rng(seed) for seed in seeds]
        self.signals = tuple(self._draw_signal(rng) for rng in rngs)
        telemetry = self.plant.reset(rngs)
        spec = self.plant.spec
        feasible = reachable_w(config.knob_rules, config.action.knobs, spec)
        base, capacity = _offered(config.signal, spec, self.signals, feasible)
        self.signal = np.stack([signal.values for signal in self.signals])
        self.targets_w, shortfall = _within(target_w(base[:, None], capacity[:, None], self.signal), *feasible)
        self._per_capacity = 1.0 / capacity
        self._range = spec.max_limit_w - spec.min_limit_w
        self._movement_per_w = 1.0 / np.maximum(self._range, 1e-9) / self._range.shape[1]
        gpus = spec.n_gpus.astype(np.float64)
        self._weight = gpus / gpus.sum(axis=1, keepdims=True)
        self._limit = telemetry.limit_w
        self._highest_w = spec.max_limit_w
        self._tick = 0
        if config.action.kind == "residual":
            self._feed_forward = common_limit(spec, self.targets_w)
        tracked = shortfall if config.signal.infeasible == "track" else None
        task = ControlTask(spec, self.layout, config, base, capacity, shortfall_w=tracked)
        if (gains := config.action.gains) is not None:
            task = replace(task, loop=FeedbackLoop(gains, task.limit_per_error))
            self._identified = IdentifiedModel(gains.identify, spec) if gains.identify > 0.0 else None
        if (own := config.action.loop) is not None:
            task = replace(task, predictive=task.predictive_loop(own, own.split))
            self._memory = JobMemory(spec)
        beside = config.action.beside_limit
        self._settings = KnobSettings(config.knob_rules, beside, spec) if beside else None
        if self._settings is not None and telemetry.in_force is not None:
            self._settings.see(telemetry.in_force)
        self._builder.reset(spec, self.targets_w, base, capacity, self._settings)
        self.task = task
        return self._observe(telemetry)

    def step(self, actions: NDArray[np.floating]) -> Outcome:
        """Lets one control period pass.

        Args:
            actions: Shape `(B, A)`, one number for each enabled knob and job, knob by knob, within [-1, 1] (beyond it
                they are clipped).

        Raises:
            UserError: An action is NaN or infinite, or the shape is another; the plant was not touched.
            RuntimeError: The episode is over or was never begun.
        """
        if self.task is None or self._tick >= self.targets_w.shape[1]:
            raise RuntimeError("the episode is over; call reset first")
        action = np.asarray(actions, dtype=np.float64)
        batch, jobs = self._range.shape
        if action.shape != (batch, self.layout.actions):
            each = "job" if self.layout.actions == jobs else "knob and job"
            raise UserError(
                f"actions have shape {action.shape}; valid: {(batch, self.layout.actions)}, one number per environment "
                f"and {each}"
            )
        finite = np.isfinite(action)
        if not finite.all():
            where = np.argwhere(~finite)[0]
            knob, job = divmod(int(where[1]), jobs)
            which = f", {self.layout.knobs[knob]}" if self.layout.actions > jobs else ""
            raise UserError(
                f"action of environment {where[0]}, job {job}{which} is {action[tuple(where)]}; valid: -1 to 1"
            )
        self.plant.apply(self._requested(np.minimum(np.maximum(action, -1.0), 1.0)))
        telemetry = self.plant.advance()
        # A live plant may have missed periods; what it reports is of the last one that passed.
        self._tick = min(telemetry.tick, self.targets_w.shape[1])
        target = self.targets_w[:, self._tick - 1]
        power = telemetry.meter_w.sum(axis=1) + telemetry.host_w
        throughput = (telemetry.throughput * self._weight).sum(axis=1)
        movement = (np.abs(telemetry.limit_w - self._limit) * self._movement_per_w).sum(axis=1)
        if self._settings is not None:
            assert telemetry.in_force is not None
            movement = movement + self._settings.see(telemetry.in_force)
        terms = reward_terms(self.config.reward, (power - target) * self._per_capacity, throughput, movement)
        self._limit = telemetry.limit_w
        return Outcome(
            observation=self._observe(telemetry),
            reward=terms.sum(axis=0),
            terms=terms,
            truncated=self._tick >= self.targets_w.shape[1],
            target_w=target,
            power_w=power,
            throughput=throughput,
            telemetry=telemetry,
        )

    def _requested(self, action: FloatArray) -> Command:
        if self._settings is None:
            return Command(self._limits(action))
        assert self.task is not None
        jobs, asked, settings = self.layout.jobs, self._settings, self.config.action
        parts = {name: action[:, k * jobs : (k + 1) * jobs] for k, name in enumerate(self.layout.knobs)}
        positions: dict[KnobName, FloatArray] = {}
        for name in asked.names:
            part = parts[name]
            if settings.kind == "absolute":
                positions[name] = 0.5 * (part + 1.0)
            elif settings.kind == "delta":
                positions[name] = asked.position(name) + settings.scale * part
            elif (predictive := self.task.predictive) is not None:
                positions[name] = predictive.knobs[name] + part
            else:
                positions[name] = 1.0 + part
        limits = self._limits(parts["power_limit"]) if "power_limit" in parts else self._highest_w
        return asked.command(limits, positions)

    def _limits(self, action: FloatArray) -> FloatArray:
        assert self.task is not None
        spec, settings = self.task.spec, self.config.action
        if settings.kind == "absolute":
            return spec.min_limit_w + (0.5 * (action + 1.0)) * self._range
        if settings.kind == "delta":
            return self._limit + settings.scale * action * self._range
        if (predictive := self.task.predictive) is not None:
            surprise_w = settings.scale * action * spec.power_table_w[:, :, -1]
            return spec.min_limit_w + predictive.advised(surprise_w) * self._range
        loop = self.task.loop
        centre = self._feed_forward[:, self._tick, None] if loop is None else loop.position[:, None]
        return spec.min_limit_w + (centre + settings.scale * action) * self._range

    @property
    def knob_positions(self) -> FloatArray:
        """Setting in force of each enabled knob beside the limit, as positions, shape `(B, J, K)`."""
        shown = [] if self._settings is None else list(self._settings.seen.values())
        return np.stack(shown, axis=2) if shown else np.empty((*self._range.shape, 0))

    def _observe(self, telemetry: Telemetry) -> NDArray[np.float32]:
        """The observation at a period's end; a loop that actions are added to acts on what it shows."""
        observation = self._builder.build(telemetry, self._foresee(telemetry))
        loop = self.task.loop if self.task is not None else None
        if loop is not None:
            feed_forward, error = observation[:, self._loop_columns].astype(np.float64).T
            centre = (feed_forward + 1.0) / 2.0
            if self._identified is not None:
                upcoming = min(telemetry.tick, self.targets_w.shape[1] - 1)
                centre = self._identified.common_limit(self.targets_w[:, upcoming], telemetry)
            # A live sensor may have nothing to say; then there is nothing to correct.
            loop.step(centre, np.nan_to_num(error))
        return observation

    def _foresee(self, telemetry: Telemetry) -> FloatArray | None:
        """Lets the predictive loop see the period, if there is one; what it has learnt of the jobs, `(F, B, J)`."""
        if self.task is None or self.task.predictive is None or self._memory is None:
            return None
        spec, predictive = self.task.spec, self.task.predictive
        position = (telemetry.limit_w - spec.min_limit_w) / np.maximum(self._range, 1e-9)
        # A live sensor may have nothing to say; then the job counts as one that does what is expected of it.
        expected_w, _ = spec.response(telemetry.in_force or Command(telemetry.limit_w))
        sensed_w = np.where(np.isfinite(telemetry.sensor_w), telemetry.sensor_w, expected_w)
        known = telemetry.tick + np.arange(self.config.observation.preview_periods + 1)
        targets_w = self.targets_w[:, np.minimum(known, self.targets_w.shape[1] - 1)]
        predictive.see(position, sensed_w, targets_w, telemetry.in_force)
        return self._memory.see(predictive, telemetry.phase)

    def _draw_signal(self, rng: np.random.Generator) -> Signal:
        config = self.config
        settings = config.signal
        if settings.trace is not None:
            return configured_signal(config)
        family = self._families[int(rng.choice(len(self._families), p=self._shares))]
        return draw_signal(family, settings.split, duration_s=config.episode_s, period_s=config.period_s, rng=rng)


def configured_signal(config: PowerShapingConfig) -> Signal:
    """The one recorded signal that a configuration names.

    Raises:
        UserError: It names none, there is no such recording, or it is shorter than the episode.
    """
    from pathlib import Path

    from wattgym.traces.table import read_trace_file

    settings, period_s, episode_s = config.signal, config.period_s, config.episode_s
    if settings.trace is None:
        raise UserError("signal.trace is not set: signals are drawn from families")
    if Path(settings.trace).suffix in (".csv", ".gz", ".parquet") and Path(settings.trace).exists():
        trace = read_trace_file(settings.trace, kind="regulation")
        return signal_from_trace(
            trace, period_s=period_s, start_s=trace.start_s + settings.start_s, duration_s=episode_s
        )
    signal = named_signal(settings.trace, period_s=period_s, start_s=settings.start_s, duration_s=episode_s)
    # A catalogued recording that belongs to no family has the offer of recordings.
    return signal if signal.family in OFFERS else replace(signal, family="recorded")


def _within(targets_w: FloatArray, low_w: FloatArray, high_w: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Targets held to the feasible band, and by how much they left it on average, shape `(B,)`, W."""
    held = np.clip(targets_w, low_w[:, None], high_w[:, None])
    shortfall = np.abs(targets_w - held).mean(axis=1)
    # What rounding alone makes of a target at the band's edge is left as it is.
    cut = shortfall > 1e-6 * high_w
    return np.where(cut[:, None], held, targets_w), np.where(cut, shortfall, 0.0)


def _offered(
    settings: SignalConfig, spec: PlantSpec, signals: Sequence[Signal], feasible: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Base power and capacity of each site, W."""
    lowest, highest = feasible
    floor, full = (spec.floor_w, spec.full_w) if settings.band == "limits" else feasible
    base, capacity = np.empty_like(floor), np.empty_like(floor)
    for b, signal in enumerate(signals):
        offer = settings.offer(signal.family)
        band = full[b] - floor[b]
        if band < MIN_BAND * full[b]:
            raise UserError(
                f"limits move the power of site {b} by {band:.0f} W of {full[b]:.0f} W, too little to follow a signal "
                f"with; at least {MIN_BAND:.0%} are needed: choose cap-sensitive surfaces (site.surfaces)"
            )
        base[b] = floor[b] + offer.base * band
        capacity[b] = offer.capacity * (band if offer.of == "band" else base[b])
        short = max(
            lowest[b] - (base[b] - capacity[b] * max(signal.values.max(), 0.0)),
            (base[b] - capacity[b] * min(signal.values.min(), 0.0)) - highest[b],
        )
        if settings.infeasible == "refuse" and short > 1e-6 * full[b]:
            raise UserError(
                f"signal '{signal.id}': capacity {capacity[b]:.0f} W around base {base[b]:.0f} W leaves the feasible "
                f"band {lowest[b]:.0f} W to {highest[b]:.0f} W by {short:.0f} W; "
                f"lower signal.offers.{signal.family}.capacity, or track what can be had with signal.infeasible: track"
            )
    return base, capacity
