"""Where tracking errors come from, and what of them a better controller could win.

    python scripts/tracking_limits.py --scenarios 24
    python scripts/tracking_limits.py --scenarios 24 --run runs/advice/advice-seed0

On scenarios of the validation split it prints two tables.

The first takes feed-forward + PI with its default gains (tuned ones fit the delays that are to be taken away): the mean
absolute error per capacity, the part of it that no limit could avoid (the target lies beyond what computing jobs at
their highest, or lowest, limit and the others' present draw add up to), and how the error changes when one thing at a
time is taken away: delays and lost commands; also the spread of plants, so that the nominal model is exact; and, on the
plant as it is, when the loop corrects an identified model.

The second takes the predictive loop and gives it one piece of knowledge at a time, up to the oracle MPC. What is paired
is the mean of PJM composite and throughput retained. Surfaces, sensors and phases leave traces in what was seen, so a
learner may win part of them; signals to come and noise do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from wattgym.agents.baselines import make_baseline
from wattgym.agents.config import TrainingConfig, parse_training
from wattgym.agents.controller import Controller, ObservedPower
from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena, commanding
from wattgym.agents.scoring import scenario_metrics
from wattgym.agents.truth import Truth
from wattgym.agents.validation import held_out
from wattgym.config import read_yaml
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.loop_settings import LoopSettings
from wattgym.envs.plant import Command, FloatArray, Phase, Telemetry
from wattgym.envs.predictive import PredictiveLoop
from wattgym.envs.shaping import PowerShaping
from wattgym.envs.task import ControlTask
from wattgym.metrics.statistics import paired_difference

RECIPES = Path(__file__).resolve().parents[1] / "configs" / "recipes"
AS_IS: dict[str, Any] = {}
PROMPT = {"control_delay_periods": (0, 0), "command_loss": 0.0}
NOMINAL = {**PROMPT, "randomise": 0.0, "power_spread": 0.0, "sensor": "instant"}
PLAIN = {"proportional": 0.2, "integral": 0.2, "rate": 1.0}
IDENTIFIED = {"proportional": 0.0, "integral": 0.0, "rate": 0.3, "identify": 0.05}


def main(
    families: str = "rega,droop",
    scenarios: int = 24,
    jobs: int = 4,
    episode_s: float = 2400.0,
    run: Path | None = None,
) -> None:
    """Prints both tables, one row a family and case.

    Args:
        families: Signal families, separated by commas.
        scenarios: Scenarios each.
        jobs: Jobs of the site.
        episode_s: Length of a scenario, seconds.
        run: Training run of the recipe `advice`, which then has a row of its own.
    """
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("feed-forward + PI", AS_IS, PLAIN),
        ("no delay, no lost command", PROMPT, PLAIN),
        ("and an exact nominal model", NOMINAL, PLAIN),
        ("identified feed-forward", AS_IS, IDENTIFIED),
    )
    names = families.split(",")
    _losses(names, cases, scenarios, jobs, episode_s)
    print()
    _knowledge(names, scenarios, jobs, episode_s, run)


def _losses(
    families: list[str],
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...],
    scenarios: int,
    jobs: int,
    episode_s: float,
) -> None:
    print("| family | case | MAE / R | of it unavoidable | all computing: share of time | MAE / R then |")
    print("|---|---|---|---|---|---|")
    for family in families:
        for label, site, gains in cases:
            action = {"kind": "residual_pi", "gains": gains}
            env = PowerShapingConfig.model_validate({"site": {"jobs": jobs, **site}, "action": action})
            steps = list(_run(held_out(env, family, "validation", episode_s), range(500, 500 + scenarios)))
            error, beyond, whole = (np.stack(part) for part in zip(*steps, strict=True))
            print(
                f"| {family} | {label} | {error.mean():.3f} | {beyond.mean():.3f} | {whole.mean():.0%} "
                f"| {error[whole].mean():.3f} |"
            )


def _run(config: PowerShapingConfig, seeds: range) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    """Error, its unavoidable part (both per capacity) and whether all jobs compute, each `(B,)`, period by period."""
    shaping = PowerShaping(config, Emulator(config), config.site.jobs)
    shaping.reset(list(seeds))
    task = shaping.task
    assert task is not None
    tables = task.spec.power_table_w
    computing = np.ones(tables.shape[:2], dtype=bool)
    draw = tables[:, :, -1]
    still = np.zeros(tables.shape[:2])
    for _ in range(config.ticks):
        high, low = (np.where(computing, tables[:, :, end], draw).sum(axis=1) + task.spec.host_w for end in (-1, 0))
        outcome = shaping.step(still)
        beyond = np.maximum(outcome.target_w - high, 0.0) + np.maximum(low - outcome.target_w, 0.0)
        yield (
            np.abs(outcome.power_w - outcome.target_w) / task.capacity_w,
            beyond / task.capacity_w,
            computing.all(axis=1),
        )
        computing = outcome.telemetry.phase == Phase.COMPUTE
        draw = outcome.telemetry.sensor_w


def _recipe(name: str) -> PowerShapingConfig:
    """The environment of a committed recipe."""
    config = parse_training(read_yaml(RECIPES / f"{name}.yaml"), name)
    assert isinstance(config, TrainingConfig)
    return config.env


class ExactSensors(Emulator):
    """Sensors show what the meters do."""

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Starts an episode."""
        return self._exact(super().reset(rngs))

    def advance(self) -> Telemetry:
        """Lets one control period pass."""
        return self._exact(super().advance())

    @staticmethod
    def _exact(telemetry: Telemetry) -> Telemetry:
        telemetry.sensor_w = telemetry.meter_w
        return telemetry


class Knowing:
    """The predictive loop with some of the truth."""

    name = "knowing"

    def __init__(self, settings: LoopSettings, plant: Emulator, knows: frozenset[str]) -> None:
        self._settings, self._plant, self._knows = settings, plant, knows

    def reset(self, task: ControlTask) -> None:
        """Waits for the truth."""
        self._task, self._seen, self._tick = task, ObservedPower(task), 0

    def inform(self, truth: Truth) -> None:
        """Takes what it may know."""
        task, knows, own = self._task, self._knows, self._settings
        credit = 0.0 if "surfaces" in knows else 1.0 if "sensors" in knows else own.credit
        spec = truth.spec if "surfaces" in knows else task.spec
        self._truth = truth
        self._loop = PredictiveLoop(
            own.model_copy(update={"credit": credit}), spec, task.config.rules, task.base_w, task.capacity_w, own.split
        )

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Plans with what it knows."""
        seen, loop, targets = self._seen, self._loop, self._truth.targets_w
        position, coming = seen.limits(observation), seen.target_w(observation)[:, None]
        if "preview" in self._knows:
            ahead = np.minimum(self._tick + np.arange(self._settings.horizon), targets.shape[1] - 1)
            coming = targets[:, ahead]
        self._tick += 1
        loop.see(position, seen.job_power_w(observation), coming)
        surprise_w = np.zeros_like(position)
        for _ in range(2 if self._knows & {"phases", "draws"} else 0):
            surprise_w = self._surprise_w(loop.advised(surprise_w), seen.computing(observation))
        return self._task.action_for(loop.advised(surprise_w), seen.feed_forward(observation), position)

    def _surprise_w(self, position: FloatArray, computing: NDArray[np.bool_]) -> FloatArray:
        """What jobs will draw beyond what is reckoned with; of phases alone, what computes on tells nothing."""
        spec, twin = self._task.spec, self._plant.fork()
        twin.apply(Command(spec.min_limit_w + position * (spec.max_limit_w - spec.min_limit_w)))
        telemetry = twin.advance()
        beyond: FloatArray = telemetry.meter_w - self._loop.reckoned_w(position)
        steady = computing & (telemetry.phase == Phase.COMPUTE) & ("draws" not in self._knows)
        return np.where(steady, 0.0, beyond)


KNOWLEDGE: tuple[tuple[str, frozenset[str]], ...] = (
    ("nothing more", frozenset()),
    ("signal to come", frozenset({"preview"})),
    ("phases of the coming period", frozenset({"phases"})),
    ("exact sensors", frozenset({"sensors"})),
    ("true surfaces", frozenset({"surfaces"})),
    ("surfaces and phases", frozenset({"surfaces", "phases"})),
    ("draw of each job in the coming period", frozenset({"draws"})),
)


def _knowledge(families: list[str], scenarios: int, jobs: int, episode_s: float, run: Path | None) -> None:
    recipe = _recipe("advice")
    settings = recipe.action.loop
    assert settings is not None
    env = recipe.model_copy(update={"site": recipe.site.model_copy(update={"jobs": jobs})})
    seeds = range(500, 500 + scenarios)
    print("| family | the loop knows | score + throughput | difference | MAE / R |")
    print("|---|---|---|---|---|")
    for family in families:
        config = held_out(commanding(env), family, "validation", episode_s)
        uncapped = Arena(config).run(make_baseline("uncapped"), seeds)
        entrants: list[tuple[str, PowerShapingConfig, Emulator, Controller]] = []
        for label, knows in KNOWLEDGE:
            plant = ExactSensors(config) if "sensors" in knows else Emulator(config)
            entrants.append((label, config, plant, Knowing(settings, plant, knows)))
        if run is not None:
            policy = load_policy(run)
            own = held_out(policy.config.env, family, "validation", episode_s)  # type: ignore[union-attr]
            entrants.append(("what a policy tells it", own, Emulator(own), policy.controller))
        entrants.append(("oracle MPC", config, Emulator(config), make_baseline("oracle MPC")))
        entrants.append(("MPC", config, Emulator(config), make_baseline("MPC")))
        plain: FloatArray | None = None
        for label, where, plant, controller in entrants:
            metrics = scenario_metrics(Arena(where, plant).run(controller, seeds), uncapped)
            value = (metrics["pjm_composite"] + metrics["throughput_retained"]) / 2.0
            plain = value if plain is None else plain
            found = paired_difference(value, plain, nan_policy="omit")
            difference = f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
            error = metrics["mae_over_r"].mean()
            print(f"| {family} | {label} | {np.nanmean(value):.4f} | {difference} | {error:.3f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
