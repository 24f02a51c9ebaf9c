"""Power only: the sites with the most available power, whatever their links."""

from __future__ import annotations

from wattgym.agents.selectors.ranking import Share, best_k
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray


class PowerTopK(Memoryless):
    """`S` = the k eligible sites with the highest `P_k`, at the present power sample."""

    name = "power-only top k"

    def __init__(self, settings: Share | None = None) -> None:
        self._settings = settings or Share()

    def act(self, turn: Turn) -> BoolArray:
        """The k strongest."""
        known = turn.view.known
        return best_k(known.power_w, known.eligible, self._settings.count(known.eligible))
