"""Configuration of the site-selection environment; every key changes what happens, unknown keys are refused."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel

Split = Literal["train", "validation", "test"]

MAX_SITES = 100
"""Most sites of a federation."""


class NamedSite(FrozenModel):
    """One pinned site.

    Attributes:
        name: Its name, unique in the federation.
        region: Cloud region it lies in.
        capacity_w: Capacity of its power domain, W.
        gpu: Board, as the hardware presets call it.
        samples: Training samples it holds.
        mix: Shares of the learning domains in its data; empty draws them.
        trace: Power-utilisation trace; None draws one of `power.traces`.
    """

    name: str = Field(min_length=1)
    region: str
    capacity_w: float = Field(gt=0.0)
    gpu: str = "h100-sxm"
    samples: float = Field(default=20_000.0, gt=0.0)
    mix: tuple[float, ...] = ()
    trace: str | None = None


class SitesConfig(FrozenModel):
    """How many sites there are and what each holds.

    Attributes:
        count: Fewest and most sites of an episode, drawn uniformly.
        slots: Sites that observations and actions have room for; the rest is padding. None: as many as `count` asks
            for.
        named: Pins these sites instead of drawing `count` of them.
        capacity_w: Median capacity of a site's power domain, W (the power traces withhold watts, so they are assigned).
        capacity_sigma: Spread of the logarithm of the capacity (log-normal).
        gpus: Boards to draw from; each site has one kind.
        samples: Median training samples of a site.
        samples_sigma: Spread of the logarithm of the samples (log-normal).
        alpha: Dirichlet concentration of the domain mixes; 100 is near IID, 0.1 nearly one domain a site.
    """

    count: tuple[int, int] = (8, 20)
    slots: int | None = Field(default=None, ge=1, le=MAX_SITES)
    named: tuple[NamedSite, ...] = ()
    capacity_w: float = Field(default=100_000.0, gt=0.0)
    capacity_sigma: float = Field(default=0.7, ge=0.0, le=3.0)
    gpus: tuple[str, ...] = Field(default=("a100-sxm", "h100-sxm", "h200-sxm"), min_length=1)
    samples: float = Field(default=20_000.0, gt=0.0)
    samples_sigma: float = Field(default=0.75, ge=0.0, le=3.0)
    alpha: float = Field(default=0.3, gt=0.0, le=1e4)

    @model_validator(mode="after")
    def _sane(self) -> SitesConfig:
        low, high = self.count
        if not 1 <= low <= high <= MAX_SITES:
            raise ValueError(f"count needs 1 <= fewest <= most <= {MAX_SITES}, got {low}, {high}")
        names = [site.name for site in self.named]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sites are named '{twice}'; names must be unique")
        if len(names) > MAX_SITES:
            raise ValueError(f"at most {MAX_SITES} sites, got {len(names)}")
        if self.slots is not None and self.slots < self.most:
            raise ValueError(f"slots {self.slots} is fewer than the {self.most} sites of an episode")
        return self

    @property
    def most(self) -> int:
        """Most sites of an episode."""
        return len(self.named) or self.count[1]

    @property
    def size(self) -> int:
        """Site slots N of every array."""
        return self.slots or self.most


class PowerConfig(FrozenModel):
    """What power a site has for training.

    Attributes:
        reading: `residual`: what the domain leaves unused, `cap · max(0, u_max − utilisation)`. `non_production`: all
            but production work may be displaced, `cap · max(0, u_max − production_share · utilisation)`.
            `utilisation`: the utilisation itself is the allotment, `cap · utilisation`.
        u_max: Highest safe utilisation of a domain.
        production_share: Production work's share of the measured utilisation (the shipped traces hold only the measured
            one, so the share is an assumption).
        traces: Utilisation traces to draw from; empty = all of kind `power_utilisation` with a window in the split.
        split: Weeks to draw from.
        alignment: `hour_of_day`: a trace is read at the site's local hour, whole days apart. `none`: anywhere.
        min_gpus: A site with power for fewer GPUs is not eligible.
        pue: Facility power per IT power.
    """

    reading: Literal["residual", "non_production", "utilisation"] = "residual"
    u_max: float = Field(default=0.95, gt=0.0, le=1.0)
    production_share: float = Field(default=0.8, ge=0.0, le=1.0)
    traces: tuple[str, ...] = ()
    split: Split = "train"
    alignment: Literal["hour_of_day", "none"] = "hour_of_day"
    min_gpus: float = Field(default=8.0, gt=0.0)
    pue: float = Field(default=1.2, ge=1.0, le=3.0)

    @model_validator(mode="after")
    def _read(self) -> PowerConfig:
        default = type(self).model_fields["production_share"].default
        if self.reading != "non_production" and self.production_share != default:
            raise ValueError("production_share has a meaning for reading 'non_production' only")
        return self


class NetworkConfig(FrozenModel):
    """Links between sites and the aggregator.

    Attributes:
        split: Which places sites and aggregator are drawn from; `all` ignores the held-out sets.
        regions: Draw from these regions instead.
        distinct_regions: Fewest and most regions that an episode's sites and aggregator lie in, drawn uniformly; with
            fewer than there are sites, several sites share one. None: as many as there are.
        aggregator: Region of the aggregator; None draws it from the same regions.
        throughput: Measurement campaign of the throughput (Skyplane).
        bandwidth_share: Share of the measured throughput (64 connections between two large machines) that a round gets.
        tcp_window_bytes: Where set, a transfer gets at most a window per round trip.
        local_rtt_ms: Round trip within a region, which the tables do not hold.
        local_gbps: Throughput within a region.
        table: CSV file with src_region, dst_region, rtt_ms, gbps, egress_usd_per_gb in place of the measured tables.
    """

    split: Split | Literal["all"] = "train"
    regions: tuple[str, ...] = ()
    distinct_regions: tuple[int, int] | None = None
    aggregator: str | None = None
    throughput: Literal["2022-01", "2022-11"] = "2022-11"
    bandwidth_share: float = Field(default=0.1, gt=0.0, le=1.0)
    tcp_window_bytes: float | None = Field(default=None, gt=0.0)
    local_rtt_ms: float = Field(default=1.0, gt=0.0)
    local_gbps: float = Field(default=10.0, gt=0.0)
    table: str | None = None

    @model_validator(mode="after")
    def _some_regions(self) -> NetworkConfig:
        if self.distinct_regions is not None and not 1 <= self.distinct_regions[0] <= self.distinct_regions[1]:
            fewest, most = self.distinct_regions
            raise ValueError(f"distinct_regions needs 1 <= fewest <= most, got {fewest}, {most}")
        return self


class MarketConfig(FrozenModel):
    """Price and carbon intensity of the sites' power.

    Attributes:
        split: Weeks of the year to draw from.
        carbon: Life-cycle or direct emissions.
    """

    split: Split = "train"
    carbon: Literal["lca", "direct"] = "lca"


class WorkloadConfig(FrozenModel):
    """What is trained.

    Attributes:
        model: Model, see `workload.yaml`.
        adapter: LoRA on the query and value projections, on all linear layers, or full fine-tuning.
        rank: Adapter rank.
        bytes_per_value: Bytes a value on the wire (2: bf16).
        sequence_tokens: Tokens a sample.
        mfu: Share of the boards' peak that training reaches.
        host_share: Power of hosts and fabric per GPU power.
    """

    model: str = "mistral-7b"
    adapter: Literal["lora_qv", "lora_all", "full"] = "lora_all"
    rank: int = Field(default=32, ge=1, le=1024)
    bytes_per_value: float = Field(default=2.0, gt=0.0, le=8.0)
    sequence_tokens: int = Field(default=512, ge=1)
    mfu: float = Field(default=0.4, gt=0.0, le=1.0)
    host_share: float = Field(default=0.3, ge=0.0, le=3.0)


class RoundsConfig(FrozenModel):
    """How a round passes.

    Attributes:
        time_model: `A`: the round's samples are split over the chosen sites in proportion to their power. `B`: every
            site trains for fixed local epochs on its own data, the slowest counts.
        work_samples: Model A: samples of a round.
        epochs: Model B: local epochs of a round.
        overhead_s: Start-up, serialisation and aggregation per round and site, s.
        deadline_s: The aggregator waits no longer than this; late sites do not count.
        dropouts_per_hour: Rate at which a training site drops out.
        detect_s: How long after its last sign of life a site counts as lost (Flower's heartbeat: 41 s).
        outage_s: How long a lost site stays away.
        straggler_sigma: Spread of the logarithm of a site's slow-down in a round.
    """

    time_model: Literal["A", "B"] = "A"
    work_samples: float = Field(default=200_000.0, gt=0.0)
    epochs: float = Field(default=1.0, gt=0.0)
    overhead_s: float = Field(default=2.0, ge=0.0)
    deadline_s: float = Field(default=3600.0, gt=0.0, le=86_400.0)
    dropouts_per_hour: float = Field(default=0.0, ge=0.0)
    detect_s: float = Field(default=41.0, ge=0.0)
    outage_s: float = Field(default=900.0, ge=0.0)
    straggler_sigma: float = Field(default=0.0, ge=0.0, le=1.0)


class LearningConfig(FrozenModel):
    """How rounds lower the loss; see `wattgym.envs.federation.learning` for the equations.

    Attributes:
        profile: File with fitted values for `loss_start`, `loss_floor`, `s0`, `beta` and `phi`; None uses the ones
            below.
        domains: Learning domains D.
        loss_start: Loss before the first round, nats.
        loss_floor: Loss that no training goes below, nats.
        s0: Effective site-rounds after which the power law sets in.
        beta: Exponent of the power law.
        phi: Noise scale: the cohort size at which more sites stop helping much.
        phi_growth: The noise scale grows as (loss_start / loss) to this power.
        transfer: Share of a round's progress that reaches every domain, whatever was trained on.
        forgetting: Share of a domain's progress lost in a round that leaves it out.
        reference_samples: Samples of one site-round, the unit of `s0`.
        work_exponent: Local work beyond the reference counts with this exponent.
        evaluation: Domains weigh the same in the loss, or as in the data of all sites.
        noise: Spread of the observed log loss, and the part that shrinks with the cohort size.
        accuracy_max: Accuracy at zero loss would tend to this (logistic map of the loss).
        accuracy_slope: Slope of that map, per nat.
        accuracy_half_loss: Loss at half of `accuracy_max`, nats.
        randomise: Half-width of the per-episode draw of `s0`, `beta` and `phi`, share of the value.
    """

    profile: str | None = None
    domains: int = Field(default=8, ge=1, le=64)
    loss_start: float = Field(default=4.13, gt=0.0)
    loss_floor: float = Field(default=0.05, ge=0.0)
    s0: float = Field(default=13.3, gt=0.0)
    beta: float = Field(default=1.04, gt=0.0, le=10.0)
    phi: float = Field(default=6.3, gt=0.0)
    phi_growth: float = Field(default=0.0, ge=0.0, le=3.0)
    transfer: float = Field(default=0.45, ge=0.0, le=1.0)
    forgetting: float = Field(default=0.01, ge=0.0, lt=1.0)
    reference_samples: float = Field(default=20_000.0, gt=0.0)
    work_exponent: float = Field(default=0.65, ge=0.0, le=1.0)
    evaluation: Literal["even", "population"] = "even"
    noise: tuple[float, float] = (0.07, 0.14)
    accuracy_max: float = Field(default=0.9, gt=0.0, le=1.0)
    accuracy_slope: float = Field(default=2.5, gt=0.0)
    accuracy_half_loss: float = Field(default=1.2, gt=0.0)
    randomise: float = Field(default=0.2, ge=0.0, le=0.9)

    @model_validator(mode="after")
    def _sane(self) -> LearningConfig:
        if self.loss_floor >= self.loss_start:
            raise ValueError(f"loss_floor {self.loss_floor:g} must lie below loss_start {self.loss_start:g}")
        if min(self.noise) < 0.0:
            raise ValueError(f"noise needs two non-negative spreads, got {self.noise}")
        return self


class GoalConfig(FrozenModel):
    """When an episode ends.

    Attributes:
        target_accuracy: Accuracy to reach; the episode terminates there.
        target_loss: Loss to reach instead, nats.
        time_limit_s: Emulated time after which the episode is truncated, s.
        round_limit: Rounds after which it is truncated.
    """

    target_accuracy: float | None = Field(default=None, gt=0.0, lt=1.0)
    target_loss: float | None = Field(default=0.6, gt=0.0)
    time_limit_s: float = Field(default=12 * 3600.0, gt=0.0, le=14 * 86_400.0)
    round_limit: int = Field(default=1000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _one_target(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("target_accuracy") is not None and "target_loss" not in data:
            return {**data, "target_loss": None}
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> GoalConfig:
        if (self.target_accuracy is None) == (self.target_loss is None):
            raise ValueError("give either target_accuracy or target_loss")
        return self


class SelectionActionConfig(FrozenModel):
    """What an action means.

    Attributes:
        kind: `score`: one number in [-1, 1] a site, chosen if above 0. `binary`: one bit a site (MultiBinary).
    """

    kind: Literal["score", "binary"] = "score"


class SelectionObservationConfig(FrozenModel):
    """What the observation vector holds beside the fixed features.

    Attributes:
        domain_mix: Show each site's domain mix (what it discloses of its data).
        domain_loss: Show the evaluated loss of each domain.
        market: Show price, carbon intensity and egress price.
    """

    domain_mix: bool = True
    domain_loss: bool = True
    market: bool = True


class SelectionRewardConfig(FrozenModel):
    """Weights of the reward terms, each logged by name in `info`.

    Progress is the decrease of the log loss, as a share of the whole way to the target.

    Attributes:
        form: `rate`: progress per second times `time_scale_s`, minus the priced terms. `net`: progress minus seconds
            over `time_scale_s`; summed over an episode that is the way made good minus the time it took, so its
            optimum is the shortest time to the target.
        time_scale_s: Seconds that weigh as much as the whole way to the target.
        energy_per_kwh: Weight of facility energy, per kWh.
        carbon_per_kg: Weight of emissions, per kg CO2e.
        cost_per_usd: Weight of energy and egress cost, per USD.
        target: Reward for reaching the target.
    """

    form: Literal["rate", "net"] = "rate"
    time_scale_s: float = Field(default=3600.0, gt=0.0)
    energy_per_kwh: float = Field(default=0.0, ge=0.0)
    carbon_per_kg: float = Field(default=0.0, ge=0.0)
    cost_per_usd: float = Field(default=0.0, ge=0.0)
    target: float = Field(default=0.0, ge=0.0)


class SiteSelectionConfig(FrozenModel):
    """One site-selection environment.

    Attributes:
        sites: How many sites, and what each holds.
        power: Power available for training.
        network: Links to the aggregator.
        market: Price and carbon.
        workload: What is trained.
        rounds: How a round passes.
        learning: How rounds lower the loss.
        goal: Target and limits.
        action: Meaning of actions.
        observation: Observation vector.
        reward: Reward.
    """

    sites: SitesConfig = Field(default_factory=SitesConfig)
    power: PowerConfig = Field(default_factory=PowerConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    market: MarketConfig = Field(default_factory=MarketConfig)
    workload: WorkloadConfig = Field(default_factory=WorkloadConfig)
    rounds: RoundsConfig = Field(default_factory=RoundsConfig)
    learning: LearningConfig = Field(default_factory=LearningConfig)
    goal: GoalConfig = Field(default_factory=GoalConfig)
    action: SelectionActionConfig = Field(default_factory=SelectionActionConfig)
    observation: SelectionObservationConfig = Field(default_factory=SelectionObservationConfig)
    reward: SelectionRewardConfig = Field(default_factory=SelectionRewardConfig)

    @model_validator(mode="after")
    def _named_sites(self) -> SiteSelectionConfig:
        if self.sites.named and self.network.distinct_regions is not None:
            raise ValueError(
                "network.distinct_regions is for sites that are drawn; these are named, each in its region"
            )
        for site in self.sites.named:
            if site.mix and len(site.mix) != self.learning.domains:
                raise ValueError(
                    f"site '{site.name}': mix has {len(site.mix)} shares for {self.learning.domains} domains"
                )
            if site.mix and (min(site.mix) < 0.0 or not math.isclose(sum(site.mix), 1.0, abs_tol=1e-6)):
                raise ValueError(f"site '{site.name}': mix must be non-negative and sum to 1, got {sum(site.mix):g}")
        return self
