"""Deadline selection after FedCS: as many sites as fit into a deadline (Nishio and Yonetani, ICC 2019)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.agents.selectors.ranking import pick, prefixes
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.config import FrozenModel
from wattgym.envs.federation.arrays import BoolArray


class DeadlineSettings(FrozenModel):
    """How long a round may take.

    Attributes:
        slack: Deadline over the shortest round that any of the sets considered would take now.
    """

    slack: float = Field(default=1.5, ge=1.0)


class FedCS(Memoryless):
    """The most sites whose predicted round meets the deadline.

    FedCS adds the client that prolongs the round least until the deadline is met; its clients upload one after
    another. Here transfers run side by side, so sites are added in the order of their own predicted time in a round
    with everybody, and of the sets `S_1 ⊂ S_2 ⊂ …` the largest with `T(S_m) ≤ slack · min_m T(S_m)` is taken. FedCS
    fixes its deadline in seconds; as a multiple of the shortest round it fits federations of any size and power.
    """

    name = "FedCS-like deadline"

    def __init__(self, settings: DeadlineSettings | None = None) -> None:
        self._settings = settings or DeadlineSettings()

    def act(self, turn: Turn) -> BoolArray:
        """The largest set in time."""
        view = turn.view
        eligible = view.known.eligible
        sets = prefixes(-view.site_seconds(eligible), eligible)
        seconds = view.round_seconds(sets)
        fits = seconds <= self._settings.slack * seconds.min(axis=1, keepdims=True)
        largest = sets.shape[1] - 1 - np.argmax(fits[:, ::-1], axis=1)
        return pick(sets, largest)
