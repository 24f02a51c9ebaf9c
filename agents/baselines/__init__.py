"""Power-shaping controllers that a learned policy has to beat, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from wattgym.agents.baselines import (
    aqa,
    bandit,
    feedback,
    fixed,
    gpu_count,
    ofo,
    oracle,
    pause,
    powermorph,
    predictive,
    thresholds,
)
from wattgym.agents.baselines.feedback import Feedback
from wattgym.agents.baselines.settings import Range
from wattgym.agents.baselines.static import RandomLimits, StaticCap, Uncapped
from wattgym.agents.controller import Controller
from wattgym.config import FrozenModel, load_config, parse_config
from wattgym.envs.feedback import FeedbackGains
from wattgym.envs.knobs import KnobName
from wattgym.envs.loop_settings import PredictiveSettings
from wattgym.envs.site_model import Split
from wattgym.errors import UserError

ENERGY_MATCHED = "energy-matched cap"
"""A static cap that uses as much energy as the controller it is compared with; the evaluator finds its level."""

LIMIT_ONLY: tuple[KnobName, ...] = ("power_limit",)
"""Knobs of an environment that moves power limits alone."""

TUNED_FILES = (Path(__file__).with_name("tuned.yaml"), Path(__file__).with_name("tuned_knobs.yaml"))
"""Shipped settings: of baselines that need the power limit alone, and of those that need another knob."""

_NO_FEEDBACK = FeedbackGains(proportional=0.0, integral=0.0)

_PLAIN: Mapping[str, Callable[[], Controller]] = {
    "uncapped": Uncapped,
    "static cap": StaticCap,
    "random": RandomLimits,
    "feed-forward": lambda: Feedback("feed-forward", _NO_FEEDBACK, "feed_forward"),
    "feed-forward (best split)": lambda: Feedback("feed-forward (best split)", _NO_FEEDBACK, "feed_forward", "optimal"),
}


@dataclass(frozen=True)
class Tunable:
    """A baseline that is tuned.

    Attributes:
        settings: Model of its settings.
        search: Which of them are tuned, and where.
        build: Makes it from its settings.
        needs: Knobs that it cannot do without.
    """

    settings: type[FrozenModel]
    search: Mapping[str, Range]
    build: Callable[[Any], Controller]
    needs: tuple[KnobName, ...] = LIMIT_ONLY


def _feedback(name: str, start: Literal["feed_forward", "base"], split: Split = "proportional") -> Tunable:
    return Tunable(FeedbackGains, feedback.SEARCH, lambda gains: Feedback(name, gains, start, split))


def _predictive(name: str, split: Split) -> Tunable:
    build = lambda settings: predictive.PredictiveControl(settings, name, split)  # noqa: E731
    return Tunable(PredictiveSettings, predictive.SEARCH, build)


_TUNABLE: Mapping[str, Tunable] = {
    "PI": _feedback("PI", "base"),
    "feed-forward + PI": _feedback("feed-forward + PI", "feed_forward"),
    "feed-forward + PI (best split)": _feedback("feed-forward + PI (best split)", "feed_forward", "optimal"),
    "two thresholds": Tunable(thresholds.TwoThresholdSettings, thresholds.SEARCH, thresholds.TwoThreshold),
    "AQA-style rule": Tunable(aqa.AqaSettings, aqa.SEARCH, aqa.AqaRule),
    "online feedback optimisation": Tunable(ofo.OfoSettings, ofo.SEARCH, ofo.OnlineFeedback),
    "UCB bandit": Tunable(bandit.BanditSettings, bandit.SEARCH, bandit.UcbBandit),
    "MPC": _predictive("MPC", "proportional"),
    "MPC (best split)": _predictive("MPC (best split)", "optimal"),
    "oracle MPC": Tunable(oracle.OracleSettings, oracle.SEARCH, oracle.OracleControl),
    "Zeus-style fixed": Tunable(fixed.ZeusSettings, fixed.SEARCH, fixed.ZeusFixed),
    "PowerMorph (reconstruction)": Tunable(powermorph.PowerMorphSettings, powermorph.SEARCH, powermorph.PowerMorph),
    "GPU-count scaling": Tunable(gpu_count.GpuCountSettings, gpu_count.SEARCH, gpu_count.GpuCount, ("active_gpus",)),
    "pause/resume": Tunable(pause.PauseSettings, pause.SEARCH, pause.PauseResume, ("duty_cycle",)),
}

CORE = ("uncapped", "static cap", ENERGY_MATCHED, "feed-forward", "PI", "feed-forward + PI", "random")
"""The few that every comparison should have; cheap."""

BASELINES = (*CORE, *(name for name in (*_PLAIN, *_TUNABLE) if name not in CORE))
"""Every baseline."""

TUNABLE = tuple(_TUNABLE)
"""Those that `wattgym tune-baselines` tunes."""


ORACLES = ("oracle MPC",)
"""Yardsticks that are told what no controller can know; they run in the emulator only."""


def needs(name: str) -> tuple[KnobName, ...]:
    """Knobs that a baseline cannot do without."""
    return _TUNABLE[name].needs if name in _TUNABLE else LIMIT_ONLY


def usable(name: str, knobs: Sequence[str]) -> bool:
    """Whether an environment with these knobs has all that a baseline needs."""
    return set(needs(name)) <= set(knobs)


class TunedGains(FrozenModel):
    """Settings found by `wattgym tune-baselines`, with what they cost to find.

    Attributes:
        command: Command that wrote the file.
        budget: Settings tried per controller, each on the same training scenarios.
        scenarios: Training scenarios per setting.
        objective: What was maximised.
        gains: Best settings by controller.
        objective_value: The objective they reached, by controller.
    """

    command: str
    budget: int = Field(ge=1)
    scenarios: int = Field(ge=1)
    objective: str
    gains: dict[str, dict[str, Any]]
    objective_value: dict[str, float]

    def of(self, name: str) -> Mapping[str, Any]:
        """Settings of a controller.

        Raises:
            UserError: There are none.
        """
        if name not in self.gains:
            raise UserError(f"the tuned gains hold nothing for '{name}'; they hold: {', '.join(self.gains)}")
        return self.gains[name]


def load_tuned(path: str | Path | None = None) -> TunedGains:
    """The tuned settings: the shipped ones, or those of a file.

    Raises:
        UserError: The file is missing or does not fit.
    """
    if path is None:
        return _merged([load_tuned(shipped) for shipped in TUNED_FILES])
    tuned = load_config(TunedGains, path)
    for name, values in tuned.gains.items():
        if name not in _TUNABLE:
            raise UserError(f"{path}: gains.{name}: no such tunable baseline; known: {', '.join(TUNABLE)}")
        parse_config(_TUNABLE[name].settings, values, f"{path}: gains.{name}")
    return tuned


def _merged(parts: Sequence[TunedGains]) -> TunedGains:
    """The settings of files that were tuned with one budget."""
    first = parts[0]
    return TunedGains(
        command="; ".join(part.command for part in parts),
        budget=first.budget,
        scenarios=first.scenarios,
        objective=first.objective,
        gains={name: values for part in parts for name, values in part.gains.items()},
        objective_value={name: value for part in parts for name, value in part.objective_value.items()},
    )


def tunable(name: str) -> Tunable:
    """What is known of a baseline of `TUNABLE`."""
    return _TUNABLE[name]


def make_tunable(name: str, settings: Mapping[str, Any]) -> Controller:
    """A tunable baseline with given settings; defaults where left out.

    Raises:
        UserError: The settings do not fit.
    """
    entry = _TUNABLE[name]
    return entry.build(parse_config(entry.settings, dict(settings), f"settings of '{name}'"))


def feedback_baseline(name: str, gains: FeedbackGains) -> Controller:
    """One of the feedback baselines with given gains."""
    return _TUNABLE[name].build(gains)


def make_baseline(name: str, tuned: TunedGains | None = None) -> Controller:
    """A baseline by name, except the energy-matched cap, which needs a controller to match.

    Args:
        name: One of `BASELINES`.
        tuned: Settings of the tunable baselines; the shipped ones if None. Oracles have defaults where it lacks them.

    Raises:
        UserError: Unknown name, or the tuned settings hold nothing for it.
    """
    if name in _PLAIN:
        return _PLAIN[name]()
    if name in _TUNABLE:
        found = tuned or load_tuned()
        return make_tunable(name, {} if name in ORACLES and name not in found.gains else found.of(name))
    raise UserError(f"unknown baseline '{name}'; known: {', '.join(BASELINES)}")


def select_baselines(names: str, knobs: Sequence[str] = LIMIT_ONLY) -> tuple[str, ...]:
    """Baselines from a command-line list: `all`, `core`, `none`, or names separated by commas.

    Args:
        names: The list; `all` and `core` leave out what the knobs do not allow.
        knobs: Knobs of the environment.

    Raises:
        UserError: Unknown name, or a baseline that needs another knob.
    """
    sets: dict[str, tuple[str, ...]] = {"all": BASELINES, "core": CORE, "none": ()}
    if names in sets:
        return tuple(name for name in sets[names] if usable(name, knobs))
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in BASELINES:
            raise UserError(f"unknown baseline '{name}'; known: {', '.join(sets)}, {', '.join(BASELINES)}")
        if not usable(name, knobs):
            raise UserError(
                f"baseline '{name}' needs {' and '.join(needs(name))}; action.knobs enables {', '.join(knobs)}"
            )
    return chosen
