"""What a selector may know, in natural units: the same facts as the observation vector, for rules and bandits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.config import LearningConfig, SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator, RoundResult, Telemetry
from wattgym.envs.federation.learning import local_work
from wattgym.envs.federation.observation import SelectionLayout

_NEVER_S = 1e12
_LEAST = 1e-9


@dataclass(frozen=True, eq=False)
class SelectionTask:
    """What a selector is told at the start of an episode; arrays are `(B, N)` unless they say otherwise.

    Attributes:
        config: The environment's configuration.
        learning: The learning model's central values (the episode's true ones are drawn around them).
        layout: Which observation feature lies where.
        target_loss: Loss to reach, nats.
        count: Sites, shape `(B,)`.
        exists: Whether the slot holds a site.
        region: Index of each site's region in `regions`.
        regions: Names of regions.
        capacity_w: Capacity of the site's power domain, W.
        samples_per_joule: Samples per joule of facility energy.
        min_power_w: Power below which a site cannot train, W.
        samples: Samples the site holds.
        mix: Domain mixes as disclosed, shape `(B, N, D)`.
        rtt_s: Round-trip time, s.
        comm_s: Transfers, round trips and overhead of a round, s.
        egress_usd: Price of the transfers of a round, USD.
    """

    config: SiteSelectionConfig
    learning: LearningConfig
    layout: SelectionLayout
    target_loss: float
    count: IntArray
    exists: BoolArray
    region: IntArray
    regions: tuple[str, ...]
    capacity_w: FloatArray
    samples_per_joule: FloatArray
    min_power_w: FloatArray
    samples: FloatArray
    mix: FloatArray
    rtt_s: FloatArray
    comm_s: FloatArray
    egress_usd: FloatArray

    @classmethod
    def of(cls, emulator: FederationEmulator, layout: SelectionLayout) -> SelectionTask:
        """The task of the emulator's present episodes."""
        federation, library = emulator.federation, emulator.library
        return cls(
            config=emulator.config,
            learning=library.learning,
            layout=layout,
            target_loss=library.target_loss,
            count=federation.count,
            exists=federation.exists,
            region=federation.region,
            regions=library.network.regions,
            capacity_w=federation.capacity_w,
            samples_per_joule=federation.samples_per_joule,
            min_power_w=federation.min_power_w,
            samples=federation.samples,
            mix=federation.mix,
            rtt_s=federation.rtt_s,
            comm_s=federation.comm_s,
            egress_usd=federation.egress_usd,
        )

    def names(self, index: int = 0) -> tuple[str, ...]:
        """Names of the sites of one environment of the batch: as configured, or region and slot."""
        pinned = tuple(site.name for site in self.config.sites.named)
        sites = self.region[index, : self.count[index]].tolist()
        return pinned or tuple(f"{self.regions[r]}/{k}" for k, r in enumerate(sites))


@dataclass(frozen=True, eq=False)
class SelectionView:
    """What a selector knows before one round.

    Attributes:
        task: The episode's task.
        known: Power, eligibility, losses and history.
        last: The last round; None before the first. Its true losses and progress are not for selectors.
    """

    task: SelectionTask
    known: Telemetry
    last: RoundResult | None

    @property
    def rate(self) -> FloatArray:
        """Training rate at the present power, shape `(B, N)`, samples/s; 0 where a site is not eligible."""
        rate: FloatArray = self.known.power_w * self.task.samples_per_joule * self.known.eligible
        return rate

    def work(self, chosen: BoolArray) -> FloatArray:
        """Samples that each site of a choice would be given.

        Args:
            chosen: Shape `(B, N)`, or `(B, C, N)` for candidates.
        """
        rounds, rate = self.task.config.rounds, self.rate
        samples = self.task.samples
        if chosen.ndim == 3:
            rate, samples = rate[:, None], samples[:, None]
        if rounds.time_model == "B":
            work: FloatArray = samples * chosen * rounds.epochs
            return work
        taken = rate * chosen
        split: FloatArray = taken * (rounds.work_samples / np.maximum(taken.sum(axis=-1, keepdims=True), _LEAST))
        return split

    def site_seconds(self, chosen: BoolArray) -> FloatArray:
        """Predicted time of each chosen site at the present power, shape of `chosen`, s; 0 elsewhere.

        Args:
            chosen: Shape `(B, N)`, or `(B, C, N)` for candidates.
        """
        rate, comm = self.rate, self.task.comm_s
        if chosen.ndim == 3:
            rate, comm = rate[:, None], comm[:, None]
        seconds = self.work(chosen) / np.maximum(rate, _LEAST) + comm
        return np.where(chosen, np.minimum(seconds, _NEVER_S), 0.0)

    def round_seconds(self, chosen: BoolArray) -> FloatArray:
        """Predicted length of a round, shape of `chosen` without its last axis, s."""
        longest: FloatArray = self.site_seconds(chosen).max(axis=-1)
        return longest

    def alone_seconds(self) -> FloatArray:
        """Predicted length of a round of each site alone, shape `(B, N)`, s; very long where it is not eligible."""
        rounds = self.task.config.rounds
        work = rounds.work_samples if rounds.time_model == "A" else self.task.samples * rounds.epochs
        seconds = work / np.maximum(self.rate, _LEAST) + self.task.comm_s
        return np.where(self.known.eligible, np.minimum(seconds, _NEVER_S), _NEVER_S)

    def best_site(self) -> IntArray:
        """The eligible site with the most predicted local work per second alone, shape `(B,)`."""
        rounds, learning = self.task.config.rounds, self.task.learning
        work = self.task.samples * rounds.epochs if rounds.time_model == "B" else rounds.work_samples + 0.0 * self.rate
        counted = local_work(work / learning.reference_samples, learning.work_exponent)
        worth = np.where(self.known.eligible, counted / self.alone_seconds(), -1.0)
        best: IntArray = worth.argmax(axis=1)
        return best
