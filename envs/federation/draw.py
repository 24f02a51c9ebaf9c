"""Draws one episode's federation: sites, links, power windows, markets and the learning task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray, Rows
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.learning import Curve, resolved, target_loss
from wattgym.envs.federation.market import Market
from wattgym.envs.federation.network import Network, places_by_region, pool
from wattgym.envs.federation.power import STEP_S, STEPS_A_DAY, PowerSource, available_power_w
from wattgym.envs.federation.workload import gpu_power_w, samples_per_joule, transfer_bytes

HOUR_S = 3600.0

_ALL = slice(None)

_SITE = ("region", "trace", "day", "gpu")
_EPISODE = ("sites", "aggregator", "hour", "market_day", "s0", "beta", "phi")


@dataclass(eq=False)
class Federation(Rows):
    """`B` federations of up to `N` sites; arrays are `(B, N)` unless they say otherwise.

    Everything here is fixed for an episode. Padding has no capacity, no data and is never eligible.

    Attributes:
        count: Sites, shape `(B,)`.
        exists: Whether the slot holds a site.
        region: Index of the region in the network.
        aggregator: Index of the aggregator's region, shape `(B,)`.
        capacity_w: Capacity of the power domain, W.
        gpu: Index of the board in the catalogue of boards.
        samples_per_joule: Samples per joule of facility energy.
        min_power_w: Power below which the site cannot train, W.
        samples: Samples the site holds.
        mix: Domain mix, shape `(B, N, D)`.
        rtt_s: Round-trip time to the aggregator, s.
        up_s: Time to send an update, s.
        down_s: Time to receive the model, s.
        comm_s: Whole communication of a round: both transfers, a round trip for each, and overhead, s.
        egress_usd: Price of both transfers of a round, USD.
        local_offset_s: Local time less UTC at each site, s.
        first_sample: Position in the power traces at which the episode begins.
        trace: Index of the power trace.
        first_hour: Hour of the year at which the episode begins, UTC, shape `(B,)`.
        start_of_day_s: Time of day at which the episode begins, UTC, shape `(B,)`, s.
    """

    count: IntArray
    exists: BoolArray
    region: IntArray
    aggregator: IntArray
    capacity_w: FloatArray
    gpu: IntArray
    samples_per_joule: FloatArray
    min_power_w: FloatArray
    samples: FloatArray
    mix: FloatArray
    rtt_s: FloatArray
    up_s: FloatArray
    down_s: FloatArray
    comm_s: FloatArray
    egress_usd: FloatArray
    local_offset_s: FloatArray
    first_sample: IntArray
    trace: IntArray
    first_hour: IntArray
    start_of_day_s: FloatArray


class FederationLibrary:
    """Everything that federations of one configuration are drawn from, read once.

    Attributes:
        learning: Learning model with its profile's values in place.
        target_loss: Loss at which an episode's goal is reached, nats.
        steps: Power samples that an episode may touch.
        hours: Market hours that an episode may touch.
    """

    def __init__(self, config: SiteSelectionConfig) -> None:
        """Reads tables and traces.

        Raises:
            UserError: Something named in the configuration is unknown, missing, too short or out of range.
        """
        self.config = config
        self.learning = resolved(config.learning)
        self.target_loss = target_loss(self.learning, config.goal)
        # A round that begins just before the time limit runs on for at most its deadline and the detection of losses.
        longest = config.goal.time_limit_s + config.rounds.deadline_s
        self.steps = int(np.ceil(longest / STEP_S)) + 2
        self.hours = int(np.ceil(longest / HOUR_S)) + 2
        named = config.sites.named
        self.source = PowerSource.build(config.power, [s.trace for s in named if s.trace is not None], self.steps)
        candidates = tuple(site.region for site in named) or pool(config.network)
        aggregator = (config.network.aggregator,) if config.network.aggregator is not None else ()
        self.network = Network.build(config.network, (*candidates, *aggregator))
        self.candidates = self.network.indices(candidates)
        self.aggregators = self.network.indices(aggregator or candidates)
        self.market = Market.build(config.market, self.network.regions, self.hours)
        self.gpus = tuple(dict.fromkeys(site.gpu for site in named)) or config.sites.gpus
        workload, pue = config.workload, config.power.pue
        self._per_joule = np.array([samples_per_joule(gpu, workload) for gpu in self.gpus]) / pue
        self._gpu_w = np.array([gpu_power_w(gpu, workload) for gpu in self.gpus]) * pue
        self._bytes = transfer_bytes(workload)
        self._offset_h = np.array([places_by_region()[r].utc_offset_h for r in self.network.regions])

    def draw(self, rngs: Sequence[np.random.Generator]) -> tuple[Federation, Curve]:
        """Draws one federation per generator.

        Args:
            rngs: One generator per environment; each is read the same number of times whatever the others draw.
        """
        config, sites, learning = self.config, self.config.sites, self.learning
        n, d = sites.size, learning.domains
        r = len(self.candidates)
        clustered = config.network.distinct_regions is not None
        u = np.empty((len(rngs), len(_EPISODE) + n * len(_SITE) + r + clustered))
        normal, gamma = np.empty((len(rngs), 2, n)), np.empty((len(rngs), n, d))
        for i, rng in enumerate(rngs):
            rng.random(out=u[i])
            rng.standard_normal(out=normal[i])
            rng.standard_gamma(sites.alpha, out=gamma[i])
        episode = dict(zip(_EPISODE, u[:, : len(_EPISODE)].T, strict=True))
        per_site = u[:, len(_EPISODE) : len(_EPISODE) + n * len(_SITE)].reshape(len(rngs), n, len(_SITE))
        site = {name: per_site[..., i] for i, name in enumerate(_SITE)}
        keys = u[:, len(_EPISODE) + n * len(_SITE) :][:, :r]

        low, high = (sites.most, sites.most) if sites.named else sites.count
        count = low + _choose(episode["sites"], high - low + 1)
        exists = np.arange(n) < count[:, None]
        # Regions without repetition as long as there are enough of them.
        order = np.argsort(keys, axis=1)
        distinct = np.full(len(rngs), r)
        if config.network.distinct_regions is not None:
            fewest, most = np.minimum(config.network.distinct_regions, r)
            distinct = fewest + _choose(u[:, -1], most - fewest + 1)
        region = self.candidates[np.take_along_axis(order, np.arange(n) % distinct[:, None], axis=1)]
        capacity = sites.capacity_w * np.exp(sites.capacity_sigma * normal[:, 0])
        samples = sites.samples * np.exp(sites.samples_sigma * normal[:, 1])
        gpu = _choose(site["gpu"], len(self.gpus))
        trace = _choose(site["trace"], len(self.source.ids))
        # With a small concentration every gamma can round to zero; such a site holds all domains evenly.
        mix = (gamma + 1e-12) / (gamma + 1e-12).sum(axis=2, keepdims=True)
        for k, pinned in enumerate(sites.named):
            region[:, k] = self.network.regions.index(pinned.region)
            capacity[:, k], samples[:, k] = pinned.capacity_w, pinned.samples
            gpu[:, k] = self.gpus.index(pinned.gpu)
            if pinned.trace is not None:
                trace[:, k] = self.source.ids.index(pinned.trace)
            if pinned.mix:
                mix[:, k] = pinned.mix
        capacity, samples, mix = capacity * exists, samples * exists, mix * exists[..., None]

        aggregator = self.aggregators[_choose(episode["aggregator"], len(self.aggregators))]
        if clustered and config.network.aggregator is None:
            # Somewhere among the sites.
            first = _choose(episode["aggregator"], distinct)
            aggregator = self.candidates[order[np.arange(len(rngs)), first]]
        links = self._links(region, aggregator)
        start_step = _choose(episode["hour"], STEPS_A_DAY)
        local = start_step[:, None] + np.round(self._offset_h[region] * HOUR_S / STEP_S).astype(np.int64)
        start_s = (start_step * STEP_S).astype(np.float64)
        day = self.market.days[_choose(episode["market_day"], self.market.days.size)]
        federation = Federation(
            count=count,
            exists=exists,
            region=region,
            aggregator=aggregator,
            capacity_w=capacity,
            gpu=gpu,
            samples_per_joule=self._per_joule[gpu],
            min_power_w=np.maximum(config.power.min_gpus * self._gpu_w[gpu], 1e-6),
            samples=samples,
            mix=mix,
            local_offset_s=self._offset_h[region] * HOUR_S,
            first_sample=self.source.draw(trace, local, site["day"]),
            trace=trace,
            first_hour=day + (start_s // HOUR_S).astype(np.int64),
            start_of_day_s=start_s,
            **links,
        )
        spread = learning.randomise
        weights = np.full((len(rngs), d), 1.0 / d)
        if learning.evaluation == "population":
            population = (samples[..., None] * mix).sum(axis=1)
            weights = population / population.sum(axis=1, keepdims=True)
        curve = Curve(
            s0=learning.s0 * (1.0 + spread * (2.0 * episode["s0"] - 1.0)),
            beta=learning.beta * (1.0 + spread * (2.0 * episode["beta"] - 1.0)),
            phi=learning.phi * (1.0 + spread * (2.0 * episode["phi"] - 1.0)),
            weights=weights,
        )
        return federation, curve

    def available_w(self, federation: Federation, step: IntArray, rows: IntArray | slice = _ALL) -> FloatArray:
        """Power available for training at a power sample of the episode, shape `(rows, N)`, W.

        Args:
            federation: Sites.
            step: Power sample of each of the environments, shape `(rows,)`; beyond the last one, the last one.
            rows: The environments; all by default.
        """
        position = federation.first_sample[rows] + np.minimum(step, self.steps - 1)[:, None]
        return available_power_w(self.config.power, federation.capacity_w[rows], self.source.values[position])

    def training_w(self, federation: Federation, step: IntArray, rows: IntArray | slice = _ALL) -> FloatArray:
        """The same where it is enough to train, and 0 where it is not."""
        available = self.available_w(federation, step, rows)
        return available * (available >= federation.min_power_w[rows])

    def site_training_w(self, federation: Federation, row: IntArray, site: IntArray, step: IntArray) -> FloatArray:
        """The same for single sites, each at power samples of its own.

        Args:
            federation: Sites.
            row: Environments.
            site: Slots of the sites in them.
            step: Power samples; the three shapes broadcast to that of the answer.
        """
        position = federation.first_sample[row, site] + np.minimum(step, self.steps - 1)
        values = self.source.values[position]
        available = available_power_w(self.config.power, federation.capacity_w[row, site], values)
        return available * (available >= federation.min_power_w[row, site])

    def market_at(
        self, federation: Federation, hour: IntArray, rows: IntArray | slice = _ALL
    ) -> tuple[FloatArray, FloatArray]:
        """Price (USD/MWh) and carbon intensity (gCO2e/kWh) in an hour of the episode, each `(rows, N)`."""
        where = federation.region[rows], (federation.first_hour[rows] + hour)[:, None]
        return self.market.price_usd_per_mwh[where], self.market.carbon_g_per_kwh[where]

    def _links(self, region: IntArray, aggregator: IntArray) -> dict[str, FloatArray]:
        network, centre = self.network, aggregator[:, None]
        rtt = network.rtt_s[region, centre]
        up = self._bytes / network.bytes_per_s[region, centre]
        down = self._bytes / network.bytes_per_s[centre, region]
        gigabytes = self._bytes / 1e9
        per_gb = network.egress_usd_per_gb[region, centre] + network.egress_usd_per_gb[centre, region]
        return {
            "rtt_s": rtt,
            "up_s": up,
            "down_s": down,
            "comm_s": up + down + 2.0 * rtt + self.config.rounds.overhead_s,
            "egress_usd": gigabytes * per_gb,
        }


def _choose(u: FloatArray, n: int | IntArray) -> IntArray:
    return np.minimum((u * n).astype(np.int64), n - 1)
