"""The gap between emulator and live plant: one controller, one scenario, both plants, one accounting."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wattgym.agents.controller import Controller
from wattgym.agents.deployment import LiveRun, Tick, composite
from wattgym.agents.episodes import METRICS, Metric
from wattgym.agents.rollout import Arena, Rollout
from wattgym.agents.scoring import scenario_metrics
from wattgym.envs.config import PowerShapingConfig, SiteConfig
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.plant import FloatArray
from wattgym.envs.profile import load_profile
from wattgym.errors import UserError
from wattgym.metrics.pjm import PjmVariant

THROUGHPUT = Metric(
    "throughput", "Throughput", "1", "higher", "Training progress as a share of the calibrated full speed."
)
COMPARED = (
    *(METRICS[name] for name in ("pjm_composite", "pjm_correlation", "pjm_delay", "pjm_precision")),
    *(METRICS[name] for name in ("nrmse", "mae_over_r", "share_within_30pct")),
    THROUGHPUT,
    *(METRICS[name] for name in ("energy_kwh", "actuations_per_h_per_job")),
)
"""What is compared, in the order of the table."""

AIMS = {"pjm_composite": (0.05, False), "throughput": (0.05, True)}
"""Largest differences that an emulator should have: absolute, or relative to the live value."""


@dataclass(frozen=True)
class GapRow:
    """One quantity on both plants.

    Attributes:
        metric: The quantity.
        emulated: Mean over the emulator's seeds; None where it does not apply.
        emulated_sd: Standard deviation over them.
        live: Value of the live run; None where it does not apply.
    """

    metric: Metric
    emulated: float | None
    emulated_sd: float | None
    live: float | None

    @property
    def difference(self) -> float | None:
        """Emulated minus live; None where one is missing."""
        return None if self.emulated is None or self.live is None else self.emulated - self.live

    @property
    def relative(self) -> float | None:
        """The difference as a share of the live value."""
        return self.difference / self.live if self.difference is not None and self.live else None

    @property
    def within_aim(self) -> bool | None:
        """Whether the difference is as small as it should be; None without an aim or a difference."""
        if self.metric.name not in AIMS:
            return None
        aim, relative = AIMS[self.metric.name]
        found = self.relative if relative else self.difference
        return None if found is None else abs(found) <= aim

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "metric": self.metric.name,
            "unit": self.metric.unit,
            "emulated": self.emulated,
            "emulated_sd": self.emulated_sd,
            "live": self.live,
            "difference": self.difference,
            "relative": self.relative,
            "within_aim": self.within_aim,
        }


@dataclass(frozen=True)
class Gap:
    """A comparison.

    Attributes:
        controller: Name of the controller.
        signal: Signal that both plants followed.
        duration_s: Length of what was compared, seconds.
        seeds: Seeds of the emulator.
        rows: Quantities.
        lateness_p99_ms: Lateness of the live ticks, 99th percentile.
        missed: Control periods that the live run missed.
    """

    controller: str
    signal: str
    duration_s: float
    seeds: tuple[int, ...]
    rows: tuple[GapRow, ...]
    lateness_p99_ms: float
    missed: int

    @property
    def within_aim(self) -> bool:
        """Whether every aim that applies is met."""
        return all(row.within_aim is not False for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "controller": self.controller,
            "signal": self.signal,
            "duration_s": self.duration_s,
            "seeds": list(self.seeds),
            "lateness_p99_ms": self.lateness_p99_ms,
            "missed_periods": self.missed,
            "within_aim": self.within_aim,
            "metrics": [row.to_json() for row in self.rows],
        }


def gap_scenario(env: PowerShapingConfig, profile: str) -> PowerShapingConfig:
    """A live run's scenario on the calibrated emulator.

    A live plant has no control network between controller and actuator: what delays a command was calibrated. Nor does
    it meter its hosts.

    Args:
        env: The live run's environment.
        profile: The calibrated profile.

    Raises:
        UserError: The profile cannot be used, or is of another number of jobs.
    """
    found = len(load_profile(profile).jobs)
    if found != env.site.jobs:
        raise UserError(f"{profile}: jobs: describes {found} jobs, the plant has {env.site.jobs}")
    site = SiteConfig(jobs=found, profile=profile, control_delay_periods=(0, 0), command_loss=0.0)
    return env.model_copy(update={"site": site})


def emulate(controller: Controller, env: PowerShapingConfig, seeds: Sequence[int]) -> Rollout:
    """The scenario on the emulator, once for each seed.

    Raises:
        UserError: The profile, the signal or the controller does not fit.
    """
    return Arena(env).run(controller, seeds)


def run_live(
    controller: Controller,
    env: PowerShapingConfig,
    plant: LivePlant,
    *,
    started: Callable[[LiveRun], None] = lambda run: None,
    watch: Callable[[Tick], object] = lambda tick: None,
) -> Rollout:
    """The scenario on the live plant.

    Raises:
        UserError: Something cannot be used, or a job died.
    """
    run = LiveRun(controller, env, plant)
    run.run(started, watch)
    rollout = run.rollout()
    assert rollout is not None
    return rollout


def compare(
    controller: str,
    signal: str,
    emulated: Rollout,
    live: Rollout,
    seeds: Sequence[int],
    plant: LivePlant,
    variant: PjmVariant,
) -> Gap:
    """Puts both side by side.

    Args:
        controller: Name of the controller.
        signal: Name of the signal.
        emulated: One scenario per seed.
        live: One scenario.
        seeds: The emulator's seeds.
        plant: The live plant, for its punctuality.
        variant: Rules of the regulation score.
    """
    ours, theirs = _metrics(emulated, variant), _metrics(live, variant)
    rows = []
    for metric in COMPARED:
        values, value = (found.get(metric.name, np.array([np.nan])) for found in (ours, theirs))
        values = values[~np.isnan(values)]
        rows.append(
            GapRow(
                metric,
                float(values.mean()) if values.size else None,
                float(values.std(ddof=1)) if values.size > 1 else None,
                None if math.isnan(value[0]) else float(value[0]),
            )
        )
    late_ms = 1000.0 * float(np.percentile(plant.ticks.lateness_s, 99)) if plant.ticks.lateness_s else 0.0
    duration_s = live.period_s * live.power_w.shape[1]
    return Gap(controller, signal, duration_s, tuple(seeds), tuple(rows), late_ms, plant.ticks.missed)


def _metrics(rollout: Rollout, variant: PjmVariant) -> Mapping[str, FloatArray]:
    """Metrics by name; the regulation score's are left out where the run is too short for it."""
    scored = composite(rollout, variant) is not None
    found = scenario_metrics(rollout, None, variant if scored else None)
    return {**found, THROUGHPUT.name: rollout.throughput.mean(axis=1)}
