"""Where a job's time goes and how the knobs pace it, on a clock that the test owns."""

import contextlib

import pytest

from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.config import checked_micro_batch
from wattgym.live.pacing import SLICE_S, Reporter, StopFlag
from wattgym.phase import Phase


class Time:
    """A clock that sleeping moves on, always a little too far."""

    def __init__(self, late_s=0.003):
        self.now = 100.0
        self.late_s = late_s
        self.on_sleep = lambda: None

    def sleep(self, seconds):
        assert 0 < seconds <= SLICE_S
        self.now += seconds + self.late_s
        self.on_sleep()


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def channel(tmp_path):
    made = Channel.create(tmp_path / "channel", Knobs(), JobStatus())
    yield made
    made.close()


@pytest.fixture
def reporter(channel, time):
    status = JobStatus(pid=1, micro_batch=2, samples_per_update=8)
    return Reporter(channel, StopFlag(), status, clock=lambda: time.now, sleep=time.sleep)


def work(reporter, time, seconds):
    with reporter.work():
        time.now += seconds


@pytest.mark.parametrize(("duty", "speed"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.5), (0.5, 0.5), (0.97, 1.0), (0.2, 0.8)])
@pytest.mark.parametrize("unit_s", [0.004, 0.1])
def test_share_of_time_is_the_duty_and_the_speed(channel, reporter, time, duty, speed, unit_s):
    channel.write_knobs(Knobs(duty=duty, speed=speed))
    start, units = time.now, round(4 / unit_s)
    with reporter.phase(Phase.COMPUTE):
        for _ in range(units):
            work(reporter, time, unit_s)
    elapsed = time.now - start
    work_s = units * unit_s
    assert elapsed == pytest.approx(work_s / (speed * duty), abs=2 * SLICE_S)
    status = channel.read_status()
    assert status.phase_s[Phase.COMPUTE] == pytest.approx(elapsed)
    assert status.speed_held_s + status.duty_held_s == pytest.approx(elapsed - work_s, abs=1e-6)
    # Waits begin with the speed's part; a slice that straddles the two counts for the first.
    slack = units * (SLICE_S + time.late_s)
    assert status.speed_held_s == pytest.approx(work_s / speed - work_s, abs=slack)
    assert (status.speed_held_s > 0) == (speed < 1)
    assert (status.duty_held_s > 0) <= (duty < 1)


def test_long_waits_are_split_between_speed_and_duty(channel, reporter, time):
    channel.write_knobs(Knobs(duty=0.5, speed=0.25))
    work(reporter, time, 2.0)
    # 2 s of work at a quarter of the speed last 8 s, of which half the time may be used: 16 s.
    assert channel.read_status().speed_held_s == pytest.approx(6.0, abs=0.05)
    assert channel.read_status().duty_held_s == pytest.approx(8.0, abs=0.05)


@pytest.mark.parametrize("knobs", [Knobs(duty=0.0), Knobs(speed=0.0), Knobs(duty=0.001)])
def test_a_wait_follows_the_knobs_while_it_lasts(channel, reporter, time, knobs):
    channel.write_knobs(knobs)
    start = time.now
    time.on_sleep = lambda: time.now > start + 4 and channel.write_knobs(Knobs())
    work(reporter, time, 1.0)
    assert time.now == pytest.approx(start + 4, abs=2 * SLICE_S + 2 * time.late_s)
    assert channel.read_status().knobs_sequence > 2
    # What was waited too long is no licence to run ahead.
    channel.write_knobs(Knobs(duty=0.5))
    time.on_sleep = lambda: None
    start = time.now
    work(reporter, time, 1.0)
    assert time.now == pytest.approx(start + 2, abs=2 * SLICE_S)


def test_a_stop_ends_a_wait(channel, reporter, time):
    channel.write_knobs(Knobs(duty=0.0))
    time.on_sleep = lambda: setattr(reporter.stop, "reason", "SIGTERM")
    work(reporter, time, 1.0)
    assert time.now < 102


def test_a_pause_is_idle_time_and_can_begin_in_a_wait(channel, reporter, time):
    seen = []

    def on_sleep():
        seen.append((channel.read_status().state, channel.read_status().phase))
        if time.now > 105:
            channel.write_knobs(Knobs())
        elif time.now > 103:
            channel.write_knobs(Knobs(duty=0.1, paused=True))

    time.on_sleep = on_sleep
    channel.write_knobs(Knobs(duty=0.1))
    with reporter.phase(Phase.COMPUTE):
        work(reporter, time, 1.0)
    status = channel.read_status()
    assert (JobState.PAUSED, Phase.IDLE) in seen
    assert status.state is JobState.RUNNING
    assert status.phase_s[Phase.IDLE] == pytest.approx(2.0, abs=0.1)
    assert status.duty_held_s == pytest.approx(2.0, abs=0.1)


def test_phases_nest_and_account_for_all_time(channel, reporter, time):
    time.now += 1
    with reporter.phase(Phase.COMPUTE):
        time.now += 2
        with reporter.phase(Phase.EVALUATE):
            time.now += 3
            assert channel.read_status().phase is Phase.EVALUATE
        with contextlib.suppress(KeyError), reporter.phase(Phase.CHECKPOINT):
            time.now += 4
            raise KeyError
        time.now += 0.5
    assert channel.read_status().phase_s == (1.0, 2.5, 3.0, 4.0, 0.0)
    assert channel.read_status().heartbeat_s == time.now


def test_steps_count_their_own_time_without_pauses(channel, reporter, time):
    for loss, unit_s, duty in ((3.0, 0.1, 1.0), (1.0, 0.3, 0.5)):
        channel.write_knobs(Knobs(duty=duty))
        assert reporter.begin_step() == 2
        for _ in range(4):
            work(reporter, time, unit_s)
        reporter.end_step(loss)
        reporter.step_times()
        time.now += 50  # an evaluation or a checkpoint is no part of a step
    status = channel.read_status()
    assert (status.steps, status.loss, status.loss_mean) == (2, 1.0, 2.0)
    assert status.free_step_time_s == pytest.approx((0.4 + 1.2) / 2)
    assert status.step_time_s == pytest.approx(2.4, abs=0.05)
    assert status.step_time_mean_s == pytest.approx((0.4 + 2.4) / 2, abs=0.05)


def test_micro_batch_follows_the_knob_and_returns_to_the_job_s_own(channel, reporter):
    channel.write_knobs(Knobs(micro_batch=4))
    assert reporter.begin_step() == 4
    channel.write_knobs(Knobs())
    assert reporter.begin_step() == 2


@pytest.mark.parametrize(
    ("value", "samples", "nearest"), [(3, 8, "2 and 4"), (9, 8, "8"), (100, 7, "7"), (5, 12, "4 and 6"), (0, 8, "1")]
)
def test_a_micro_batch_must_divide_the_update(value, samples, nearest):
    with pytest.raises(
        UserError, match=f"micro-batch {value} does not divide the {samples} .* nearest valid: {nearest}$"
    ):
        checked_micro_batch(value, samples)
    for divisor in (n for n in range(1, samples + 1) if samples % n == 0):
        assert checked_micro_batch(divisor, samples) == divisor
