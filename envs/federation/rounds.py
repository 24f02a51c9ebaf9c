"""How a round passes: work, power that moves under it, stragglers, dropouts, the deadline, and who counts.

A site's work is a need of facility energy, `samples / samples_per_joule`, met by its available power as it moves every
five minutes; below the power of its smallest share of boards it pauses. Nothing here changes state, so that the same
code plays the round that happens and the ones that an oracle imagines.

    model A   W samples are split over the chosen sites in proportion to their power at the start:
              T = W / Σ rate + max c while power stands still
    model B   every chosen site trains for E epochs of its own data: T = max (E D_k / rate_k + c_k)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray, Rows
from wattgym.envs.federation.draw import Federation, FederationLibrary
from wattgym.envs.federation.learning import Curve, domain_loss, domain_progress
from wattgym.envs.federation.power import STEP_S, power_step

_NEVER = 1e-9


@dataclass(eq=False)
class Moment(Rows):
    """What the outcome of a round depends on at its start, beside the federation.

    Attributes:
        time_s: Time since the episode's start, shape `(B,)`, s.
        progress: Domain progress, shape `(B, D)`.
        loss: True loss, shape `(B,)`, nats.
        power_w: Power that trains now, 0 where it is too little, shape `(B, N)`, W.
        slow: Factor by which each site is slower in this round, shape `(B, N)` or `(B, 1)`.
        lost_after_s: When each site would drop out, shape `(B, N)` or `(B, 1)`, s from the round's start.
    """

    time_s: FloatArray
    progress: FloatArray
    loss: FloatArray
    power_w: FloatArray
    slow: FloatArray
    lost_after_s: FloatArray


@dataclass(eq=False, slots=True)
class Played:
    """Outcome of a round; arrays are `(B, N)` unless they say otherwise.

    Attributes:
        chosen: Sites that took part.
        counted: Sites whose update arrived in time.
        lost: Sites that dropped out.
        late: Sites past the deadline.
        samples: Samples that count.
        compute_s: Time each chosen site would compute; infinite where it would not finish by the deadline.
        busy_s: Time at which each chosen site was through, lost or given up, s from the round's start.
        energy_j: Facility energy of each site, J.
        duration_s: Length of the round, shape `(B,)`, s.
        progress: Domain progress after it, shape `(B, D)`.
        domain_loss: Loss of each domain after it, shape `(B, D)`, nats.
        loss: Loss after it, shape `(B,)`, nats.
        effective_sites: Effective number of sites, shape `(B,)`.
    """

    chosen: BoolArray
    counted: BoolArray
    lost: BoolArray
    late: BoolArray
    samples: FloatArray
    compute_s: FloatArray
    busy_s: FloatArray
    energy_j: FloatArray
    duration_s: FloatArray
    progress: FloatArray
    domain_loss: FloatArray
    loss: FloatArray
    effective_sites: FloatArray


class RoundModel:
    """Plays rounds of one configuration."""

    def __init__(self, library: FederationLibrary) -> None:
        self._library = library
        self._rounds = library.config.rounds
        self._learning = library.learning

    def work(self, federation: Federation, power_w: FloatArray, chosen: BoolArray) -> FloatArray:
        """Samples that each chosen site is given, shape of `chosen`."""
        if self._rounds.time_model == "B":
            work: FloatArray = federation.samples * chosen * self._rounds.epochs
            return work
        rate = power_w * federation.samples_per_joule * chosen
        total = rate.sum(axis=1, keepdims=True)
        split: FloatArray = rate * (self._rounds.work_samples / np.maximum(total, _NEVER))
        return split

    def play(
        self, federation: Federation, curve: Curve, moment: Moment, chosen: BoolArray, steady: bool = False
    ) -> Played:
        """Plays one round in every environment.

        Args:
            federation: Sites.
            curve: Learning parameters.
            moment: State at the round's start.
            chosen: Sites to take part, all of them eligible, shape `(B, N)`; an empty row passes no time.
            steady: Whether power stays as it is at the round's start, rather than going on as recorded.
        """
        deadline = self._rounds.deadline_s
        samples = self.work(federation, moment.power_w, chosen)
        need_j = samples * moment.slow / federation.samples_per_joule
        compute_s = self._seconds(federation, moment, need_j, steady)
        finish = compute_s + federation.comm_s * chosen
        late = finish > deadline
        lost = late & False
        busy = finish
        cut = bool(late.any())
        if self._rounds.dropouts_per_hour > 0.0:
            lost = chosen & (moment.lost_after_s < np.minimum(finish, deadline))
            late &= ~lost
            busy = np.where(lost, moment.lost_after_s + self._rounds.detect_s, finish)
            cut = cut or bool(lost.any())
        energy_j, counted = need_j, chosen
        if cut:
            compute_s = np.where(compute_s > deadline, np.inf, compute_s)
            busy = np.minimum(busy, deadline)
            counted = chosen & ~late & ~lost
            rows = np.nonzero((late | lost).any(axis=1))[0]
            stop = np.where(lost, moment.lost_after_s, deadline)[rows]
            energy_j = need_j.copy()
            drawn = self._energy(federation, moment, stop, need_j, rows, steady)
            energy_j[rows] = np.where(counted[rows], need_j[rows], drawn)
            samples = samples * counted
        progress, effective = domain_progress(
            self._learning, curve, moment.progress, moment.loss, samples, federation.mix
        )
        by_domain = domain_loss(self._learning, curve, progress)
        return Played(
            chosen=chosen,
            counted=counted,
            lost=lost,
            late=late,
            samples=samples,
            compute_s=compute_s,
            busy_s=busy,
            energy_j=energy_j,
            duration_s=busy.max(axis=1),
            progress=progress,
            domain_loss=by_domain,
            loss=(by_domain * curve.weights).sum(axis=1),
            effective_sites=effective,
        )

    def _seconds(self, federation: Federation, moment: Moment, need_j: FloatArray, steady: bool) -> FloatArray:
        """Time in which the available power meets each need; infinite where the deadline comes first."""
        step = power_step(moment.time_s)
        left = (step + 1) * STEP_S - moment.time_s
        seconds = need_j / np.maximum(moment.power_w, _NEVER)
        if steady:
            return seconds
        # Power changes before these sites are through: they go on from one power sample to the next.
        row, site = (seconds > left[:, None]).nonzero()
        if not row.size:
            return seconds
        seconds[row, site] = np.inf
        step, elapsed = step[row], left[row]
        need, samples = need_j[row, site] - moment.power_w[row, site] * elapsed, 1
        while row.size:
            # Most are through with the next sample; the more samples a site has seen, the more are read at a time.
            ahead = np.arange(1, samples + 1)
            power = self._library.site_training_w(federation, row[:, None], site[:, None], step[:, None] + ahead)
            begun, missing = np.empty((2, row.size, samples + 1))
            begun[:, 0], begun[:, 1:] = elapsed, STEP_S
            missing[:, 0], missing[:, 1:] = need, power * STEP_S
            np.add.accumulate(begun, axis=1, out=begun)
            np.subtract.accumulate(missing, axis=1, out=missing)
            done = (missing[:, :-1] <= power * STEP_S) & (begun[:, :-1] < self._rounds.deadline_s)
            through = done.any(axis=1)
            k, last = np.nonzero(through)[0], done.argmax(axis=1)[through]
            seconds[row[k], site[k]] = begun[k, last] + missing[k, last] / np.maximum(power[k, last], _NEVER)
            k = np.nonzero(~through & (begun[:, -1] < self._rounds.deadline_s))[0]
            row, site, step = row[k], site[k], step[k] + samples
            need, elapsed, samples = missing[k, -1], begun[k, -1], 2 * samples
        return seconds

    def _energy(
        self,
        federation: Federation,
        moment: Moment,
        stop_s: FloatArray,
        need_j: FloatArray,
        rows: IntArray,
        steady: bool,
    ) -> FloatArray:
        """Energy drawn up to a time at which a site stops, at most what it needs, in some environments, J."""
        time_s = moment.time_s[rows]
        step = power_step(time_s)
        elapsed = ((step + 1) * STEP_S - time_s)[:, None]
        drawn = moment.power_w[rows] * np.minimum(stop_s, elapsed)
        if steady:
            return np.minimum(moment.power_w[rows] * stop_s, need_j[rows])
        while (elapsed < stop_s).any():
            step = step + 1
            drawn = drawn + self._library.training_w(federation, step, rows) * np.clip(stop_s - elapsed, 0.0, STEP_S)
            elapsed = elapsed + STEP_S
        return np.minimum(drawn, need_j[rows])
