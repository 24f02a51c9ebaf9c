"""Nearest only: the sites that communicate fastest, whatever their power."""

from __future__ import annotations

from wattgym.agents.selectors.ranking import Share, best_k
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray


class NearestTopK(Memoryless):
    """`S` = the k eligible sites with the lowest communication time `c_k` of a round."""

    name = "nearest-only top k"

    def __init__(self, settings: Share | None = None) -> None:
        self._settings = settings or Share()

    def act(self, turn: Turn) -> BoolArray:
        """The k nearest."""
        eligible = turn.view.known.eligible
        return best_k(-turn.view.task.comm_s, eligible, self._settings.count(eligible))
