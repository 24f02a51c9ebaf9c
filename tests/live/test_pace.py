"""A job keeps the speed that it was told to have, whatever else the machine does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from wattgym.envs.live.pace import JobKnobs
from wattgym.live.channel import JobState, JobStatus
from wattgym.phase import Phase

DT_S = 0.01


class PacedJob:
    """Micro-batches of 2 samples, each as long as it takes at the machine's free speed, over the knobs."""

    def __init__(self, free, duty=1.0):
        self.free, self.duty, self.knobs = free, duty, SimpleNamespace(speed=1.0, duty=duty)
        self.status = JobStatus(
            pid=1, state=JobState.RUNNING, phase=Phase.COMPUTE, steps=1, samples_per_update=8, duty=duty
        )
        self.t_s = self.left = 0.0
        self.begin()

    def set_knobs(self, speed):
        self.knobs.speed = speed

    def begin(self):
        self.work_s = 2.0 / self.free(self.t_s)
        self.left = 1.0  # share of the micro-batch, waiting included

    def run(self):
        self.t_s += DT_S
        spent = list(self.status.phase_s)
        spent[Phase.COMPUTE] += DT_S
        changes = {"phase_s": tuple(spent)}
        pace = self.knobs.speed * self.duty
        self.left -= DT_S * pace / self.work_s
        changes["speed_held_s"] = self.status.speed_held_s + DT_S * (1.0 - pace)
        if self.left <= 0.0:
            changes |= {"samples": self.status.samples + 2, "steps": self.status.steps + 1}
            self.begin()
        self.status = replace(self.status, **changes)


def trained(job, knobs, speed, seconds):
    """Samples in so many seconds, the knobs being set every 50 ms."""
    before = job.status.samples
    for i in range(round(seconds / DT_S)):
        if i % 5 == 0:
            knobs.slow_to(speed(job.t_s), job.status)
        job.run()
    return job.status.samples - before


def knobs_of(job, full=10.0):
    knobs = JobKnobs(job, 0.1)
    knobs.full_samples_per_s = full
    return knobs


@pytest.mark.parametrize("later", [30.0, 300.0])
def test_other_work_that_comes_or_goes_does_not_show(later):
    job = PacedJob(lambda t_s: 100.0 if t_s < 40.0 else later)
    knobs = knobs_of(job)
    trained(job, knobs, lambda t_s: 1.0, 40.0)
    assert trained(job, knobs, lambda t_s: 1.0, 20.0) == pytest.approx(200.0, rel=0.06)
    assert trained(job, knobs, lambda t_s: 1.0, 20.0) == pytest.approx(200.0, rel=0.03)


def test_the_speed_follows_the_limit():
    job = PacedJob(lambda t_s: 100.0)
    knobs = knobs_of(job)
    trained(job, knobs, lambda t_s: 1.0, 20.0)
    for speed in (0.6, 0.9, 0.5):
        trained(job, knobs, lambda t_s, speed=speed: speed, 5.0)
        assert trained(job, knobs, lambda t_s, speed=speed: speed, 20.0) == pytest.approx(200.0 * speed, abs=6.0)


def test_what_a_duty_cycle_leaves_out_is_not_caught_up():
    job = PacedJob(lambda t_s: 100.0, duty=0.5)
    knobs = knobs_of(job)
    trained(job, knobs, lambda t_s: 1.0, 20.0)
    assert trained(job, knobs, lambda t_s: 1.0, 40.0) == pytest.approx(200.0, rel=0.03)


def test_a_machine_that_was_too_slow_is_not_made_good_forever():
    job = PacedJob(lambda t_s: 100.0 if not 20.0 < t_s < 80.0 else 4.0)
    knobs = knobs_of(job)
    trained(job, knobs, lambda t_s: 1.0, 20.0)
    assert trained(job, knobs, lambda t_s: 1.0, 60.0) == pytest.approx(240.0, rel=0.05)  # as fast as it could
    # At most the last five seconds' worth comes back.
    assert trained(job, knobs, lambda t_s: 1.0, 30.0) < 300.0 + 60.0
    assert trained(job, knobs, lambda t_s: 1.0, 20.0) == pytest.approx(200.0, rel=0.04)
