"""Settings of predictive control."""

from __future__ import annotations

from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.envs.site_model import Split


class PredictiveSettings(FrozenModel):
    """Weights and memories of predictive control.

    Attributes:
        horizon: Periods looked ahead.
        move: Price of moving the command by one capacity, against a squared error of one capacity.
        throughput: Worth of full speed, against the same.
        credit: Share of a lasting misfit between sensor and nominal model that is put down to the model.
        fill: Share of a job's dip (a checkpoint) that the others are to fill.
        prior: Evidence that the assumed dead time counts for, squared shares of full power.
        memory: Periods over which the forecast of the target forgets.
        ridge: Pull of the forecast towards persistence.
    """

    horizon: int = Field(default=4, ge=1, le=30)
    move: float = Field(default=0.03, ge=0.0)
    throughput: float = Field(default=0.03, ge=0.0)
    credit: float = Field(default=0.2, ge=0.0, le=1.0)
    fill: float = Field(default=0.5, ge=0.0, le=1.0)
    prior: float = Field(default=0.02, gt=0.0)
    memory: float = Field(default=200.0, ge=2.0)
    ridge: float = Field(default=0.1, gt=0.0)


class LoopSettings(PredictiveSettings):
    """Settings of `PredictiveLoop` in an environment.

    Attributes:
        split: How power is split between jobs: `proportional` puts all limits at one position of their range, `optimal`
            gives it where another watt trains most.
    """

    split: Split = "proportional"
