"""The loop of a live federated run: select, train, record; the same for every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from wattgym.agents.selection_rollout import SelectionEpisode, Step, as_episode
from wattgym.agents.selectors.selector import Selector, Turn
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.selection import SelectionOutcome, SiteSelection
from wattgym.errors import UserError
from wattgym.federated.log import RoundLog
from wattgym.federated.messages import Assignment, Evaluation, RoundRecord
from wattgym.federated.selection import LiveFederation

LONGEST_WAIT_S = 300.0
"""On the wall clock a federation without an eligible site looks again after at most this time."""


class Rounds(Protocol):
    """What trains: `wattgym.federated.federation.Federation` over any engine."""

    def evaluate(self) -> Evaluation:
        """The global adapter as it is now."""
        ...

    def run_round(self, assignments: Mapping[str, Assignment]) -> RoundRecord:
        """Plays the next round with the sites named."""
        ...


@dataclass(frozen=True)
class SelectionPlan:
    """How a run is selected and for how long.

    Attributes:
        env: The selection environment; its sites are the federation's, by name.
        domains: Names of the learning domains of the data.
        rounds: Rounds at most; the run ends earlier at the target or the time limit of `env.goal`.
        seed: Seed of what the emulated federation draws.
        reference_steps: Local steps that stand for `env.learning.reference_samples` emulated samples.
        wall_clock: Whether time and energy are the measured ones.
    """

    env: SiteSelectionConfig
    domains: tuple[str, ...]
    rounds: int
    seed: int
    reference_steps: int
    wall_clock: bool = False


@dataclass(frozen=True, eq=False)
class Progress:
    """A round as it is shown while the run goes on.

    Attributes:
        record: What was recorded.
        outcome: What the selection environment made of it.
    """

    record: RoundRecord | None
    outcome: SelectionOutcome


class ReplayedRounds:
    """Plays the recorded rounds of an interrupted run again without training, then goes on with real ones.

    The selector and the environment see what they saw, so both are where they were, whatever they remember.
    """

    def __init__(self, rounds: Rounds, log: RoundLog) -> None:
        self._rounds = rounds
        self._left = [record for record in log.records if record.round > 0]
        self._path = log.path

    @property
    def replaying(self) -> bool:
        """Whether recorded rounds are left."""
        return bool(self._left)

    def run_round(self, assignments: Mapping[str, Assignment]) -> RoundRecord:
        """The next round.

        Raises:
            UserError: The recorded round had other sites than this selector chooses.
        """
        if not self._left:
            return self._rounds.run_round(assignments)
        record = self._left.pop(0)
        theirs = {outcome.site for outcome in record.outcomes}
        if theirs != set(assignments):
            raise UserError(
                f"{self._path}: round {record.round} was played with {_names(theirs)}, this run selects "
                f"{_names(assignments)}; resume with the policy, federation and seed that began it"
            )
        return record


def run_rounds(
    rounds: Rounds,
    selector: Selector,
    plan: SelectionPlan,
    log: RoundLog,
    show: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> SelectionEpisode | None:
    """Selects and trains until the target, the last round or a stop; every round is on disk before the next begins.

    Args:
        rounds: What trains, standing where the log ends.
        selector: Who chooses.
        plan: How.
        log: Where rounds are recorded; those in it already are not trained again.
        show: Told every round that is played now.
        stop: Asked between rounds.

    Returns:
        The whole run in the evaluator's form; None if not one round was played.

    Raises:
        UserError: The log does not fit the run, or nothing can be evaluated.
    """
    if not log.lines:
        log.append(_start_record(rounds.evaluate(), plan.wall_clock), selector=selector.name)
    _check_selector(log, selector)
    replay = ReplayedRounds(rounds, log)
    live = LiveFederation(
        plan.env,
        plan.domains,
        log.records[0].evaluation,
        replay.run_round,
        reference_steps=plan.reference_steps,
        wall_clock=plan.wall_clock,
    )
    selection = SiteSelection(plan.env, live)
    observation = selection.reset([plan.seed])
    selector.reset(selection.task)
    steps: list[Step] = []
    accuracy: list[float] = []
    reached = False
    while not stop() and int(live.telemetry.rounds[0]) < plan.rounds:
        replayed = replay.replaying
        outcome = selection.step(selector.act(Turn(selection.view, observation)))
        observation = outcome.observation
        steps.append(Step.of(outcome))
        accuracy.append(live.evaluation.accuracy)
        if not replayed:
            record = live.record
            if record is not None:
                log.append(record, **_more(outcome))
            elif plan.wall_clock and bool(outcome.result.waited[0]):
                time.sleep(min(float(outcome.result.seconds[0]), LONGEST_WAIT_S))
            show(Progress(record, outcome))
        reached = bool(outcome.terminated[0])
        if reached or bool(outcome.truncated[0]):
            break
    if not steps:
        return None
    episode = as_episode(
        steps,
        0,
        selection,
        seed=plan.seed,
        names=live.names,
        reached=reached,
        start_loss=log.records[0].evaluation.loss,
    )
    # Where accuracy was measured, it replaces the learning model's map of the loss.
    return replace(episode, accuracy=np.array(accuracy)) if np.isfinite(accuracy).all() else episode


def _start_record(evaluation: Evaluation, wall_clock: bool) -> RoundRecord:
    return RoundRecord(
        round=0,
        seconds=0.0,
        time_s=0.0,
        outcomes=(),
        evaluation=evaluation,
        effective_sites=0.0,
        noise_scale=float("nan"),
        emulated_clock=not wall_clock,
    )


def _more(outcome: SelectionOutcome) -> dict[str, Any]:
    """What the environment adds to a line of the log: times, energy and cost on the run's own clock."""
    result = outcome.result
    return {
        "unix_s": time.time(),
        "clock_s": float(outcome.time_s[0]),
        "clock_round_s": float(result.seconds[0]),
        "communication_s": float(result.communication_s[0]),
        "energy_kwh": float(result.energy_kwh[0]),
        "unused_kwh": float(result.unused_kwh[0]),
        "carbon_kg": float(result.carbon_kg[0]),
        "cost_usd": float(result.cost_usd[0]),
        "repaired": bool(outcome.repaired[0]),
    }


def _check_selector(log: RoundLog, selector: Selector) -> None:
    began = log.lines[0][1].get("selector")
    if began != selector.name:
        raise UserError(f"{log.path}: the run was begun by '{began}', not by '{selector.name}'")


def _names(sites: Sequence[str] | set[str] | Mapping[str, Any]) -> str:
    return ", ".join(sorted(sites)) or "nobody"
