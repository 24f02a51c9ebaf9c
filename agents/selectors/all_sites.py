"""Everybody: full participation, as in FedAvg without sampling (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray


class AllSites(Memoryless):
    """`S = {k : eligible}`."""

    name = "all sites"

    def act(self, turn: Turn) -> BoolArray:
        """Every eligible site."""
        return turn.view.known.eligible
