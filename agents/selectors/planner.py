"""A full-horizon plan for small federations: the strongest reference, found by beam search with full knowledge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.agents.selectors.oracle import subsets
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.power import STEP_S
from wattgym.envs.federation.rounds import Moment
from wattgym.envs.federation.view import SelectionTask
from wattgym.errors import UserError

MOST_SITES = 8
"""Largest federation that is planned for: each state branches into every set of its sites."""


@dataclass(eq=False)
class _Beam:
    """States of one federation's plans: `W` of them, with the sets played so far, shape `(W, rounds, N)`."""

    moment: Moment
    played: BoolArray


class HorizonPlanner:
    """Plans all rounds to the target before the first one, on the true power, learning parameters and domain coverage.

    Beam search: from every state kept, every non-empty set of the sites that have power is played through the round
    model; states are ranked by time so far plus time still needed, estimated from the effective site-rounds S that
    are missing at the best rate that any set reaches from any state kept:

        S = S₀ (((L₀ − E) / (L − E))^(1/β) − 1)        f = t + (S_target − S) / max (ΔS / T)

    and the best `width` are kept, the path of the myopic oracle always among them. The plan with the earliest arrival
    is followed. It is a strong reference and *no bound*: a beam may lose the best plan, the estimate is not
    admissible, and stragglers and dropouts are not foreseen (sites that are away when their round comes sit out;
    after the planned rounds the last set goes on).
    """

    name = "horizon planner"

    def __init__(self, width: int = 32, rounds: int = 200) -> None:
        """Configures the search.

        Args:
            width: States kept.
            rounds: Longest plan; what has not arrived by then is followed as far as it goes.
        """
        self._width = width
        self._most_rounds = rounds

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Forgets the plans."""
        batch = task.count.size
        if rows is None:
            self._plans: list[BoolArray | None] = [None] * batch
        else:
            for row in rows.tolist():
                self._plans[row] = None

    def act(self, turn: Turn) -> BoolArray:
        """The planned set of the round.

        Raises:
            UserError: There is no emulated federation, or it has more than `MOST_SITES` sites.
        """
        truth, known = turn.truth, turn.view.known
        if truth is None:
            raise UserError(f"'{self.name}' needs an emulated federation; a live one cannot be seen through")
        if int(turn.view.task.count.max()) > MOST_SITES:
            raise UserError(
                f"'{self.name}' plans for at most {MOST_SITES} sites, this federation has {turn.view.task.count.max()}"
            )
        chosen: BoolArray = np.zeros_like(known.eligible)
        for row in range(known.eligible.shape[0]):
            plan = self._plans[row]
            if plan is None:
                plan = self._plans[row] = self._plan(truth, row)
            if len(plan):
                chosen[row] = plan[min(int(known.rounds[row] + known.waits[row]), len(plan) - 1)]
        chosen &= known.eligible
        return chosen

    def _plan(self, truth: FederationEmulator, row: int) -> BoolArray:
        """Sets of the rounds to come, shape `(rounds, N)`."""
        goal, limit = truth.library.target_loss, truth.config.goal.time_limit_s
        start = truth.moment(foresee=False).take(np.array([row]))
        beam = _Beam(start, np.zeros((1, 0, truth.federation.exists.shape[1]), dtype=bool))
        best_time, best = np.inf, beam.played[0]
        for _ in range(self._most_rounds):
            after, f = self._expand(truth, row, beam)
            arrived = after.moment.loss <= goal
            if arrived.any():
                first = int(np.where(arrived, after.moment.time_s, np.inf).argmin())
                if after.moment.time_s[first] < best_time:
                    best_time, best = float(after.moment.time_s[first]), after.played[first]
            going = np.flatnonzero(~arrived & (after.moment.time_s < min(best_time, limit)))
            if not going.size:
                break
            # The first state is the myopic path: it stays as long as it is under way, whatever its rank.
            rank = f[going] - np.where(going == 0, np.inf, 0.0)
            kept = going[np.argsort(rank, kind="stable")[: self._width]]
            beam = _Beam(after.moment.take(kept), after.played[kept])
        plan: BoolArray = best if np.isfinite(best_time) else beam.played[0]
        return plan

    def _expand(self, truth: FederationEmulator, row: int, beam: _Beam) -> tuple[_Beam, FloatArray]:
        """Every state after every set, the first state's best next round first, and estimated times of arrival."""
        before, chosen, parent = self._children(beam)
        same = np.full(parent.size, row)
        federation = truth.federation.take(same)
        outcome = truth.model.play(federation, truth.curve.take(same), before, chosen)
        # Where no site has power the federation waits for the next power sample.
        wait = (np.floor(before.time_s / STEP_S) + 1.0) * STEP_S - before.time_s
        seconds = np.where(chosen.any(axis=1), outcome.duration_s, wait)
        time_s = before.time_s + seconds
        power_w = truth.library.training_w(federation, (time_s / STEP_S).astype(np.int64))
        after = Moment(time_s, outcome.progress, outcome.loss, power_w, before.slow, before.lost_after_s)
        done, had = self._rounds(truth, row, outcome.loss), self._rounds(truth, row, before.loss)
        missing = self._rounds(truth, row, np.array(truth.library.target_loss)) - done
        # One rate for all states: a state does not look better for having left the quick gains undone.
        rate = float(((done - had) / seconds).max())
        f = time_s + np.maximum(missing, 0.0) / max(rate, 1e-12)
        myopic = np.where(parent == 0, np.log(before.loss / outcome.loss) / seconds, -np.inf)
        order = np.argsort(-myopic, kind="stable")
        order = np.concatenate([order[:1], np.sort(order[1:])])
        played = np.concatenate([beam.played[parent], chosen[:, None]], axis=1)
        return _Beam(after.take(order), played[order]), f[order]

    def _children(self, beam: _Beam) -> tuple[Moment, BoolArray, IntArray]:
        """The state before, the set, and the state's number of every child, without repetitions."""
        sets = subsets(beam.moment.power_w > 0.0)
        width, count, n = sets.shape
        parent, chosen = np.repeat(np.arange(width), count), sets.reshape(-1, n)
        first = np.unique(np.concatenate([parent[:, None], chosen], axis=1), axis=0, return_index=True)[1]
        return beam.moment.take(parent[first]), chosen[first], parent[first]

    def _rounds(self, truth: FederationEmulator, row: int, loss: FloatArray) -> FloatArray:
        """Effective site-rounds that would give a loss if every domain had the same."""
        learning, curve = truth.library.learning, truth.curve
        ratio = (learning.loss_start - learning.loss_floor) / np.maximum(loss - learning.loss_floor, 1e-9)
        rounds: FloatArray = curve.s0[row] * (ratio ** (1.0 / curve.beta[row]) - 1.0)
        return rounds
