"""Runs a selector through a batch of federations and keeps what scores are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.agents.selectors.selector import Selector, Turn
from wattgym.envs.federation.arrays import BoolArray, FloatArray
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.learning import accuracy
from wattgym.envs.selection import SelectionOutcome, SiteSelection


@dataclass(frozen=True, eq=False)
class SelectionEpisode:
    """What a selector did in one federation over `T` rounds and waits; arrays are `(T,)` unless they say otherwise.

    Attributes:
        seed: Scenario seed.
        sites: Names of the sites.
        reached: Whether the target was reached.
        time_limit_s: Time that counts where it was not.
        start_loss: Loss before the first round, nats.
        seconds: Time that passed.
        communication_s: Time in which the round's slowest site communicated.
        chosen: Sites that took part, shape `(T, sites)`.
        counted: Sites whose update arrived, shape `(T, sites)`.
        waited: Whether no site was eligible.
        repaired: Whether the environment's choice stood in for an empty one.
        true_loss: Loss after it without the noise of evaluation, nats.
        accuracy: Accuracy that goes with it.
        energy_kwh: Facility energy.
        unused_kwh: Energy that eligible sites had available and did not use.
        carbon_kg: Emissions.
        cost_usd: Energy and egress.
        reward: Reward.
    """

    seed: int
    sites: tuple[str, ...]
    reached: bool
    time_limit_s: float
    start_loss: float
    seconds: FloatArray
    communication_s: FloatArray
    chosen: BoolArray
    counted: BoolArray
    waited: BoolArray
    repaired: BoolArray
    true_loss: FloatArray
    accuracy: FloatArray
    energy_kwh: FloatArray
    unused_kwh: FloatArray
    carbon_kg: FloatArray
    cost_usd: FloatArray
    reward: FloatArray


class SelectionArena:
    """One emulated environment configuration that rollouts reuse."""

    def __init__(self, config: SiteSelectionConfig) -> None:
        """Reads what federations are drawn from.

        Raises:
            UserError: The configuration cannot be met.
        """
        self.config = config
        self.selection = SiteSelection(config)

    def run(self, selector: Selector, seeds: Sequence[int]) -> tuple[SelectionEpisode, ...]:
        """Plays one episode per seed to its end, all side by side.

        An episode that has ended begins again, for the batch's sake, and what follows is dropped.

        Args:
            selector: Who chooses.
            seeds: Scenario seeds; equal seeds are identical scenarios for every selector.
        """
        selection = self.selection
        observation = selection.reset(seeds)
        task = selection.task
        selector.reset(task)
        names = [task.names(row) for row in range(len(seeds))]
        start_loss = selection.emulator.true_loss.copy()
        length, reached = np.zeros(len(seeds), dtype=np.int64), np.zeros(len(seeds), dtype=bool)
        steps: list[Step] = []
        while (length == 0).any():
            outcome = selection.step(selector.act(Turn(selection.view, observation, selection.emulator)))
            steps.append(Step.of(outcome))
            observation = outcome.observation
            ended = outcome.terminated | outcome.truncated
            first = ended & (length == 0)
            length[first], reached[first] = len(steps), outcome.terminated[first]
            if ended.any() and (length == 0).any():
                rows = np.flatnonzero(ended)
                observation = selection.reset([seeds[row] for row in rows.tolist()], rows)
                selector.reset(selection.task, rows)
        return tuple(
            as_episode(
                steps[: length[row]],
                row,
                selection,
                seed=seeds[row],
                names=names[row],
                reached=bool(reached[row]),
                start_loss=float(start_loss[row]),
            )
            for row in range(len(seeds))
        )


def as_episode(
    steps: Sequence[Step],
    row: int,
    selection: SiteSelection,
    *,
    seed: int,
    names: tuple[str, ...],
    reached: bool,
    start_loss: float,
) -> SelectionEpisode:
    """The episode that steps of one row of a batch make.

    Args:
        steps: Its steps, at least one.
        row: The row.
        selection: The environment that it was played in.
        seed: Scenario seed.
        names: Names of the sites.
        reached: Whether the target was reached.
        start_loss: Loss before the first round, nats.
    """
    columns = {name: np.array([step.numbers[name][row] for step in steps]) for name in _NUMBERS}
    sites = slice(0, len(names))
    return SelectionEpisode(
        seed=seed,
        sites=names,
        reached=reached,
        time_limit_s=selection.config.goal.time_limit_s,
        start_loss=start_loss,
        chosen=np.stack([step.chosen[row, sites] for step in steps]),
        counted=np.stack([step.counted[row, sites] for step in steps]),
        waited=np.array([step.waited[row] for step in steps]),
        repaired=np.array([step.repaired[row] for step in steps]),
        accuracy=accuracy(selection.emulator.library.learning, columns["true_loss"]),
        **columns,
    )


_NUMBERS = (
    "seconds",
    "communication_s",
    "true_loss",
    "energy_kwh",
    "unused_kwh",
    "carbon_kg",
    "cost_usd",
    "reward",
)


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """What is kept of a step of the whole batch."""

    numbers: dict[str, FloatArray]
    chosen: BoolArray
    counted: BoolArray
    waited: BoolArray
    repaired: BoolArray

    @classmethod
    def of(cls, outcome: SelectionOutcome) -> Step:
        """Copies it from an outcome."""
        result = outcome.result
        # Copied: the federation goes on writing into some of its arrays.
        numbers = {
            name: np.array(getattr(outcome if name in ("true_loss", "reward") else result, name)) for name in _NUMBERS
        }
        played = result.played
        return cls(numbers, played.chosen.copy(), played.counted.copy(), result.waited.copy(), outcome.repaired.copy())
