"""What a job did at each sample of a calibration: computing, or another phase that shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wattgym.envs.plant import FloatArray
from wattgym.phase import Phase

SHORT_S = 1.0
"""Phases that are shorter on average are no phases at a control period of seconds: they count as computing."""

_EDGE_S = (0.3, 0.8)
"""Time before and after a phase that is left out of computing: meters lag, and draws take time to move."""

BoolArray = NDArray[np.bool_]


def long_phases(rows: pd.DataFrame) -> list[Phase]:
    """Phases that show at a control period of seconds."""
    long = [Phase.LOAD, Phase.IDLE]
    for phase in (Phase.EVALUATE, Phase.CHECKPOINT):
        count, seconds = occurrences(rows, phase)
        if count and seconds / count >= SHORT_S:
            long.append(phase)
    return long


def occurrences(rows: pd.DataFrame, phase: Phase) -> tuple[int, float]:
    """How often a phase came, and its seconds in all."""
    column = {Phase.EVALUATE: "eval_step", Phase.CHECKPOINT: "checkpoint_step"}[phase]
    spent = rows[f"{phase.name.lower()}_s"].to_numpy()
    return int((np.diff(rows[column]) > 0).sum()), float(spent[-1] - spent[0])


def busy_s(rows: pd.DataFrame) -> FloatArray:
    """Time spent computing so far at each sample, phases too short to show included, s."""
    other = sum(rows[f"{phase.name.lower()}_s"].to_numpy() for phase in long_phases(rows))
    total: FloatArray = rows[[f"{phase.name.lower()}_s" for phase in Phase]].sum(axis=1).to_numpy() - other
    return total


def is_clean(rows: pd.DataFrame) -> BoolArray:
    """Samples at which the job computes, away from other phases."""
    at_s = rows["t_s"].to_numpy()
    long = long_phases(rows)
    spent = sum(rows[f"{phase.name.lower()}_s"].to_numpy() for phase in long)
    other = rows["phase"].isin([int(phase) for phase in long]).to_numpy(copy=True)
    other[1:] |= np.diff(spent) > 1e-3
    clean = ~other
    for moment in at_s[other]:
        clean &= (at_s < moment - _EDGE_S[0]) | (at_s > moment + _EDGE_S[1])
    return clean
