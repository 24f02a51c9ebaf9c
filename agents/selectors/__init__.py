"""Site selectors that a learned policy has to beat, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from wattgym.agents.selectors.all_sites import AllSites
from wattgym.agents.selectors.fastest_k import FastestK
from wattgym.agents.selectors.fedcs import DeadlineSettings, FedCS
from wattgym.agents.selectors.nearest_top_k import NearestTopK
from wattgym.agents.selectors.oort import Oort, OortSettings
from wattgym.agents.selectors.oracle import MyopicOracle
from wattgym.agents.selectors.planner import HorizonPlanner
from wattgym.agents.selectors.power_top_k import PowerTopK
from wattgym.agents.selectors.powertrip import GreedySettings
from wattgym.agents.selectors.powertrip_measured import MeasuredSettings, PowerTripMeasured
from wattgym.agents.selectors.powertrip_predicted import PowerTripPredicted
from wattgym.agents.selectors.powertrip_static import PowerTripStatic
from wattgym.agents.selectors.random_k import RandomK
from wattgym.agents.selectors.ranking import Share
from wattgym.agents.selectors.selector import Selector
from wattgym.agents.selectors.single_best import SingleBest
from wattgym.agents.selectors.ucb import Ucb, UcbSettings
from wattgym.config import FrozenModel, load_config, parse_config
from wattgym.errors import UserError

REFERENCE = "PowerTrip predicted"
"""What times to the target are expressed in."""

_PLAIN = {
    "all sites": AllSites,
    "single best": SingleBest,
    "myopic oracle": MyopicOracle,
    "clairvoyant oracle": lambda: MyopicOracle("clairvoyant oracle", foresee=True),
    "present-power oracle": lambda: MyopicOracle("present-power oracle", steady=True),
    "horizon planner": HorizonPlanner,
}
"""Selectors without settings."""

_TUNABLE: dict[str, tuple[type[FrozenModel], Any]] = {
    "random k": (Share, RandomK),
    "power-only top k": (Share, PowerTopK),
    "nearest-only top k": (Share, NearestTopK),
    "fastest k": (Share, FastestK),
    "FedCS-like deadline": (DeadlineSettings, FedCS),
    "Oort": (OortSettings, Oort),
    "UCB per site": (UcbSettings, Ucb),
    "PowerTrip static": (GreedySettings, PowerTripStatic),
    "PowerTrip measured": (MeasuredSettings, PowerTripMeasured),
    REFERENCE: (GreedySettings, PowerTripPredicted),
}
"""Settings and class of each selector that has any."""

ORACLES = ("present-power oracle", "myopic oracle", "clairvoyant oracle", "horizon planner")
"""Selectors that see the true federation."""

SELECTORS = ("all sites", "single best", *_TUNABLE, *ORACLES)
"""Every selector, weakest knowledge first."""

STANDARD = tuple(name for name in SELECTORS if name != "horizon planner")
"""Selectors of an evaluation by default; the planner is for small federations."""

TUNED_FILE = Path(__file__).with_name("tuned.yaml")


class FamilySettings(FrozenModel):
    """What tuning found for one scenario family.

    Attributes:
        settings: Best settings by selector.
        objective_value: The objective they reached, by selector.
    """

    settings: dict[str, dict[str, Any]]
    objective_value: dict[str, float]


class TunedSelectors(FrozenModel):
    """Settings found by `wattgym tune-baselines`, with what they cost to find.

    Attributes:
        command: Command that wrote the file.
        budget: Settings tried per selector, each on the same training scenarios.
        scenarios: Training scenarios per setting.
        objective: What was minimised.
        families: What was found, by scenario family.
    """

    command: str
    budget: int = Field(ge=1)
    scenarios: int = Field(ge=1)
    objective: str
    families: dict[str, FamilySettings]

    def of(self, family: str) -> Mapping[str, Mapping[str, Any]]:
        """Settings of a family by selector; empty for a family that nothing was tuned on."""
        return self.families[family].settings if family in self.families else {}


def load_tuned_selectors(path: str | Path = TUNED_FILE) -> TunedSelectors:
    """The tuned settings, from the shipped file or another one.

    Raises:
        UserError: The file is missing or does not fit.
    """
    return load_config(TunedSelectors, path)


def make_selector(name: str, settings: Mapping[str, Any] | None = None) -> Selector:
    """A selector by name.

    Args:
        name: One of `SELECTORS`.
        settings: Its settings; defaults where left out.

    Raises:
        UserError: Unknown name, or settings that do not fit.
    """
    if name in _PLAIN:
        if settings:
            raise UserError(f"'{name}' has no settings, got {', '.join(settings)}")
        plain: Selector = _PLAIN[name]()  # type: ignore[operator]
        return plain
    if name in _TUNABLE:
        model, build = _TUNABLE[name]
        tuned: Selector = build(parse_config(model, dict(settings or {}), f"settings of '{name}'"))
        return tuned
    raise UserError(f"unknown selector '{name}'; known: {', '.join(SELECTORS)}")


def select_selectors(names: str) -> tuple[str, ...]:
    """Selectors from a command-line list: `all` (those of `STANDARD`), `none`, or names separated by commas.

    Raises:
        UserError: Unknown name.
    """
    if names == "all":
        return STANDARD
    if names == "none":
        return ()
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in SELECTORS:
            raise UserError(f"unknown selector '{name}'; known: all, none, {', '.join(SELECTORS)}")
    return chosen


def settings_of(name: str) -> type[FrozenModel] | None:
    """The model of a selector's settings; None if it has none."""
    return _TUNABLE[name][0] if name in _TUNABLE else None
