"""The observation vector: one table of features, one builder, for emulated and live plants alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.config import ObservationConfig, PowerShapingConfig
from wattgym.envs.job_memory import JOB_MEMORY
from wattgym.envs.knob_actions import KnobSettings
from wattgym.envs.knobs import DISCRETE, KnobName
from wattgym.envs.plant import FloatArray, Phase, PlantSpec, Telemetry

BOUND = 5.0
"""Features are clipped to ±BOUND; in normal operation they lie within about ±1."""


@dataclass(frozen=True)
class Feature:
    """One entry of the observation vector.

    Attributes:
        name: `target`, or `job0.power` for features of a job.
        unit: What 1 means.
        description: What it is.
    """

    name: str
    unit: str
    description: str


@dataclass(frozen=True)
class ObservationLayout:
    """Which feature lies where in the vector.

    Attributes:
        config: Optional parts.
        jobs: Jobs J.
        knobs: Knobs that actions set.
        advice: Whether actions advise a predictive loop, whose memory of each job is then shown.
    """

    config: ObservationConfig
    jobs: int
    knobs: tuple[KnobName, ...] = ("power_limit",)
    advice: bool = False

    @classmethod
    def of(cls, config: PowerShapingConfig, jobs: int | None = None) -> ObservationLayout:
        """The layout of an environment.

        Args:
            config: The environment.
            jobs: Jobs of its plant; those of the emulated site if None.
        """
        shown = config.site.jobs if jobs is None else jobs
        return cls(config.observation, shown, config.action.knobs, config.action.kind == "advice")

    @property
    def actions(self) -> int:
        """Numbers in an action: one for each enabled knob and job, knob by knob, each for all jobs."""
        return len(self.knobs) * self.jobs

    @property
    def beside_limit(self) -> tuple[KnobName, ...]:
        """Enabled knobs other than the power limit."""
        return tuple(name for name in self.knobs if name != "power_limit")

    @cached_property
    def site_features(self) -> tuple[Feature, ...]:
        """Features of the whole site, in order."""
        history, preview = self.config.error_history, self.config.preview_periods
        return (
            Feature("target", "half band from its middle", "power to draw in the coming period"),
            Feature("target_change", "capacity", "target minus the previous target"),
            Feature("feed_forward", "half limit range", "common limit that meets the target in the nominal model"),
            Feature("signal_level", "capacity", "leaky mean of the signal's absolute value"),
            *(Feature(f"preview_{k}", "capacity", f"signal {k} period(s) ahead") for k in range(1, preview + 1)),
            *(
                Feature(f"error_{k}", "capacity", f"sensed power minus target, {k} period(s) ago")
                for k in range(1, history + 1)
            ),
            Feature("error_integral", "capacity", "leaky mean of the error"),
            Feature("power", "half band from its middle", "sensed site power of the last period"),
            Feature("capacity", "half band", "offered capacity"),
            Feature("age", "period", "age of the telemetry"),
        )

    @cached_property
    def job_features(self) -> tuple[Feature, ...]:
        """Features of one job, in order; the vector holds them feature by feature, each for all jobs."""
        return (
            *(
                Feature(f"limit_{k}", "half limit range", f"power limit written {k} period(s) ago")
                for k in range(1, self.config.command_history + 1)
            ),
            Feature("power", "half nominal full power", "sensed power, minus 1"),
            Feature("throughput", "half nominal full speed", "progress of the last period, minus 1"),
            Feature("computing", "1", "+1 while the job computes, -1 while it loads, evaluates or checkpoints"),
            Feature("phase_age", "2 minutes", "time in the present phase, at most 1"),
            Feature("share", "1", "nominal full power over the site's"),
            Feature("knee", "1", "nominal throughput at the middle of the limit range"),
            *(Feature(*entry) for entry in JOB_MEMORY if self.advice),
            *self._knob_features(),
        )

    def _knob_features(self) -> tuple[Feature, ...]:
        """Features of knobs beside the power limit: settings, dwell times, and their nominal effect."""
        beside = self.beside_limit
        shown: list[Feature] = []
        for name in beside:
            shown.append(Feature(name, "half range", "setting in force, 1 = neutral"))
            if name in DISCRETE:
                shown.append(Feature(f"{name}_dwell", "dwell time", "time until it may change again"))
        if "micro_batch" in beside:
            shown.append(Feature("micro_power", "full power", "nominal power at the smallest micro-batch, no limit"))
            shown.append(Feature("micro_throughput", "full speed", "nominal throughput there"))
        if "active_gpus" in beside or "duty_cycle" in beside:
            shown.append(Feature("idle_power", "full power", "nominal power while nothing works"))
        if "active_gpus" in beside or "local_steps" in beside:
            shown.append(Feature("comm_share", "1", "nominal share of communication in a synchronous step"))
            shown.append(Feature("straggler_share", "1", "nominal share of waiting for the slowest rank"))
        return tuple(shown)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return len(self.site_features) + len(self.job_features) * self.jobs

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Every entry of the vector, in order."""
        per_job = tuple(
            Feature(f"job{j}.{f.name}", f.unit, f.description) for f in self.job_features for j in range(self.jobs)
        )
        return self.site_features + per_job

    def site(self, name: str) -> int:
        """Column of a site feature."""
        return [f.name for f in self.site_features].index(name)

    def job(self, name: str) -> slice:
        """Columns of a job feature, one for each job."""
        start = len(self.site_features) + [f.name for f in self.job_features].index(name) * self.jobs
        return slice(start, start + self.jobs)


class ObservationBuilder:
    """Turns telemetry and the signal into observation vectors for a batch of sites.

    It keeps the short history that observations show; `reset` starts an episode, `build` is called once a period.
    """

    def __init__(self, layout: ObservationLayout) -> None:
        self.layout = layout
        self._first = len(layout.site_features)

    def reset(
        self,
        spec: PlantSpec,
        targets_w: FloatArray,
        base_w: FloatArray,
        capacity_w: FloatArray,
        settings: KnobSettings | None = None,
    ) -> None:
        """Starts an episode.

        Args:
            spec: The plant's nominal description.
            targets_w: Targets of every period of the episode, shape `(B, T)`, W.
            base_w: Declared base power, shape `(B,)`, W.
            capacity_w: Offered capacity, shape `(B,)`, W.
            settings: Settings beside the power limit, which has seen what is in force before each `build`; None where
                the limit is the only knob.
        """
        config, jobs = self.layout.config, self.layout.jobs
        batch = base_w.shape[0]
        self._middle = (spec.full_w + spec.floor_w) / 2.0
        self._per_half_band = 2.0 / (spec.full_w - spec.floor_w)
        self._per_capacity = 1.0 / capacity_w
        self._per_period = 1.0 / spec.period_s
        full = spec.power_table_w[:, :, -1]
        self._per_half_full = 2.0 / full
        self._limit_middle = (spec.max_limit_w + spec.min_limit_w) / 2.0
        self._per_half_range = 2.0 / np.maximum(spec.max_limit_w - spec.min_limit_w, 1e-9)
        self._phase_step = spec.period_s / 120.0
        self._leak = config.integral_leak
        self._history = config.error_history
        self._limits = config.command_history

        # What depends on the signal alone is worked out for the whole episode; only what has been sent is shown.
        self._targets = targets_w
        self._known = self._signal_features(spec, targets_w, base_w)
        self._x = np.zeros((batch, self.layout.size))
        share = full / full.sum(axis=1, keepdims=True)
        self._x[:, self.layout.site("capacity")] = capacity_w * self._per_half_band
        self._x[:, self.layout.job("share")] = share
        middle = spec.limit_grid.size // 2
        self._x[:, self.layout.job("knee")] = spec.throughput_table[:, :, middle]
        self._settings = settings
        if settings is not None:
            self._show_table(spec, full)
        self._phase = np.full((batch, jobs), -1)
        self._phase_age = np.zeros((batch, jobs))
        self._columns = {f.name: self.layout.site(f.name) for f in self.layout.site_features}
        self._job_columns = {f.name: self.layout.job(f.name) for f in self.layout.job_features}

    def build(self, telemetry: Telemetry, memory: FloatArray | None = None) -> NDArray[np.float32]:
        """The observation at the end of a period, for the action of the next.

        Args:
            telemetry: What the plant reports; its `tick` says which period comes next.
            memory: What a predictive loop has learnt of the jobs, where it is shown, shape `(F, B, J)`.

        Returns:
            Observations, shape `(B, size)`, float32, within ±`BOUND`.
        """
        x, column, job = self._x, self._columns, self._job_columns
        tick = telemetry.tick
        upcoming = min(tick, self._targets.shape[1] - 1)
        power = telemetry.sensor_w.sum(axis=1) + telemetry.host_w
        first_error = column["error_1"]
        if tick > 0:
            error = (power - self._targets[:, min(tick, self._targets.shape[1]) - 1]) * self._per_capacity
            x[:, first_error + 1 : first_error + self._history] = x[:, first_error : first_error + self._history - 1]
            x[:, first_error] = error
            integral = x[:, column["error_integral"]]
            integral *= self._leak
            integral += (1.0 - self._leak) * error
        x[:, : self._known.shape[2]] = self._known[upcoming]
        x[:, column["power"]] = (power - self._middle) * self._per_half_band
        x[:, column["age"]] = telemetry.age_s * self._per_period

        limit = (telemetry.limit_w - self._limit_middle) * self._per_half_range
        start, jobs = job["limit_1"].start, self.layout.jobs
        if tick > 0:
            x[:, start + jobs : start + self._limits * jobs] = x[:, start : start + (self._limits - 1) * jobs]
            x[:, start : start + jobs] = limit
        else:
            for k in range(self._limits):
                x[:, start + k * jobs : start + (k + 1) * jobs] = limit
        x[:, job["power"]] = telemetry.sensor_w * self._per_half_full - 1.0
        x[:, job["throughput"]] = 2.0 * telemetry.throughput - 1.0
        self._show_phase(telemetry.phase)
        if memory is not None:
            for (name, _, _), value in zip(JOB_MEMORY, memory, strict=True):
                x[:, job[name]] = value
        if self._settings is not None:
            self._show_settings(self._settings)
        return np.maximum(np.minimum(x, BOUND), -BOUND).astype(np.float32)

    def _show_table(self, spec: PlantSpec, full_w: FloatArray) -> None:
        """What the nominal table says of each job; the same all episode long."""
        table = spec.knobs
        assert table is not None
        nominal = {
            "micro_power": table.power_w[:, :, -1, -1] / full_w,
            "micro_throughput": table.throughput[:, :, -1, -1],
            "idle_power": table.idle_w / full_w,
            "comm_share": table.comm_share,
            "straggler_share": table.straggler_share,
        }
        shown = {feature.name for feature in self.layout.job_features}
        for name, value in nominal.items():
            if name in shown:
                self._x[:, self.layout.job(name)] = value

    def _show_settings(self, settings: KnobSettings) -> None:
        for name, position in settings.seen.items():
            self._x[:, self._job_columns[name]] = 2.0 * position - 1.0
            if name in DISCRETE:
                self._x[:, self._job_columns[f"{name}_dwell"]] = settings.dwell_left(name)

    def _signal_features(self, spec: PlantSpec, targets_w: FloatArray, base_w: FloatArray) -> FloatArray:
        """The leading features, which follow from the signal alone, for every period, shape `(T, B, features)`."""
        from scipy.signal import lfilter

        signal = (base_w[:, None] - targets_w) * self._per_capacity[:, None]
        size = np.abs(signal)
        level, _ = lfilter([1.0 - self._leak], [1.0, -self._leak], size, axis=1, zi=self._leak * size[:, :1])
        change = np.diff(targets_w, axis=1, prepend=targets_w[:, :1]) * self._per_capacity[:, None]
        last = signal.shape[1] - 1
        ahead = [
            signal[:, np.minimum(np.arange(last + 1) + k, last)]
            for k in range(1, self.layout.config.preview_periods + 1)
        ]
        features = [
            (targets_w - self._middle[:, None]) * self._per_half_band[:, None],
            change,
            2.0 * common_limit(spec, targets_w) - 1.0,
            level,
            *ahead,
        ]
        return np.ascontiguousarray(np.stack(features).transpose(2, 1, 0))

    def _show_phase(self, phase: NDArray[np.int64]) -> None:
        age = self._phase_age
        age += self._phase_step
        changed = phase != self._phase
        if changed.any():
            age[changed] = 0.0
            self._phase = phase.copy()
            self._x[:, self._job_columns["computing"]] = (phase == Phase.COMPUTE) * 2.0 - 1.0
        np.minimum(age, 1.0, out=self._x[:, self._job_columns["phase_age"]])


def common_limit(spec: PlantSpec, targets_w: FloatArray) -> FloatArray:
    """The inverse of the nominal model: one position in every job's limit range that makes the site draw a target.

    Args:
        spec: Nominal description.
        targets_w: Target site powers, shape `(B, T)`, W.

    Returns:
        Positions in [0, 1], shape `(B, T)`; 0 or 1 where the target is out of reach.
    """
    site = np.maximum.accumulate(spec.power_table_w.sum(axis=1), axis=1) + spec.host_w[:, None]
    positions = [np.interp(target, table, spec.limit_grid) for target, table in zip(targets_w, site, strict=True)]
    return np.array(positions)
