"""What a hyper-parameter search may change in a training configuration, and within which ranges."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from wattgym.config import FrozenModel

SEARCHABLE = ("train.", "network.", "imitation.", "env.reward.", "env.action.", "env.observation.")
"""Beginnings of the keys that may be searched; others would change the scenarios that policies are compared on."""


class SearchRange(FrozenModel):
    """Where one key's value is searched: a range, of whole numbers if both ends are whole, or a choice.

    Attributes:
        low: Lower end.
        high: Upper end.
        log: Search the range on a logarithmic scale.
        step: Distance of the values in the range.
        choices: Values to choose from.
    """

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = Field(default=None, gt=0)
    choices: tuple[Any, ...] = ()

    @model_validator(mode="after")
    def _one_kind(self) -> SearchRange:
        ends = (self.low, self.high)
        if self.choices:
            if ends != (None, None) or self.log or self.step is not None:
                raise ValueError("choices exclude low, high, log and step")
            return self
        if self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} must lie below high {self.high:g}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs a positive low and excludes step")
        if self.whole and self.step is not None and not isinstance(self.step, int):
            raise ValueError(f"step {self.step:g} must be a whole number, as both ends are")
        return self

    @property
    def whole(self) -> bool:
        """Whether the range is one of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def samples(self) -> tuple[Any, ...]:
        """Every choice, or the ends: values that a configuration has to accept."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial: Any, key: str) -> Any:
        """A value for an Optuna trial."""
        if self.choices:
            # Optuna stores plain values; a list is chosen by its place.
            return self.choices[trial.suggest_categorical(key, list(range(len(self.choices))))]
        if self.whole:
            return trial.suggest_int(key, self.low, self.high, log=self.log, step=self.step or 1)
        return trial.suggest_float(key, self.low, self.high, log=self.log, step=self.step)

    def value(self, parameter: Any) -> Any:
        """The value that a stored parameter of a trial stands for."""
        return self.choices[parameter] if self.choices else parameter


def with_values(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested mappings with dotted keys replaced.

    Args:
        data: Nested mappings.
        values: New values by dotted key; missing mappings on the way are made.
    """
    changed = copy.deepcopy(dict(data))
    for key, value in values.items():
        *path, last = key.split(".")
        branch = changed
        for part in path:
            below = branch.get(part)
            branch[part] = below = below if isinstance(below, dict) else {}
            branch = below
        branch[last] = value
    return changed
