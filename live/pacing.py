"""The job's side of its channel: where its time goes, and how the knobs pace it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from wattgym.live.channel import JobState, JobStatus, Knobs
from wattgym.live.config import checked_micro_batch, checked_ranks
from wattgym.phase import Phase

SLICE_S = 0.02
"""While it waits, the job looks at its knobs this often, s."""

WINDOW_STEPS = 20
"""Steps that the published means are taken over."""

_RANKS_POLL_S = 0.0002
_STEADY_STEPS = 3

_ORPHAN_POLL_S = 0.5
_ORPHAN_GRACE_S = 60.0


class StopFlag:
    """Why the job shall end, if it shall: a signal, or the death of the process that owns it."""

    def __init__(self) -> None:
        self.reason = ""

    def on_signals(self) -> None:
        """Lets SIGTERM, SIGINT and SIGHUP ask for a stop; the job saves its state and ends."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def on_death_of(self, owner: int) -> None:
        """Asks for a stop when the parent process dies, and ends this one if it does not come to it.

        A death signal (`PR_SET_PDEATHSIG`) would fire when the *thread* that started the job ends, and a pipe stays
        open in any other child that its owner has forked; the parent's process id has neither fault.
        """

        def watch() -> None:
            while os.getppid() == owner:
                time.sleep(_ORPHAN_POLL_S)
            self.reason = self.reason or "its owner died"
            time.sleep(_ORPHAN_GRACE_S)
            os._exit(1)

        threading.Thread(target=watch, name="owner-watch", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name


class ChannelSide(Protocol):
    """What a rank needs of the job's channel."""

    path: Path

    def read_knobs(self) -> tuple[int, Knobs]:
        """The newest knobs with their sequence number."""
        ...

    def write_status(self, status: JobStatus) -> None:
        """Publishes the status."""
        ...


@dataclass(frozen=True)
class StepTime:
    """Where a rank's time of one step went.

    Attributes:
        work_s: Seconds of work.
        speed_held_s: Seconds waited for the sake of the speed.
        duty_held_s: Seconds waited for the sake of the duty.
    """

    work_s: float = 0.0
    speed_held_s: float = 0.0
    duty_held_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it, s."""
        return self.work_s + self.speed_held_s + self.duty_held_s


class Reporter:
    """Counts the job's time by phase, publishes its status and makes it wait as the knobs ask.

    After each unit of work (a micro-batch) of `w` seconds the job waits until `w / (speed * duty)` have passed since
    the unit began: `w / speed` is how long the unit would have taken at the given speed, the rest is idle time. The
    wait follows the knobs while it lasts, so that a controller never waits for a long one to end.

    Args:
        channel: The channel; this is its writer of the status.
        stop: Ends waits at once.
        status: First status.
        clock: Monotonic time, s.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        channel: ChannelSide,
        stop: StopFlag,
        status: JobStatus,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.status = status
        self.stop = stop
        self._channel = channel
        self._own_micro_batch = status.micro_batch
        self.clock = clock
        self._sleep = sleep
        self._mark = clock()
        self._knobs = Knobs()
        self._overslept = 0.0
        self.step_time = StepTime()
        self._settings: tuple[object, ...] | None = None
        self._since_switch: list[float] | None = None
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._step_times: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._read_knobs()

    def publish(self, **changes: Any) -> None:
        """Publishes the status after the given changes to its fields."""
        now = self.clock()
        spent = list(self.status.phase_s)
        spent[self.status.phase] += now - self._mark
        self._mark = now
        self.status = replace(self.status, heartbeat_s=now, phase_s=tuple(spent), **changes)
        self._channel.write_status(self.status)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Runs a block in a phase and returns to the one before."""
        before = self.status.phase
        self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Runs one unit of work; then publishes and waits as the knobs ask. An exception skips the wait."""
        start = self.clock()
        yield
        work_s = self.clock() - start
        self.step_time = replace(self.step_time, work_s=self.step_time.work_s + work_s)
        self.publish()
        self._hold(work_s)

    def begin_step(self) -> int:
        """Waits while paused, then fixes the step's micro-batch and ranks by the knobs.

        Returns:
            The micro-batch.
        """
        self._wait_while_paused()
        knobs, ranks = self._knobs, self.status.ranks
        micro_batch = checked_micro_batch(knobs.micro_batch or self._own_micro_batch, self.status.samples_per_update)
        active = knobs.active_ranks or ranks
        checked_ranks(active, ranks, knobs.local_steps)
        steps = knobs.local_steps if isinstance(knobs.local_steps, int) else max(knobs.local_steps[:active])
        settings = (micro_batch, active, knobs.local_steps)
        switched = self._settings not in (None, settings)
        if switched:
            self._count_switch()
            self._since_switch = []
        self._settings = settings
        self.publish(
            micro_batch=micro_batch, active_ranks=active, local_steps=steps, switches=self.status.switches + switched
        )
        self.begin_share()
        return micro_batch

    @property
    def channel_path(self) -> Path:
        """The channel's file."""
        return self._channel.path

    def begin_share(self) -> None:
        """Begins to count the time of a step."""
        self.step_time = StepTime()

    @property
    def wanted_local_steps(self) -> int | tuple[int, ...]:
        """Local steps as the knobs have them."""
        return self._knobs.local_steps

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Waits until all ranks have met; a pause that holds them back is this rank's, too."""
        looked_at = self.clock()
        while not done():
            if self.clock() - looked_at > SLICE_S:
                self._wait_while_paused(done)
                looked_at = self.clock()
            self._sleep(_RANKS_POLL_S)

    def meet(self, others: Sequence[StepTime], waited_s: float) -> None:
        """Counts a step that several ranks took: it lasts as long as that of the rank which held it up.

        Args:
            others: Times of the other ranks.
            waited_s: Seconds for which this rank waited for them and exchanged data with them.
        """
        own = self.step_time
        slowest = max([own, *others], key=lambda time: time.total_s)
        exchanged_s = max(0.0, waited_s - (slowest.total_s - own.total_s))
        self.step_time = replace(slowest, work_s=slowest.work_s + exchanged_s)
        self.publish(
            speed_held_s=self.status.speed_held_s + max(0.0, slowest.speed_held_s - own.speed_held_s),
            duty_held_s=self.status.duty_held_s + max(0.0, slowest.duty_held_s - own.duty_held_s),
            exchange_s=self.status.exchange_s + waited_s,
        )

    def end_step(self, *losses: float) -> None:
        """Counts finished updates; their times follow once the last wait is over."""
        self._losses.extend(losses)
        mean = sum(self._losses) / len(self._losses)
        self.status = replace(self.status, steps=self.status.steps + len(losses), loss=losses[-1], loss_mean=mean)

    def step_times(self, updates: int = 1) -> tuple[float, float]:
        """Publishes and returns the length of each finished update and its length without waits, s."""
        times = (self.step_time.total_s / updates, self.step_time.work_s / updates)
        self._step_times.extend([times] * updates)
        n = len(self._step_times)
        self.publish(
            step_time_s=times[0],
            step_time_mean_s=sum(total for total, _ in self._step_times) / n,
            free_step_time_s=sum(free for _, free in self._step_times) / n,
        )
        if self._since_switch is not None:
            self._since_switch.append(self.step_time.work_s)
            if len(self._since_switch) > _STEADY_STEPS:
                self._count_switch()
        return times

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """Losses behind `loss_mean`, oldest first."""
        return tuple(self._losses)

    def restore_losses(self, losses: tuple[float, ...]) -> None:
        """Takes up the losses of an earlier process."""
        self._losses.extend(losses)

    def _enter(self, phase: Phase) -> None:
        self.publish()
        self.publish(phase=phase)

    def _read_knobs(self) -> None:
        sequence, knobs = self._channel.read_knobs()
        if sequence != self.status.knobs_sequence:
            self._knobs = knobs
            self.publish(knobs_sequence=sequence, duty=knobs.duty, speed=knobs.speed)

    def _hold(self, work_s: float) -> None:
        start = self.clock()
        while not self.stop.reason:
            self._read_knobs()
            if self._knobs.paused:
                self._wait_while_paused()
                return
            speed, pace = self._knobs.speed, self._knobs.speed * self._knobs.duty
            speed_s = work_s / speed - work_s if speed else float("inf")
            due_s = work_s / pace - work_s - self._overslept if pace else float("inf")
            waited = self.clock() - start
            if waited >= due_s:
                # A sleep ends a little late; the next wait is shorter by so much, which keeps the share exact.
                self._overslept = min(waited - due_s, SLICE_S)
                return
            self._sleep(min(SLICE_S, due_s - waited))
            slept = self.clock() - start - waited
            step = self.step_time
            if waited < speed_s:
                self.step_time = replace(step, speed_held_s=step.speed_held_s + slept)
                self.publish(speed_held_s=self.status.speed_held_s + slept)
            else:
                self.step_time = replace(step, duty_held_s=step.duty_held_s + slept)
                self.publish(duty_held_s=self.status.duty_held_s + slept)

    def _wait_while_paused(self, done: Callable[[], bool] = lambda: False) -> None:
        self._read_knobs()
        if not self._pausing():
            return
        with self.phase(Phase.IDLE):
            self.publish(state=JobState.PAUSED)
            while self._pausing() and not done():
                self._sleep(SLICE_S)
                self._read_knobs()
                self.publish()
            self.publish(state=JobState.RUNNING)

    def _pausing(self) -> bool:
        return self._knobs.paused and not self.stop.reason

    def _count_switch(self) -> None:
        """What the first step after a change took beyond the slowest of the next: noise hardly ever counts."""
        if self._since_switch and len(self._since_switch) > 1:
            first, *steady = self._since_switch
            self.publish(switch_s=self.status.switch_s + max(0.0, first - max(steady)))
        self._since_switch = None
