"""Fastest: the sites that would be through first on their own, by power and link together."""

from __future__ import annotations

from wattgym.agents.selectors.ranking import Share, best_k
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray


class FastestK(Memoryless):
    """`S` = the k eligible sites with the shortest predicted round alone, `W_k / r_k + c_k`.

    `W_k` is the whole round's work under model A, the site's own epochs under model B.
    """

    name = "fastest k"

    def __init__(self, settings: Share | None = None) -> None:
        self._settings = settings or Share()

    def act(self, turn: Turn) -> BoolArray:
        """The k fastest."""
        eligible = turn.view.known.eligible
        return best_k(-turn.view.alone_seconds(), eligible, self._settings.count(eligible))
