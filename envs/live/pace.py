"""How fast a job runs: its two knobs, and how fast it would run if nobody held it."""

from __future__ import annotations

import math
import threading

from wattgym.envs.knobs import MIN_DUTY
from wattgym.errors import UserError
from wattgym.live.channel import JobStatus, progress
from wattgym.live.handle import JobHandle
from wattgym.phase import Phase

MEMORY_S = 3.0
"""Time, waiting included, after which an old observation of the free speed counts half; other work on the machine comes
and goes."""


CATCH_UP_S = 5.0
"""Time within which a job makes good what it is ahead or behind; some micro-batches of a slow job."""


class JobKnobs:
    """A job's speed, duty and other knobs, which two threads change.

    Its duty is a product: what an actuator makes of a limit, where it has no other means, times what was asked for.

    Attributes:
        full_samples_per_s: Speed that counts as full, once it is known.
        asked_duty: Duty that was asked for beside the limit; 0 while the job is paused.
    """

    def __init__(self, handle: JobHandle, pace: float) -> None:
        self.full_samples_per_s: float | None = None
        self._handle = handle
        self._pace = pace
        self._free = FreeSpeed()
        self._catch_up = CatchUp()
        self.asked_duty = 1.0
        self._limit_duty = 1.0
        self._lock = threading.Lock()

    @property
    def duty(self) -> float:
        """Share of time the job works."""
        return self._handle.knobs.duty

    def slow_to(self, speed: float, status: JobStatus) -> None:
        """Sets the speed as a share of the job's full speed.

        Args:
            speed: Wanted share.
            status: The job's status; what it did without waiting tells how much waiting that takes just now.
        """
        share = max(min(speed, 1.0), MIN_DUTY)
        free = self._free.update(status)
        if self.full_samples_per_s is None or free is None:
            wanted = share * self._pace
        else:
            target = share * self.full_samples_per_s
            wanted = target / free * self._catch_up.factor(target * status.duty, status)
        wanted = min(wanted, 1.0)
        if speed >= 1.0 and self._pace >= 1.0:
            wanted = 1.0  # a job that nothing limits is not held to the speed that it once had
        with self._lock:
            if abs(wanted - self._handle.knobs.speed) > 1e-3:
                self._handle.set_knobs(speed=wanted)

    def work_for(self, duty: float) -> None:
        """Sets the share of time the job works for the sake of its limit."""
        with self._lock:
            self._limit_duty = max(min(duty, 1.0), MIN_DUTY)
            self._handle.set_knobs(duty=self._shared_duty())

    def set(self, micro_batch: int, active_ranks: int, duty: float, local_steps: int) -> None:
        """Sets the knobs beside the limit; all but duty and pause are taken up at the job's next optimiser step.

        Args:
            micro_batch: Samples of one pass.
            active_ranks: Ranks that take part.
            duty: Share of time the job works; 0 pauses it.
            local_steps: Optimiser steps between two averages.

        Raises:
            UserError: The job cannot have the setting; nothing was changed.
        """
        with self._lock:
            before, self.asked_duty = self.asked_duty, duty
            try:
                self._handle.set_knobs(
                    duty=self._shared_duty(),
                    paused=duty == 0.0,
                    micro_batch=micro_batch,
                    active_ranks=active_ranks,
                    local_steps=local_steps,
                )
            except UserError:
                self.asked_duty = before
                raise

    def _shared_duty(self) -> float:
        # A paused job keeps the duty it will go on with.
        return max(self._limit_duty * (self.asked_duty or 1.0), MIN_DUTY)


class CatchUp:
    """Corrects a job's pace by how far it is ahead or behind.

    The free speed is known from the past only: where other work on the machine comes or goes, or texts are longer than
    before, a job would for seconds run faster or slower than it was told to.
    """

    def __init__(self) -> None:
        self._last: JobStatus | None = None
        self._lead = 0.0

    def factor(self, target: float, status: JobStatus) -> float:
        """What to multiply the pace with.

        Args:
            target: Samples per second that the job was told to train since the last call.
            status: The job's status.
        """
        last, self._last = self._last, status
        if last is None or last.pid != status.pid or target <= 0.0:
            self._lead = 0.0
            return 1.0
        due = target * (status.phase_s[Phase.COMPUTE] - last.phase_s[Phase.COMPUTE])
        # What could not be caught up within the time is forgotten: it was not the pace that held the job back.
        bound = target * CATCH_UP_S
        self._lead = min(max(self._lead + status.samples - last.samples - due, -bound), bound)
        return math.exp(-self._lead / bound)


class FreeSpeed:
    """A job's speed without waiting, from its status again and again."""

    def __init__(self) -> None:
        self._last: JobStatus | None = None
        self._samples = 0.0
        self._work_s = 0.0

    def update(self, status: JobStatus) -> float | None:
        """Takes a status in.

        Returns:
            Samples per second of work; None before the first two samples.
        """
        if status.pid == 0 or status.steps == 0:
            return None  # still loading, or in its first step, which is slower than all others
        if self._last is None:
            self._last = status
        elif status.samples > self._last.samples:
            work_s = compute_work_s(self._last, status)
            kept = 0.5 ** ((status.phase_s[Phase.COMPUTE] - self._last.phase_s[Phase.COMPUTE]) / MEMORY_S)
            self._samples = kept * self._samples + status.samples - self._last.samples
            self._work_s = kept * self._work_s + work_s
            self._last = status
        return self._samples / self._work_s if self._work_s > 0.0 else None


def compute_work_s(before: JobStatus, after: JobStatus) -> float:
    """Seconds of training between two readings, waiting left out."""
    done = progress(before, after)
    computed_s, evaluated_s = done.phase_s[Phase.COMPUTE], done.phase_s[Phase.EVALUATE]
    held_s = done.speed_held_s + done.duty_held_s  # in both phases, in proportion to their length
    share = computed_s / (computed_s + evaluated_s) if computed_s > 0.0 else 0.0
    return max(computed_s - held_s * share, 0.0)
