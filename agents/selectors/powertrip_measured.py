"""PowerTrip's dynamic greedy with measured efficiency: try a site, keep it or roll back (reconstruction)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from wattgym.agents.selectors.powertrip import power_to_cost
from wattgym.agents.selectors.ranking import places
from wattgym.agents.selectors.selector import Turn
from wattgym.config import FrozenModel
from wattgym.envs.federation.arrays import BoolArray, IntArray
from wattgym.envs.federation.power import STEP_S
from wattgym.envs.federation.view import SelectionTask, SelectionView


class MeasuredSettings(FrozenModel):
    """How trials are made and judged.

    Attributes:
        window: Rounds of a trial, w.
        patience: Additions in a row that may fail before the set is rolled back to the best one.
        threshold: Relative gain in efficiency from which an addition is kept.
        memory: Weight of the newest window where a size was measured before; the rest is the earlier estimate (EWMA).
        start: Share of the sites that the first trial begins with.
        hold: Rounds after which a held set is reconsidered, R.
        drop: Share of the efficiency at the start of holding below which the set is reconsidered.
        on_power: Whether a new power sample makes a held set be reconsidered.
    """

    window: int = Field(default=1, ge=1)
    patience: int = Field(default=1, ge=0)
    threshold: float = Field(default=0.0, ge=0.0)
    memory: float = Field(default=0.5, gt=0.0, le=1.0)
    start: float = Field(default=0.5, gt=0.0, le=1.0)
    hold: int = Field(default=20, ge=1)
    drop: float = Field(default=0.3, ge=0.0, lt=1.0)
    on_power: bool = True


@dataclass
class Trials:
    """One federation's search; sizes count sites in score order.

    Attributes:
        order: Sites by falling score at the last re-selection.
        size: Sites that take part now.
        best: Best size so far, 0 before the first measurement.
        best_efficiency: Its efficiency when it was measured.
        failed: Additions in a row that did not improve on it.
        holding: Whether the search has ended and the best set is held.
        estimate: Efficiency by size, over all windows (EWMA).
        times_s: Times at the ends of the window's rounds, its start first.
        log_losses: Logarithm of the evaluated loss at those times.
        held: Rounds since the set is held.
        power_step: Power sample of the last re-selection.
    """

    order: list[int] = field(default_factory=list)
    size: int = 0
    best: int = 0
    best_efficiency: float = 0.0
    failed: int = 0
    holding: bool = False
    estimate: dict[int, float] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    log_losses: list[float] = field(default_factory=list)
    held: int = 0
    power_step: int = 0


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line, against the noise of single values; 0 where no time passes."""
    t = np.asarray(times_s) - np.mean(times_s)
    spread = float(t @ t)
    return float(t @ np.asarray(values)) / spread if spread > 0.0 else 0.0


class PowerTripMeasured:
    """Grows the set site by site and measures what each addition brings.

    Sites are ordered by `h_k = P_k / c_k`. A set trains for w rounds; its efficiency η is the slope of the logarithm
    of the evaluated loss over these rounds, negated (the paper speaks of accuracy per unit of time). The next site
    joins for w rounds: with `η_new > (1 + threshold) η_best` it stays, else it fails; after more failures in a row
    than patience allows, the set is rolled back to the best one and held. A held set is reconsidered, in a new order
    and beginning one site below the present size, when a new power sample arrives (every five minutes), a member can
    no longer train, η has fallen to less than a share of what it was, or R rounds have passed. A member that can no
    longer train also breaks off a trial. Nothing is known of the learning model.
    """

    name = "PowerTrip measured"

    def __init__(self, settings: MeasuredSettings | None = None) -> None:
        self._settings = settings or MeasuredSettings()

    def reset(self, task: SelectionTask, rows: IntArray | None = None) -> None:
        """Begins the search anew."""
        if rows is None:
            self.trials = [Trials() for _ in range(task.count.size)]
        else:
            for row in rows.tolist():
                self.trials[row] = Trials()

    def act(self, turn: Turn) -> BoolArray:
        """Notes how the last round went and decides on the next."""
        view = turn.view
        eligible = view.known.eligible
        place = places(power_to_cost(view), eligible)
        chosen = np.zeros_like(eligible)
        for row, trials in enumerate(self.trials):
            if not eligible[row].any():
                continue
            ranked = np.argsort(place[row])[: eligible[row].sum()].tolist()
            self._follow(trials, view, row, ranked)
            chosen[row, trials.order[: trials.size]] = True
        return chosen & eligible

    def _follow(self, trials: Trials, view: SelectionView, row: int, ranked: list[int]) -> None:
        now_s, log_loss = float(view.known.time_s[row]), float(np.log(view.known.loss[row]))
        step = int(now_s // STEP_S)
        if not trials.size:
            self._reselect(trials, ranked, max(1, round(self._settings.start * len(ranked))), step)
        else:
            trials.times_s.append(now_s)
            trials.log_losses.append(log_loss)
            lost = any(not view.known.eligible[row, site] for site in trials.order[: trials.size])
            if lost:
                self._reselect(trials, ranked, min(trials.size, len(ranked)), step)
            elif trials.holding:
                self._hold(trials, ranked, step)
            elif len(trials.times_s) > self._settings.window:
                self._judge(trials)
        if not trials.times_s:
            trials.times_s, trials.log_losses = [now_s], [log_loss]

    def _reselect(self, trials: Trials, ranked: list[int], size: int, step: int) -> None:
        """Starts a search with a new order at a size."""
        trials.order, trials.size = ranked, size
        trials.best, trials.best_efficiency, trials.failed = 0, 0.0, 0
        trials.holding, trials.held, trials.power_step = False, 0, step
        trials.times_s, trials.log_losses = [], []

    def _judge(self, trials: Trials) -> None:
        """Keeps or rolls back the site that was tried."""
        settings, size = self._settings, trials.size
        measured = -slope(trials.times_s, trials.log_losses)
        before = trials.estimate.get(size, measured)
        efficiency = trials.estimate[size] = settings.memory * measured + (1.0 - settings.memory) * before
        first = trials.best == 0
        if first or efficiency > trials.best_efficiency + settings.threshold * abs(trials.best_efficiency):
            trials.best, trials.best_efficiency, trials.failed = size, efficiency, 0
        else:
            trials.failed += 1
        if trials.failed > settings.patience or size == len(trials.order):
            trials.size, trials.holding = trials.best, True
        else:
            trials.size += 1
        trials.times_s, trials.log_losses = [], []

    def _hold(self, trials: Trials, ranked: list[int], step: int) -> None:
        """Reconsiders a held set where there is a reason to."""
        settings = self._settings
        trials.held += 1
        window = slice(-(settings.window + 1), None)
        full = len(trials.times_s) > settings.window
        fallen = full and -slope(trials.times_s[window], trials.log_losses[window]) < (
            settings.drop * trials.best_efficiency
        )
        if fallen or trials.held >= settings.hold or (settings.on_power and step != trials.power_step):
            self._reselect(trials, ranked, max(1, min(trials.size - 1, len(ranked))), step)
