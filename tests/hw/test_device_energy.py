"""Energy by counter and by integral."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.hw.clock import VirtualClock
from wattgym.hw.device import DeviceReading
from wattgym.hw.energy import EnergyMeter
from wattgym.hw.simulated import Faults, SimulatedDevice


def metered(readings, **options):
    meter = EnergyMeter(**options)
    for reading in readings:
        meter.add(reading)
    return meter


def at(t_s, power_w=None, energy_j=None, age_s=None):
    return DeviceReading(t_s=t_s, power_w=power_w, energy_j=energy_j, age_s=age_s)


def test_trapezoid_on_real_time_stamps():
    # 100 to 200 W in 1 s is 150 J; 200 to 200 W in 3 s is 600 J.
    assert metered([at(0, 100.0), at(1, 200.0), at(4, 200.0)]).integral_j == 750.0


def test_samples_belong_to_when_they_were_taken():
    # Read at 10 s and 20 s, but taken 1 s and 5 s before: 6 s apart.
    assert metered([at(10, 100.0, age_s=1.0), at(20, 100.0, age_s=5.0)], longest_gap_s=9).integral_j == 600.0


def test_the_counter_starts_at_the_first_reading():
    # Millions of joules since the driver was loaded are not this run's.
    assert metered([at(0, energy_j=5e6), at(1, energy_j=5e6 + 300.0)]).energy_j == 300.0


def test_nothing_known_is_nan_never_zero():
    for readings in ([], [at(0)], [at(0), at(1)], [at(0, 100.0)], [at(0, energy_j=7.0)]):
        assert math.isnan(metered(readings).energy_j)


def test_without_a_counter_the_integral_stands_in():
    meter = metered([at(0, 100.0), at(2, 100.0)])
    assert math.isnan(meter.counter_j)
    assert meter.energy_j == 200.0


def test_counter_and_integral_are_two_sensors():
    meter = metered([at(0, 100.0, 0.0), at(5, 100.0, 187.0)])
    assert (meter.counter_j, meter.integral_j, meter.energy_j) == (187.0, 500.0, 187.0)


def test_a_counter_that_falls_never_gives_negative_energy():
    meter = metered([at(0, energy_j=900.0), at(1, energy_j=1000.0), at(2, energy_j=40.0), at(3, energy_j=140.0)])
    assert (meter.energy_j, meter.resets) == (240.0, 1)


def test_gaps_are_left_out_and_told():
    meter = metered([at(0, 100.0), at(1, 100.0), at(61, 300.0), at(62, 300.0)])
    assert (meter.integral_j, meter.unmetered_s) == (400.0, 60.0)


def test_a_repeated_sample_adds_nothing():
    meter = metered([at(0, 100.0, age_s=0.0), at(0.05, 100.0, age_s=0.05), at(1.0, 100.0, age_s=0.0)])
    assert meter.integral_j == pytest.approx(100.0)


def test_on_a_device_through_a_driver_reload():
    clock = VirtualClock(10.0)
    device = SimulatedDevice("h100-sxm", clock=clock)
    device.set_demand(1.0)
    clock.sleep(3.0)
    meter = EnergyMeter()
    for second in range(61):
        if second == 30:
            device.reload_driver()
        meter.add(device.read())
        clock.sleep(1.0)
    assert meter.resets == 1
    assert meter.integral_j == pytest.approx(60 * 620.0, rel=0.005)
    # What was drawn in the second before the reload is in no counter.
    assert meter.counter_j == pytest.approx(59 * 620.0, rel=0.005)
    device.inject(Faults(no_energy_counter=True))
    later = metered([device.read()])
    clock.sleep(1.0)
    later.add(device.read())
    assert later.energy_j == pytest.approx(620.0, rel=0.001)


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=30))
def test_counted_energy_is_the_sum_of_rises(values):
    meter = metered(at(turn, energy_j=value) for turn, value in enumerate(values))
    falls = sum(later < earlier for earlier, later in pairwise(values))
    assert meter.counter_j >= 0.0
    assert meter.resets == falls
    if falls == 0:
        assert meter.counter_j == pytest.approx(values[-1] - values[0], abs=1e-3)
