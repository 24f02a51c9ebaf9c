"""One suite for every kind of device: simulated, NVML over a Python library object, NVML over the C stand-in."""

import math
import pickle
from dataclasses import replace

import pytest

from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceError, DeviceLostError, PermissionDeniedError, PowerKind
from wattgym.hw.nvml import NvmlDevice
from wattgym.hw.simulated import SimulatedDevice


class SimulatedBench:
    """A simulated device on a virtual clock."""

    def __init__(self, preset):
        self.clock = VirtualClock(100.0)
        self.gpu = SimulatedDevice(preset, clock=self.clock)
        self.device = self.gpu

    def reopen(self):
        # What it tells about itself is probed at opening; the same goes for the same state.
        self.gpu._info = self.gpu._describe(self.gpu._store._state, 0)

    def advance(self, seconds):
        self.clock.sleep(seconds)

    def load(self, demand):
        self.gpu.set_demand(demand)

    def fault(self, **changes):
        self.gpu.inject(replace(self.gpu.faults(), **changes))

    def foreign_write(self, limit_mw):
        self.gpu.write_as_other(limit_mw)

    def reload_driver(self):
        self.gpu.reload_driver()

    def writes(self):
        return self.gpu.writes()


class SlotBench(SimulatedBench):
    """The same simulator under NVML's functions, and the real NVML device on top of them."""

    def __init__(self, preset, slot_library):
        super().__init__(preset)
        slot_library([self.gpu])
        self.reopen()

    def reopen(self):
        self.device = NvmlDevice("SIM-" + self.gpu.preset_name + "-0")


STANDIN_BOARDS = {"h100-sxm": "H100", "a40": "A40"}
STANDIN_KEYS = {
    "permission_denied": lambda on: ("permitted", not on),
    "set_ignored": lambda on: ("silent_set", on),
    "show_delay_s": lambda seconds: ("show_delay_ms", 1000 * seconds),
    "lost": lambda on: ("lost", on),
    "unknown_error": lambda on: ("unknown_error", on),
    "stale_sensor": lambda on: ("stale_sensor", on),
    "mig": lambda on: ("mig", on),
    "persistence_off": lambda on: ("persistence", not on),
    "no_energy_counter": lambda on: ("energy_supported", not on),
    "implausible_power_w": lambda watts: ("implausible_mw", 1000 * watts),
    "bmc_limit_mw": lambda limit: ("out_of_band_mw", limit),
    "min_limit_mw": lambda limit: ("min_mw", limit),
    "max_limit_mw": lambda limit: ("max_mw", limit),
}


class StandInBench:
    """The C stand-in on a virtual clock, called by the unmodified binding."""

    def __init__(self, preset, make_standin, use_library):
        self.machine = make_standin(STANDIN_BOARDS[preset], virtual=True)
        use_library(self.machine.hooks)
        self.reopen()

    def reopen(self):
        self.device = NvmlDevice(self.machine.uuid(0))

    def advance(self, seconds):
        self.machine.advance(seconds)

    def load(self, demand):
        self.machine.set(0, "load", demand)

    def fault(self, **changes):
        for name, value in changes.items():
            self.machine.set(0, *STANDIN_KEYS[name](value))

    def foreign_write(self, limit_mw):
        self.machine.set(0, "requested_mw", limit_mw)

    def reload_driver(self):
        self.machine.set(0, "driver_reload")

    def writes(self):
        return self.machine.get(0, "set_calls")


@pytest.fixture(params=["simulated", "nvml-slot", "nvml-standin"])
def make_bench(request):
    def make(preset="h100-sxm"):
        if request.param == "simulated":
            return SimulatedBench(preset)
        if request.param == "nvml-slot":
            return SlotBench(preset, request.getfixturevalue("slot_library"))
        fixtures = (request.getfixturevalue(name) for name in ("make_standin", "use_library"))
        return StandInBench(preset, *fixtures)

    return make


@pytest.fixture
def bench(make_bench):
    return make_bench()


def test_identity_limits_and_capabilities(bench):
    info = bench.device.info()
    assert (info.min_limit_mw, info.default_limit_mw, info.max_limit_mw) == (200_000, 700_000, 700_000)
    assert (info.requested_limit_mw, info.enforced_limit_mw) == (700_000, 700_000)
    assert (info.index, info.is_mig, info.persistence) == (0, False, True)
    assert (info.power_kind, info.power_window_s) == (PowerKind.INSTANT, 0.025)
    for name in ("energy", "sm_clock", "temperature", "utilisation", "requested_limit", "set_power_limit"):
        assert info.capabilities[name] == "ok"


def test_reading_is_complete_on_a_healthy_board(bench):
    bench.load(1.0)
    bench.advance(3.0)
    reading = bench.device.read()
    assert 550 < reading.power_w < 700
    assert reading.power_kind == PowerKind.INSTANT
    assert reading.sm_clock_mhz == 1980
    assert reading.memory_clock_mhz == 2619
    assert reading.utilisation == 1.0
    assert 25 < reading.temperature_c < 90
    assert reading.throttle_reasons == 0
    assert (reading.requested_limit_mw, reading.enforced_limit_mw) == (700_000, 700_000)


def test_a_limit_is_set_read_back_and_obeyed(bench):
    bench.load(1.0)
    bench.advance(3.0)
    bench.device.set_power_limit_mw(400_000)
    assert bench.device.requested_limit_mw() == 400_000
    assert bench.device.enforced_limit_mw() == 400_000
    bench.advance(3.0)
    reading = bench.device.read()
    assert 0.93 * 400 < reading.power_w <= 1.01 * 400
    assert reading.throttle_reasons & 0x4
    assert reading.sm_clock_mhz < 1900


def test_a_limit_is_a_ceiling_not_a_set_point(bench):
    bench.load(0.1)
    bench.advance(3.0)
    before = bench.device.read().power_w
    bench.device.set_power_limit_mw(400_000)
    bench.advance(3.0)
    after = bench.device.read()
    assert after.power_w == pytest.approx(before, rel=0.01)
    assert not after.throttle_reasons & 0x4


@pytest.mark.parametrize("limit", [200_000, 700_000])
def test_the_ends_of_the_range_are_valid(bench, limit):
    bench.device.set_power_limit_mw(limit)
    assert bench.device.requested_limit_mw() == limit


@pytest.mark.parametrize("limit", [450.0, 450_000.0, math.nan, math.inf, True, "450000", None])
def test_only_integers_reach_the_driver(bench, limit):
    with pytest.raises(DeviceError, match=r"not an integer.*milliwatts"):
        bench.device.set_power_limit_mw(limit)
    assert bench.writes() == 0


@pytest.mark.parametrize("limit", [-1, -450_000, 0, 500, 199_999, 700_001, 2**32, 2**32 + 450_000])
def test_out_of_range_is_refused_and_nothing_changes(bench, limit):
    # 500 is watts given as milliwatts; -1 and 2**32 + 450,000 would wrap in C.
    with pytest.raises(DeviceError, match=r"out of range|outside 200000 … 700000"):
        bench.device.set_power_limit_mw(limit)
    assert bench.device.requested_limit_mw() == 700_000
    assert bench.writes() == 0


def test_permission_denied_names_the_capability_and_reads_go_on(bench):
    bench.fault(permission_denied=True)
    with pytest.raises(PermissionDeniedError, match=r"root.*SYS_ADMIN"):
        bench.device.set_power_limit_mw(400_000)
    with pytest.raises(PermissionDeniedError):
        bench.device.lock_clocks_mhz(min_mhz=600, max_mhz=900)
    with pytest.raises(PermissionDeniedError):
        bench.device.reset_clocks()
    assert bench.device.read().requested_limit_mw == 700_000


@pytest.mark.parametrize(("fault", "words"), [("lost", "lost"), ("unknown_error", "container")])
def test_a_device_that_is_gone_says_so_everywhere(bench, fault, words):
    bench.fault(**{fault: True})
    calls = [
        bench.device.read,
        bench.device.requested_limit_mw,
        bench.device.enforced_limit_mw,
        bench.device.reset_clocks,
        lambda: bench.device.set_power_limit_mw(400_000),
        lambda: bench.device.lock_clocks_mhz(min_mhz=600, max_mhz=900),
    ]
    for call in calls:
        with pytest.raises(DeviceLostError, match=words) as caught:
            call()
        # Unlike the binding's, the project's exceptions can be hashed, compared and sent to another process.
        hash(caught.value)
        assert caught.value != RuntimeError()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_out_of_band_limit_is_enforced_not_requested(bench):
    bench.load(1.0)
    bench.fault(bmc_limit_mw=500_000)
    bench.advance(3.0)
    reading = bench.device.read()
    assert (reading.requested_limit_mw, reading.enforced_limit_mw) == (700_000, 500_000)
    assert (bench.device.requested_limit_mw(), bench.device.enforced_limit_mw()) == (700_000, 500_000)
    assert reading.power_w <= 505


def test_a_foreign_write_is_seen(bench):
    bench.device.set_power_limit_mw(400_000)
    bench.foreign_write(350_000)
    assert bench.device.requested_limit_mw() == 350_000


def test_a_set_that_does_nothing_is_caught_by_reading_back(bench):
    bench.fault(set_ignored=True)
    bench.device.set_power_limit_mw(400_000)
    assert bench.device.requested_limit_mw() == 700_000
    assert bench.writes() == 1


def test_a_limit_may_show_later_than_it_was_set(bench):
    bench.fault(show_delay_s=0.2)
    bench.device.set_power_limit_mw(400_000)
    assert bench.device.requested_limit_mw() == 700_000
    bench.advance(0.1)
    assert bench.device.requested_limit_mw() == 700_000
    bench.advance(0.15)
    assert bench.device.requested_limit_mw() == 400_000
    assert bench.device.enforced_limit_mw() == 400_000


def test_driver_reload_forgets_limit_and_energy(bench):
    bench.load(1.0)
    bench.device.set_power_limit_mw(400_000)
    bench.advance(60.0)
    before = bench.device.read()
    bench.reload_driver()
    bench.advance(1.0)
    after = bench.device.read()
    assert after.requested_limit_mw == 700_000
    assert 0 <= after.energy_j < 1000 < before.energy_j


def test_the_energy_counter_counts_the_power(bench):
    bench.load(1.0)
    bench.advance(5.0)
    first = bench.device.read()
    bench.advance(20.0)
    second = bench.device.read()
    assert second.energy_j - first.energy_j == pytest.approx(20.0 * second.power_w, rel=0.01)


def test_without_an_energy_counter_energy_is_unknown_not_zero(bench):
    bench.fault(no_energy_counter=True)
    bench.reopen()
    assert "not supported" in bench.device.info().capabilities["energy"]
    assert bench.device.read().energy_j is None


def test_a_stale_sensor_repeats_itself(bench):
    bench.advance(1.0)
    bench.fault(stale_sensor=True)
    before = bench.device.read()
    bench.load(1.0)
    bench.advance(5.0)
    after = bench.device.read()
    assert after.power_w == before.power_w
    assert after.energy_j == before.energy_j


def test_an_implausible_reading_is_passed_on_for_the_guard_to_judge(bench):
    bench.fault(implausible_power_w=3700.0)
    assert bench.device.read().power_w == 3700.0


def test_mig_is_told_and_takes_utilisation_away(bench):
    bench.fault(mig=True)
    bench.reopen()
    assert bench.device.info().is_mig
    assert bench.device.read().utilisation is None


def test_persistence_off_is_told(bench):
    bench.fault(persistence_off=True)
    bench.reopen()
    assert bench.device.info().persistence is False


def test_a_narrower_range_is_read_at_opening(bench):
    bench.fault(min_limit_mw=300_000, max_limit_mw=600_000)
    bench.reopen()
    assert (bench.device.info().min_limit_mw, bench.device.info().max_limit_mw) == (300_000, 600_000)
    for limit in (299_000, 601_000):
        with pytest.raises(DeviceError, match="300000 … 600000"):
            bench.device.set_power_limit_mw(limit)


def test_locked_clocks_lower_clock_and_power_until_reset(bench):
    bench.load(1.0)
    bench.advance(3.0)
    free = bench.device.read()
    bench.device.lock_clocks_mhz(min_mhz=600, max_mhz=990)
    bench.advance(3.0)
    locked = bench.device.read()
    assert locked.sm_clock_mhz <= 990
    assert locked.power_w < 0.7 * free.power_w
    bench.device.reset_clocks()
    bench.advance(3.0)
    assert bench.device.read().sm_clock_mhz == free.sm_clock_mhz


@pytest.mark.parametrize(("low", "high"), [(990, 600), (-1, 600), (600.0, 990), (True, 990), (600, math.nan)])
def test_clock_ranges_are_checked_before_the_driver(bench, low, high):
    with pytest.raises(DeviceError, match="clock"):
        bench.device.lock_clocks_mhz(min_mhz=low, max_mhz=high)


def test_a_power_limit_wins_over_a_locked_minimum(bench):
    bench.load(1.0)
    bench.device.lock_clocks_mhz(min_mhz=1980, max_mhz=1980)
    bench.device.set_power_limit_mw(350_000)
    bench.advance(3.0)
    reading = bench.device.read()
    assert reading.power_w < 360
    assert reading.sm_clock_mhz < 1900


def test_the_lowest_limit_need_not_be_reachable(make_bench):
    # An A40 told 100 W draws 107 to 119 W (Zeus traces).
    bench = make_bench("a40")
    bench.load(1.0)
    bench.device.set_power_limit_mw(100_000)
    bench.advance(5.0)
    assert 105 < bench.device.read().power_w < 120


def test_closing_twice_is_harmless(bench):
    bench.device.close()
    bench.device.close()
