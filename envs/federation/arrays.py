"""Structs of arrays with one row per environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(eq=False)
class Rows:
    """A dataclass whose every field is an array with the environment as its leading axis."""

    def take(self, rows: IntArray) -> Self:
        """A copy of some environments, in the order named; an environment may be named more than once."""
        return type(self)(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    def put(self, rows: IntArray, new: Self) -> None:
        """Overwrites some environments in place."""
        for name in self.__dataclass_fields__:
            getattr(self, name)[rows] = getattr(new, name)
