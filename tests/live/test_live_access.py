import numpy as np
import pytest

from wattgym.envs.live.access import Access, check_devices, close_guards, open_access
from wattgym.envs.live.actuators import ClockActuator, DutyActuator, PowerLimitActuator
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.meters import MeteredDevice
from wattgym.envs.live.pace import MIN_DUTY, FreeSpeed, JobKnobs
from wattgym.envs.live.plant import job_environment
from wattgym.envs.profile import JobProfile, nominal_profile
from wattgym.errors import UserError
from wattgym.hw.device import DeviceReading
from wattgym.hw.guard import ARM_VARIABLE, Guard
from wattgym.hw.limits import CommandRules
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.live.channel import JobStatus, Knobs
from wattgym.phase import Phase

RULES = CommandRules()
SURFACE = "h100-sxm/assumed/compute_bound"


@pytest.fixture
def board(tmp_path):
    """A simulated board that other processes could see too."""
    folder = tmp_path / "devices"
    folder.mkdir()
    return SimulatedDevice("h100-sxm", index=0, state_path=folder / "SIM-h100-sxm-0.simulated")


def config(tmp_path, **changes):
    return LiveConfig.model_validate(
        {"jobs": [{"devices": ["h100-sxm:0"]}], "state_dir": str(tmp_path / "devices"), **changes}
    )


def opened(config):
    access = open_access(config, RULES, "test")
    found = access.kind, access.why, [guard for guards in access.guards for guard in guards]
    close_guards(found[2])
    return found


def test_the_finest_control_is_taken_where_it_may_be(tmp_path, board):
    assert opened(config(tmp_path))[:2] == ("power_limit", "the finest control that the devices allow")
    assert opened(config(tmp_path, actuator="locked_clocks"))[:2] == ("locked_clocks", "as configured")


def test_without_permission_the_duty_cycle_is_left_and_the_reason_told(tmp_path, board):
    board.inject(Faults(permission_denied=True))
    kind, why, guards = opened(config(tmp_path))
    assert (kind, guards) == ("duty_cycle", [])
    assert "SIM-h100-sxm-0: set power limit: this process may not" in why or "permission" in why.lower()
    assert board.requested_limit_mw() == 700_000


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(permission_denied=True), "permission"),
        (Faults(persistence_off=True), "persistence mode is off"),
        (Faults(mig=True), "MIG is on"),
        (Faults(bmc_limit_mw=500_000), "something else"),
    ],
)
@pytest.mark.parametrize("wanted", ["auto", "power_limit", "locked_clocks"])
def test_what_cannot_be_written_to_is_never_forced(tmp_path, board, faults, reason, wanted):
    board.inject(faults)
    if wanted == "auto":
        kind, why, _ = opened(config(tmp_path))
        assert kind == "duty_cycle"
    else:
        with pytest.raises(UserError) as caught:
            opened(config(tmp_path, actuator=wanted))
        why = str(caught.value)
        assert f"actuator {wanted}: " in why
        assert "'duty_cycle' needs no permission" in why
    assert reason in why
    assert board.writes() == 0
    assert not list((tmp_path / "devices").glob("*.session.json"))


def test_one_device_that_may_not_be_written_to_disarms_all(tmp_path, board):
    denied = SimulatedDevice("h100-sxm", index=1, state_path=tmp_path / "devices" / "SIM-h100-sxm-1.simulated")
    denied.inject(Faults(permission_denied=True))
    kind, _, guards = opened(config(tmp_path, jobs=[{"devices": ["h100-sxm:0", "h100-sxm:1"]}]))
    assert (kind, guards) == ("duty_cycle", [])
    with Guard(board, arm=True, state_dir=tmp_path / "devices", environ={ARM_VARIABLE: "1"}):  # not locked
        pass


def test_the_duty_cycle_touches_no_device(tmp_path, board):
    kind, why, guards = opened(config(tmp_path, actuator="duty_cycle"))
    assert (kind, why, guards) == ("duty_cycle", "as configured", [])
    assert board.writes() == 0


def test_a_lost_device_or_one_of_another_controller_is_an_error_not_a_reason(tmp_path, board):
    with Guard(board, arm=True, state_dir=tmp_path / "devices", environ={ARM_VARIABLE: "1"}):
        for call in (lambda: opened(config(tmp_path)), lambda: check_devices(config(tmp_path))):
            with pytest.raises(UserError, match="already controls this device"):
                call()
    board.inject(Faults(lost=True))
    with pytest.raises(UserError, match="SIM-h100-sxm-0"):
        opened(config(tmp_path))


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([{"devices": ["h100-sxm:0"]}, {"devices": ["h100-sxm"]}], "jobs 0 and 1 share the device SIM-h100-sxm-0"),
        ([{"devices": ["h101"]}], "simulated device 'h101'"),
    ],
)
def test_devices_are_checked_before_anything_starts(tmp_path, jobs, message):
    for call in (check_devices, opened):
        with pytest.raises(UserError, match=message):
            call(config(tmp_path, jobs=jobs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "nvml", "jobs": [{"devices": ["0", "1"]}]}, "make one job per GPU"),
        ({"backend": "nvml", "jobs": [{"devices": ["0"], "training": {"device": "cpu"}}]}, "trains on the CPU"),
        ({"guard": {"rules": {"interval_s": 2.0}}}, "guard.rules would not be read"),
    ],
)
def test_configurations_that_nothing_would_obey_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_a_jobs_process_sees_its_own_gpu_and_no_other():
    class Gpu:
        def __init__(self, uuid):
            self.uuid = uuid

        def info(self):
            return self

    access = Access([[Gpu("GPU-a")], [Gpu("GPU-b")]])
    real = LiveConfig.model_validate({"backend": "nvml", "jobs": [{"devices": ["0"]}, {"devices": ["1"]}]})
    assert job_environment(real, access, 1) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    simulated = LiveConfig.model_validate({"jobs": [{"devices": ["h100-sxm"]}]})
    assert job_environment(simulated, access, 0) == {}


def test_a_profile_of_another_gpu_is_refused(board):
    guard = Guard(board)
    far = JobProfile(gpu="h100-sxm", n_gpus=1, limit_w=(800.0, 900.0), power_w=(800.0, 900.0), throughput=(0.9, 1.0))
    with pytest.raises(UserError, match="takes limits of 350 to 700 W, the job's profile covers 800 to 900 W"):
        PowerLimitActuator([guard], far)


class Handle:
    """Knobs of a job that is not there."""

    def __init__(self):
        self.knobs = Knobs()

    def set_knobs(self, **changes):
        self.knobs = self.knobs.model_copy(update=changes)


def test_a_duty_cycle_draws_about_what_was_commanded_and_obeys_the_rules():
    handle = Handle()
    profile = nominal_profile(SURFACE, 1, "duty_cycle")
    actuator = DutyActuator(JobKnobs(handle, 1.0), profile, CommandRules(interval_s=1.0, dead_band_w=5.0))
    assert actuator.limit_w == actuator.high_w == profile.limit_w[-1]
    middle = (actuator.low_w + actuator.high_w) / 2
    actuator.apply(middle)
    assert actuator.limit_w == middle
    assert handle.knobs.duty == pytest.approx(float(profile.throughput_at(np.asarray(middle))))
    actuator.apply(actuator.high_w)  # a raise right after a cut is too soon
    assert actuator.limit_w == middle


def test_a_frozen_guard_leaves_clocks_and_the_limit_in_force_alone(tmp_path, board):
    folder = tmp_path / "devices"
    with Guard(board, arm=True, state_dir=folder, environ={ARM_VARIABLE: "1"}) as guard:
        profile = nominal_profile(SURFACE, 1, "locked_clocks")
        actuator = ClockActuator([guard], profile, RULES)
        actuator.apply(0.6 * actuator.high_w)
        assert actuator.limit_w == pytest.approx(0.6 * actuator.high_w)
        board.write_as_other(600_000)
        actuator._written_s = -np.inf  # long ago
        with pytest.raises(UserError, match="clocks were not locked: somebody else set 600000 mW"):
            actuator.apply(0.5 * actuator.high_w)
        assert actuator.limit_w == pytest.approx(0.6 * actuator.high_w)


class Source:
    """A device that reads what it is told to."""

    def __init__(self):
        self.reading = DeviceReading(t_s=10.0, age_s=0.5, power_w=300.0, energy_j=0.0)

    def info(self):
        return None

    def read(self):
        return self.reading


def test_a_reading_without_power_leaves_the_last_good_sample():
    source = Source()
    device = MeteredDevice(source)
    assert device.sample is None
    device.read()
    source.reading = DeviceReading(t_s=11.0, age_s=0.5, power_w=400.0, energy_j=350.0)
    device.read()
    source.reading = DeviceReading(t_s=12.0, power_w=None, energy_j=700.0)
    device.read()
    assert (device.sample.power_w, device.sample.taken_s, device.sample.energy_j) == (400.0, 10.5, 350.0)


def test_one_dip_in_the_window_does_not_move_what_is_sensed_but_a_longer_one_does():
    source = Source()
    device = MeteredDevice(source)
    assert device.steady_w(0.5) is None

    def publish(t_s, power_w):
        source.reading = DeviceReading(t_s=t_s, age_s=0.0, power_w=power_w, energy_j=0.0)
        device.read()

    for tenth, power_w in enumerate((700.0, 500.0, 501.0, 502.0, 503.0)):
        publish(10.0 + tenth / 10, power_w)
    for _ in range(5):
        publish(10.5, 380.0)  # one publication, read five times
    assert device.sample.power_w == 380.0
    assert device.steady_w(0.45) == 501.0  # of 500, 501, 502, 503, 380; the 700 is too long ago
    publish(10.6, 380.0)
    publish(10.7, 380.0)
    assert device.steady_w(0.45) == 380.0


def status(samples, compute_s, evaluate_s=0.0, held_s=0.0, steps=1):
    spent = [0.0] * len(Phase)
    spent[Phase.COMPUTE], spent[Phase.EVALUATE] = compute_s, evaluate_s
    return JobStatus(pid=1, steps=steps, samples=samples, phase_s=tuple(spent), speed_held_s=held_s)


def test_the_free_speed_leaves_waiting_and_the_first_step_out():
    free = FreeSpeed()
    assert free.update(status(4, 30.0, steps=0)) is None
    assert free.update(status(4, 30.0)) is None
    assert free.update(status(8, 34.0, held_s=2.0)) == pytest.approx(4 / 2.0)  # 2 of the 4 s were waited
    assert free.update(status(8, 36.0, held_s=4.0)) == pytest.approx(2.0)  # nothing new
    # 6 of 10 s in COMPUTE, 25/3 s waited, so 6 - 5 s of work for 2 samples; before that, 2 s for 4.
    assert free.update(status(10, 40.0, 4.0, held_s=2.0 + 25 / 3)) == pytest.approx(2.0)


def test_knobs_hold_the_full_speed_whatever_the_machine_has_left():
    handle = Handle()
    knobs = JobKnobs(handle, 0.3)
    knobs.slow_to(1.0, status(0, 0.0, steps=0))
    assert handle.knobs.speed == pytest.approx(0.3)  # the pace, until speeds are known
    knobs.full_samples_per_s = 1.0
    knobs.slow_to(0.8, status(4, 10.0))
    knobs.slow_to(0.8, status(8, 12.0))  # free speed 2/s
    assert handle.knobs.speed == pytest.approx(0.8 * 1.0 / 2.0)
    knobs.slow_to(0.0, status(8, 12.0))
    assert handle.knobs.speed == pytest.approx(MIN_DUTY * 1.0 / 2.0)
