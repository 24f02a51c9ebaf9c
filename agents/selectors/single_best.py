"""One site alone: what training without a federation reaches."""

from __future__ import annotations

import numpy as np

from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray


class SingleBest(Memoryless):
    """`S = {argmax_k  local work of a round of k alone / its predicted time}`, chosen anew each round."""

    name = "single best"

    def act(self, turn: Turn) -> BoolArray:
        """The site with the most local work per second."""
        view = turn.view
        chosen: BoolArray = np.arange(view.task.exists.shape[1]) == view.best_site()[:, None]
        return chosen & view.known.eligible
