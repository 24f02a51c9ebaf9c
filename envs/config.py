"""Configuration of the power-shaping environment; every key changes what happens, unknown keys are refused."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.envs.feedback import FeedbackGains
from wattgym.envs.knobs import KNOBS, MIN_DUTY, KnobName
from wattgym.envs.loop_settings import LoopSettings
from wattgym.hw.limits import CommandRules

Split = Literal["train", "validation", "test"]


class KnobPhysics(FrozenModel):
    """What knobs beside the power limit do to an emulated job. Ranges are uniform; controllers know their middle.

    Attributes:
        step_s: Length of an optimiser step at full speed, seconds; knobs change between steps.
        comm_share: Range of the share of a synchronous step spent in communication. Assumption.
        straggler_share: Range of the share of a synchronous step that ranks wait for the slowest. Assumption.
        micro_batch_switch_s: Training time lost by a change of the micro-batch, seconds.
        active_gpus_switch_s: Training time lost by a change of the active GPUs, seconds.
        local_steps_switch_s: Training time lost by a change of the local steps, seconds.
    """

    step_s: float = Field(default=2.0, gt=0.0, le=600.0)
    comm_share: tuple[float, float] = (0.05, 0.15)
    straggler_share: tuple[float, float] = (0.01, 0.05)
    micro_batch_switch_s: float = Field(default=0.2, ge=0.0, le=600.0)
    active_gpus_switch_s: float = Field(default=0.5, ge=0.0, le=600.0)
    local_steps_switch_s: float = Field(default=0.0, ge=0.0, le=600.0)

    @model_validator(mode="after")
    def _shares(self) -> KnobPhysics:
        for name in ("comm_share", "straggler_share"):
            low, high = getattr(self, name)
            if not 0.0 <= low <= high <= 0.45:
                raise ValueError(f"{name} needs 0 <= low <= high <= 0.45, got {low:g}, {high:g}")
        return self


class SiteConfig(FrozenModel):
    """The emulated site: its jobs, boards and everything that is drawn anew each episode.

    Attributes:
        jobs: Training jobs J that share the site.
        surfaces: Which response surfaces jobs are drawn from: a split of plants, or explicit surface ids.
        profile: File of a calibrated plant (`wattgym hw calibrate`): its jobs, with their measured spread, instead of
            drawn ones. It has its own surfaces, sizes, spread and sensor, and phases where it measured them.
        gpus_per_job: Job sizes to draw from, GPUs.
        phase_families: Names of fitted phase models to draw from; empty = all, or those that the profile measured.
        randomise: 0 pins every parameter of a job's plant to its central value, 1 draws from its whole range.
        power_spread: Half-width of the per-job error of the nominal power (silicon, cooling, data), fraction.
        sensor: Which reading the controller gets: the board's instantaneous or average field, or its default one.
        control_delay_periods: Fewest and most whole periods by which a command acts late (control network).
        command_loss: Probability that a command is lost and the previous one stays in force.
        host_w_per_gpu: Power of hosts per GPU that no limit changes, W.
        knobs: What knobs beside the power limit do.
    """

    jobs: int = Field(default=4, ge=1, le=4096)
    surfaces: Split | tuple[str, ...] = "train"
    profile: str | None = None
    gpus_per_job: tuple[int, ...] = Field(default=(8, 16, 32), min_length=1)
    phase_families: tuple[str, ...] = ()
    randomise: float = Field(default=1.0, ge=0.0, le=1.0)
    power_spread: float = Field(default=0.05, ge=0.0, le=0.5)
    sensor: Literal["default", "instant", "average"] = "default"
    control_delay_periods: tuple[int, int] = (0, 1)
    command_loss: float = Field(default=0.005, ge=0.0, lt=1.0)
    host_w_per_gpu: float = Field(default=0.0, ge=0.0, le=2000.0)
    knobs: KnobPhysics = Field(default_factory=KnobPhysics)

    @model_validator(mode="after")
    def _sane(self) -> SiteConfig:
        low, high = self.control_delay_periods
        if not 0 <= low <= high <= 16:
            raise ValueError(f"control_delay_periods needs 0 <= fewest <= most <= 16, got {low}, {high}")
        if min(self.gpus_per_job) < 1:
            raise ValueError(f"gpus_per_job needs at least 1 GPU a job, got {min(self.gpus_per_job)}")
        if isinstance(self.surfaces, tuple) and not self.surfaces:
            raise ValueError("surfaces needs at least one surface id, or a split")
        if self.profile is not None:
            # Keys that nothing would read are refused, as misspelt ones are.
            for name in ("surfaces", "gpus_per_job", "power_spread", "sensor"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"profile and {name} exclude each other: the profile has its own")
        return self

    @property
    def by_split(self) -> bool:
        """Whether jobs are drawn from a split of plants, so that another split holds plants out."""
        return self.profile is None and isinstance(self.surfaces, str)


class Offer(FrozenModel):
    """What a site promises for a kind of signal: its base power and the capacity around it.

    Attributes:
        base: Base power as a position in the band (`SignalConfig.band`), 0 = floor, 1 = full power.
        capacity: Capacity as a share of `of`.
        of: `band` (full minus floor) or `base` (the base power itself, as peak events are worded).
    """

    base: float = Field(ge=0.0, le=1.0)
    capacity: float = Field(gt=0.0, le=1.0)
    of: Literal["band", "base"] = "band"

    @model_validator(mode="after")
    def _inside_band(self) -> Offer:
        if self.of == "band" and (self.base - self.capacity < -1e-9 or self.base + self.capacity > 1.0 + 1e-9):
            excess = max(self.capacity - self.base, self.base + self.capacity - 1.0)
            raise ValueError(
                f"capacity {self.capacity:g} around base {self.base:g} leaves the feasible band by {excess:g} of it; "
                f"largest possible here: {min(self.base, 1.0 - self.base):g}"
            )
        return self


REGULATION = Offer(base=0.5, capacity=0.35)
OFFERS: dict[str, Offer] = {
    "synthetic_regd": REGULATION,
    "regd": REGULATION,
    "rega": REGULATION,
    "droop": REGULATION,
    "recorded": REGULATION,
    "renewable": Offer(base=0.5, capacity=0.45),
    "peak_event": Offer(base=0.95, capacity=0.25, of="base"),
    "emergency": Offer(base=0.95, capacity=0.30, of="base"),
}
"""Offers by signal family. Peak events: −25 % for three hours (arXiv 2507.00909); emergency: −30 % within 30 s."""


_FAMILIES = {"synthetic_regd": 1.0}
_SCALE = 0.3


class SignalConfig(FrozenModel):
    """Which grid signals episodes follow.

    Attributes:
        families: Signal families and the weights they are drawn with.
        split: Split of recordings and events to draw from.
        trace: Follow this one recorded signal (catalogue id or file) instead of drawing from `families`.
        start_s: Where in `trace` episodes begin, seconds.
        offers: Offers that replace the default of a family.
        band: What offers are relative to: `limits`, the band that power limits alone span whatever knobs are enabled,
            so that results with and without knobs compare at equal targets; or `knobs`, down to what the enabled
            knobs reach.
        infeasible: What becomes of an offer that leaves the feasible band: `refuse` it, or `track` the part within
            (targets are held to the band; `ControlTask.shortfall_w` tells what is missing).
    """

    families: dict[str, float] = Field(default_factory=lambda: dict(_FAMILIES), min_length=1)
    split: Split = "train"
    trace: str | None = None
    start_s: float = 0.0
    offers: dict[str, Offer] = Field(default_factory=dict)
    band: Literal["limits", "knobs"] = "limits"
    infeasible: Literal["refuse", "track"] = "refuse"

    @model_validator(mode="after")
    def _weights(self) -> SignalConfig:
        drawable = [name for name in OFFERS if name != "recorded"]
        for names, known in ((self.families, drawable), (self.offers, list(OFFERS))):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown signal family '{name}'; known: {', '.join(known)}")
        if min(self.families.values()) < 0 or sum(self.families.values()) <= 0:
            raise ValueError("family weights must be non-negative and not all zero")
        # Keys that nothing would read are refused, as misspelt ones are.
        if self.trace is None and self.start_s != 0.0:
            raise ValueError("start_s needs trace: signals drawn from families begin where the episode's seed says")
        if self.trace is not None and self.families != _FAMILIES:
            raise ValueError("trace and families exclude each other: an episode follows one or the other")
        return self

    def offer(self, family: str) -> Offer:
        """The offer for a family, the configured one first."""
        return self.offers.get(family, OFFERS[family])


class ActionConfig(FrozenModel):
    """What an action in [-1, 1] per knob and job means.

    Attributes:
        knobs: Knobs that actions set, in the order of `wattgym.envs.knobs.KNOBS`; the others stay neutral.
        kind: `absolute`: −1 is the lowest end of a knob's range (the job's lowest power limit), +1 its highest.
            `delta`: a change of the limit, or of another knob's position.
            `residual`: added to the limit that the nominal model gives for the target (feed-forward).
            `residual_pi`: added to what feed-forward + PI does, a loop in the environment: an action of 0 is that loop.
            `advice`: what a job will draw beyond what a predictive loop in the environment reckons with in the coming
                period, as a share of its nominal full power; an action of 0 is that loop.
            Residuals leave other knobs neutral from 0 up, and reach their lowest end at −1. Beside advice, knobs are
                moved from where the loop has them: by 0 not at all, by ±1 as far as their range reaches.
        scale: For all but `absolute`: the share of the limit range that an action of 1 moves (for `advice`, of full
            power); for `delta`, of every knob's range.
        gains: For `residual_pi`: the loop's gains. They go wherever the actions' meaning goes, into bundles too.
        loop: For `advice`: the loop's settings, which go wherever the actions' meaning goes too.
    """

    knobs: tuple[KnobName, ...] = ("power_limit",)
    kind: Literal["absolute", "delta", "residual", "residual_pi", "advice"] = "absolute"
    scale: float = Field(default=_SCALE, gt=0.0, le=1.0)
    gains: FeedbackGains | None = None
    loop: LoopSettings | None = None

    @property
    def beside_limit(self) -> tuple[KnobName, ...]:
        """Enabled knobs other than the power limit."""
        return tuple(name for name in self.knobs if name != "power_limit")

    @model_validator(mode="after")
    def _read(self) -> ActionConfig:
        if not self.knobs or self.knobs != tuple(name for name in KNOBS if name in self.knobs):
            raise ValueError(f"knobs must be some of {', '.join(KNOBS)}, once each and in this order")
        if self.kind in ("residual", "residual_pi", "advice") and "power_limit" not in self.knobs:
            raise ValueError(
                f"kind '{self.kind}' is about power limits; knobs must have power_limit, or kind be 'absolute'"
            )
        if self.kind == "absolute" and self.scale != _SCALE:
            raise ValueError("scale has no meaning for kind 'absolute'; it goes with the other kinds")
        if (self.gains is None) == (self.kind == "residual_pi"):
            raise ValueError(
                f"gains go with kind 'residual_pi', which needs them ('wattgym tune-baselines' finds them); "
                f"kind is '{self.kind}'"
            )
        if (self.loop is None) == (self.kind == "advice"):
            raise ValueError(
                f"loop goes with kind 'advice', which needs it (empty for its defaults); kind is '{self.kind}'"
            )
        return self


class KnobRules(FrozenModel):
    """How far and how often knobs beside the power limit may be changed, on any plant.

    Attributes:
        hysteresis: How far beyond half-way to its next setting a discrete knob must be pushed to change, in settings.
        micro_batch_dwell_s: Least time between changes of the micro-batch, seconds.
        active_gpus_dwell_s: Least time between changes of the active GPUs, seconds.
        local_steps_dwell_s: Least time between changes of the local steps, seconds.
        duty_dead_band: Changes of the duty smaller than this are not passed on.
        min_duty: Lowest duty; 0 lets a job be paused.
        min_active_share: Least share of a job's GPUs that stay active.
        max_local_steps: Most optimiser steps between averages.
    """

    hysteresis: float = Field(default=0.2, ge=0.0, lt=0.5)
    micro_batch_dwell_s: float = Field(default=10.0, ge=0.0)
    active_gpus_dwell_s: float = Field(default=30.0, ge=0.0)
    local_steps_dwell_s: float = Field(default=30.0, ge=0.0)
    duty_dead_band: float = Field(default=0.01, ge=0.0, lt=0.5)
    min_duty: float = Field(default=MIN_DUTY, ge=0.0, lt=1.0)
    min_active_share: float = Field(default=0.0, ge=0.0, le=1.0)
    max_local_steps: int = Field(default=8, ge=1, le=1024)

    @model_validator(mode="after")
    def _duty(self) -> KnobRules:
        if 0.0 < self.min_duty < MIN_DUTY:
            raise ValueError(f"min_duty must be 0 (jobs may be paused) or at least {MIN_DUTY:g}, got {self.min_duty:g}")
        return self


class ObservationConfig(FrozenModel):
    """What the observation vector holds beside the fixed features.

    Attributes:
        preview_periods: Future signal samples shown (only where the service announces them).
        error_history: Past tracking errors shown.
        command_history: Past commands of each job shown.
        integral_leak: Share of the error integral and of the signal's level that is kept each period.
    """

    preview_periods: int = Field(default=0, ge=0, le=64)
    error_history: int = Field(default=4, ge=1, le=64)
    command_history: int = Field(default=2, ge=1, le=16)
    integral_leak: float = Field(default=0.95, ge=0.0, lt=1.0)


class RewardConfig(FrozenModel):
    """Weights of the reward terms, each logged by name in `info`.

    Attributes:
        tracking: Weight of the Huber-shaped tracking error per capacity.
        huber: Error (share of capacity) beyond which the tracking term grows linearly only.
        throughput: Weight of training progress relative to full speed.
        actuation: Weight of the mean change of the limits (share of their range).
        violation: Weight of the error beyond 30 % of capacity (the 30 % / 90 % rule's band).
    """

    tracking: float = Field(default=1.0, ge=0.0)
    huber: float = Field(default=0.1, gt=0.0)
    throughput: float = Field(default=0.2, ge=0.0)
    actuation: float = Field(default=0.05, ge=0.0)
    violation: float = Field(default=0.5, ge=0.0)


class PowerShapingConfig(FrozenModel):
    """One power-shaping environment.

    Attributes:
        site: The emulated site.
        signal: Grid signals.
        action: Meaning of actions.
        observation: Observation vector.
        reward: Reward weights.
        rules: The command rules of the hardware guard, in force in training too.
        knob_rules: Rules for the knobs beside the power limit.
        period_s: Control period, seconds.
        episode_s: Episode length, seconds; episodes end truncated.
    """

    site: SiteConfig = Field(default_factory=SiteConfig)
    signal: SignalConfig = Field(default_factory=SignalConfig)
    action: ActionConfig = Field(default_factory=ActionConfig)
    observation: ObservationConfig = Field(default_factory=ObservationConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    rules: CommandRules = Field(default_factory=CommandRules)
    knob_rules: KnobRules = Field(default_factory=KnobRules)
    period_s: float = Field(default=2.0, ge=0.2, le=60.0)
    episode_s: float = Field(default=1200.0, gt=0.0, le=7 * 86400.0)

    @model_validator(mode="after")
    def _whole_ticks(self) -> PowerShapingConfig:
        ticks = self.episode_s / self.period_s
        if abs(ticks - round(ticks)) > 1e-6 or ticks < 1:
            raise ValueError(f"episode_s {self.episode_s:g} must be a whole number of periods of {self.period_s:g} s")
        if not self.action.beside_limit:
            # Keys that nothing would read are refused, as misspelt ones are.
            for where, changed in (
                ("knob_rules", self.knob_rules != KnobRules()),
                ("site.knobs", self.site.knobs != KnobPhysics()),
                ("signal.band", self.signal.band != "limits"),
            ):
                if changed:
                    raise ValueError(f"{where} is set, but action.knobs enables no knob beside the power limit")
        return self

    @property
    def ticks(self) -> int:
        """Control periods in an episode."""
        return round(self.episode_s / self.period_s)
