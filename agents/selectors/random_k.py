"""Random sites: the client sampling of FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

import numpy as np

from wattgym.agents.selectors.ranking import Share, best_k
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.arrays import BoolArray, IntArray
from wattgym.envs.federation.view import SelectionTask


class RandomK:
    """`S` = k eligible sites, each set equally likely, drawn anew each round."""

    name = "random k"

    def __init__(self, settings: Share | None = None, seed: int = 0) -> None:
        self._settings = settings or Share()
        self._seed = seed

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Starts each environment's random sequence again."""
        if rows is None:
            self._rngs = [np.random.default_rng((self._seed, row)) for row in range(task.count.size)]
        else:
            for row in rows.tolist():
                self._rngs[row] = np.random.default_rng((self._seed, row))

    def act(self, turn: Turn) -> BoolArray:
        """A fresh draw."""
        eligible = turn.view.known.eligible
        score = np.stack([rng.random(eligible.shape[1]) for rng in self._rngs])
        return best_k(score, eligible, self._settings.count(eligible))
