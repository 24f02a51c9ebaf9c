"""Meters and sensors of the emulator against power computed at any instant, by superposition of step responses."""

import itertools

import numpy as np
import pytest

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.emulator.library import RANGED
from wattgym.envs.plant import Command
from wattgym.hw.physics import TickKernel

FAST = {"interval_s": 0.2, "raise_window_s": 0.2, "raise_fraction_per_s": 50.0, "dead_band_fraction": 0.0}


def config_of(period_s, surface, *, rules=None, **site):
    data = {"jobs": 2, "surfaces": (surface,), "command_loss": 0.0, "control_delay_periods": (0, 0), **site}
    return PowerShapingConfig.model_validate(
        {"site": data, "period_s": period_s, "episode_s": 600.0, "rules": {**FAST, **(rules or {})}}
    )


class Course:
    """Runs an emulator under given limits and knows its power at every instant.

    The power is the present target plus, for each earlier change of target, that change times a decaying shape. It
    shares with the emulator only the targets themselves; modes, windows and energies are worked out anew.
    """

    def __init__(self, config, limit_fractions, seed=5):
        self.emulator = Emulator(config)
        self.period_s = config.period_s
        first = self.emulator.reset([np.random.default_rng(seed)])
        self.site = self.emulator._site
        actuator = {name: self.site.actuator[i, 0] for i, name in enumerate(RANGED)}
        self.actuator = actuator
        self.latency_s = np.minimum(actuator["call_s"] + actuator["dead_time_s"], self.period_s)
        self.times, self.targets = [np.full(2, -1e9)], [first.meter_w[0]]
        self.commanded = [False]
        low, high = self.site.shaped.low_w, self.site.shaped.high_w
        self.telemetry = [first]
        for tick, fraction in enumerate(limit_fractions):
            self.emulator.apply(Command(low + fraction * (high - low)))
            self.telemetry.append(self.emulator.advance())
            for offset, row, commanded in (
                (np.zeros(2), TickKernel.P1, False),
                (self.latency_s, TickKernel.P2, True),
            ):
                self.times.append(tick * self.period_s + offset)
                self.targets.append(self.emulator._rows[row].copy())
                self.commanded.append(commanded)

    def power_w(self, job, t_s):
        """Power of one job at instants `t_s`, W."""
        a = {name: values[job] for name, values in self.actuator.items()}
        power = np.full(t_s.shape, self.targets[0][job])
        for k in range(1, len(self.targets)):
            since = t_s - self.times[k][job]
            drop = self.targets[k - 1][job] - self.targets[k][job]
            live = since >= 0.0
            power[live] -= drop
            s = since[live]
            if drop < 0.0:
                power[live] += drop * np.exp(-s / a["up_tau_s"])
            else:
                over = a["undershoot"] if self.commanded[k] else 0.0
                power[live] += drop * (1.0 + over) * np.exp(-s / a["down_tau_s"])
                power[live] -= drop * over * np.exp(-s / a["recovery_tau_s"])
        return power

    def mean_w(self, job, begin_s, end_s):
        # Split at every change so that no sample interval straddles a jump in slope.
        cuts = [t[job] for t in self.times[1:] if begin_s < t[job] < end_s]
        edges = [begin_s, *cuts, end_s]
        total = 0.0
        for left, right in itertools.pairwise(edges):
            t = left + (right - left) * np.linspace(0.0, 1.0, 4_001) ** 2
            t[-1] = np.nextafter(right, left)
            total += np.trapezoid(self.power_w(job, t), t)
        return total / (end_s - begin_s)


LIMITS = [1.0, 0.2, 0.2, 0.9, 0.4, 0.4, 0.4, 0.0, 1.0, 1.0, 0.3, 0.8]


@pytest.mark.parametrize("period_s", [0.2, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("surface", "sensor"),
    [("a40/bert_base_squad/b72", "average"), ("a40/bert_base_squad/b72", "instant"), ("v100/resnet50/b360", "default")],
)
def test_meter_and_sensor_match_brute_force(period_s, surface, sensor):
    course = Course(config_of(period_s, surface, sensor=sensor), LIMITS)
    site = course.site
    for tick in range(1, len(LIMITS) + 1):
        got, end = course.telemetry[tick], tick * period_s
        for job in range(2):
            assert got.meter_w[0, job] == pytest.approx(course.mean_w(job, end - period_s, end), rel=2e-5)
            published = end - site.sensor_lag_s[0, job]
            mean = course.mean_w(job, published - site.sensor_window_s[0, job], published)
            reading = site.sensor_gain[0, job] * mean + site.sensor_offset_w[0, job]
            assert got.sensor_w[0, job] == pytest.approx(reading, rel=2e-5)


def test_a_one_second_average_ramps_linearly():
    """After a cut, a boxcar mean falls by equal steps for one second, then stays."""
    course = Course(config_of(0.2, "a40/bert_base_squad/b72", randomise=0.0, sensor="average"), [1.0] * 10 + [0.4] * 15)
    reading = np.array([t.sensor_w[0, 0] for t in course.telemetry[10:]])
    before, after = course.telemetry[10].meter_w[0, 0], course.telemetry[-1].meter_w[0, 0]
    share = (before - reading) / (before - after)
    # The window's end lies between 0 and 0.1 s before the period's end; the cut acts 0.03 s after its beginning.
    lag = course.site.sensor_lag_s[0, 0] + course.latency_s[0]
    times = 0.2 * np.arange(share.size)
    np.testing.assert_allclose(share, np.clip(times - lag, 0.0, 1.0), atol=0.06)
    assert np.diff(share)[1:4] == pytest.approx([0.2] * 3, abs=0.02)


def test_an_instant_sensor_shows_the_new_level_at_once():
    course = Course(config_of(1.0, "a40/bert_base_squad/b72", randomise=0.0, sensor="instant"), [1.0] * 3 + [0.4] * 3)
    settled = course.telemetry[-1].meter_w[0, 0]
    assert course.telemetry[4].sensor_w[0, 0] == pytest.approx(settled, rel=0.02)
    assert course.telemetry[4].meter_w[0, 0] > 1.005 * settled


def test_energy_is_meter_times_time():
    course = Course(config_of(2.0, "v100/bert_base_squad/b56"), LIMITS)
    energy = sum(t.meter_w[0] for t in course.telemetry[1:]) * 2.0
    expected = [course.mean_w(job, 0.0, 24.0) * 24.0 for job in range(2)]
    np.testing.assert_allclose(energy, expected, rtol=2e-5)


def test_training_slows_when_the_command_arrives():
    """Throughput of the tick is the mean of old and new speed, weighted with the time each was in force."""
    course = Course(config_of(2.0, "v100/bert_base_squad/b56"), [1.0, 1.0, 0.0, 0.0, 0.0])
    old, mixed, new = (course.telemetry[k].throughput[0] for k in (2, 3, 4))
    late = course.latency_s / 2.0
    np.testing.assert_allclose(mixed, late * old + (1.0 - late) * new, rtol=1e-12)
    assert (new < mixed).all()
    assert (mixed < old).all()
