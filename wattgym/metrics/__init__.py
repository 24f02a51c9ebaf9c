"""Scores of grid services, tracking errors, and what they cost the training."""

from wattgym.metrics.events import EventCompliance, event_compliance
from wattgym.metrics.pjm import PJM_VARIANTS, PjmScore, PjmVariant, pjm_score, pjm_variant
from wattgym.metrics.settlement import Settlement, mileage, mileage_ratio, regulation_credit
from wattgym.metrics.tracking import RampCompliance, Tracking, mape, ramp_compliance, tracking
from wattgym.metrics.training import actuations_per_hour, energy_per_token_j, throughput_retained

__all__ = [
    "PJM_VARIANTS",
    "EventCompliance",
    "PjmScore",
    "PjmVariant",
    "RampCompliance",
    "Settlement",
    "Tracking",
    "actuations_per_hour",
    "energy_per_token_j",
    "event_compliance",
    "mape",
    "mileage",
    "mileage_ratio",
    "pjm_score",
    "pjm_variant",
    "ramp_compliance",
    "regulation_credit",
    "throughput_retained",
    "tracking",
]
