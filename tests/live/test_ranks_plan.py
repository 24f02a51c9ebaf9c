"""How rounds are shared among ranks, and what a step of several ranks counts; no torch."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobStatus, Knobs
from wattgym.live.config import JobConfig, checked_ranks
from wattgym.live.pacing import Reporter, StepTime, StopFlag
from wattgym.live.ranks import Followers, _own_gpu
from wattgym.live.rounds import plan_round, steps_by_speed


def positions(share):
    return [i for step in share for batch in step for i in batch]


@st.composite
def shapes(draw):
    ranks = draw(st.integers(1, 6))
    samples = draw(st.integers(ranks, 40))
    steps = draw(st.lists(st.integers(1, 9), min_size=1, max_size=ranks))
    return samples, draw(st.integers(1, samples)), ranks, steps, draw(st.none() | st.integers(1, 12))


@given(shapes())
def test_every_sample_is_taken_once_whatever_the_settings(shape):
    samples, micro_batch, ranks, steps, left = shape
    plan = plan_round(*shape)
    taken = [i for share in plan.shares for i in positions(share)]
    assert sorted(taken) == list(range(plan.updates * samples))
    assert len(plan.shares) == ranks
    assert plan.samples == tuple(len(positions(share)) for share in plan.shares)
    assert all(1 <= len(batch) <= micro_batch for share in plan.shares for step in share for batch in step)
    together = [sum(len(batch) for batch in step) for share in plan.shares for step in share]
    assert max(together) - min(together) <= 1
    assert plan.averaged == (len(steps) > 1 and max(steps) > 1)
    most = max(steps) if plan.averaged else 1
    assert plan.updates == min(most, left or most)
    counts = [len(share) for share in plan.shares]
    assert max(counts) == plan.updates
    assert counts[len(steps) :] == [0] * (ranks - len(steps))
    if plan.averaged and plan.updates == most:
        assert counts[: len(steps)] == steps
    # What rank 0 publishes as done after its last micro-batch is the whole round, and no sample of it twice.
    paced = list(plan.keeping_pace())
    assert len(paced) == sum(len(step) for step in plan.shares[0])
    assert sorted(i for done in paced for i in done) == sorted(taken)


def test_shares_worked_out_by_hand():
    # 8 samples by three of four ranks: 2, 3 and 3 of them, in passes of at most 2.
    plan = plan_round(8, 2, 4, (1, 1, 1))
    assert [[list(batch) for step in share for batch in step] for share in plan.shares] == [
        [[0, 1]],
        [[2, 3], [4]],
        [[5, 6], [7]],
        [],
    ]
    # Two updates of 6 samples in three local steps of 4: at a quarter, half and three quarters of the round.
    plan = plan_round(6, 4, 2, (2, 1))
    assert plan.updates == 2
    assert plan.shares == (((range(4),), (range(8, 12),)), ((range(4, 8),),))
    # Only one update is left: the second rank's single step stays.
    assert [len(share) for share in plan_round(6, 4, 2, (2, 1), 1).shares] == [1, 1]
    assert steps_by_speed(4, (10.0, 5.0, 0.1, 0.0)) == (4, 2, 1, 4)


def test_settings_that_do_not_fit(config):
    with pytest.raises(UserError, match=r"active_ranks 3, but the job's ranks are 2; valid: 1 to 2"):
        checked_ranks(3, 2)
    with pytest.raises(UserError, match=r"local_steps has 3 entries for 2 ranks; give one number, or one a rank"):
        checked_ranks(2, 2, (1, 2, 3))
    with pytest.raises(ValueError, match="ranks 9 cannot share the 8 samples of an update"):
        config(ranks=9)
    assert JobConfig().ranks == 1


def test_a_rank_that_cannot_begin_says_why(monkeypatch):
    with pytest.raises(UserError, match=r"ranks 2, but GPUs visible here: 1; each rank needs one of its own"):
        Followers(1, {}, gpus=1)
    followers = Followers(2, {"config": {"ranks": 0}}, gpus=None)

    def wait():
        while not followers.all_ready():
            time.sleep(0.02)

    try:
        with pytest.raises(UserError, match=r"rank [12] of 3 failed: job: ranks: .*greater than or equal to 1"):
            wait()
    finally:
        followers.kill()
    for visible, own in ((None, "1"), ("5, 3", "3"), ("GPU-a,GPU-b", "GPU-b")):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert _own_gpu(1) == {"CUDA_VISIBLE_DEVICES": own}


@pytest.fixture
def clock():
    class Clock:
        now = 10.0

        def sleep(self, seconds):
            self.now += seconds

    return Clock()


@pytest.fixture
def reporter(tmp_path, clock):
    channel = Channel.create(tmp_path / "channel", Knobs(), JobStatus())
    status = JobStatus(pid=1, micro_batch=4, samples_per_update=8, ranks=2, active_ranks=2)
    yield Reporter(channel, StopFlag(), status, clock=lambda: clock.now, sleep=clock.sleep)
    channel.close()


def test_a_step_lasts_as_long_as_the_rank_that_holds_it_up(reporter, clock):
    reporter.begin_step()
    with reporter.work():
        clock.now += 1.0
    # The other worked for 2 s and waited for 3 s; rank 0 waited 4.5 s for it, half a second of that for the wire.
    reporter.meet([StepTime(2.0, 1.0, 2.0)], 4.5)
    reporter.end_step(3.0)
    assert reporter.step_times() == (5.5, 2.5)
    status = reporter.status
    assert (status.speed_held_s, status.duty_held_s, status.exchange_s) == (1.0, 2.0, 4.5)


def test_switching_costs_what_the_first_step_took_beyond_the_next(reporter, clock):
    def step(seconds, **knobs):
        if knobs:
            reporter._channel.write_knobs(Knobs(**knobs))
            reporter._read_knobs()
        reporter.begin_step()
        with reporter.work():
            clock.now += seconds
        reporter.end_step(1.0)
        reporter.step_times()
        return reporter.status.switches, pytest.approx(reporter.status.switch_s)

    assert step(9.0) == (0, 0.0)  # the start is no switch
    assert step(1.0) == (0, 0.0)
    assert [step(3.0, active_ranks=1), step(1.0), step(1.25), step(1.0)] == [(1, 0), (1, 0), (1, 0), (1, 1.75)]
    # Changed again after a step: counted against that one; a first step that is no slower costs nothing.
    assert [step(2.0, micro_batch=8), step(1.5), step(1.0, local_steps=3)] == [(2, 1.75), (2, 1.75), (3, 2.25)]
    assert step(1.1) == (3, 2.25)
    assert step(1.0, duty=0.5, local_steps=3) == (3, 2.25)
    assert step(1.0) == (3, 2.25)
