"""The command rules: worked values, and the properties a guard and an emulator both rely on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from wattgym.hw.limits import CommandRules, Decision, ShapedLimits, shape_command_w

H100 = {"min_w": 200.0, "max_w": 700.0, "default_w": 700.0}


@pytest.mark.parametrize(
    ("requested", "last", "elapsed", "command", "decision"),
    [
        (600.0, 700.0, 5.0, 600.0, Decision.NONE),  # a cut goes through whole
        (350.0, 700.0, 1.0, 350.0, Decision.NONE),
        (300.0, 700.0, 1.0, 350.0, Decision.CLIPPED_LOW),  # floor: half of the default
        (705.0, 600.0, 2.0, 700.0, Decision.CLIPPED_HIGH),
        (600.0, 350.0, 1.0, 490.0, Decision.RAISE_LIMITED),  # 20 % of 700 W per second
        (700.0, 350.0, 60.0, 630.0, Decision.RAISE_LIMITED),  # the allowance stops at 2 s
        (503.4, 500.0, 5.0, 500.0, Decision.DEAD_BANDED),  # 0.5 % of 700 W = 3.5 W
        (503.5, 500.0, 5.0, 503.5, Decision.NONE),
        (400.0, 500.0, 0.99, 500.0, Decision.TOO_SOON),
        (900.0, 350.0, 1.5, 560.0, Decision.CLIPPED_HIGH | Decision.RAISE_LIMITED),
        (100.0, 350.0, 0.5, 350.0, Decision.CLIPPED_LOW | Decision.TOO_SOON),
    ],
)
def test_worked_values(requested, last, elapsed, command, decision):
    got, why = shape_command_w(requested, last, elapsed_s=elapsed, rules=CommandRules(), **H100)
    assert float(got) == pytest.approx(command)
    assert Decision(int(why)) == decision


def test_dead_band_of_a_small_card_is_two_watts():
    limits = ShapedLimits(60.0, 70.0, 70.0, CommandRules())
    assert float(limits.dead_band_w) == 2.0


def test_ten_ticks_of_a_tenth_are_a_second():
    elapsed = sum([0.1] * 10)
    assert elapsed < 1.0
    command, _ = shape_command_w(400.0, 500.0, elapsed_s=elapsed, rules=CommandRules(), **H100)
    assert float(command) == 400.0


def test_arrays_of_different_devices_match_one_by_one():
    rng = np.random.default_rng(3)
    minimum, default = rng.uniform(50, 200, (4, 6)), rng.uniform(250, 700, (4, 6))
    requested, last, elapsed = rng.uniform(0, 900, (4, 6)), rng.uniform(100, 700, (4, 6)), rng.uniform(0, 4, (4, 6))
    limits = ShapedLimits(minimum, default, default, CommandRules())
    command, why = limits.shape(requested, last, elapsed)
    assert command.shape == why.shape == (4, 6)
    assert why.dtype == np.uint8
    np.testing.assert_array_equal(command, limits.command_w(requested, last, elapsed))
    for at in np.ndindex(4, 6):
        one, one_why = shape_command_w(
            requested[at],
            last[at],
            min_w=minimum[at],
            max_w=default[at],
            default_w=default[at],
            elapsed_s=elapsed[at],
            rules=CommandRules(),
        )
        assert float(one) == command[at]
        assert int(one_why) == why[at]


watts = st.floats(-1e6, 1e6)


@given(requested=watts, last=st.floats(200.0, 700.0), elapsed=st.floats(0.0, 1e4), floor=st.floats(0.0, 1.0))
def test_a_command_stays_in_bounds_and_never_rises_too_fast(requested, last, elapsed, floor):
    rules = CommandRules(floor_fraction=floor)
    limits = ShapedLimits(200.0, 700.0, 700.0, rules)
    command, why = limits.shape(np.float64(requested), np.float64(last), elapsed)
    assert 200.0 <= command <= 700.0
    assert command - last <= 0.2 * 700.0 * min(elapsed, rules.raise_window_s) + 1e-9
    if command != last:
        assert elapsed >= rules.interval_s - 1e-6
        assert not Decision(int(why)) & (Decision.TOO_SOON | Decision.DEAD_BANDED)
    if int(why) == 0:
        assert command == requested


@given(start=st.floats(200.0, 700.0), target=st.floats(350.0, 700.0))
def test_repeating_a_request_arrives_within_the_dead_band(start, target):
    limits = ShapedLimits(200.0, 700.0, 700.0, CommandRules())
    last = np.float64(start)
    for _ in range(6):
        last = limits.command_w(np.float64(target), last, 2.0)
    assert abs(float(last) - target) < limits.dead_band_w


@pytest.mark.parametrize(
    "bad",
    [
        {"interval_s": 0.19},
        {"interval_s": float("nan")},
        {"floor_fraction": 0.8, "ceiling_fraction": 0.7},
        {"interval_s": 5.0},  # above the raise window
        {"raise_fraction_per_s": 0.0},
        {"dead_band": 3.0},
    ],
)
def test_rules_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValidationError):
        CommandRules(**bad)


def test_a_floor_above_the_maximum_does_not_invert_the_range():
    limits = ShapedLimits(100.0, 200.0, 500.0, CommandRules())
    assert (float(limits.low_w), float(limits.high_w)) == (200.0, 200.0)
