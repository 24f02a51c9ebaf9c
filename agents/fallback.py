"""A controller that stands in for a learned policy whenever the policy, or what it is shown, cannot be trusted."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.baselines import make_baseline
from wattgym.agents.controller import Controller
from wattgym.config import FrozenModel
from wattgym.envs.observation import BOUND
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask

Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

STAND_IN = "feed-forward + PI"
"""The tuned baseline that takes over."""


class Reason(StrEnum):
    """Why the policy is not listened to, the gravest first."""

    LATE = "policy too slow"
    FAILED = "policy failed"
    NOT_FINITE = "observation not finite"
    STALE = "telemetry stale"
    OUT_OF_RANGE = "observation out of range"
    BAD_ACTION = "action not finite"
    RECOVERING = "recovering"


class FallbackConfig(FrozenModel):
    """When to take over, and when to hand back.

    Attributes:
        stale_periods: Telemetry older than this many control periods is not acted on.
        deadline_share: A policy that needs more than this share of the control period is late; 0 runs it in the
            loop's own thread and lets it take as long as it takes.
        good_periods: Periods in a row in which all must have been well before the policy gets the control back.
    """

    stale_periods: float = Field(default=3.0, gt=0.0, lt=BOUND)
    deadline_share: float = Field(default=0.5, ge=0.0, lt=1.0)
    good_periods: int = Field(default=5, ge=1)


@dataclass(frozen=True, eq=False)
class _Answer:
    """What the policy's thread came up with: an action, or why there is none."""

    ticket: int
    action: FloatArray | None = None
    why: str = ""


class FallbackController:
    """Wraps a policy; a controller like any other, live or in the emulator.

    Each period, the observation is checked before the policy's answer and the answer after it. While anything is
    wrong, and for some good periods after, the tuned feed-forward + PI acts instead. It starts without any memory, and
    where what it would correct is not to be trusted (stale or missing telemetry), it leaves the correction out and
    follows the nominal model alone. The policy is asked all the same, so that a recurrent one stays in the picture;
    what it is shown then has the last good value of each feature that is missing.

    A policy runs in a thread of its own: one that hangs is late each period, and nothing waits for it longer than
    its deadline. Meanwhile the last command stays in force.

    Attributes:
        counts: Site-periods in which the policy was not listened to, by reason.
        last_failure: The policy's last exception, as text.
    """

    def __init__(
        self, policy: Controller, config: FallbackConfig | None = None, stand_in: Controller | None = None
    ) -> None:
        """Wraps.

        Args:
            policy: Who acts while all is well.
            config: When to take over; the defaults if None.
            stand_in: Who takes over; the tuned feed-forward + PI if None.
        """
        self.counts: Counter[Reason] = Counter()
        self.last_failure = ""
        self._policy = policy
        self._config = config or FallbackConfig()
        self._stand_in = stand_in or make_baseline(STAND_IN)
        self._thread: _PolicyThread | None = None

    @property
    def name(self) -> str:
        """The policy's name."""
        return self._policy.name

    @property
    def reasons(self) -> tuple[Reason | None, ...]:
        """Why the policy was not listened to in the last period, for each site; None where it was."""
        return tuple(self._reasons)

    @property
    def total(self) -> int:
        """Site-periods in which the policy was not listened to."""
        return sum(self.counts.values())

    def reset(self, task: ControlTask) -> None:
        """Prepares both for an episode; counts go on.

        Raises:
            UserError: The policy does not fit the task.
        """
        self._task = task
        layout = task.layout
        self._age = layout.site("age")
        self._error = layout.site("error_1")
        batch = task.base_w.size
        self._good = np.zeros(batch, dtype=np.int64)
        self._trusted = np.ones(batch, dtype=np.bool_)
        self._reasons: list[Reason | None] = [None] * batch
        self._last_good = np.zeros((batch, layout.size), dtype=np.float32)
        self._policy.reset(task)
        self._stand_in.reset(task)
        if self._config.deadline_share > 0.0 and (self._thread is None or self._thread.busy):
            self._thread = _PolicyThread(self._policy)

    def act(self, observation: Float32Array) -> FloatArray:
        """The policy's action where all is well, the stand-in's elsewhere."""
        finite = np.isfinite(observation)
        shown = np.where(finite, observation, self._last_good)
        np.clip(shown, -BOUND, BOUND, out=shown)
        self._last_good = shown
        reasons = self._judged(observation, finite)
        action, why = self._ask(shown)
        if action is None:
            reasons = [reason or why for reason in reasons] if why is not Reason.LATE else [why] * len(reasons)
            action = np.zeros((shown.shape[0], self._task.layout.actions))
        else:
            action = self._checked(action, reasons)
        self._decide(reasons)
        instead = ~self._trusted
        if instead.any():
            blind = np.array([r in (Reason.NOT_FINITE, Reason.STALE) for r in reasons], dtype=np.bool_)
            action = np.where(instead[:, None], self._stand_in.act(self._without_error(shown, blind)), action)
        return action

    def _judged(self, observation: Float32Array, finite: BoolArray) -> list[Reason | None]:
        """What is wrong with each site's observation."""
        missing: BoolArray = np.logical_not(np.logical_and.reduce(finite, axis=1))
        with np.errstate(invalid="ignore"):
            # The age is told in periods. A feature at its bound was clipped: how far off it really is, nobody sees.
            stale = observation[:, self._age] > self._config.stale_periods
            outside: BoolArray = np.logical_or.reduce(np.abs(observation) >= BOUND, axis=1)
        return [
            Reason.NOT_FINITE if m else Reason.STALE if s else Reason.OUT_OF_RANGE if o else None
            for m, s, o in zip(missing, stale, outside, strict=True)
        ]

    def _ask(self, shown: Float32Array) -> tuple[FloatArray | None, Reason]:
        """The policy's action, or None and the reason."""
        if self._thread is None:
            answer = _answer(self._policy, shown, 0)
        else:
            found = self._thread.ask(shown, self._config.deadline_share * self._task.spec.period_s)
            if found is None:
                return None, Reason.LATE
            answer = found
        if answer.action is None:
            self.last_failure = answer.why
        return answer.action, Reason.FAILED

    def _checked(self, action: FloatArray, reasons: list[Reason | None]) -> FloatArray:
        wanted = (len(reasons), self._task.layout.actions)
        if np.shape(action) != wanted:
            self.last_failure = f"action of shape {np.shape(action)}, expected {wanted}"
            reasons[:] = [reason or Reason.FAILED for reason in reasons]
            return np.zeros(wanted)
        wrong: BoolArray = np.logical_not(np.logical_and.reduce(np.isfinite(action), axis=1))
        if wrong.any():
            # What a recurrent policy remembers of this can be no better than its answer.
            self._policy.reset(self._task)
            reasons[:] = [
                reason or (Reason.BAD_ACTION if w else None) for reason, w in zip(reasons, wrong, strict=True)
            ]
        return np.where(wrong[:, None], 0.0, action)

    def _decide(self, reasons: list[Reason | None]) -> None:
        """Who acts for each site; a stand-in that was not acting begins without memory."""
        acted = bool((~self._trusted).any())
        for i, reason in enumerate(reasons):
            self._good[i] = 0 if reason else self._good[i] + 1
            if reason:
                self._trusted[i] = False
            elif not self._trusted[i]:
                self._trusted[i] = self._good[i] > self._config.good_periods
                reasons[i] = None if self._trusted[i] else Reason.RECOVERING
        self.counts.update(reason for reason in reasons if reason)
        self._reasons = reasons
        if not acted and not self._trusted.all():
            self._stand_in.reset(self._task)

    def _without_error(self, shown: Float32Array, blind: BoolArray) -> Float32Array:
        seen = shown.copy()
        seen[blind, self._error] = 0.0
        return seen


class _PolicyThread:
    """Runs a policy beside the control loop, one observation at a time."""

    def __init__(self, policy: Controller) -> None:
        self._policy = policy
        self._questions: queue.SimpleQueue[tuple[int, Float32Array]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._asked = self._answered = 0
        # A daemon: a policy that never comes back must not keep the process from ending.
        threading.Thread(target=self._run, name="wattgym-policy", daemon=True).start()

    @property
    def busy(self) -> bool:
        """The policy still thinks about an earlier observation."""
        self._drop_old()
        return self._answered < self._asked

    def ask(self, observation: Float32Array, deadline_s: float) -> _Answer | None:
        """The policy's answer; None if it is not there in time, or an earlier question is still open."""
        if self.busy:
            return None
        self._asked += 1
        self._questions.put((self._asked, observation))
        try:
            answer = self._answers.get(timeout=deadline_s)
        except queue.Empty:
            return None
        self._answered = answer.ticket
        return answer

    def _drop_old(self) -> None:
        while not self._answers.empty():
            self._answered = self._answers.get().ticket

    def _run(self) -> None:
        while True:
            ticket, observation = self._questions.get()
            self._answers.put(_answer(self._policy, observation, ticket))


def _answer(policy: Controller, observation: Float32Array, ticket: int) -> _Answer:
    try:
        return _Answer(ticket, policy.act(observation))
    except Exception as error:  # whatever a policy's library raises: the loop must go on
        return _Answer(ticket, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
