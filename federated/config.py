"""The federation file: sites, model, data, how they are trained, aggregated and reached."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel, load_config
from wattgym.envs.federation.config import (
    GoalConfig,
    LearningConfig,
    MarketConfig,
    NetworkConfig,
    PowerConfig,
    RoundsConfig,
    SelectionObservationConfig,
    SelectionRewardConfig,
    WorkloadConfig,
)
from wattgym.errors import UserError
from wattgym.federated.tasks import FAMILIES
from wattgym.live.config import DataConfig, JobConfig, LoraSettings, ModelConfig, OptimiserConfig


class SiteShaping(FrozenModel):
    """How a site holds its power.

    Attributes:
        devices: Device addresses (`wattgym.hw.open`): UUID, index or `cuda:N`; simulated: `PRESET:N`.
        backend: Where the devices live.
        arm: First key to real writes; the second is the environment variable `WATTGYM_ARM=1`.
        controller: A power-shaping baseline by name or a policy bundle's folder; None: devices only keep the budget.
        signal: Regulation signal that the controller follows: a trace by id or a file.
        signal_start_s: Where in the signal the site begins, s.
        capacity: Share of the feasible power band that the controller offers at most, around its base power.
        period_s: Control period, s.
        surface: Response surface that describes the training until it is calibrated.
        pace: Share of this machine's free speed that counts as full speed; below 1 where sites share a machine.
    """

    devices: tuple[str, ...] = Field(min_length=1)
    backend: Literal["simulated", "nvml"] = "simulated"
    arm: bool = False
    controller: str | None = None
    signal: str | None = None
    signal_start_s: float = Field(0.0, ge=0)
    capacity: float = Field(0.25, gt=0, le=0.5)
    period_s: float = Field(2.0, ge=0.2, le=60)
    surface: str = "h100-sxm/assumed/compute_bound"
    pace: float = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _signal_fits(self) -> SiteShaping:
        if (self.controller is None) != (self.signal is None):
            raise ValueError("controller and signal go together: give both or neither")
        return self


class FederatedSite(FrozenModel):
    """One site.

    Attributes:
        name: Its name, unique in the federation.
        region: Cloud region it lies in, as the network table names it.
        gpu: Board, as the hardware presets call it.
        capacity_w: Capacity of its power domain, W.
        trace: Power-utilisation trace that says how much of the capacity is free; None: the capacity is always free.
        trace_start_s: Where in the trace the run begins, s after the trace's start.
        data: JSON lines with the site's own records; None: its slice of the federation's data.
        shaping: The devices that it holds its power with; None: it does not.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    region: str
    gpu: str = "h100-sxm"
    capacity_w: float = Field(100_000.0, gt=0)
    trace: str | None = None
    trace_start_s: float = Field(0.0, ge=0)
    data: str | None = None
    shaping: SiteShaping | None = None


class SplitConfig(FrozenModel):
    """How the records are dealt to the sites.

    Attributes:
        kind: `iid`: evenly at random. `dirichlet`: each domain over the sites by a Dirichlet draw. `quantity`: at
            random, in log-normal amounts. `category`: whole domains, dealt out in turn.
        alpha: Concentration of `dirichlet`; 100 is near IID, 0.1 nearly one domain a site.
        sigma: Spread of the logarithm of the amounts of `quantity`.
    """

    kind: Literal["iid", "dirichlet", "quantity", "category"] = "dirichlet"
    alpha: float = Field(0.3, gt=0, le=1e4)
    sigma: float = Field(0.75, ge=0, le=3)


class FederatedData(FrozenModel):
    """Which records the federation has.

    Attributes:
        source: `tasks` (generated, see `wattgym.federated.tasks`), `gsm8k`, `self_instruct` (both shipped) or `file`.
        path: JSON lines, also gzip-compressed, for `file`.
        prompt_field: Field that holds the prompt; found by its usual names if None.
        response_field: Field that holds the answer; found by its usual names if None.
        text_field: Field that holds plain text.
        domain_field: Field that names a record's domain, for `file` and for sites' own records; without it all are of
            one domain. GSM8K's domains are the numbers of calculations in the answer (2 to 6 and more), those of
            Self-Instruct classification, generation and user-oriented.
        families: Families of `tasks`.
        records: Records of `tasks`.
        max_tokens: Longest sequence.
        max_records: Only so many records from the top of the file; all if None.
        evaluation: Records kept from training for evaluation, as even over the domains as they allow.
        split: How the others are dealt to the sites.
    """

    source: Literal["tasks", "gsm8k", "self_instruct", "file"] = "gsm8k"
    path: str | None = None
    prompt_field: str | None = None
    response_field: str | None = None
    text_field: str | None = None
    domain_field: str | None = None
    families: tuple[str, ...] = Field(tuple(FAMILIES), min_length=1)
    records: int = Field(2000, ge=2)
    max_tokens: int = Field(256, ge=8)
    max_records: int | None = Field(None, ge=2)
    evaluation: int = Field(64, ge=1)
    split: SplitConfig = SplitConfig()

    @model_validator(mode="after")
    def _known(self) -> FederatedData:
        for name in self.families:
            if name not in FAMILIES:
                raise ValueError(f"unknown family '{name}'; known: {', '.join(FAMILIES)}")
        if self.source == "tasks" and self.path is not None:
            raise ValueError("source 'tasks' has no path")
        self.records_of(self.path)
        return self

    def records_of(self, path: str | None) -> DataConfig:
        """The live job's view of these records, or of a site's own file in their place."""
        if path is None and self.source == "tasks":
            return DataConfig(max_tokens=self.max_tokens, holdout=1)  # generated: a live job would not find them
        return DataConfig(
            source="file" if self.source == "tasks" or path != self.path else self.source,
            path=path,
            prompt_field=self.prompt_field,
            response_field=self.response_field,
            text_field=self.text_field,
            max_tokens=self.max_tokens,
            max_records=self.max_records,
            holdout=1,
        )


class AggregationConfig(FrozenModel):
    """How replies become the next global adapter, and which of them may.

    Attributes:
        method: `factors`: the mean of the factors, weighted by samples (FedAvg). `svd`: the mean of the products B·A,
            which is what the sites' models differ by, brought back to the rank by a truncated singular value
            decomposition; exact as far as that rank can be.
        history_ratio: A reply whose change per step is so many times the median of those that counted is rejected.
        step_ratio: A reply is rejected if its change exceeds so many times what its steps can do: the learning rate per
            weight and step, as AdamW bounds it.
    """

    method: Literal["factors", "svd"] = "factors"
    history_ratio: float = Field(20.0, gt=1)
    step_ratio: float = Field(10.0, gt=1)


class SelectionSettings(FrozenModel):
    """What the selection environment around the federation is told (`wattgym.envs.federation.config`).

    A round of `local_steps` at one site stands for `learning.reference_samples` emulated samples. Under time model A
    `rounds.work_samples` are split over the chosen sites by their power, under B each passes over its data.

    Attributes:
        workload: What is emulated to be trained: energy of a sample, bytes of a transfer.
        rounds: How an emulated round passes.
        learning: Learning model that predicting selectors assume; its start is replaced by the measured one.
        goal: When the run ends; a target is a loss.
        market: Price and carbon.
        observation: Optional parts of the observation, as a learned policy wants them.
        reward: Reward.
    """

    workload: WorkloadConfig = WorkloadConfig()
    rounds: RoundsConfig = RoundsConfig()
    learning: LearningConfig = LearningConfig()
    goal: GoalConfig = GoalConfig()
    market: MarketConfig = MarketConfig()
    observation: SelectionObservationConfig = SelectionObservationConfig()
    reward: SelectionRewardConfig = SelectionRewardConfig()

    @model_validator(mode="after")
    def _loss_target(self) -> SelectionSettings:
        if self.goal.target_loss is None:
            raise ValueError("goal.target_accuracy: the target of a live federation is a loss; give goal.target_loss")
        return self


class FederationConfig(FrozenModel):
    """A federation of sites that fine-tune one adapter.

    Attributes:
        seed: Drives the tiny model's weights, the adapter's start, the split, the order of the data and dropout.
        sites: The sites.
        model: The model; every site loads it by itself.
        data: The records.
        lora: The adapter.
        optimiser: The sites' optimiser; its warm-up begins anew in every round.
        keep_optimiser: Whether a site's optimiser keeps its state from round to round.
        samples_per_update: Samples of an optimiser step.
        micro_batch: Samples of one pass.
        local_steps: Optimiser steps of a round where an assignment says nothing else.
        device: `cuda`, `cpu`, or `auto`.
        threads: CPU threads of a site.
        deadline_s: The aggregator waits no longer than this for a round's replies.
        evaluation_s: It waits no longer than this for an evaluation.
        backoff_s: Wait after a first round with nobody; doubled for each further one, up to 32 times.
        aggregation: How replies are aggregated.
        network: Table of the emulated links between sites and aggregator; None: links are as they are.
        link_bytes: Bytes that an emulated link carries each way; the adapter's own size if None.
        clock: `wall`: emulated transfers take their time. `emulated`: they are only added to the clock.
        power: How the sites' traces are read.
        selection: What the selection environment is told.
    """

    seed: int = Field(0, ge=0)
    sites: tuple[FederatedSite, ...] = Field(min_length=1)
    model: ModelConfig = ModelConfig()
    data: FederatedData = FederatedData()
    lora: LoraSettings = LoraSettings()
    optimiser: OptimiserConfig = OptimiserConfig()
    keep_optimiser: bool = False
    samples_per_update: int = Field(8, ge=1)
    micro_batch: int = Field(8, ge=1)
    local_steps: int = Field(10, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=1)
    deadline_s: float = Field(3600.0, gt=0)
    evaluation_s: float = Field(600.0, gt=0)
    backoff_s: float = Field(5.0, ge=0)
    aggregation: AggregationConfig = AggregationConfig()
    network: NetworkConfig | None = None
    link_bytes: float | None = Field(None, gt=0)
    clock: Literal["wall", "emulated"] = "wall"
    power: PowerConfig = PowerConfig()
    selection: SelectionSettings = SelectionSettings()

    @model_validator(mode="after")
    def _sane(self) -> FederationConfig:
        names = [site.name for site in self.sites]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two sites are named '{twice}'; names must be unique")
        if self.network is None and (self.clock == "emulated" or self.link_bytes is not None):
            raise ValueError("clock 'emulated' and link_bytes need network: the table of the links")
        self.job(names[0])
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sites."""
        return tuple(site.name for site in self.sites)

    def site(self, name: str) -> FederatedSite:
        """A site by name.

        Raises:
            UserError: There is none of that name.
        """
        for site in self.sites:
            if site.name == name:
                return site
        raise UserError(f"no site is named '{name}'; sites: {', '.join(self.names)}")

    def job(self, name: str) -> JobConfig:
        """A site's training as a live job, whose memory its power controller watches."""
        return JobConfig(
            seed=self.seed,
            model=self.model,
            data=self.data.records_of(self.site(name).data or self.data.path),
            lora=self.lora,
            optimiser=self.optimiser,
            samples_per_update=self.samples_per_update,
            micro_batch=self.micro_batch,
            checkpoint_every=None,
            device=self.device,
            threads=self.threads,
        )


def load_federation(path: str | Path) -> FederationConfig:
    """Reads a federation file and checks all that can be checked without loading the model.

    Raises:
        UserError: The file, a region pair, a trace, a controller, a data slice or the model; one line that names it.
    """
    config = load_config(FederationConfig, path)
    check_federation(config)
    return config


def check_federation(config: FederationConfig) -> None:
    """Looks for everything that a federation names.

    Raises:
        UserError: A region pair, a trace, a controller, a data slice or the model is missing or cannot be used.
    """
    from wattgym.federated.links import Links
    from wattgym.federated.partition import Partition
    from wattgym.federated.power import AvailablePower
    from wattgym.live.models import check_available

    check_available(config.model)
    if config.network is not None:
        Links(config)
    AvailablePower(config)
    if any(site.shaping is not None for site in config.sites):
        from wattgym.federated.site.shaping import check_shaping

        for name in config.names:
            check_shaping(config, name)
    partition = Partition(config)
    for name in config.names:
        partition.slice(name)
