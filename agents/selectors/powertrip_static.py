"""PowerTrip without its dynamics: the predicted greedy's set of the first round, kept (reconstruction)."""

from __future__ import annotations

import numpy as np

from wattgym.agents.selectors.powertrip import GreedySettings
from wattgym.agents.selectors.powertrip_predicted import predicted_greedy
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.arrays import BoolArray, IntArray
from wattgym.envs.federation.view import SelectionTask


class PowerTripStatic:
    """`S` is chosen at the first round in which any site is eligible; members that lack power sit out."""

    name = "PowerTrip static"

    def __init__(self, settings: GreedySettings | None = None) -> None:
        self._settings = settings or GreedySettings()

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Forgets the sets."""
        if rows is None:
            self._chosen = np.zeros(task.exists.shape, dtype=bool)
        else:
            self._chosen[rows] = False

    def act(self, turn: Turn) -> BoolArray:
        """The set of the start, as far as it is eligible."""
        new = ~self._chosen.any(axis=1)
        if new.any():
            self._chosen[new] = predicted_greedy(turn.view, self._settings)[new]
        return self._chosen & turn.view.known.eligible
