"""Calibration recovers the hidden parameters of a simulated board with a scripted job, in virtual time."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.live.calibration import PERIOD_S, RULES, CalibrationPlan, calibrate
from wattgym.envs.live.sample import JobSample
from wattgym.envs.plant import Command, PlantSpec
from wattgym.envs.profile import load_profile, nominal_profile
from wattgym.errors import UserError
from wattgym.hw.clock import VirtualClock
from wattgym.hw.energy import EnergyMeter
from wattgym.hw.limits import ShapedLimits
from wattgym.hw.simulated import SimulatedDevice
from wattgym.live.channel import JobState, JobStatus
from wattgym.phase import Phase

SURFACE = "h100-sxm/assumed/compute_bound"
CURVE_W, CURVE = [350.0, 500.0, 700.0], [0.6, 0.85, 1.0]
"""Speed at a limit that no calibration is told."""


class ScriptedJob:
    """A job whose every number is known: steps of 8 samples, an evaluation and checkpoints every so many steps."""

    def __init__(
        self, clock, seed, *, rate, evaluate=(0, 0.0, 1.0), checkpoint=(0, 0.0, 1.0), index=0, n_gpus=1, wobble=0.0
    ):
        self.devices = [SimulatedDevice("h100-sxm", index=index + i, seed=seed, clock=clock) for i in range(n_gpus)]
        self.rate, self.evaluate, self.checkpoint, self.wobble = rate, evaluate, checkpoint, wobble
        self.limit_w = 700.0
        self.meters = [EnergyMeter() for _ in self.devices]
        self.status = JobStatus(pid=1, state=JobState.RUNNING, phase=Phase.COMPUTE, samples_per_update=8)
        self.progress, self.tokens, self.left_s, self.todo = 0.0, 0.0, 0.0, []
        self.set_level(1.0)
        self.poll()

    def set_level(self, level):
        for device in self.devices:
            device.set_demand(level)

    def speed(self):
        return float(np.interp(self.limit_w, CURVE_W, CURVE))

    def poll(self):
        self.readings = [device.read() for device in self.devices]
        for meter, reading in zip(self.meters, self.readings, strict=True):
            meter.add(reading)

    def run(self, dt_s):
        """Lets time pass; shorter than any phase."""
        status = self.status
        spent = list(status.phase_s)
        spent[status.phase] += dt_s
        changes = {"phase_s": tuple(spent)}
        if status.phase is Phase.COMPUTE:
            # Tokens take their time; how many samples they are changes with the texts' lengths.
            done = dt_s * self.speed() * self.rate
            self.tokens += 100.0 * done
            self.progress += done / 8 * (1.0 + self.wobble * np.sin(spent[Phase.COMPUTE] / 4.0))
            steps = int(self.progress)
            changes |= {"steps": steps, "samples": int(self.progress * 8), "tokens": int(self.tokens)}
            if steps > status.steps:
                self.todo = [
                    (phase, seconds, level)
                    for phase, (every, seconds, level) in (
                        (Phase.EVALUATE, self.evaluate),
                        (Phase.CHECKPOINT, self.checkpoint),
                    )
                    if every and steps % every == 0
                ]
        else:
            self.left_s -= dt_s * (self.speed() if status.phase is Phase.EVALUATE else 1.0)
        self.status = replace(status, **changes)
        if (status.phase is Phase.COMPUTE and self.todo) or (status.phase is not Phase.COMPUTE and self.left_s <= 0.0):
            if status.phase is Phase.EVALUATE:
                self.status = replace(self.status, eval_step=self.status.steps)
            if status.phase is Phase.CHECKPOINT:
                self.status = replace(self.status, checkpoint_step=self.status.steps)
            phase, self.left_s, level = self.todo.pop(0) if self.todo else (Phase.COMPUTE, 0.0, 1.0)
            self.status = replace(self.status, phase=phase)
            self.set_level(level)


class FakePlant:
    """Boards with hidden parameters and scripted jobs behind the surface of a live plant."""

    def __init__(self, jobs, clock, nominal=None):
        self.clock, self.jobs = clock, jobs
        nominal = nominal or nominal_profile(SURFACE, 1).model_copy(update={"sensor_window_s": 0.025})
        self.profiles = tuple(nominal.model_copy(update={"n_gpus": len(job.devices)}) for job in jobs)
        low, high = ([job.limit_w[i] for job in self.profiles] for i in (0, -1))
        self.shaped = ShapedLimits(low, high, [700.0] * len(jobs), RULES)
        self.written_s = np.full(len(jobs), -np.inf)
        self.obeys, self.dies_at_s = True, np.inf

    def reset(self, rngs):
        self.due_s, self.polled_s = self.clock.now_s(), self.clock.now_s()
        self.spec = PlantSpec(
            period_s=PERIOD_S, n_gpus=None, min_limit_w=self.shaped.low_w[None], max_limit_w=self.shaped.high_w[None],
            limit_grid=None, power_table_w=None, throughput_table=None, host_w=np.zeros(1),
        )  # fmt: skip

    def sleep(self, seconds):
        end_s = self.clock.now_s() + seconds
        while (left := end_s - self.clock.now_s()) > 1e-9:
            step = min(left, 0.01)
            self.clock.sleep(step)
            for job in self.jobs:
                job.run(step)
            if self.clock.now_s() - self.polled_s >= 0.1:
                self.polled_s = self.clock.now_s()
                for job in self.jobs:
                    job.poll()

    def apply(self, asked):
        now_s = self.clock.now_s()
        last = np.array([job.limit_w for job in self.jobs])
        command = self.shaped.command_w(asked.limit_w[0], last, now_s - self.written_s)
        for j, job in enumerate(self.jobs):
            if self.obeys and command[j] != last[j]:
                self.written_s[j], job.limit_w = now_s, float(command[j])
                for device in job.devices:
                    called_s = self.clock.now_s()
                    device.set_power_limit_mw(round(1000 * command[j]))
                    for other in self.jobs:  # training goes on while the setter blocks
                        other.run(self.clock.now_s() - called_s)

    def advance(self):
        self.due_s += PERIOD_S
        self.sleep(max(self.due_s - self.clock.now_s(), 0.0))
        if self.clock.now_s() > self.dies_at_s:
            raise UserError("job 0 died: killed")

    def sample(self):
        now_s = self.clock.now_s()
        samples = []
        for job in self.jobs:
            at_s = [reading.t_s - reading.age_s for reading in job.readings]
            samples.append(
                JobSample(
                    t_s=now_s, age_s=now_s - min(at_s), sensor_w=sum(r.power_w for r in job.readings),
                    energy_j=sum(meter.energy_j for meter in job.meters), metered_s=float(np.mean(at_s)),
                    limit_w=job.limit_w, status=job.status,
                )
            )  # fmt: skip
        return tuple(samples)


def run(plant, minutes=4.0, limits=6, **options):
    plan = CalibrationPlan(minutes=minutes, limits=limits, **options)
    return calibrate(plant, plan, clock=plant.clock.now_s, sleep=plant.sleep, command="test")


def expected_w(board, limit_w):
    return min(board.training_w, max(board.drawn_share * limit_w, board.floor_w))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hidden_parameters_are_recovered(seed):
    clock = VirtualClock()
    job = ScriptedJob(clock, seed, rate=40.0)
    result = run(FakePlant([job], clock), seed=seed)
    (profile,) = result.profile.jobs
    board = job.devices[0]._board
    # The meter counts as the sensor does, so the sensor's own gain and offset are in both: 1.
    assert profile.sensor_gain == pytest.approx(1.0, abs=0.01)
    assert profile.sensor_period_s == pytest.approx(0.1, abs=0.005)
    power = np.array([expected_w(board, limit) for limit in profile.limit_w])
    np.testing.assert_allclose(profile.power_w, board.gain * power + board.offset_w, rtol=0.005)
    speed = np.interp(profile.limit_w, CURVE_W, CURVE)
    np.testing.assert_allclose(profile.throughput, speed, atol=0.01)
    assert profile.full_samples_per_s == pytest.approx(40.0, rel=0.01)
    # Half-way of a cut that undershoots is reached a little before the time constant's ln 2.
    half_way_s = board.call_s + board.dead_time_s + np.log(2.0) * board.response.tau_s[0, 0]
    assert profile.delay_s == pytest.approx(half_way_s, abs=0.05)
    assert profile.limit_w[0] == 350.0
    assert profile.limit_w[-1] == 700.0
    assert max(profile.power_sd_w) < 3.0
    assert max(profile.throughput_sd) < 0.02
    assert result.profile.held_out.power < 0.005
    assert result.profile.held_out.throughput < 0.02
    # No phase but computing was seen, so the emulated job has no other within a week.
    assert profile.phases.compute_work_s.mean > 7 * 86400
    assert profile.phases.noise.innovation_sd < 0.005


def test_phases_are_told_apart_from_computing():
    clock = VirtualClock()
    # 5 steps a second: an evaluation of 4 s (at full speed) after 100 steps, a checkpoint of 2 s after 50.
    job = ScriptedJob(clock, None, rate=40.0, evaluate=(100, 4.0, 0.7), checkpoint=(50, 2.0, 0.3))
    result = run(FakePlant([job], clock), minutes=8.0)
    (profile,) = result.profile.jobs
    board = job.devices[0]._board
    power = np.array([expected_w(board, limit) for limit in profile.limit_w])
    np.testing.assert_allclose(profile.power_w, power, rtol=0.005)
    np.testing.assert_allclose(profile.throughput, np.interp(profile.limit_w, CURVE_W, CURVE), atol=0.02)
    phases = profile.phases
    assert phases.evaluate_s.mean == pytest.approx(4.0, rel=0.05)
    assert phases.compute_work_s.mean == pytest.approx(20.0, rel=0.05)
    full_w, idle_w = board.training_w, board.idle_w
    assert phases.evaluate_level == pytest.approx((idle_w + 0.7 * (full_w - idle_w)) / full_w, abs=0.03)
    # Two checkpoints between evaluations become one as long as both.
    assert phases.checkpoint.duration_s[0] == pytest.approx(4.0, rel=0.1)
    assert phases.checkpoint.level[0] == pytest.approx((idle_w + 0.3 * (full_w - idle_w)) / full_w, abs=0.03)
    assert phases.checkpoint.compute_work_s[0] <= phases.compute_work_s.mean * (1 + 1e-9)


def test_phases_too_short_to_show_count_as_computing():
    clock = VirtualClock()
    # Every 10 steps, 2 s of computing and 0.2 s of saving at 40 %.
    job = ScriptedJob(clock, None, rate=40.0, checkpoint=(10, 0.2, 0.4))
    (profile,) = run(FakePlant([job], clock)).profile.jobs
    board = job.devices[0]._board
    assert profile.full_samples_per_s == pytest.approx(40.0 * 2.0 / 2.2, rel=0.02)
    low_w = board.idle_w + 0.4 * (board.training_w - board.idle_w)
    assert profile.power_w[-1] == pytest.approx((2.0 * board.training_w + 0.2 * low_w) / 2.2, rel=0.02)
    assert profile.phases.compute_work_s.mean > 7 * 86400


def test_jobs_of_a_plant_are_measured_each_for_itself():
    clock = VirtualClock()
    jobs = [
        ScriptedJob(clock, 5, rate=40.0),
        ScriptedJob(clock, 6, rate=9.0, index=1, n_gpus=2, evaluate=(30, 3.0, 0.8)),
    ]
    result = run(FakePlant(jobs, clock), minutes=6.0)
    first, second = result.profile.jobs
    assert first.full_samples_per_s == pytest.approx(40.0, rel=0.02)
    assert second.full_samples_per_s == pytest.approx(9.0, rel=0.02)
    for job, profile in zip(jobs, (first, second), strict=True):
        means = [
            np.mean([d._board.gain * expected_w(d._board, limit) + d._board.offset_w for d in job.devices])
            for limit in profile.limit_w
        ]
        np.testing.assert_allclose(profile.power_w, means, rtol=0.01)
    assert second.phases.evaluate_s.mean == pytest.approx(3.0, rel=0.1)
    assert first.phases.compute_work_s.mean > 7 * 86400
    # Every limit of every job twice or more, in an order of its own that never stands still.
    visits = result.samples.groupby(["job", "dwell"])["wanted_w"].first().unstack("job")
    assert (visits.apply(lambda column: column.value_counts().min()) >= 2).all()
    assert (visits.diff().dropna() != 0).all().all()
    assert not (visits[0] == visits[1]).all()


def test_a_written_calibration_is_whole_and_reads_back(tmp_path):
    clock = VirtualClock()
    result = run(FakePlant([ScriptedJob(clock, 1, rate=40.0)], clock), minutes=1.5, limits=4)
    beside = result.save(tmp_path / "plant.yaml")
    assert load_profile(tmp_path / "plant.yaml") == result.profile
    assert {path.name for path in tmp_path.iterdir()} == {"plant.yaml", "plant.samples.csv"}
    samples = pd.read_csv(beside)
    assert len(samples) == len(result.samples)
    assert samples["energy_j"].dropna().is_monotonic_increasing


def test_the_emulator_of_a_calibrated_plant_behaves_like_the_plant(tmp_path):
    clock = VirtualClock()
    job = ScriptedJob(clock, 9, rate=40.0)
    plant = FakePlant([job], clock)
    run(plant).save(tmp_path / "plant.yaml")
    site = {"jobs": 1, "profile": str(tmp_path / "plant.yaml"), "control_delay_periods": (0, 0), "command_loss": 0.0}
    config = PowerShapingConfig.model_validate({"site": site, "period_s": PERIOD_S, "rules": RULES.model_dump()})
    emulator = Emulator(config)
    emulator.reset([np.random.default_rng(0)])
    # The same commands on both, second by second.
    plant.reset(None)
    commands = np.random.default_rng(4).uniform(350.0, 700.0, 60).repeat(3)
    commands[:5] = 350.0
    errors = []
    (before,) = plant.sample()
    for limit in commands:
        plant.apply(Command(np.array([[limit]])))
        emulator.apply(Command(np.array([[limit]])))
        plant.advance()
        (after,) = plant.sample()
        live_w = (after.energy_j - before.energy_j) / (after.metered_s - before.metered_s)
        telemetry = emulator.advance()
        errors.append((telemetry.meter_w[0, 0] - live_w, telemetry.limit_w[0, 0] - after.limit_w))
        before = after
    power, limits = np.array(errors[5:]).T
    np.testing.assert_allclose(limits, 0.0, atol=1.0)
    assert abs(power.mean()) < 3.0
    # Meters publish up to 0.2 s late, which shows at steps of up to 350 W; in between nothing differs.
    assert np.median(np.abs(power)) < 3.0
    assert np.sqrt((power**2).mean()) < 25.0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"minutes": 0.5}, "0.5 minutes are too short for 6 limits, each twice; take at least 0.9 minutes"),
        ({"minutes": 5.0, "limits": 64}, "too short for 64 limits"),
    ],
)
def test_a_plan_that_is_too_short_is_refused_before_it_starts(plan, message):
    clock = VirtualClock()
    plant = FakePlant([ScriptedJob(clock, None, rate=40.0)], clock)
    with pytest.raises(UserError, match=message):
        run(plant, **plan)
    assert clock.now_s() == 0.0


def test_limits_that_cannot_be_moved_are_named():
    clock = VirtualClock()
    plant = FakePlant([ScriptedJob(clock, None, rate=40.0)], clock)
    plant.obeys = False
    with pytest.raises(UserError, match=r"job 0: limits cannot be moved: 700 W per GPU is in force .* was commanded"):
        run(plant)
    narrow = nominal_profile(SURFACE, 1).model_copy(update={"limit_w": (690.0, 700.0)})
    with pytest.raises(UserError, match="job 0: limits cannot be moved: lowest 690 W, highest 700 W"):
        run(FakePlant([ScriptedJob(clock, None, rate=40.0)], clock, narrow))


def test_a_job_that_ends_or_hardly_moves_ends_the_calibration():
    clock = VirtualClock()
    plant = FakePlant([ScriptedJob(clock, None, rate=40.0)], clock)
    plant.dies_at_s = 20.0
    with pytest.raises(UserError, match="job 0 died"):
        run(plant)
    finished = ScriptedJob(clock, None, rate=40.0)
    finished.status = replace(finished.status, state=JobState.FINISHED, steps=7)
    with pytest.raises(UserError, match=r"job 0 is finished after 7 steps.*raise training\.max_steps"):
        run(FakePlant([finished], clock))
    with pytest.raises(UserError, match=r"a job makes fewer than 2 optimiser steps, or computes .* in 100 s"):
        run(FakePlant([ScriptedJob(clock, None, rate=0.05)], clock))
    busy = ScriptedJob(clock, None, rate=40.0, evaluate=(2, 3.0, 0.9))
    with pytest.raises(UserError, match=r"hardly computed at .* W.*evaluate and save less often"):
        run(FakePlant([busy], clock))


def test_a_slow_job_gets_the_time_it_needs():
    clock = VirtualClock()
    # A step takes 6 to 10 s, a dwell was to take 10 s.
    (profile,) = run(FakePlant([ScriptedJob(clock, None, rate=8 / 6.0)], clock)).profile.jobs
    assert profile.full_samples_per_s == pytest.approx(8 / 6.0, rel=0.02)
    np.testing.assert_allclose(profile.throughput, np.interp(profile.limit_w, CURVE_W, CURVE), atol=0.02)


def test_the_lengths_of_texts_are_not_taken_for_speed():
    clock = VirtualClock()
    # Samples come up to half faster or slower than on average, by their length.
    (profile,) = run(FakePlant([ScriptedJob(clock, None, rate=40.0, wobble=0.5)], clock)).profile.jobs
    np.testing.assert_allclose(profile.throughput, np.interp(profile.limit_w, CURVE_W, CURVE), atol=0.02)
    assert profile.full_samples_per_s == pytest.approx(40.0, rel=0.02)
    assert max(profile.throughput_sd) < 0.02
