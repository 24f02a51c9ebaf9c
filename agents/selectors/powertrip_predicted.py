"""PowerTrip's dynamic greedy with predicted efficiency (reconstruction; formulae in `powertrip.py`)."""

from __future__ import annotations

from wattgym.agents.selectors.powertrip import GreedySettings, greedy_stop, power_to_cost, predicted_efficiency
from wattgym.agents.selectors.ranking import pick, prefixes
from wattgym.agents.selectors.selector import Memoryless, Turn
from wattgym.envs.federation.arrays import BoolArray
from wattgym.envs.federation.view import SelectionView


def predicted_greedy(view: SelectionView, settings: GreedySettings) -> BoolArray:
    """The set at which the greedy on predicted efficiency stops, shape `(B, N)`."""
    eligible = view.known.eligible
    sets = prefixes(power_to_cost(view), eligible)
    stop = greedy_stop(predicted_efficiency(view, sets), eligible.sum(axis=1), settings)
    return pick(sets, stop)


class PowerTripPredicted(Memoryless):
    """Sites in the order of `h_k`, added while `η(S_m) = a(S_m) / T(S_m)` grows.

    The set is chosen anew each round: predictions cost nothing, so every power sample and every absence counts at once.
    """

    name = "PowerTrip predicted"

    def __init__(self, settings: GreedySettings | None = None) -> None:
        self._settings = settings or GreedySettings()

    def act(self, turn: Turn) -> BoolArray:
        """The greedy's set at the present power."""
        return predicted_greedy(turn.view, self._settings)
