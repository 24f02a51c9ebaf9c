"""What one controller did in one scenario: named metrics and, for chosen hours, the power over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError


@dataclass(frozen=True)
class Metric:
    """A quantity that every controller is measured by.

    Attributes:
        name: Key in results, with the unit in it where there is one.
        title: Column heading.
        unit: Unit, `1` for a ratio.
        better: Direction of improvement.
        description: Definition in one sentence.
    """

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    description: str

    @property
    def arrow(self) -> str:
        """Direction of improvement as one character."""
        return "↑" if self.better == "higher" else "↓"


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "pjm_composite",
            "PJM composite",
            "1",
            "higher",
            "Regulation performance score: mean of correlation, delay and precision.",
        ),
        Metric(
            "pjm_correlation",
            "Correlation",
            "1",
            "higher",
            "Correlation of response and signal at the shift that the score chooses.",
        ),
        Metric("pjm_delay", "Delay score", "1", "higher", "One minus the chosen shift as a share of five minutes."),
        Metric(
            "pjm_precision",
            "Precision",
            "1",
            "higher",
            "One minus mean absolute error over mean absolute signal, at least 0.",
        ),
        Metric(
            "nrmse",
            "nRMSE",
            "1",
            "lower",
            "Root mean square of power minus target, as a share of the regulation capacity.",
        ),
        Metric(
            "mae_over_r",
            "MAE / R",
            "1",
            "lower",
            "Mean absolute power error as a share of the regulation capacity R.",
        ),
        Metric(
            "share_within_30pct",
            "Within 30 %",
            "1",
            "higher",
            "Share of time with an error of at most 30 % of the regulation capacity.",
        ),
        Metric("mape", "MAPE", "1", "lower", "Mean absolute error of the power as a share of the target."),
        Metric(
            "throughput_retained",
            "Throughput retained",
            "1",
            "higher",
            "Training samples processed, as a share of the uncapped run's in the same time.",
        ),
        Metric("energy_kwh", "Energy", "kWh", "lower", "Metered energy of the site over the scenario."),
        Metric(
            "energy_per_token_relative",
            "Energy per token",
            "1",
            "lower",
            "Energy per training token or sample, as a share of the uncapped run's.",
        ),
        Metric("j_per_sample", "Energy per sample", "J", "lower", "Metered energy per training sample."),
        Metric(
            "actuations_per_h_per_job",
            "Actuations",
            "1/h",
            "lower",
            "Changes of the power cap by more than 1 % of its range, per hour and job.",
        ),
        Metric(
            "guard_interventions_per_h",
            "Guard interventions",
            "1/h",
            "lower",
            "Commands that the guard changed or refused, per hour.",
        ),
        Metric("reward_mean", "Reward", "1", "higher", "Mean reward per control period."),
    )
}
"""Every metric an evaluation may report, in the order of its tables."""


@dataclass(frozen=True)
class EpisodeResult:
    """One row of an evaluation.

    Attributes:
        controller: Name of the controller.
        scenario: Scenario id; the same id means the same signal, plant and seed for every controller.
        family: Signal family, for example `regd`, `rega`, `frequency`.
        plant_group: Group of plants, for example `v100` or `held-out GPUs`.
        seed: Seed of the scenario.
        metrics: Values by name (keys of `METRICS`); NaN where a metric does not apply.
        train_run: Which training run of the controller this was, where several were evaluated; else empty.
    """

    controller: str
    scenario: str
    family: str
    plant_group: str
    seed: int
    metrics: Mapping[str, float]
    train_run: str = ""

    def __post_init__(self) -> None:
        if not (self.controller and self.scenario and self.family and self.plant_group):
            raise UserError("an episode result needs a controller, a scenario, a family and a plant group")
        for name, value in self.metrics.items():
            if name not in METRICS:
                raise UserError(f"unknown metric '{name}'; known: {', '.join(METRICS)}")
            if math.isinf(value):
                raise UserError(f"'{self.controller}' on '{self.scenario}': metric '{name}' is {value}")

    @property
    def task(self) -> str:
        """Stratum of the bootstrap: signal family × plant group."""
        return f"{self.family} × {self.plant_group}"


@dataclass(frozen=True, eq=False)
class PowerTrace:
    """Power over one scenario, for plots.

    Attributes:
        controller: Name of the controller.
        scenario: Scenario id.
        t_s: Time since the scenario's start, seconds, shape `(n,)`.
        target_w: Power that the grid service asked for, watts, shape `(n,)`.
        power_w: Metered power, watts, shape `(n,)`.
        throughput: Training throughput as a share of the uncapped one, shape `(n,)`.
    """

    controller: str
    scenario: str
    t_s: NDArray[np.float64]
    target_w: NDArray[np.float64]
    power_w: NDArray[np.float64]
    throughput: NDArray[np.float64] = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("t_s", "target_w", "power_w", "throughput"):
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.size == 0 or values.shape != np.shape(self.t_s):
                raise UserError(
                    f"trace of '{self.controller}' on '{self.scenario}': {name} has shape {values.shape}, "
                    f"t_s has {np.shape(self.t_s)}; all need the same, non-empty one"
                )
            object.__setattr__(self, name, values)
