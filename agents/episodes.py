"""What one controller did in one scenario: named metrics and, for chosen scenarios, its course over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.metrics.statistics import Statistic

Problem = Literal["power_shaping", "site_selection"]
"""What was controlled."""


@dataclass(frozen=True)
class Metric:
    """A quantity that every controller is measured by.

    Attributes:
        name: Key in results, with the unit in it where there is one.
        title: Column heading.
        unit: Unit, `1` for a ratio.
        better: Direction of improvement.
        description: Definition in one sentence.
        statistic: What aggregates it over scenarios: interquartile mean, or mean where the middle half says nothing (a
            share of successes).
    """

    name: str
    title: str
    unit: str
    better: Literal["higher", "lower"]
    description: str
    statistic: Statistic = "iqm"

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
            "mape_15min",
            "MAPE, 15 min",
            "1",
            "lower",
            "Mean absolute error of 15-minute mean power as a share of the target's; not for regulation signals.",
        ),
        Metric(
            "throughput_retained",
            "Throughput retained",
            "1",
            "higher",
            "Training samples processed, as a share of the uncapped run's in the same time.",
        ),
        Metric(
            "energy_kwh", "Energy", "kWh", "lower", "Metered energy of the site, or of all sites, over the scenario."
        ),
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
            "Changes of the power cap, and of other knobs, by more than 1 % of their range, per hour and job.",
        ),
        Metric(
            "shortfall_w",
            "Out of reach",
            "W",
            "lower",
            "Mean power by which the offered targets leave the feasible band, to which they were cut for everybody.",
        ),
        Metric(
            "guard_interventions_per_h",
            "Guard interventions",
            "1/h",
            "lower",
            "Commands that the guard changed or refused, per hour.",
        ),
        Metric("reward_mean", "Reward", "1", "higher", "Mean reward per control period."),
        Metric(
            "time_to_target_relative",
            "Relative time to target",
            "1",
            "lower",
            "Time to the target over that of PowerTrip's predicted greedy in the same scenario.",
        ),
        Metric(
            "time_to_target_s",
            "Time to target",
            "s",
            "lower",
            "Time until the true loss reaches the target; the time limit where it does not.",
        ),
        Metric(
            "expense_relative",
            "Relative expense",
            "1",
            "lower",
            "Time (twice the limit where the target is missed) plus whatever the reward prices, over that of "
            "PowerTrip's predicted greedy in the same scenario.",
        ),
        Metric(
            "target_reached", "Reached", "1", "higher", "Share of scenarios in which the target was reached.", "mean"
        ),
        Metric("rounds", "Rounds", "1", "lower", "Rounds played."),
        Metric("participants_mean", "Participants", "1", "lower", "Mean number of sites in a round."),
        Metric(
            "communication_share",
            "Communicating",
            "1",
            "lower",
            "Share of the rounds' time in which the slowest site communicated rather than computed.",
        ),
        Metric(
            "unused_power_share",
            "Unused power",
            "1",
            "lower",
            "Energy that eligible sites had available and did not use, as a share of what they had available.",
        ),
        Metric("carbon_kg", "Carbon", "kg", "lower", "Emissions of the energy, by each site's carbon intensity."),
        Metric("cost_usd", "Cost", "USD", "lower", "Energy at each site's price, and egress of the transfers."),
        Metric(
            "site_churn_per_h", "Site churn", "1/h", "lower", "Sites that joined or left from one round to the next."
        ),
        Metric("final_loss", "Final loss", "nats", "lower", "True loss at the end."),
        Metric("final_accuracy", "Final accuracy", "1", "higher", "Accuracy that goes with the final loss."),
        Metric("waits", "Waits", "1", "lower", "Times that no site was eligible.", "mean"),
        Metric(
            "repairs",
            "Repairs",
            "1",
            "lower",
            "Rounds in which nothing eligible was chosen and the environment took the best predicted site.",
            "mean",
        ),
        Metric("return", "Return", "1", "higher", "Sum of rewards over the episode."),
    )
}
"""Every metric an evaluation may report, in the order of its tables."""


@dataclass(frozen=True)
class EpisodeResult:
    """One row of an evaluation.

    Attributes:
        controller: Name of the controller.
        scenario: Scenario id; the same id means the same signal, plant and seed for every controller.
        family: Signal family or scenario family, for example `regd`, `rega`, `communication_bound`.
        plant_group: Group of plants, for example `v100`, `held-out GPUs` or `57 sites`.
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
        """Stratum of the bootstrap: family × plant group."""
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

    columns: ClassVar[tuple[str, ...]] = ("t_s", "target_w", "power_w", "throughput")

    def __post_init__(self) -> None:
        for name in self.columns:
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.size == 0 or values.shape != np.shape(self.t_s):
                raise UserError(
                    f"trace of '{self.controller}' on '{self.scenario}': {name} has shape {values.shape}, "
                    f"t_s has {np.shape(self.t_s)}; all need the same, non-empty one"
                )
            object.__setattr__(self, name, values)

    def table(self) -> dict[str, Sequence[Any]]:
        """Columns of a file."""
        return {name: getattr(self, name).tolist() for name in self.columns}

    @classmethod
    def of_table(cls, controller: str, scenario: str, table: Mapping[str, Sequence[Any]]) -> PowerTrace:
        """Reads what `table` wrote.

        Raises:
            KeyError: A column is missing.
        """
        return cls(controller, scenario, *(np.asarray(table[name], dtype=float) for name in cls.columns))


@dataclass(frozen=True, eq=False)
class SelectionTrace:
    """The rounds of one federation, for plots.

    Attributes:
        controller: Name of the selector.
        scenario: Scenario id.
        t_s: Time at which each round ended, since the scenario's start, seconds, shape `(T,)`.
        loss: True loss after it, nats, shape `(T,)`.
        accuracy: Accuracy that goes with it, shape `(T,)`.
        chosen: Sites that took part, shape `(T, sites)`.
        sites: Names of the sites.
    """

    controller: str
    scenario: str
    t_s: NDArray[np.float64]
    loss: NDArray[np.float64]
    accuracy: NDArray[np.float64]
    chosen: NDArray[np.bool_] = field(repr=False)
    sites: tuple[str, ...] = ()

    columns: ClassVar[tuple[str, ...]] = ("t_s", "loss", "accuracy", "chosen", "sites")

    def __post_init__(self) -> None:
        shape = (np.size(self.t_s), len(self.sites))
        if np.shape(self.chosen) != shape or shape[0] == 0 or np.size(self.loss) != shape[0]:
            raise UserError(
                f"trace of '{self.controller}' on '{self.scenario}': who trained has shape {np.shape(self.chosen)}, "
                f"loss {np.shape(self.loss)}; there are {shape[0]} rounds and {shape[1]} sites"
            )

    def table(self) -> dict[str, Sequence[Any]]:
        """Columns of a file: who trained as a text of 0 and 1 a round, the sites' names in every row."""
        return {
            "t_s": self.t_s.tolist(),
            "loss": self.loss.tolist(),
            "accuracy": self.accuracy.tolist(),
            "chosen": ["".join("01"[bit] for bit in row) for row in self.chosen.astype(int).tolist()],
            "sites": ["\t".join(self.sites)] * self.t_s.size,
        }

    @classmethod
    def of_table(cls, controller: str, scenario: str, table: Mapping[str, Sequence[Any]]) -> SelectionTrace:
        """Reads what `table` wrote.

        Raises:
            KeyError: A column is missing.
        """
        sites = tuple(str(table["sites"][0]).split("\t"))
        chosen = np.array([[bit == "1" for bit in row] for row in table["chosen"]], dtype=bool)
        t_s, loss, accuracy = (np.asarray(table[name], dtype=float) for name in ("t_s", "loss", "accuracy"))
        return cls(controller, scenario, t_s, loss, accuracy, chosen, sites)


Trace = PowerTrace | SelectionTrace
"""The course of a scenario; its kind goes with the problem."""

TRACE_TYPES: Mapping[Problem, type[PowerTrace] | type[SelectionTrace]] = {
    "power_shaping": PowerTrace,
    "site_selection": SelectionTrace,
}
