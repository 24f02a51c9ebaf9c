"""One live plant with a tiny job for all tests of this file; it must be last that the job dies."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.plant import JobDiedError, LivePlant
from wattgym.envs.observation import ObservationBuilder, ObservationLayout
from wattgym.envs.plant import Command, Phase
from wattgym.envs.shaping import PowerShaping
from wattgym.hw.limits import CommandRules
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.telemetry import GuardState
from wattgym.live.channel import JobState
from wattgym.live.handle import JobHandle

pytestmark = pytest.mark.slow

PERIOD_S = 0.5
FREE_STEPS = 12
RULES = CommandRules(interval_s=0.2, raise_window_s=0.5, raise_fraction_per_s=10.0, dead_band_w=0.0)
TRAINING = {
    "model": {"source": "tiny"},
    "data": {"max_records": 100, "holdout": 4},
    "samples_per_update": 4,
    "micro_batch": 1,
    "checkpoint_every": None,
}


def config(tmp_path, **changes):
    job = {"devices": ["h100-sxm:0"], "training": TRAINING, "pace": 0.4}
    return LiveConfig.model_validate({"jobs": [job], "state_dir": str(tmp_path / "devices"), **changes})


@pytest.fixture(scope="module")
def plant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    settings = config(folder)
    free = settings.jobs[0].training.model_copy(update={"max_steps": FREE_STEPS})
    with (
        JobHandle.start(free, folder / "free") as uncontrolled,
        LivePlant(settings, PERIOD_S, RULES, folder / "jobs") as plant,
    ):
        plant.folder, plant.uncontrolled = folder, uncontrolled
        plant.device_path = folder / "devices" / "SIM-h100-sxm-0.simulated"
        plant.reset([np.random.default_rng(0)])
        yield plant


@pytest.fixture
def device(plant):
    return SimulatedDevice.attach(plant.device_path)


def hold(plant, position, ticks):
    """Telemetry of some ticks at one position of the limit range."""
    spec = plant.spec
    found = []
    for _ in range(ticks):
        plant.apply(Command(spec.min_limit_w + position * (spec.max_limit_w - spec.min_limit_w)))
        found.append(plant.advance())
    return found


def test_it_starts_uncapped_and_says_what_it_took(plant, device):
    first = plant.reset([np.random.default_rng(0)])
    assert plant.actuator == ("power_limit", "the finest control that the devices allow")
    assert [guard.state for guard in plant.guards] == [GuardState.ARMED]
    assert first.tick == 0
    assert first.limit_w[0, 0] == device.requested_limit_mw() / 1000 == 700.0
    assert first.decisions.dtype == np.uint8
    spec = plant.spec
    assert (spec.min_limit_w[0, 0], spec.max_limit_w[0, 0], spec.n_gpus[0, 0]) == (350.0, 700.0, 1)
    assert np.isfinite(first.sensor_w).all()


def test_the_loop_is_closed_both_ways(plant, device):
    spec = plant.spec
    speed = {0.0: [], 1.0: []}
    for _ in range(4):  # by turns, and again if need be: on a shared machine the free speed itself wanders
        for position, found in speed.items():
            telemetry = hold(plant, position, 5)[1:]
            found += [t.throughput[0, 0] for t in telemetry]
            limit_w = spec.max_limit_w[0, 0] if position else spec.min_limit_w[0, 0]
            assert telemetry[-1].limit_w[0, 0] == limit_w == device.requested_limit_mw() / 1000
            drawn_w = spec.power_table_w[0, 0, -1 if position else 0]
            assert telemetry[-1].meter_w[0, 0] == pytest.approx(drawn_w, rel=0.03)
        slower = np.mean(speed[0.0]) / np.mean(speed[1.0])
        if abs(slower - spec.throughput_table[0, 0, 0]) < 0.15:
            return
    raise AssertionError(f"capped, the job ran at {slower:.2f} of its speed, not at {spec.throughput_table[0, 0, 0]}")


def test_the_jobs_phase_drives_the_draw(plant):
    hold(plant, 1.0, 2)
    plant._handles[0].set_knobs(paused=True)
    paused = hold(plant, 1.0, 5)[-1]
    plant._handles[0].set_knobs(paused=False)
    resumed = hold(plant, 1.0, 5)[-1]
    assert paused.phase[0, 0] == Phase.IDLE
    assert paused.throughput[0, 0] == pytest.approx(0.0, abs=0.01)
    assert paused.meter_w[0, 0] < 0.4 * plant.spec.full_w[0]
    assert resumed.meter_w[0, 0] > 0.95 * plant.spec.full_w[0]


def test_a_controller_that_sleeps_misses_periods_and_its_last_command_holds(plant, device):
    plant.reset([np.random.default_rng(0)])
    hold(plant, 0.5, 1)
    missed, late = plant.ticks.missed, len(plant.ticks.lateness_s)
    time.sleep(2.2 * PERIOD_S)
    assert device.requested_limit_mw() == 525_000
    telemetry = plant.advance()
    passed = telemetry.tick - 1
    assert passed >= 2  # one that was slept through, and the one in which the sleep ended
    assert plant.ticks.missed - missed == passed - 1
    assert len(plant.ticks.lateness_s) == late + 1
    assert all(lateness >= 0.0 for lateness in plant.ticks.lateness_s)
    assert telemetry.limit_w[0, 0] == 525.0


def test_wall_clock_jumps_change_nothing(plant, monkeypatch):
    plant.reset([np.random.default_rng(0)])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    first = hold(plant, 1.0, 1)[0]
    monkeypatch.setattr(time, "time", lambda: 4e9)
    second = hold(plant, 1.0, 1)[0]
    assert second.tick >= first.tick + 1
    assert second.age_s[0] < 1.0


def test_live_observations_come_from_the_emulators_own_code(plant):
    """The same telemetry and the same description give the same vector, whoever measured it."""
    env = PowerShapingConfig.model_validate(
        {
            "site": {"jobs": 1},
            "period_s": PERIOD_S,
            "episode_s": 4 * PERIOD_S,
            "rules": RULES.model_dump(),
            "signal": {"trace": "regd"},
        }
    )
    recorded = []
    advance, reset = plant.advance, plant.reset

    class Recorder:
        """The live plant, with its telemetry kept."""

        spec = property(lambda self: plant.spec)
        apply = staticmethod(plant.apply)

        def reset(self, rngs):
            recorded.append(reset(rngs))
            return recorded[-1]

        def advance(self):
            recorded.append(advance())
            return recorded[-1]

    live = PowerShaping(env, Recorder(), 1)
    seen = [live.reset([0])]
    for action in (0.9, -0.2, 0.3):
        seen.append(live.step(np.array([[action]])).observation)

    class Replay(Emulator):
        """An emulator that reports what the live plant measured."""

        spec = property(lambda self: plant.spec)

        def reset(self, rngs):
            super().reset(rngs)
            self.left = list(recorded)
            return self.left.pop(0)

        def advance(self):
            super().advance()
            return self.left.pop(0)

    emulated = PowerShaping(env, Replay(env), 1)
    replayed = [emulated.reset([0])]
    for action in (0.9, -0.2, 0.3):
        replayed.append(emulated.step(np.array([[action]])).observation)
    np.testing.assert_array_equal(np.array(replayed), np.array(seen))
    assert np.isfinite(seen).all()

    builder = ObservationBuilder(ObservationLayout(env.observation, 1))
    builder.reset(plant.spec, live.targets_w, live.task.base_w, live.task.capacity_w)
    np.testing.assert_array_equal([builder.build(telemetry) for telemetry in recorded], seen)


def test_a_sensor_that_stops_publishing_only_grows_old(plant, device):
    before = hold(plant, 1.0, 2)[-1]
    device.inject(Faults(stale_sensor=True))
    stale = hold(plant, 1.0, 3)[-1]
    device.inject(Faults())
    assert stale.age_s[0] > 2 * PERIOD_S
    assert stale.sensor_w[0, 0] == pytest.approx(before.sensor_w[0, 0], rel=0.02)
    assert np.isfinite(stale.meter_w).all()
    assert hold(plant, 1.0, 2)[-1].age_s[0] < PERIOD_S


def test_losses_are_those_of_an_uncontrolled_run_bit_for_bit(plant):
    """The job has been capped, paused and slowed by the tests above; here its duty varies too."""
    plant._jobs[0].knobs.work_for(0.6)
    hold(plant, 0.2, 2)
    plant._jobs[0].knobs.work_for(1.0)
    while plant.job_status[0].steps < FREE_STEPS:
        hold(plant, 1.0, 1)
    plant.uncontrolled.wait(120.0)
    assert losses(plant.folder / "free") == losses(plant.folder / "jobs" / "job0")[:FREE_STEPS]


def losses(folder: Path):
    rows = [line.split(",") for line in (folder / "steps.csv").read_text().splitlines()]
    column = rows[0].index("loss")
    return [row[column] for row in rows[1:]]


def test_a_foreign_limit_freezes_the_guard_and_the_loop_goes_on(plant, device):
    device.write_as_other(600_000)
    telemetry = hold(plant, 0.0, 2)[-1]
    assert plant.guards[0].state is GuardState.FROZEN
    assert "600000 mW" in plant.guards[0].why
    assert device.requested_limit_mw() == 600_000
    assert np.isfinite(telemetry.meter_w).all()


def test_a_job_that_dies_ends_the_run_and_the_devices_are_given_back(plant, device):
    (status,) = plant.job_status
    os.kill(status.pid, signal.SIGKILL)
    with pytest.raises(JobDiedError, match="job 0 died: its process was killed by SIGKILL"):
        hold(plant, 0.0, 3)
    assert plant.guards[0].state is GuardState.CLOSED
    assert not list((plant.folder / "devices").glob("*.session.json"))
    plant.close()  # again, harmless
    assert status.state is not JobState.FAILED
