"""The emulated federation: `B` federations of up to `N` sites, one array step a round.

Environments of a batch begin and end on their own: `reset` takes the ones to begin anew, and what the others do does
not depend on it. Everything random comes from one generator per environment and is drawn alike whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray, Rows
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.draw import HOUR_S, Federation, FederationLibrary
from wattgym.envs.federation.learning import Curve, domain_loss
from wattgym.envs.federation.power import STEP_S, power_step
from wattgym.envs.federation.rounds import Moment, Played, RoundModel

BLOCK = 32
"""Rounds whose noise is drawn at a time."""


@dataclass(eq=False)
class Telemetry(Rows):
    """What the aggregator knows before a round; arrays are `(B, N)` unless they say otherwise.

    Attributes:
        time_s: Time since the episode's start, shape `(B,)`, s.
        rounds: Rounds played, shape `(B,)`.
        waits: Times that no site was eligible and the federation waited for the next power sample, shape `(B,)`.
        power_w: Power available for training, W.
        power_change_w: Its change against the previous power sample, W.
        eligible: Whether the site has power enough and is not away.
        loss: Loss as evaluated, with noise, shape `(B,)`, nats.
        domain_loss: Loss of each domain as evaluated, shape `(B, D)`, nats.
        mix_loss: Evaluated loss weighted by each site's domain mix, nats.
        site_loss: Loss that a site reported when it took part last; the start's loss before.
        last_seconds: Seconds that a site took when it took part last; 0 before.
        last_round: Number of the round in which a site counted last; 0: never.
        times: How often a site counted.
        failed: Whether a site was lost or late when it took part last.
        price_usd_per_mwh: Price at the site, USD/MWh.
        carbon_g_per_kwh: Carbon intensity at the site, gCO2e/kWh.
    """

    time_s: FloatArray
    rounds: IntArray
    waits: IntArray
    power_w: FloatArray
    power_change_w: FloatArray
    eligible: BoolArray
    loss: FloatArray
    domain_loss: FloatArray
    mix_loss: FloatArray
    site_loss: FloatArray
    last_seconds: FloatArray
    last_round: IntArray
    times: IntArray
    failed: BoolArray
    price_usd_per_mwh: FloatArray
    carbon_g_per_kwh: FloatArray


@dataclass(eq=False)
class _Hidden(Rows):
    """What nobody sees: the true state of learning and of absences."""

    progress: FloatArray
    loss: FloatArray
    away_until_s: FloatArray
    power_step: IntArray
    hour: IntArray


@dataclass(eq=False)
class _Noise(Rows):
    """Noise of a block of rounds.

    Dropouts and slow-downs have the shape `(B, BLOCK, N)`, or `(B, BLOCK, 1)` where there are none, evaluation `(B,
    BLOCK)`.
    """

    lost_after_s: FloatArray
    slow: FloatArray
    evaluation: FloatArray


@dataclass(eq=False, slots=True)
class RoundResult:
    """A round, or a wait, of every environment; `(B,)` unless it says otherwise.

    Attributes:
        played: The round's outcome; sites of a waiting environment did nothing.
        waited: Whether no site was eligible and the environment waited instead.
        seconds: Time that passed, s.
        log_progress: Decrease of the logarithm of the true loss.
        communication_s: Time of the round in which its slowest site communicated rather than computed, s.
        energy_kwh: Facility energy, kWh.
        carbon_kg: Emissions, kg CO2e.
        cost_usd: Energy and egress, USD.
        unused_kwh: Energy that eligible sites had available over the round and did not use, kWh.
    """

    played: Played
    waited: BoolArray
    seconds: FloatArray
    log_progress: FloatArray
    communication_s: FloatArray
    energy_kwh: FloatArray
    carbon_kg: FloatArray
    cost_usd: FloatArray
    unused_kwh: FloatArray


@dataclass(eq=False, slots=True)
class Imagined:
    """What a round of some choice would bring, without noise of evaluation; `(B, C)` for `C` candidates.

    Attributes:
        seconds: Length of the round, s.
        log_progress: Decrease of the logarithm of the true loss.
        per_second: Progress over length, 0 where nothing is chosen.
        energy_kwh: Facility energy, kWh.
        progress: Domain progress S after the round, shape `(B, C, D)`.
    """

    seconds: FloatArray
    log_progress: FloatArray
    per_second: FloatArray
    energy_kwh: FloatArray
    progress: FloatArray


class FederationEmulator:
    """A batch of emulated federations.

    Attributes:
        library: What federations are drawn from.
        federation: The sites of the present episodes.
        curve: Their true learning parameters.
        telemetry: What is known before the next round.
    """

    federation: Federation
    curve: Curve
    telemetry: Telemetry
    _hidden: _Hidden
    _noise: _Noise

    def __init__(self, config: SiteSelectionConfig) -> None:
        """Reads what federations are drawn from.

        Raises:
            UserError: Something named in the configuration is unknown, missing, too short or out of range.
        """
        self.config = config
        self.library = FederationLibrary(config)
        self.model = RoundModel(self.library)
        self._rngs: list[np.random.Generator] = []

    @property
    def true_loss(self) -> FloatArray:
        """Loss without the noise of its evaluation, shape `(B,)`, nats; no policy sees it."""
        return self._hidden.loss

    def reset(self, seeds: Sequence[int], rows: IntArray | None = None) -> None:
        """Begins episodes.

        Args:
            seeds: One seed per episode; equal seeds give equal episodes, alone or in any batch.
            rows: Environments to begin anew, ascending; None begins a batch of `len(seeds)`.
        """
        rngs = [np.random.default_rng(seed) for seed in seeds]
        federation, curve = self.library.draw(rngs)
        noise = self._draw_noise(rngs)
        hidden, telemetry = self._begin(federation, curve)
        if rows is None:
            self._rngs = rngs
            self.federation, self.curve, self._noise = federation, curve, noise
            self._hidden, self.telemetry = hidden, telemetry
            self._row = np.arange(len(seeds))
            return
        for row, rng in zip(rows.tolist(), rngs, strict=True):
            self._rngs[row] = rng
        self.federation.put(rows, federation)
        self.curve.put(rows, curve)
        self._noise.put(rows, noise)
        self._hidden.put(rows, hidden)
        self.telemetry.put(rows, telemetry)

    def moment(self, foresee: bool = True) -> Moment:
        """The state that the coming round depends on.

        Args:
            foresee: Whether the round's stragglers and dropouts are in it; without, no site slows down or drops out.
        """
        known, hidden = self.telemetry, self._hidden
        k = known.rounds % BLOCK
        slow = self._noise.slow[self._row, k] if foresee else np.ones((self._row.size, 1))
        lost = self._noise.lost_after_s[self._row, k] if foresee else np.full((self._row.size, 1), np.inf)
        return Moment(
            time_s=known.time_s,
            progress=hidden.progress,
            loss=hidden.loss,
            power_w=known.power_w * (known.power_w >= self.federation.min_power_w),
            slow=slow,
            lost_after_s=lost,
        )

    def imagine(self, candidates: BoolArray, foresee: bool = False, steady: bool = False) -> Imagined:
        """Plays the coming round for candidate choices, without side effects and with the true power to come.

        Args:
            candidates: Choices, shape `(B, C, N)`; sites that are not eligible are left out.
            foresee: Whether the round's stragglers and dropouts, as drawn, are known too.
            steady: Whether power is taken to stay as it is instead.
        """
        batch, count, n = candidates.shape
        rows = np.repeat(self._row, count)
        chosen = candidates.reshape(batch * count, n) & self.telemetry.eligible[rows]
        moment = self.moment(foresee).take(rows)
        played = self.model.play(self.federation.take(rows), self.curve.take(rows), moment, chosen, steady)
        gain = np.log(moment.loss) - np.log(played.loss)
        shape = (batch, count)
        return Imagined(
            seconds=played.duration_s.reshape(shape),
            log_progress=gain.reshape(shape),
            per_second=(gain / np.maximum(played.duration_s, 1e-9)).reshape(shape),
            energy_kwh=(played.energy_j.sum(axis=1) / 3.6e6).reshape(shape),
            progress=played.progress.reshape(*shape, -1),
        )

    def step(self, chosen: BoolArray) -> RoundResult:
        """Plays one round in every environment; one without an eligible site waits for the next power sample.

        Args:
            chosen: Sites to take part, shape `(B, N)`: all eligible, at least one where any is.
        """
        known, hidden = self.telemetry, self._hidden
        waited: BoolArray = ~np.asarray(known.eligible.any(axis=1))
        played = self._play(chosen)
        seconds = played.duration_s
        time_s = known.time_s + seconds
        if waited.any():
            time_s = np.where(waited, (hidden.power_step + 1) * STEP_S, time_s)
            seconds = np.where(waited, time_s - known.time_s, seconds)
        result = self._account(played, waited, seconds)
        self._learn(played)
        known.time_s = time_s
        known.rounds = known.rounds + ~waited
        known.waits = known.waits + waited
        self._refill(waited)
        self._look()
        return result

    def _play(self, chosen: BoolArray) -> Played:
        """The round as it happens; a live federation trains here."""
        return self.model.play(self.federation, self.curve, self.moment(), chosen)

    def _account(self, played: Played, waited: BoolArray, seconds: FloatArray) -> RoundResult:
        known, federation = self.telemetry, self.federation
        energy = played.energy_j * (1.0 / 3.6e6)
        communication = np.minimum(federation.comm_s, played.busy_s) * (played.busy_s >= seconds[:, None])
        available = np.where(known.eligible, known.power_w, 0.0) * (seconds[:, None] * (1.0 / 3.6e6))
        cost = energy * known.price_usd_per_mwh * 1e-3 + federation.egress_usd * played.chosen
        return RoundResult(
            played=played,
            waited=waited,
            seconds=seconds,
            log_progress=np.log(self._hidden.loss) - np.log(played.loss),
            communication_s=(communication * played.chosen).max(axis=1),
            energy_kwh=energy.sum(axis=1),
            carbon_kg=(energy * known.carbon_g_per_kwh).sum(axis=1) * 1e-3,
            cost_usd=cost.sum(axis=1),
            unused_kwh=np.maximum(available - energy, 0.0).sum(axis=1),
        )

    def _learn(self, played: Played) -> None:
        """What is known of learning after the round."""
        known, hidden, noise = self.telemetry, self._hidden, self.library.learning.noise
        chosen, counted = played.chosen, played.counted
        k = known.rounds % BLOCK
        hidden.progress, hidden.loss = played.progress, played.loss
        spread = np.sqrt(noise[0] ** 2 + noise[1] ** 2 / np.maximum(played.effective_sites, 1.0))
        error = np.exp(spread * self._noise.evaluation[self._row, k])
        heard: BoolArray = np.asarray(counted.any(axis=1))
        local = np.matmul(self.federation.mix, played.domain_loss[:, :, None])[..., 0]
        known.loss = np.where(heard, played.loss * error, known.loss)
        heard, error = heard[:, None], error[:, None]
        known.domain_loss = np.where(heard, played.domain_loss * error, known.domain_loss)
        known.mix_loss = np.where(heard, local * error, known.mix_loss)
        known.site_loss = np.where(counted, local, known.site_loss)
        known.last_seconds = np.where(chosen, played.busy_s, known.last_seconds)
        known.last_round = np.where(counted, (known.rounds + 1)[:, None], known.last_round)
        known.times = known.times + counted
        known.failed = (known.failed & ~chosen) | (chosen & ~counted)
        if self.config.rounds.dropouts_per_hour > 0.0:
            back = known.time_s[:, None] + played.busy_s + self.config.rounds.outage_s
            hidden.away_until_s = np.where(played.lost, back, hidden.away_until_s)

    def _look(self) -> None:
        """Power, eligibility and market at the new time."""
        known, hidden = self.telemetry, self._hidden
        federation, library = self.federation, self.library
        step = power_step(known.time_s)
        rows = (step != hidden.power_step).nonzero()[0]
        if rows.size:
            # Two samples are read because the time may have passed over several.
            now = step[rows]
            power = library.available_w(federation, now, rows)
            known.power_change_w[rows] = power - library.available_w(federation, now - 1, rows)
            known.power_w[rows] = power
            hidden.power_step = step
            hour = ((known.time_s + federation.start_of_day_s % HOUR_S) * (1.0 / HOUR_S)).astype(np.int64)
            rows = (hour != hidden.hour).nonzero()[0]
            if rows.size:
                price, carbon = library.market_at(federation, hour[rows], rows)
                known.price_usd_per_mwh[rows], known.carbon_g_per_kwh[rows] = price, carbon
                hidden.hour = hour
            known.eligible = (known.power_w >= federation.min_power_w) & federation.exists
        if self.config.rounds.dropouts_per_hour > 0.0:
            here = hidden.away_until_s <= known.time_s[:, None]
            known.eligible = (known.power_w >= federation.min_power_w) & federation.exists & here

    def _begin(self, federation: Federation, curve: Curve) -> tuple[_Hidden, Telemetry]:
        batch, n = federation.exists.shape
        learning = self.library.learning
        progress = np.zeros((batch, learning.domains))
        by_domain = domain_loss(learning, curve, progress)
        loss = (by_domain * curve.weights).sum(axis=1)
        whole, none = np.zeros(batch, dtype=np.int64), np.zeros((batch, n))
        power = self.library.available_w(federation, whole)
        price, carbon = self.library.market_at(federation, whole)
        mix_loss = np.matmul(federation.mix, by_domain[:, :, None])[..., 0]
        hidden = _Hidden(
            progress=progress,
            loss=loss,
            away_until_s=none.copy(),
            power_step=whole.copy(),
            hour=whole.copy(),
        )
        telemetry = Telemetry(
            time_s=np.zeros(batch),
            rounds=whole.copy(),
            waits=whole.copy(),
            power_w=power,
            power_change_w=none.copy(),
            eligible=(power >= federation.min_power_w) & federation.exists,
            loss=loss.copy(),
            domain_loss=by_domain.copy(),
            mix_loss=mix_loss,
            site_loss=mix_loss.copy(),
            last_seconds=none.copy(),
            last_round=np.zeros((batch, n), dtype=np.int64),
            times=np.zeros((batch, n), dtype=np.int64),
            failed=np.zeros((batch, n), dtype=bool),
            price_usd_per_mwh=price,
            carbon_g_per_kwh=carbon,
        )
        return hidden, telemetry

    def _draw_noise(self, rngs: Sequence[np.random.Generator]) -> _Noise:
        rounds, block = self.config.rounds, (BLOCK, self.config.sites.size)
        evaluation = np.stack([rng.standard_normal(BLOCK) for rng in rngs])
        none = (len(rngs), BLOCK, 1)
        lost, slow = np.full(none, np.inf), np.ones(none)
        if rounds.dropouts_per_hour > 0.0:
            # Time to the first event of a Poisson process.
            mean_s = HOUR_S / rounds.dropouts_per_hour
            lost = mean_s * np.stack([rng.standard_exponential(block) for rng in rngs])
        if rounds.straggler_sigma > 0.0:
            slow = np.exp(rounds.straggler_sigma * np.stack([rng.standard_normal(block) for rng in rngs]))
        return _Noise(lost_after_s=lost, slow=slow, evaluation=evaluation)

    def _refill(self, waited: BoolArray) -> None:
        empty = (self.telemetry.rounds % BLOCK == 0) & ~waited
        if empty.any():
            rows = empty.nonzero()[0]
            self._noise.put(rows, self._draw_noise([self._rngs[row] for row in rows.tolist()]))
