"""Site selection over a batch of federations: actions and their repair, observations, rewards and ends of episodes.

The single and the batched environment are thin shells around this class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.federation.arrays import BoolArray, FloatArray, IntArray
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator, RoundResult
from wattgym.envs.federation.observation import SelectionLayout, SelectionObserver
from wattgym.envs.federation.reward import reward_terms
from wattgym.envs.federation.view import SelectionTask, SelectionView
from wattgym.errors import UserError


@dataclass(eq=False, slots=True)
class SelectionOutcome:
    """One round (or wait) of a batch.

    Attributes:
        observation: Shape `(B, D)`, float32.
        reward: Shape `(B,)`.
        terms: Reward terms in the order of `wattgym.envs.federation.reward.TERMS`, shape `(6, B)`.
        terminated: Whether the target is reached, shape `(B,)`.
        truncated: Whether time or rounds have run out, shape `(B,)`.
        result: What happened.
        ineligible: Sites asked for that were not eligible and so were left out, shape `(B,)`.
        repaired: Whether nothing eligible was asked for and the best predicted site took part instead, shape `(B,)`.
        time_s: Time since the episode's start, shape `(B,)`, s.
        loss: Evaluated loss, shape `(B,)`, nats.
        true_loss: Loss without the noise of its evaluation, shape `(B,)`, nats.
    """

    observation: NDArray[np.float32]
    reward: FloatArray
    terms: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    result: RoundResult
    ineligible: IntArray
    repaired: BoolArray
    time_s: FloatArray
    loss: FloatArray
    true_loss: FloatArray


class SiteSelection:
    """A batch of site-selection episodes that begin and end on their own."""

    def __init__(self, config: SiteSelectionConfig, emulator: FederationEmulator | None = None) -> None:
        """Wraps an emulated federation.

        Args:
            config: The environment.
            emulator: Federation to select from; a new one by default.

        Raises:
            UserError: The configuration cannot be met.
        """
        self.config = config
        self.emulator = emulator or FederationEmulator(config)
        self.layout = SelectionLayout.of(config, self.emulator.library.learning.domains)
        self._observer = SelectionObserver(self.layout, self.emulator)
        self._log_target = np.log(self.emulator.library.target_loss)
        self._last: RoundResult | None = None
        self._task: SelectionTask | None = None
        self._over: BoolArray | None = None

    @property
    def task(self) -> SelectionTask:
        """What a selector is told at the start of the present episodes."""
        if self._over is None:
            raise RuntimeError("no episode before the first reset")
        if self._task is None:
            self._task = SelectionTask.of(self.emulator, self.layout)
        return self._task

    @property
    def view(self) -> SelectionView:
        """What a selector knows before the coming round."""
        return SelectionView(self.task, self.emulator.telemetry, self._last)

    @property
    def eligible(self) -> BoolArray:
        """Sites that may be chosen now, shape `(B, N)`."""
        return self.emulator.telemetry.eligible

    def action_masks(self) -> BoolArray:
        """Which bits are open, for each site first `off`, then `on`, as MaskablePPO wants them; shape `(B, 2 N)`."""
        eligible = self.eligible
        return np.stack([np.ones_like(eligible), eligible], axis=2).reshape(eligible.shape[0], -1)

    def reset(self, seeds: Sequence[int], rows: IntArray | None = None) -> NDArray[np.float32]:
        """Begins one episode per seed; equal seeds give equal episodes, alone or in any batch.

        Args:
            seeds: Seeds.
            rows: Environments to begin anew, ascending; None begins a batch of `len(seeds)`.

        Returns:
            Observations of all environments, shape `(B, D)`.
        """
        emulator = self.emulator
        emulator.reset(seeds, rows)
        way = np.log(emulator.true_loss) - self._log_target
        if rows is None or self._over is None:
            self._way, self._over, self._last = way, np.zeros(len(seeds), dtype=bool), None
        else:
            self._way[rows] = way[rows]
            self._over[rows] = False
        self._task = None
        return self._observer.begin(rows)

    def step(self, actions: NDArray[np.generic]) -> SelectionOutcome:
        """Plays one round with the sites that the actions choose.

        A site is chosen where its number is above 0. Sites that are not eligible are left out and counted. Where
        nothing is left, the best predicted site takes part (`SelectionView.best_site`); where no site is eligible at
        all, the environment waits for the next power sample.

        Args:
            actions: Shape `(B, N)`: scores in [-1, 1], or bits.

        Raises:
            UserError: An action is NaN or infinite, or the shape is another; nothing has happened.
            RuntimeError: An episode is over or was never begun.
        """
        if self._over is None or self._over.any():
            raise RuntimeError("an episode is over; call reset first")
        chosen, ineligible, repaired = self._choose(actions)
        result = self.emulator.step(chosen)
        self._last = result
        known, loss = self.emulator.telemetry, self.emulator.true_loss
        goal = self.config.goal
        terminated = loss <= self.emulator.library.target_loss
        steps = known.rounds + known.waits
        truncated = ((known.time_s >= goal.time_limit_s) | (steps >= goal.round_limit)) & ~terminated
        self._over = terminated | truncated
        terms = reward_terms(self.config.reward, result, self._way, terminated)
        return SelectionOutcome(
            observation=self._observer.build(result),
            reward=terms.sum(axis=0),
            terms=terms,
            terminated=terminated,
            truncated=truncated,
            result=result,
            ineligible=ineligible,
            repaired=repaired,
            time_s=known.time_s,
            loss=known.loss,
            true_loss=loss,
        )

    def _choose(self, actions: NDArray[np.generic]) -> tuple[BoolArray, IntArray, BoolArray]:
        eligible = self.eligible
        action = np.asarray(actions)
        if action.shape != eligible.shape:
            raise UserError(
                f"actions have shape {action.shape}; valid: {eligible.shape}, one number per environment and site slot"
            )
        if action.dtype.kind == "f" and not np.isfinite(action).all():
            where = np.argwhere(~np.isfinite(action))[0]
            raise UserError(
                f"action of environment {where[0]}, site {where[1]} is {action[tuple(where)]}; valid: -1 to 1"
            )
        asked = action > 0
        chosen = asked & eligible
        existing = asked & self.emulator.federation.exists
        ineligible = existing.sum(axis=1) - chosen.sum(axis=1)
        repaired: BoolArray = ~np.asarray(chosen.any(axis=1))
        if repaired.any():
            repaired &= eligible.any(axis=1)
            rows = repaired.nonzero()[0]
            if rows.size:
                chosen[rows, self.view.best_site()[rows]] = True
        return chosen, ineligible, repaired
