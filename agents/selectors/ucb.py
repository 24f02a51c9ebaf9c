"""A bandit per site: combinatorial UCB (Chen, Wang and Yuan, ICML 2013) on progress per second."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from wattgym.agents.selectors.ranking import Share, best_k
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.view import SelectionTask


class UcbSettings(Share):
    """Size and width.

    Attributes:
        width: Weight of the confidence radius.
        memory: Weight of the newest reward in a site's mean (rewards drift as training proceeds); the plain mean
            decides while it weighs more.
    """

    width: float = Field(default=0.5, ge=0.0)
    memory: float = Field(default=0.1, gt=0.0, le=1.0)


class Ucb:
    """`S` = the k eligible sites with the highest `x̄_k + width · sqrt(1.5 ln R / n_k)`; sites never tried come first.

    After a round every site that counted is credited with the round's decrease of the logarithm of the evaluated loss
    per second; `x̄_k` is the mean of these over the highest one seen so far, within [0, 1]. R counts rounds, n_k those
    in which the site counted.
    """

    name = "UCB per site"

    def __init__(self, settings: UcbSettings | None = None) -> None:
        self._settings = settings or UcbSettings()

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Forgets what was learnt."""
        if rows is None:
            batch, n = task.exists.shape
            self._mean, self._times = np.zeros((batch, n)), np.zeros((batch, n))
            self._highest, self._rounds = np.zeros(batch), np.zeros(batch)
            self._before = np.full((2, batch), np.nan)
        else:
            self._mean[rows], self._times[rows] = 0.0, 0.0
            self._highest[rows], self._rounds[rows] = 0.0, 0.0
            self._before[:, rows] = np.nan

    def act(self, turn: Turn) -> BoolArray:
        """Credits the last round, then picks by upper bounds."""
        known, settings = turn.view.known, self._settings
        now = np.stack([known.time_s, np.log(known.loss)])
        begun = ~np.isnan(self._before[0])
        if begun.any() and turn.view.last is not None:
            self._credit(now, turn.view.last.played.counted & begun[:, None])
        self._before = now
        tried = np.maximum(self._times, 1.0)
        radius = np.sqrt(1.5 * np.log(np.maximum(self._rounds, 1.0))[:, None] / tried)
        mean = self._mean / np.maximum(self._highest, 1e-300)[:, None]
        bound = np.where(self._times > 0, mean + settings.width * radius, np.inf)
        # Of sites never tried the ones that would be through first lead.
        first = np.where(np.isinf(bound), 1e9 - np.log(turn.view.alone_seconds()), bound)
        return best_k(first, known.eligible, settings.count(known.eligible))

    def _credit(self, now: FloatArray, counted: BoolArray) -> None:
        seconds = np.maximum(now[0] - self._before[0], 1e-9)
        heard = counted.any(axis=1)
        rate = np.where(heard, np.maximum(self._before[1] - now[1], 0.0) / seconds, 0.0)
        self._highest = np.maximum(self._highest, np.nan_to_num(rate))
        self._rounds += heard
        self._times += counted
        weight = np.maximum(1.0 / np.maximum(self._times, 1.0), self._settings.memory)
        self._mean += np.where(counted, weight * (np.nan_to_num(rate)[:, None] - self._mean), 0.0)
