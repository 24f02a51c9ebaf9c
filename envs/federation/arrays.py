"""Structs of arrays with one row per environment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@cache
def _names(kind: type[Rows]) -> tuple[str, ...]:
    """Names of a struct's arrays; looked up once, because small batches take and put rows all the time."""
    return tuple(field.name for field in fields(kind))


@dataclass(eq=False)
class Rows:
    """A dataclass whose every field is an array with the environment as its leading axis."""

    def take(self, rows: IntArray) -> Self:
        """A copy of some environments, in the order named; an environment may be named more than once."""
        return type(self)(**{name: getattr(self, name)[rows] for name in _names(type(self))})

    def put(self, rows: IntArray, new: Self) -> None:
        """Overwrites some environments in place."""
        for name in _names(type(self)):
            getattr(self, name)[rows] = getattr(new, name)
