"""The myopic oracle: the most true progress per second of the coming round, with full knowledge of it."""

from __future__ import annotations

import numpy as np

from wattgym.agents.selectors.powertrip import power_to_cost
from wattgym.agents.selectors.ranking import pick, prefixes
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray, FloatArray
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.view import SelectionView
from wattgym.errors import UserError

EXHAUSTIVE = 8
"""Up to this many eligible sites every set is tried."""

_MOVES = 200
"""Most improvements of a local search; it ends by itself long before."""


class MyopicOracle(Memoryless):
    """`S = argmax  Δ log(true loss) / T(S)` on the true power to come, learning parameters and domain coverage.

    With at most `EXHAUSTIVE` eligible sites every non-empty set is tried. With more, the best of the ceiling sets
    (for any communication ceiling, every eligible site under it: optimal under model A if progress depended on the
    round's length alone), of the prefixes by power over cost and by own time is improved
    by local search: one site in or out, or one for another, as long as that helps. What it maximises is the next
    round; it is no bound on the time to the target, since it neither spares a domain for later nor sees the last
    round's overshoot.
    """

    def __init__(self, name: str = "myopic oracle", foresee: bool = False, steady: bool = False) -> None:
        """Configures the oracle.

        Args:
            name: Name in tables.
            foresee: Whether it also knows which sites the round will slow down or lose. Without, it plans as if none.
            steady: Whether it takes power to stay as it is: what is lost against that is worth knowing power to come.
        """
        self.name = name
        self._foresee, self._steady = foresee, steady

    def act(self, turn: Turn) -> BoolArray:
        """The best set found."""
        truth = turn.truth
        if truth is None:
            raise UserError(f"'{self.name}' needs an emulated federation; a live one cannot be seen through")
        return best_sets(truth, turn.view, self._foresee, steady=self._steady)


def best_sets(
    truth: FederationEmulator,
    view: SelectionView,
    foresee: bool = False,
    exhaustive: int = EXHAUSTIVE,
    steady: bool = False,
) -> BoolArray:
    """The set with the most true progress per second in each environment, shape `(B, N)`.

    Args:
        truth: The federation.
        view: What is known.
        foresee: Whether stragglers and dropouts of the round are known.
        steady: Whether power is taken to stay as it is, in place of the true power to come.
        exhaustive: Up to this many eligible sites every set is tried.
    """
    eligible = view.known.eligible
    few = eligible.sum(axis=1) <= exhaustive
    chosen = np.zeros_like(eligible)
    if few.any():
        sets = subsets(eligible & few[:, None])
        chosen = pick(sets, truth.imagine(sets, foresee, steady).per_second.argmax(axis=1))
    if not few.all():
        chosen = np.where(few[:, None], chosen, _searched(truth, view, foresee, steady))
    return chosen


def subsets(sites: BoolArray) -> BoolArray:
    """Every non-empty set of some sites, shape `(B, C, N)`; environments with fewer sites repeat theirs.

    Args:
        sites: Shape `(B, N)`.
    """
    position = np.cumsum(sites, axis=1) - 1
    bits = np.arange(1, max(2 ** int(sites.sum(axis=1).max()), 2))
    sets: BoolArray = ((bits[None, :, None] >> position[:, None, :]) & 1).astype(bool) & sites[:, None, :]
    return sets


def ceiling_sets(view: SelectionView) -> BoolArray:
    """For each communication time, every eligible site at or under it, shape `(B, N, N)`."""
    return prefixes(-view.task.comm_s, view.known.eligible)


def _searched(truth: FederationEmulator, view: SelectionView, foresee: bool, steady: bool) -> BoolArray:
    eligible = view.known.eligible
    sets = np.concatenate(
        [
            ceiling_sets(view),
            prefixes(power_to_cost(view), eligible),
            prefixes(-view.alone_seconds(), eligible),
        ],
        axis=1,
    )
    worth = truth.imagine(sets, foresee, steady).per_second
    index = worth.argmax(axis=1)
    best, value = pick(sets, index), worth.max(axis=1)
    for _ in range(_MOVES):
        moved = _improve(truth, best, value, _flips(best), foresee, steady)
        if not moved.any():
            moved = _improve(truth, best, value, _swaps(best, eligible), foresee, steady)
        if not moved.any():
            break
    return best


def _improve(
    truth: FederationEmulator, best: BoolArray, value: FloatArray, sets: BoolArray, foresee: bool, steady: bool
) -> BoolArray:
    """Takes the best neighbour where it is better, in place; says where."""
    worth = truth.imagine(sets, foresee, steady).per_second
    highest = worth.max(axis=1)
    moved: BoolArray = highest > value * (1.0 + 1e-9)
    best[moved] = pick(sets, worth.argmax(axis=1))[moved]
    value[moved] = highest[moved]
    return moved


def _flips(chosen: BoolArray) -> BoolArray:
    """Each site in or out, shape `(B, N, N)`."""
    return chosen[:, None, :] ^ np.eye(chosen.shape[1], dtype=bool)


def _swaps(chosen: BoolArray, eligible: BoolArray) -> BoolArray:
    """One member for one other, shape `(B, C, N)`.

    There are as many candidates as in the environment that has most; the others repeat the set itself.
    """
    moves = chosen[:, :, None] & (eligible & ~chosen)[:, None, :]
    most = max(int(moves.sum(axis=(1, 2)).max()), 1)
    sets = np.repeat(chosen[:, None, :], most, axis=1)
    row, out, into = np.nonzero(moves)
    first = np.searchsorted(row, np.arange(chosen.shape[0]))
    slot = np.arange(row.size) - first[row]
    sets[row, slot, out] = False
    sets[row, slot, into] = True
    return sets
