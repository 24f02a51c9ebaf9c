"""The job's side of its channel: where its time goes, and how the knobs pace it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.config import checked_micro_batch
from wattgym.phase import Phase

SLICE_S = 0.02
"""While it waits, the job looks at its knobs this often, s."""

WINDOW_STEPS = 20
"""Steps that the published means are taken over."""

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
        channel: Channel,
        stop: StopFlag,
        status: JobStatus,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.status = status
        self.stop = stop
        self._channel = channel
        self._own_micro_batch = status.micro_batch
        self._clock = clock
        self._sleep = sleep
        self._mark = clock()
        self._knobs = Knobs()
        self._overslept = 0.0
        self._step_work_s = self._step_held_s = 0.0
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._step_times: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS)
        self._read_knobs()

    def publish(self, **changes: Any) -> None:
        """Publishes the status after the given changes to its fields."""
        now = self._clock()
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
        start = self._clock()
        yield
        work_s = self._clock() - start
        self._step_work_s += work_s
        self.publish()
        self._hold(work_s)

    def begin_step(self) -> int:
        """Waits while paused, then fixes the step's micro-batch by the knobs.

        Returns:
            The micro-batch.
        """
        self._wait_while_paused()
        wanted = self._knobs.micro_batch or self._own_micro_batch
        self.publish(micro_batch=checked_micro_batch(wanted, self.status.samples_per_update))
        self._step_work_s = self._step_held_s = 0.0
        return self.status.micro_batch

    def end_step(self, loss: float) -> None:
        """Counts a finished optimiser step; its times follow once its last wait is over."""
        self._losses.append(loss)
        mean = sum(self._losses) / len(self._losses)
        self.status = replace(self.status, steps=self.status.steps + 1, loss=loss, loss_mean=mean)

    def step_times(self) -> tuple[float, float]:
        """Publishes and returns the finished step's length and its length without waits, s."""
        times = (self._step_work_s + self._step_held_s, self._step_work_s)
        self._step_times.append(times)
        n = len(self._step_times)
        self.publish(
            step_time_s=times[0],
            step_time_mean_s=sum(total for total, _ in self._step_times) / n,
            free_step_time_s=sum(free for _, free in self._step_times) / n,
        )
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
        start = self._clock()
        while not self.stop.reason:
            self._read_knobs()
            if self._knobs.paused:
                self._wait_while_paused()
                return
            speed, pace = self._knobs.speed, self._knobs.speed * self._knobs.duty
            speed_s = work_s / speed - work_s if speed else float("inf")
            due_s = work_s / pace - work_s - self._overslept if pace else float("inf")
            waited = self._clock() - start
            if waited >= due_s:
                # A sleep ends a little late; the next wait is shorter by so much, which keeps the share exact.
                self._overslept = min(waited - due_s, SLICE_S)
                return
            self._sleep(min(SLICE_S, due_s - waited))
            slept = self._clock() - start - waited
            self._step_held_s += slept
            if waited < speed_s:
                self.publish(speed_held_s=self.status.speed_held_s + slept)
            else:
                self.publish(duty_held_s=self.status.duty_held_s + slept)

    def _wait_while_paused(self) -> None:
        self._read_knobs()
        if not self._pausing():
            return
        with self.phase(Phase.IDLE):
            self.publish(state=JobState.PAUSED)
            while self._pausing():
                self._sleep(SLICE_S)
                self._read_knobs()
                self.publish()
            self.publish(state=JobState.RUNNING)

    def _pausing(self) -> bool:
        return self._knobs.paused and not self.stop.reason
