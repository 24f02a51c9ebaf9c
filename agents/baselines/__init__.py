"""Power-shaping controllers that a learned policy has to beat, by name."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from wattgym.agents.baselines.feedback import Feedback
from wattgym.agents.baselines.static import RandomLimits, StaticCap, Uncapped
from wattgym.agents.controller import Controller
from wattgym.config import FrozenModel, load_config
from wattgym.envs.feedback import FeedbackGains
from wattgym.errors import UserError

ENERGY_MATCHED = "energy-matched cap"
"""A static cap that uses as much energy as the controller it is compared with; the evaluator finds its level."""

BASELINES = ("uncapped", "static cap", ENERGY_MATCHED, "feed-forward", "PI", "feed-forward + PI", "random")
"""Every baseline, weakest knowledge first."""

TUNED_FILE = Path(__file__).with_name("tuned.yaml")

_NO_FEEDBACK = FeedbackGains(proportional=0.0, integral=0.0)


class TunedGains(FrozenModel):
    """Gains found by `wattgym tune-baselines`, with what they cost to find.

    Attributes:
        command: Command that wrote the file.
        budget: Gain settings tried per controller, each on the same training scenarios.
        scenarios: Training scenarios per setting.
        objective: What was maximised.
        gains: Best gains by controller.
        objective_value: The objective they reached, by controller.
    """

    command: str
    budget: int = Field(ge=1)
    scenarios: int = Field(ge=1)
    objective: str
    gains: dict[str, FeedbackGains]
    objective_value: dict[str, float]


def load_tuned(path: str | Path = TUNED_FILE) -> TunedGains:
    """The tuned gains, from the shipped file or another one.

    Raises:
        UserError: The file is missing or does not fit.
    """
    return load_config(TunedGains, path)


def feedback_baseline(name: str, gains: FeedbackGains) -> Feedback:
    """One of the feedback baselines with given gains."""
    return Feedback(name, gains, "base" if name == "PI" else "feed_forward")


def make_baseline(name: str, tuned: TunedGains | None = None) -> Controller:
    """A baseline by name, except the energy-matched cap, which needs a controller to match.

    Args:
        name: One of `BASELINES`.
        tuned: Gains of the feedback baselines; the shipped ones if None.

    Raises:
        UserError: Unknown name.
    """
    if name == "uncapped":
        return Uncapped()
    if name == "static cap":
        return StaticCap()
    if name == "random":
        return RandomLimits()
    if name == "feed-forward":
        return feedback_baseline(name, _NO_FEEDBACK)
    if name in ("PI", "feed-forward + PI"):
        gains = (tuned or load_tuned()).gains
        if name not in gains:
            raise UserError(f"the tuned gains hold nothing for '{name}'; they hold: {', '.join(gains)}")
        return feedback_baseline(name, gains[name])
    raise UserError(f"unknown baseline '{name}'; known: {', '.join(BASELINES)}")


def select_baselines(names: str) -> tuple[str, ...]:
    """Baselines from a command-line list: `all`, `none`, or names separated by commas.

    Raises:
        UserError: Unknown name.
    """
    if names == "all":
        return BASELINES
    if names == "none":
        return ()
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in BASELINES:
            raise UserError(f"unknown baseline '{name}'; known: all, none, {', '.join(BASELINES)}")
    return chosen
