"""What a controller is told of an episode, and how it says in an action what it wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.feedback import FeedbackLoop
from wattgym.envs.knob_actions import position_of
from wattgym.envs.knobs import Command, KnobName, KnobTable
from wattgym.envs.loop_settings import PredictiveSettings
from wattgym.envs.observation import ObservationLayout
from wattgym.envs.plant import FloatArray, PlantSpec
from wattgym.envs.predictive import PredictiveLoop
from wattgym.envs.site_model import Split
from wattgym.envs.slow_loop import SlowLoop
from wattgym.errors import UserError


@dataclass(frozen=True, eq=False)
class ControlTask:
    """What a controller is told at the start of an episode; everything in it is known on live hardware too.

    Attributes:
        spec: The plant's nominal description.
        layout: Which observation feature lies where.
        config: The environment's configuration.
        base_w: Declared base power, shape `(B,)`, W.
        capacity_w: Offered capacity, shape `(B,)`, W.
        loop: What actions are added to where they are `residual_pi`.
        predictive: What actions advise where they are `advice`.
        shortfall_w: Mean power by which the offered targets leave the feasible band, shape `(B,)`, W; None where
            such offers are refused.
    """

    spec: PlantSpec
    layout: ObservationLayout
    config: PowerShapingConfig
    base_w: FloatArray
    capacity_w: FloatArray
    loop: FeedbackLoop | None = None
    predictive: PredictiveLoop | None = None
    shortfall_w: FloatArray | None = None

    @property
    def limit_per_error(self) -> FloatArray:
        """Limit range that an error of one capacity is worth in the nominal model, shape `(B,)`."""
        per_error: FloatArray = self.capacity_w / (self.spec.full_w - self.spec.floor_w)
        return per_error

    @property
    def knobs(self) -> KnobTable:
        """Nominal effect of knobs beside the limit.

        Raises:
            UserError: The environment enables none.
        """
        if self.spec.knobs is None:
            raise UserError("this controller needs knobs beside the power limit; set action.knobs")
        return self.spec.knobs

    def predictive_loop(self, settings: PredictiveSettings, split: Split = "proportional") -> PredictiveLoop:
        """A predictive loop for this task; where knobs beside the limit are enabled, it sets them too."""
        spec, config, knobs = self.spec, self.config, self.layout.knobs
        slow = SlowLoop(spec, knobs, config.knob_rules) if self.layout.beside_limit else None
        return PredictiveLoop(settings, spec, config.rules, self.base_w, self.capacity_w, split, slow)

    def action_for(
        self,
        position: FloatArray,
        feed_forward: FloatArray,
        last: FloatArray,
        knobs: Mapping[KnobName, FloatArray] | None = None,
        last_knobs: Mapping[KnobName, FloatArray] | None = None,
    ) -> FloatArray:
        """The action that asks for a position in each job's limit range, and in those of other knobs.

        Args:
            position: Wanted positions, 0 = lowest limit, 1 = highest, shape `(B, J)`.
            feed_forward: The nominal model's position for the coming target, shape `(B,)`.
            last: Positions in force, shape `(B, J)`.
            knobs: Wanted positions of other knobs, 1 = neutral, each `(B, J)`. Those left out become neutral; those
                that the environment does not enable are left alone.
            last_knobs: For actions of kind `delta`: positions asked for last, each `(B, J)`; neutral if left out.

        Returns:
            Actions in [-1, 1], shape `(B, A)`: one number for each enabled knob and job, knob by knob.
        """
        kind, scale = self.config.action.kind, self.config.action.scale
        neutral = np.ones_like(position)
        parts = []
        for name in self.layout.knobs:
            if name != "power_limit":
                wanted = (knobs or {}).get(name, neutral)
                if kind == "absolute":
                    parts.append(2.0 * wanted - 1.0)
                elif kind == "delta":
                    parts.append((wanted - (last_knobs or {}).get(name, neutral)) / scale)
                elif self.predictive is not None:
                    parts.append(wanted - self.predictive.knobs[name])
                else:
                    parts.append(wanted - 1.0)
            elif kind == "absolute":
                parts.append(2.0 * position - 1.0)
            elif kind == "delta":
                parts.append((position - last) / scale)
            elif self.predictive is not None:
                parts.append(self.predictive.advice_for(position) / self.spec.power_table_w[:, :, -1] / scale)
            else:
                centre = feed_forward if self.loop is None else self.loop.position
                parts.append((position - centre[:, None]) / scale)
        clipped: FloatArray = np.clip(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), -1.0, 1.0)
        return clipped

    def action_of(self, command: Command, feed_forward: FloatArray, last: Command | None = None) -> FloatArray:
        """The action that asks for a whole setting; see `action_for`.

        Args:
            command: Wanted setting; what it leaves out is neutral.
            feed_forward: The nominal model's position for the coming target, shape `(B,)`.
            last: Setting asked for last, for actions of kind `delta`; neutral if None.

        Raises:
            UserError: A job cannot have the commanded micro-batch.
        """
        spec, rules, beside = self.spec, self.config.knob_rules, self.layout.beside_limit
        span = np.maximum(spec.max_limit_w - spec.min_limit_w, 1e-9)
        before = last or Command(spec.max_limit_w)
        return self.action_for(
            (command.limit_w - spec.min_limit_w) / span,
            feed_forward,
            (before.limit_w - spec.min_limit_w) / span,
            {name: position_of(rules, name, command, spec) for name in beside},
            {name: position_of(rules, name, before, spec) for name in beside},
        )
