"""The observation vector of site selection: global features, then site features, each for all slots.

Only what an aggregator can know is shown: reported power and link times, disclosed data sizes (and mixes, where
configured), evaluated losses with their noise, and what it saw of earlier rounds. Features of an empty slot are 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.federation.arrays import FloatArray, IntArray
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.draw import Federation
from wattgym.envs.federation.emulator import FederationEmulator, RoundResult, Telemetry
from wattgym.envs.federation.power import STEP_S, power_step
from wattgym.envs.observation import BOUND, Feature

_MINUTE_S = 60.0
_LOW = 1e-6
_PER_DAY = 2.0 * np.pi / 86_400.0
_RUNNING_S = 1800.0
"""Memory of the running statistics of power, s."""

_ALL = slice(None)


@dataclass(frozen=True)
class SelectionLayout:
    """Which feature lies where in the vector.

    Attributes:
        slots: Site slots N.
        domains: Learning domains D.
        domain_mix: Whether sites' mixes are shown.
        domain_loss: Whether losses by domain are shown.
        market: Whether prices are shown.
    """

    slots: int
    domains: int
    domain_mix: bool = True
    domain_loss: bool = True
    market: bool = True

    @classmethod
    def of(cls, config: SiteSelectionConfig, domains: int) -> SelectionLayout:
        """The layout of a configuration."""
        shown = config.observation
        return cls(config.sites.size, domains, shown.domain_mix, shown.domain_loss, shown.market)

    @cached_property
    def global_features(self) -> tuple[Feature, ...]:
        """Features of the whole federation, in order."""
        domains = range(self.domains) if self.domain_loss else ()
        return (
            Feature(
                "remaining", "whole way", "logarithm of the evaluated loss over the target, as a share of the start's"
            ),
            Feature("elapsed", "time limit", "time since the start"),
            Feature("sites", "100 sites", "sites of the federation"),
            Feature("eligible", "1", "share of them that are eligible"),
            Feature("sample_age", "5 minutes", "time since the last power sample"),
            Feature("hour_sin", "1", "sine of the hour, UTC"),
            Feature("hour_cos", "1", "cosine of the hour, UTC"),
            Feature("round_time", "decade from 1 minute", "length of the last round; 0 before the first"),
            Feature("round_communication", "1", "share of the last round in which its slowest site communicated"),
            Feature("round_sites", "1", "share of the sites that were chosen last"),
            Feature("round_counted", "1", "share of the chosen sites that counted"),
            Feature("round_progress", "tenth of the whole way", "decrease of the evaluated log loss in the last round"),
            *(Feature(f"domain{d}", "1", "logarithm of the domain's evaluated loss over the mean's") for d in domains),
        )

    @cached_property
    def site_features(self) -> tuple[Feature, ...]:
        """Features of one site, in order; the vector holds them feature by feature, each for all slots."""
        market = (
            Feature("price", "100 USD/MWh", "electricity price"),
            Feature("carbon", "500 gCO2e/kWh", "carbon intensity"),
            Feature("egress", "1 USD", "price of the transfers of a round"),
        )
        mix = tuple(Feature(f"mix{d}", "1", "share of the domain in the site's data") for d in range(self.domains))
        return (
            Feature("exists", "1", "whether the slot holds a site"),
            Feature("eligible", "1", "whether it may be chosen"),
            Feature(
                "compute", "decade from 1 minute", "time to train on a reference amount of samples at present power"
            ),
            Feature("alone", "decade from 1 minute", "predicted length of a round of this site alone"),
            Feature("share", "mean over sites", "its present training rate over the mean of eligible sites, minus 1"),
            Feature("power", "capacity", "power available for training"),
            Feature(
                "headroom",
                "octave",
                "power available over the least that trains, -3 at the lowest; a site below 0 pauses",
            ),
            Feature("power_change", "tenth of the capacity", "change against the last power sample"),
            Feature("power_trend", "tenth of the capacity", "power less its running mean of about half an hour"),
            Feature("power_spread", "tenth of the capacity", "root of the running mean square of that difference"),
            Feature("day_sin", "1", "sine of the hour, local time of the last power sample"),
            Feature("day_cos", "1", "cosine of the hour, local time of the last power sample"),
            Feature("communication", "decade from 1 minute", "transfers, round trips and overhead of a round"),
            Feature("rtt", "200 ms", "round-trip time to the aggregator"),
            Feature("samples", "decade from the median", "samples the site holds"),
            Feature("need", "1", "logarithm of the evaluated loss on the site's mix over the evaluated mean"),
            Feature("reported", "1", "logarithm of the loss it reported last over the evaluated mean"),
            Feature("absence", "1", "rounds since it counted last: 1 - exp(-rounds / 10); 1 before"),
            Feature("presence", "1", "share of the rounds in which it counted"),
            Feature("last_time", "decade from 1 minute", "its time in the round it took part in last; 0 before"),
            Feature("failed", "1", "whether it was lost or late when it took part last"),
            *(market if self.market else ()),
            *(mix if self.domain_mix else ()),
        )

    @property
    def first_site(self) -> int:
        """Column at which the site features begin."""
        return len(self.global_features)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.first_site + len(self.site_features) * self.slots

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """Every entry of the vector, in order."""
        return self.global_features + tuple(
            Feature(f"site{k}.{f.name}", f.unit, f.description) for f in self.site_features for k in range(self.slots)
        )

    def of_federation(self, name: str) -> int:
        """Column of a global feature."""
        return [f.name for f in self.global_features].index(name)

    def of_sites(self, name: str) -> slice:
        """Columns of a site feature, one for each slot."""
        start = self.first_site + [f.name for f in self.site_features].index(name) * self.slots
        return slice(start, start + self.slots)

    def as_dict(self, observation: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """The same numbers by name: `global.<name>` of shape `(...)`, `site.<name>` of shape `(..., N)`.

        Args:
            observation: Shape `(..., size)`.
        """
        named = {f"global.{f.name}": observation[..., i] for i, f in enumerate(self.global_features)}
        named |= {f"site.{f.name}": observation[..., self.of_sites(f.name)] for f in self.site_features}
        return named


class SelectionObserver:
    """Builds observation vectors for a batch of federations and keeps the little history that they show."""

    def __init__(self, layout: SelectionLayout, emulator: FederationEmulator) -> None:
        self.layout = layout
        self._emulator = emulator
        config = emulator.config
        self._median_samples = config.sites.samples
        self._reference = emulator.library.learning.reference_samples
        self._per_limit = 1.0 / config.goal.time_limit_s
        self._time_model = config.rounds.time_model
        self._work = config.rounds.work_samples
        self._epochs = config.rounds.epochs
        self._dropouts = config.rounds.dropouts_per_hour > 0.0
        self._target = np.log(emulator.library.target_loss)
        self._columns = {f.name: layout.of_federation(f.name) for f in layout.global_features}
        self._shown = np.zeros((0, layout.size), dtype=np.float32)
        self._sites = {f.name: layout.of_sites(f.name) for f in layout.site_features}

    def begin(self, rows: IntArray | None = None) -> NDArray[np.float32]:
        """Starts the episodes of some environments, or of a new batch.

        Args:
            rows: Environments that begin; None: all of them, of a new batch.

        Returns:
            Observations of all environments, shape `(B, size)`.
        """
        federation, known = self._emulator.federation, self._emulator.telemetry
        if rows is None:
            batch = federation.count.size
            self._x = np.zeros((batch, self.layout.size), dtype=np.float32)
            self._way, self._log_loss = np.empty(batch), np.empty(batch)
            self._power_step = np.zeros(batch, dtype=np.int64)
            self._power_mean, self._power_square = (np.zeros((batch, self.layout.slots)) for _ in range(2))
            self._ahead = np.zeros((2, batch, self.layout.slots))
            rows = np.arange(batch)
        federation, known = federation.take(rows), known.take(rows)
        columns, sites, exists = self._columns, self._sites, federation.exists
        log_loss = np.log(known.loss)
        self._way[rows] = log_loss - self._target
        self._log_loss[rows] = log_loss
        self._power_step[rows] = 0
        self._power_mean[rows], self._power_square[rows] = known.power_w, 0.0
        angle = federation.local_offset_s * _PER_DAY
        ahead = self._ahead[:, rows] = np.stack([np.sin(angle), np.cos(angle)]) * exists
        x = np.zeros((rows.size, self.layout.size), dtype=np.float32)
        x[:, columns["sites"]] = federation.count / 100.0
        x[:, sites["exists"]] = exists
        x[:, sites["communication"]] = _decades(federation.comm_s, _MINUTE_S) * exists
        x[:, sites["rtt"]] = federation.rtt_s * 5.0 * exists
        x[:, sites["samples"]] = _decades(federation.samples, self._median_samples) * exists
        x[:, sites["absence"]] = exists
        if self.layout.domain_mix:
            # Feature by feature: all sites' shares of domain 0, then of domain 1, and so on.
            first = sites["mix0"].start
            mixes = federation.mix.transpose(0, 2, 1).reshape(rows.size, -1)
            x[:, first : first + mixes.shape[1]] = mixes
        if self.layout.market:
            x[:, sites["egress"]] = federation.egress_usd * exists
        self._show_state(x, federation, known, log_loss, self._way[rows])
        self._show_power(x, federation, known, _ALL, np.zeros((2, *known.power_w.shape)), ahead)
        self._x[rows] = x
        shown = self._shown.copy() if self._shown.shape == self._x.shape else self._x.copy()
        shown[rows] = _bounded(x)
        self._shown = shown
        return shown

    def build(self, result: RoundResult) -> NDArray[np.float32]:
        """The observation after a round, before the next.

        Args:
            result: The last round.

        Returns:
            Shape `(B, size)`, float32, within ±`BOUND`.
        """
        x, federation, known = self._x, self._emulator.federation, self._emulator.telemetry
        log_loss = np.log(known.loss)
        self._show_state(x, federation, known, log_loss, self._way)
        self._show_round(result, (self._log_loss - log_loss) / self._way)
        self._log_loss = log_loss
        step = power_step(known.time_s)
        changed = (step != self._power_step).nonzero()[0]
        # Sites that drop out or come back change what is shown of power between two power samples, too.
        rows = _ALL if self._dropouts or changed.size == step.size else changed
        if rows is _ALL or changed.size:
            self._show_power(x, federation, known, rows, self._run(known, step, rows), self._ahead[:, rows])
        self._power_step = step
        self._shown = _bounded(x)
        return self._shown

    def _show_state(
        self, x: NDArray[np.float32], federation: Federation, known: Telemetry, log_loss: FloatArray, way: FloatArray
    ) -> None:
        columns, sites = self._columns, self._sites
        x[:, columns["remaining"]] = (log_loss - self._target) / way
        x[:, columns["elapsed"]] = known.time_s * self._per_limit
        x[:, columns["eligible"]] = known.eligible.sum(axis=1) / federation.count
        x[:, columns["sample_age"]] = (known.time_s % STEP_S) * (1.0 / STEP_S)
        angle = (federation.start_of_day_s + known.time_s) * _PER_DAY
        x[:, columns["hour_sin"]] = np.sin(angle)
        x[:, columns["hour_cos"]] = np.cos(angle)
        per_loss = (1.0 / known.loss)[:, None]
        if self.layout.domain_loss:
            first = columns["domain0"]
            x[:, first : first + self.layout.domains] = np.log(known.domain_loss * per_loss)
        x[:, sites["eligible"]] = known.eligible
        # The logarithm of 1 is what an empty slot shows.
        x[:, sites["need"]] = np.log(np.where(federation.exists, known.mix_loss * per_loss, 1.0))
        x[:, sites["reported"]] = np.log(np.where(federation.exists, known.site_loss * per_loss, 1.0))

    def _show_round(self, result: RoundResult, progress: FloatArray) -> None:
        x, columns, sites = self._x, self._columns, self._sites
        federation, known = self._emulator.federation, self._emulator.telemetry
        played = result.played
        chosen = played.chosen.sum(axis=1)
        seconds = np.maximum(result.seconds, _LOW)
        x[:, columns["round_time"]] = np.log10(seconds * (1.0 / _MINUTE_S))
        x[:, columns["round_communication"]] = result.communication_s / seconds
        x[:, columns["round_sites"]] = chosen / federation.count
        x[:, columns["round_counted"]] = played.counted.sum(axis=1) / np.maximum(chosen, 1)
        x[:, columns["round_progress"]] = progress * 10.0
        rounds = known.rounds[:, None]
        absent = 1.0 - _FADE[np.minimum(rounds - known.last_round, _FADE.size - 1)]
        x[:, sites["absence"]] = np.where(known.last_round > 0, absent, federation.exists)
        x[:, sites["presence"]] = known.times / np.maximum(rounds, 1)
        # The last time of a site changes only where it took part.
        last = np.where(played.chosen, known.last_seconds * (1.0 / _MINUTE_S), 1.0)
        x[:, sites["last_time"]] = np.where(played.chosen, np.log10(last), x[:, sites["last_time"]])
        x[:, sites["failed"]] = known.failed

    def _run(self, known: Telemetry, step: IntArray, rows: IntArray | slice) -> FloatArray:
        """Takes up new power samples; difference from the running mean and its spread, shape `(2, rows, N)`, W."""
        passed = (step[rows] - self._power_step[rows])[:, None] * STEP_S
        keep = np.exp(-passed / _RUNNING_S)
        apart = known.power_w[rows] - self._power_mean[rows]
        self._power_square[rows] = keep * self._power_square[rows] + (1.0 - keep) * apart**2
        self._power_mean[rows] += (1.0 - keep) * apart
        return np.stack([keep * apart, np.sqrt(self._power_square[rows])])

    def _show_power(
        self,
        x: NDArray[np.float32],
        federation: Federation,
        known: Telemetry,
        rows: IntArray | slice,
        running: FloatArray,
        ahead: FloatArray,
    ) -> None:
        """What changes with a power sample, for the environments where it did.

        Args:
            x: Written into.
            federation: Sites.
            known: What is known.
            rows: The environments.
            running: Of `_run`.
            ahead: Sine and cosine of how far the sites' local time is ahead of UTC, shape `(2, rows, N)`.
        """
        sites, exists, eligible = self._sites, federation.exists[rows], known.eligible[rows]
        power = known.power_w[rows]
        rate = power * federation.samples_per_joule[rows]
        per_rate = 1.0 / np.maximum(rate, _LOW)
        work = self._work if self._time_model == "A" else federation.samples[rows] * self._epochs
        usable = rate * eligible
        mean = usable.sum(axis=1) / np.maximum(eligible.sum(axis=1), 1)
        per_capacity = 1.0 / np.maximum(federation.capacity_w[rows], 1.0)
        least = federation.min_power_w[rows]
        # Features that lie side by side are written at once.
        hour = (federation.start_of_day_s[rows] + known.time_s[rows])[:, None] * _PER_DAY
        sine, cosine = np.sin(hour), np.cos(hour)
        x[rows, sites["compute"].start : sites["day_cos"].stop] = np.concatenate(
            [
                _decades(self._reference * per_rate, _MINUTE_S) * exists,
                _decades(work * per_rate + federation.comm_s[rows], _MINUTE_S) * exists,
                (usable / np.maximum(mean, _LOW)[:, None] - 1.0) * exists,
                power * per_capacity,
                # Empty slots have no power and show 0; sites without power are at the lowest octave.
                np.log2(np.maximum(power / least, 0.125)) * exists,
                known.power_change_w[rows] * per_capacity * 10.0,
                running[0] * per_capacity * 10.0,
                running[1] * per_capacity * 10.0,
                sine * ahead[1] + cosine * ahead[0],
                cosine * ahead[1] - sine * ahead[0],
            ],
            axis=1,
        )
        if self.layout.market:
            price, carbon = known.price_usd_per_mwh[rows], known.carbon_g_per_kwh[rows]
            x[rows, sites["price"].start : sites["carbon"].stop] = np.concatenate(
                [price * exists * 0.01, carbon * exists * 0.002], axis=1
            )


_FADE = np.exp(-np.arange(128) / 10.0)


def _bounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x.clip(-BOUND, BOUND)


def _decades(value: FloatArray, unit: float) -> FloatArray:
    decades: FloatArray = np.log10(np.maximum(value, _LOW) / unit)
    return decades
