"""The choices a regulation performance score leaves open, as named variants.

PJM Manual 12 (sections 4.4.6, 4.5.6, 4.5.9, 4.5.10) is the reference of the three-part score. Its text is not freely
readable; the rules are those that public reimplementations quote or use: the battery interface of the US national
laboratories' Grid Modernization Laboratory Consortium 1.4.2 (`lab`) and the University of Michigan's test bed for
compressor loads, whose comments quote the manual. Where the two disagree, the choice is an option here. The latter's
normaliser by total site power is not offered: it calls a site that ignores the signal precise.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.errors import UserError


class PjmVariant(FrozenModel):
    """Every choice of the score.

    Attributes:
        name: Name in reports.
        assumed: True where the operator's formula is not confirmed; reports say "assumed".
        weights: Of correlation, delay and precision.
        sample_s: Interval at which the score is computed.
        window_s: Length of the window that is correlated.
        max_delay_s: Largest shift of the response that is tried; the delay score is 0 there.
        resample: How faster samples become `sample_s` samples: `decimate` keeps every so-manyth (both public
            reimplementations do), `average` takes means (adds about half an interval of apparent lag).
        decimate_offset: Which sample of each group `decimate` keeps, 0 = the first.
        shift_rule: `joint` maximises correlation + delay (the manual's rule as quoted), `correlation` the former only.
        tie_tolerance: The smallest shift within this of the maximum is chosen; 0 = exact floating-point maximum,
            which makes periodic signals pick an arbitrary later period.
        windows: `block` = one window after another, `rolling` = a window from every sample.
        tail: `look_ahead` scores only windows whose every shift is recorded, so an hour needs 65 min of data;
            `truncate` scores to the end with the shifts that are left.
        normaliser: Precision is relative to the mean absolute signal of the settlement interval (`hour`) or of the
            window itself (`block`).
        grace_samples: Allowance for the signal's way to the resource, 0 or 1 samples: that much delay costs nothing.
        constant_std: A window whose signal has a smaller standard deviation (in capacities) is scored by slopes;
            0 = off.
        clip_correlation: Count negative correlation as 0.
        zero_delay: Which windows get no delay score, because doing nothing is not fast: those whose correlation is
            `not_positive`, those with a `constant_response` only, or `never`.
        missing: Missing responses within a window: leave the pair out (`pairwise`), `hold` the last one, or `zero`.
        min_valid_share: A window with a smaller share of recorded responses is not scored (our convention).
        outage_s: A contiguous outage this long scores 0 instead.
        low_signal: A window whose mean absolute signal is smaller (in capacities) is not scored; 0 = off.
        warmup_s: Windows that begin earlier are not scored (10 min after an assignment in the manual).
        interval_s: Settlement interval: 3600 (legacy) or 300 (since October 2025).
        forfeit_below: An interval that scores less earns nothing; exactly this much is paid.
    """

    name: str = "custom"
    assumed: bool = False
    weights: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    sample_s: float = Field(10.0, gt=0)
    window_s: float = Field(300.0, gt=0)
    max_delay_s: float = Field(300.0, gt=0)
    resample: Literal["decimate", "average"] = "decimate"
    decimate_offset: int = Field(0, ge=0)
    shift_rule: Literal["joint", "correlation"] = "joint"
    tie_tolerance: float = Field(1e-12, ge=0)
    windows: Literal["block", "rolling"] = "block"
    tail: Literal["look_ahead", "truncate"] = "look_ahead"
    normaliser: Literal["hour", "block"] = "hour"
    grace_samples: Literal[0, 1] = 0
    constant_std: float = Field(0.01, ge=0)
    clip_correlation: bool = True
    zero_delay: Literal["not_positive", "constant_response", "never"] = "not_positive"
    missing: Literal["pairwise", "hold", "zero"] = "pairwise"
    min_valid_share: float = Field(0.8, gt=0, le=1)
    outage_s: float = Field(900.0, gt=0)
    low_signal: float = Field(0.01, ge=0, lt=1)
    warmup_s: float = Field(0.0, ge=0)
    interval_s: float = Field(3600.0, gt=0)
    forfeit_below: float = Field(0.25, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> PjmVariant:
        if min(self.weights) < 0 or abs(sum(self.weights) - 1.0) > 1e-9:
            raise ValueError(f"weights must be >= 0 and sum to 1, got {self.weights}")
        for name in ("window_s", "max_delay_s", "interval_s"):
            ratio = getattr(self, name) / self.sample_s
            if abs(ratio - round(ratio)) > 1e-9 or ratio < 2:
                raise ValueError(f"{name} must be a multiple of sample_s {self.sample_s:g} and at least twice as long")
        if self.interval_s < self.window_s:
            raise ValueError(f"interval_s {self.interval_s:g} is shorter than window_s {self.window_s:g}")
        return self

    @property
    def window_samples(self) -> int:
        """Samples per window."""
        return round(self.window_s / self.sample_s)

    @property
    def max_shift(self) -> int:
        """Largest shift, samples."""
        return round(self.max_delay_s / self.sample_s)

    @property
    def interval_samples(self) -> int:
        """Samples per settlement interval."""
        return round(self.interval_s / self.sample_s)


_PRESETS = (
    PjmVariant(name="legacy"),
    PjmVariant(name="legacy_rolling", windows="rolling"),
    PjmVariant(name="grace", grace_samples=1),
    PjmVariant(
        name="lab",
        shift_rule="correlation",
        tie_tolerance=0.0,
        normaliser="block",
        clip_correlation=False,
        zero_delay="constant_response",
        low_signal=0.0,
    ),
    PjmVariant(name="five_minute", interval_s=300.0, assumed=True),
    PjmVariant(name="precision_only", weights=(0.0, 0.0, 1.0), interval_s=300.0, assumed=True),
)
PJM_VARIANTS: dict[str, PjmVariant] = {variant.name: variant for variant in _PRESETS}
"""Presets by name.

- `legacy`: the three-part score until September 2025, equal weights, hourly.
- `legacy_rolling`: the same with a window from every 10-s sample.
- `grace`: the same with 10 s of propagation allowance.
- `lab`: as the national laboratories' code scores (correlation-only shift, exact maximum, window normaliser).
- `five_minute`: the three-part score on 5-min settlement. Assumed.
- `precision_only`: precision on 5-min settlement, our reading of the redesign of October 2025. Assumed.
"""


def pjm_variant(name: str) -> PjmVariant:
    """Looks a preset up.

    Raises:
        UserError: No such preset; the message lists those there are.
    """
    if name not in PJM_VARIANTS:
        raise UserError(f"unknown score variant '{name}'; variants: {', '.join(PJM_VARIANTS)}")
    return PJM_VARIANTS[name]
