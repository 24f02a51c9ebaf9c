"""The guard in one process, on a simulated device with a virtual clock: what it lets through, and when it stops."""

import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceError, DeviceLostError, DeviceReading, PermissionDeniedError
from wattgym.hw.guard import Guard
from wattgym.hw.limits import CommandRules, Decision
from wattgym.hw.preflight import GuardConfig, checked_constraints, implausible
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.telemetry import GuardState

ARMED = {"WATTGYM_ARM": "1"}


class Bench:
    """A simulated H100 (200 to 700 W) and a guard on it, both on one virtual clock."""

    def __init__(self, *, arm=True, environ=ARMED, faults=None, **options):
        self.clock = VirtualClock()
        self.device = SimulatedDevice("h100-sxm", clock=self.clock)
        self.device.set_demand(1.0)
        if faults is not None:
            self.device.inject(faults)
            self.device = SimulatedView(self.device)
        options = {"environ": environ, "clock": self.clock.now_s, "exit_hooks": False, **options}
        self.guard = Guard(self.device, arm=arm, **options)

    def step(self, watts, seconds=2.0):
        self.clock.sleep(seconds)
        return self.guard.set_limit_w(watts)


class SimulatedView:
    """The same device, described again after faults were injected."""

    def __init__(self, device):
        self._device = device
        faults = device.faults()
        self._info = replace(
            device.info(),
            is_mig=faults.mig,
            persistence=not faults.persistence_off,
            enforced_limit_mw=device.enforced_limit_mw(),
        )

    def info(self):
        return self._info

    def __getattr__(self, name):
        return getattr(self._device, name)


# --- arming


@pytest.mark.parametrize(
    ("arm", "environ", "why"),
    [(False, ARMED, "--arm"), (True, {}, "WATTGYM_ARM=1"), (True, {"WATTGYM_ARM": "yes"}, "WATTGYM_ARM=1")],
)
def test_without_both_keys_nothing_is_written(arm, environ, why):
    bench = Bench(arm=arm, environ=environ)
    writes = bench.device.writes()
    result = bench.step(400.0)
    bench.guard.close()
    assert bench.device.writes() == writes
    assert bench.device.requested_limit_mw() == 700_000
    assert not result.written
    assert result.limit_w == 400.0  # what would be in force
    assert bench.guard.telemetry.would_write == 1
    assert why in bench.guard.telemetry.why


def test_a_dry_run_decides_like_an_armed_guard():
    dry, armed = Bench(arm=False), Bench()
    for watts in (400.0, 650.0, 650.0, 648.0, 300.0, 700.0, 352.0):
        one, two = dry.step(watts), armed.step(watts)
        assert (one.limit_w, one.decisions) == (two.limit_w, two.decisions)
    assert dry.guard.telemetry.would_write == armed.guard.telemetry.written


def controlled(bench):
    with bench.guard:
        bench.step(400.0)
        assert bench.device.requested_limit_mw() == 400_000
        raise RuntimeError("somewhere in the loop")


def test_the_limit_is_given_back_after_an_exception():
    bench = Bench()
    with pytest.raises(RuntimeError):
        controlled(bench)
    assert bench.device.requested_limit_mw() == 700_000


def test_what_is_given_back_is_the_owners_limit_not_the_default():
    device = SimulatedDevice("h100-sxm")
    device.set_power_limit_mw(550_000)
    with Guard(device, arm=True, environ=ARMED, exit_hooks=False) as guard:
        guard.set_limit_w(400.0)
    assert device.requested_limit_mw() == 550_000


# --- requests


@pytest.mark.parametrize(
    ("watts", "message"),
    [
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        (True, "not a finite number"),
        ("400", "not a finite number"),
        (None, "not a finite number"),
        (np.bool_(True), "not a finite number"),
        (400_000, "did you mean 400 W"),
        (199.0, "outside 200 to 700 W"),
        (701.0, "outside 200 to 700 W"),
        (-400.0, "outside 200 to 700 W"),
    ],
)
def test_wrong_watts_are_refused_and_counted(watts, message):
    bench = Bench()
    writes = bench.device.writes()
    with pytest.raises(UserError, match=message) as caught:
        bench.step(watts)
    assert "\n" not in str(caught.value)
    assert bench.guard.telemetry.rejected == 1
    assert bench.device.writes() == writes


@pytest.mark.parametrize(
    ("limit_mw", "message"),
    [
        (400_000.0, "not an integer"),
        (True, "not an integer"),
        (500, "did you mean 500000 mW"),
        (-1, "out of range"),
        (2**40, "out of range"),
        (199_999, "outside 200000 to 700000 mW"),
    ],
)
def test_wrong_milliwatts_are_refused(limit_mw, message):
    bench = Bench()
    with pytest.raises(UserError, match=message):
        bench.guard.set_limit_mw(limit_mw)
    assert bench.device.requested_limit_mw() == 700_000


def test_numpy_scalars_are_numbers():
    bench = Bench()
    assert bench.step(np.float32(400.0)).written
    assert bench.guard.set_limit_mw(np.int64(400_000)).limit_w == 400.0


def test_every_decision_is_counted():
    bench = Bench()
    assert bench.step(300.0).decisions == Decision.CLIPPED_LOW
    assert bench.guard.telemetry.limit_mw == 350_000  # half of the default
    assert bench.step(650.0).limit_w == 630.0  # 350 W + 2 s x 20 % of 700 W
    assert bench.step(400.0, seconds=0.5).decisions == Decision.TOO_SOON
    assert bench.step(631.0).decisions == Decision.DEAD_BANDED
    telemetry = bench.guard.telemetry
    counted = (telemetry.clipped_low, telemetry.raise_limited, telemetry.too_soon, telemetry.dead_banded)
    assert counted == (1, 1, 1, 1)
    assert (telemetry.requests, telemetry.written) == (4, 2)


def test_exact_requests_are_refused_rather_than_altered():
    bench = Bench()
    with pytest.raises(DeviceError, match="clipped low"):
        bench.guard.set_limit_mw(300_000, exact=True)
    assert bench.guard.set_limit_mw(400_000, exact=True).written
    assert bench.guard.set_limit_mw(700_000, exact=True).written  # back to what was there is always allowed


@settings(deadline=None, max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.floats(150.0, 750.0), st.floats(0.0, 5.0)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_asked_the_device_stays_in_range_and_gets_its_limit_back(requests):
    bench = Bench()
    last_write_s = -math.inf
    for watts, wait_s in requests:
        before = bench.device.requested_limit_mw()
        try:
            result = bench.step(watts, wait_s)
        except DeviceError:
            assert not 200.0 <= round(watts, 3) <= 700.0
            continue
        after = bench.device.requested_limit_mw()
        assert 350_000 <= after <= 700_000
        assert after - before <= 280_001  # 20 % of 700 W per second, over at most 2 s
        assert (after != before) == result.written
        if result.written:
            assert bench.clock.now_s() - last_write_s >= 1.0 - 1e-6
            last_write_s = bench.clock.now_s()
    bench.guard.close()
    assert bench.device.requested_limit_mw() == 700_000


# --- preflight


@pytest.mark.parametrize(
    ("faults", "message", "allowance"),
    [
        (Faults(mig=True), "MIG is on", "allow_mig"),
        (Faults(persistence_off=True), "persistence mode is off", "allow_persistence_off"),
        (Faults(bmc_limit_mw=500_000), "500000 mW are enforced", "allow_enforced_below"),
    ],
)
def test_unfit_devices_are_refused_unless_allowed(faults, message, allowance):
    with pytest.raises(DeviceError, match=message):
        Bench(faults=faults)
    assert Bench(faults=faults, config=GuardConfig(**{allowance: True})).guard.telemetry.state is GuardState.ARMED


def test_no_right_to_write_is_found_out_when_arming():
    with pytest.raises(PermissionDeniedError, match="SYS_ADMIN"):
        Bench(faults=Faults(permission_denied=True))


@pytest.mark.parametrize(
    "limits",
    [
        {"min_limit_mw": None},
        {"max_limit_mw": 3_700_000},  # a stub library's nonsense
        {"min_limit_mw": 800_000},
        {"default_limit_mw": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(DeviceError):
        checked_constraints(replace(SimulatedDevice("h100-sxm").info(), **limits))


# --- stopping


def test_a_foreign_change_freezes_and_is_never_overwritten():
    bench = Bench()
    bench.step(400.0)
    bench.device.write_as_other(450_000)
    result = bench.step(600.0)
    assert not result.written
    assert bench.guard.telemetry.state is GuardState.FROZEN
    assert "450000 mW" in bench.guard.telemetry.why
    bench.guard.close()
    assert bench.device.requested_limit_mw() == 450_000


def test_a_foreign_change_is_noticed_by_reading_too():
    bench = Bench()
    bench.step(400.0)
    bench.device.write_as_other(450_000)
    bench.guard.read()
    assert bench.guard.telemetry.state is GuardState.FROZEN


def test_a_foreign_change_while_the_state_is_saved_is_noticed():
    bench = Bench()
    bench.step(400.0)
    session = bench.guard._session
    plain = session.announce

    def slow(old_mw, next_mw):
        plain(old_mw, next_mw)
        bench.device.write_as_other(450_000)

    session.announce = slow
    assert not bench.step(600.0).written
    bench.guard.close()
    assert bench.device.requested_limit_mw() == 450_000


def test_a_driver_reload_is_named():
    bench = Bench()
    bench.step(400.0)
    bench.clock.sleep(10.0)
    bench.guard.read()
    bench.device.reload_driver()
    bench.guard.read()
    assert "driver reloaded" in bench.guard.telemetry.why
    assert bench.guard.telemetry.energy_resets == 1


def test_a_setter_that_lies_freezes_the_guard():
    bench = Bench()
    bench.device.inject(Faults(set_ignored=True))
    bench.step(400.0)
    assert "stayed at 700000 mW" in bench.guard.telemetry.why
    assert bench.guard.telemetry.limit_mw == 700_000


def test_a_lower_limit_from_elsewhere_freezes_the_guard():
    bench = Bench()
    bench.device.inject(Faults(bmc_limit_mw=380_000))
    bench.step(400.0)
    assert "380000 mW are enforced" in bench.guard.telemetry.why
    bench.guard.close()
    assert bench.device.requested_limit_mw() == 700_000  # what we wrote is ours to undo


def test_a_lost_device_freezes_at_once_and_a_reading_still_raises():
    bench = Bench()
    bench.step(400.0)
    bench.device.inject(Faults(lost=True))
    with pytest.raises(DeviceLostError):
        bench.guard.read()
    assert bench.guard.telemetry.state is GuardState.FROZEN
    assert not bench.step(500.0).written
    bench.guard.close()


def test_three_failed_writes_in_a_row_freeze():
    bench = Bench()

    def fail(limit_mw):
        raise DeviceError("the device failed")

    bench.device.set_power_limit_mw = fail
    states = []
    for _ in range(3):
        bench.step(400.0)
        states.append(bench.guard.telemetry.state)
    assert states == [GuardState.ARMED, GuardState.ARMED, GuardState.FROZEN]
    assert bench.guard.telemetry.failed_writes == 3


def test_three_implausible_readings_in_a_row_freeze():
    bench = Bench()
    bench.device.inject(Faults(implausible_power_w=3700.0))
    readings = [bench.guard.read() for _ in range(3)]
    assert all(reading.power_w is None for reading in readings)
    assert bench.guard.telemetry.implausible == 3
    assert bench.guard.telemetry.state is GuardState.FROZEN


def test_rounding_by_the_device_is_adopted():
    bench = Bench()
    plain = bench.device.set_power_limit_mw
    bench.device.set_power_limit_mw = lambda limit_mw: plain(limit_mw // 1000 * 1000)
    result = bench.step(400.6)
    assert (result.limit_w, bench.guard.telemetry.rounded) == (400.0, 1)
    assert bench.step(500.0).written
    bench.guard.close()
    assert bench.device.requested_limit_mw() == 700_000


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("power_w", 0.0, True),
        ("power_w", -1.0, True),
        ("power_w", 1119.0, False),
        ("power_w", 1121.0, True),  # 1.6 x 700 W
        ("temperature_c", 121.0, True),
        ("temperature_c", 90.0, False),
        ("energy_j", -5.0, True),
        ("energy_j", 0.0, False),
    ],
)
def test_plausibility(field, value, found):
    limits = checked_constraints(SimulatedDevice("h100-sxm").info())
    assert (field in implausible(DeviceReading(0.0, **{field: value}), limits, 120.0)) is found


def test_clocks_are_released_only_if_we_locked_them():
    bench = Bench()
    released = []
    plain = bench.device.reset_clocks
    bench.device.reset_clocks = lambda: released.append(plain())
    bench.guard.close()
    assert released == []
    bench = Bench()
    bench.device.reset_clocks = lambda: released.append(1)
    assert bench.guard.lock_clocks_mhz(min_mhz=600, max_mhz=1200)
    bench.guard.close()
    assert released == [1]


def test_after_close_nothing_is_written():
    bench = Bench()
    bench.guard.close()
    writes = bench.device.writes()
    assert not bench.step(400.0).written
    assert bench.guard.close() is None
    assert bench.device.writes() == writes
    assert bench.guard.telemetry.refused == 1


def test_a_forked_child_neither_writes_nor_restores():
    bench = Bench()
    bench.step(400.0)
    child = os.fork()
    if child == 0:
        wrote = bench.step(500.0).written
        bench.guard.close()
        os._exit(1 if wrote or bench.device.requested_limit_mw() != 400_000 else 0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bench.step(500.0).written


# --- signals


def test_signals_restore_and_reach_the_previous_handler():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        bench = Bench(exit_hooks=True)
        bench.step(400.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        assert bench.device.requested_limit_mw() == 700_000
        assert bench.guard.telemetry.state is GuardState.CLOSED
        os.kill(os.getpid(), signal.SIGTERM)  # unhooked by now
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_in_the_middle_of_a_write_waits_for_its_end():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(bench.device.requested_limit_mw()))
    try:
        bench = Bench(exit_hooks=True)
        plain = bench.device.set_power_limit_mw

        def interrupted(limit_mw):
            if limit_mw == 400_000:
                os.kill(os.getpid(), signal.SIGTERM)
                assert seen == []
            plain(limit_mw)

        bench.device.set_power_limit_mw = interrupted
        bench.step(400.0)
        assert seen == [700_000]  # written, then given back, then the previous handler ran
    finally:
        signal.signal(signal.SIGTERM, before)


def test_two_guards_unhook_in_any_order():
    before = signal.getsignal(signal.SIGTERM)
    one, two = Bench(exit_hooks=True), Bench(exit_hooks=True)
    one.guard.close()
    two.step(400.0)
    two.guard.close()
    assert two.device.requested_limit_mw() == 700_000
    handler = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert handler == before or callable(handler)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        bench = Bench(exit_hooks=True)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        bench.guard.close()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_hard_floor_of_the_interval_cannot_be_configured_away():
    with pytest.raises(ValueError, match="interval_s"):
        CommandRules(interval_s=0.1)
