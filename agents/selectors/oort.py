"""Oort: statistical utility times a penalty on slow sites, with exploration (Lai et al., OSDI 2021)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from wattgym.agents.selectors.ranking import Share
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.view import SelectionTask, SelectionView


class OortSettings(Share):
    """Oort's parameters; defaults are those of the authors' code (github.com/SymbioticLab/Oort).

    Attributes:
        penalty: Exponent of the penalty on sites slower than the preferred round time.
        explore: Share of the sites to explore at first.
        explore_decay: Factor on it each round.
        explore_least: Least share to explore.
        clip: Percentile at which utilities are clipped.
        cut_off: Share of the score of the last exploited site from which sites may be exploited.
        percentile: Percentile of the sites' durations that is the preferred round time at first.
        pacer_window: Rounds between moves of the pacer.
        pacer_step: Percentage points of a move.
    """

    penalty: float = Field(default=2.0, ge=0.0)
    explore: float = Field(default=0.9, ge=0.0, le=1.0)
    explore_decay: float = Field(default=0.95, gt=0.0, le=1.0)
    explore_least: float = Field(default=0.2, ge=0.0, le=1.0)
    clip: float = Field(default=0.98, gt=0.0, le=1.0)
    cut_off: float = Field(default=0.7, ge=0.0, le=1.0)
    percentile: float = Field(default=30.0, ge=0.0, le=100.0)
    pacer_window: int = Field(default=20, ge=1)
    pacer_step: float = Field(default=5.0, ge=0.0)


@dataclass
class _State:
    """One federation: random generator, share to explore, the pacer's percentile, and past rounds' utility."""

    rng: np.random.Generator
    explore: float
    percentile: float
    utilities: list[float] = field(default_factory=list)
    round: int = 0


class Oort:
    """Exploits sites by score and explores those that never took part.

    With n samples, the loss L that a site reported last, round R, the round r in which it last took part, and its
    duration T (measured, before that predicted):

        U = n sqrt(L²)                                      one reported loss stands for the mean over samples
        score = (min(U, clip) − min U) / (range of U) + sqrt(0.1 ln R / r)
        score ×= (T_pref / T)^penalty   where T > T_pref

    Of the k sites, a share falling from `explore` to `explore_least` goes to sites never tried, drawn in proportion
    to their predicted speed; the others are drawn in proportion to score among those that score at least `cut_off`
    times the last of the best. The pacer moves `T_pref`, a percentile of durations: up where the exploited utility of
    a window of rounds differs from that of the one before by at most 10 %, down where it is at least five times as
    high. The authors' code reads one place beyond the sorted scores when every tried site is to be exploited, as
    happens with few sites; here that place is clamped to the last one.
    """

    name = "Oort"

    def __init__(self, settings: OortSettings | None = None, seed: int = 0) -> None:
        self._settings = settings or OortSettings()
        self._seed = seed

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Forgets utilities and starts the random sequences again."""
        if rows is None:
            self._states = [self._begin(row) for row in range(task.count.size)]
        else:
            for row in rows.tolist():
                self._states[row] = self._begin(row)

    def _begin(self, row: int) -> _State:
        return _State(np.random.default_rng((self._seed, row)), self._settings.explore, self._settings.percentile)

    def act(self, turn: Turn) -> BoolArray:
        """Exploits and explores."""
        view = turn.view
        eligible = view.known.eligible
        alone = view.alone_seconds()
        count = self._settings.count(eligible)
        chosen = np.zeros_like(eligible)
        for row, state in enumerate(self._states):
            sites = np.flatnonzero(eligible[row])
            if sites.size:
                chosen[row, self._choose(state, view, row, sites, int(count[row]), alone[row])] = True
        return chosen

    def _choose(
        self, state: _State, view: SelectionView, row: int, sites: IntArray, k: int, alone: FloatArray
    ) -> IntArray:
        settings, known = self._settings, view.known
        state.round += 1
        state.explore = max(state.explore * settings.explore_decay, settings.explore_least)
        utility = view.task.samples[row] * np.sqrt(known.site_loss[row] ** 2)
        duration = np.where(known.last_seconds[row] > 0.0, known.last_seconds[row], alone)
        tried, new = sites[known.times[row, sites] > 0], sites[known.times[row, sites] == 0]
        exploit = min(max(k - round(k * state.explore), k - new.size), tried.size)
        picked = np.empty(0, dtype=np.int64)
        if exploit > 0:
            preferred = percentile(duration[sites], state.percentile / 100.0)
            score = self._scores(state, utility[tried], known.last_round[row, tried], duration[tried], preferred)
            picked = tried[self._draw_best(state, score, exploit)]
        self._pace(state, float(utility[picked].sum()))
        explored = min(k - picked.size, new.size)
        if explored > 0:
            speed = 1.0 / duration[new]
            picked = np.append(picked, state.rng.choice(new, explored, replace=False, p=speed / speed.sum()))
        return picked

    def _scores(
        self, state: _State, utility: FloatArray, last: IntArray, duration: FloatArray, preferred: float
    ) -> FloatArray:
        ceiling = percentile(utility, self._settings.clip)
        low = float(utility.min())
        extent = max(ceiling - low, 1e-4)
        score = (np.minimum(utility, ceiling) - low) / extent
        score = score + np.sqrt(0.1 * np.log(state.round) / np.maximum(last, 1))
        slow = np.minimum(preferred / np.maximum(duration, 1e-9), 1.0) ** self._settings.penalty
        scores: FloatArray = score * slow
        return scores

    def _draw_best(self, state: _State, score: FloatArray, exploit: int) -> IntArray:
        falling = np.sort(score)[::-1]
        # The place behind the exploited ones, clamped: with few sites there is none behind.
        bar = falling[min(exploit, falling.size - 1)] * self._settings.cut_off
        able = np.flatnonzero(score >= bar)
        weight = np.maximum(score[able], 1e-9)
        drawn: IntArray = state.rng.choice(able, min(exploit, able.size), replace=False, p=weight / weight.sum())
        return drawn

    def _pace(self, state: _State, utility: float) -> None:
        settings = self._settings
        state.utilities.append(utility)
        w = settings.pacer_window
        if len(state.utilities) < 2 * w or len(state.utilities) % w:
            return
        before, now = sum(state.utilities[-2 * w : -w]), sum(state.utilities[-w:])
        if abs(now - before) <= 0.1 * before:
            state.percentile = min(state.percentile + settings.pacer_step, 100.0)
        elif now >= 5.0 * before:
            state.percentile = max(state.percentile - settings.pacer_step, settings.pacer_step)


def percentile(values: FloatArray, share: float) -> float:
    """The value at a share of the sorted ones, the last one at most, as Oort reads it."""
    ordered = np.sort(values)
    return float(ordered[min(int(share * ordered.size), ordered.size - 1)])
