"""Settlement, tracking, event compliance and training cost, worked by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.metrics import (
    actuations_per_hour,
    energy_per_token_j,
    event_compliance,
    mape,
    mileage,
    mileage_ratio,
    ramp_compliance,
    regulation_credit,
    throughput_retained,
    tracking,
)


def test_five_minute_settlement() -> None:
    """10 MW, 30 + 5 x 2 USD per MW and hour, one twelfth of an hour."""
    market = {"capacity_mw": 10.0, "capability_price": 30.0, "performance_price": 2.0, "mileage_ratio": 5.0}
    paid = regulation_credit([1.0, 0.9, 0.25, 0.2499, np.nan], interval_s=300.0, **market)
    assert paid.credit_usd.tolist() == pytest.approx([100 / 3, 30.0, 25 / 3, 0.0, 0.0], abs=1e-6)
    assert paid.forfeited.tolist() == [False, False, False, True, False]
    assert paid.total_usd == pytest.approx(100 / 3 + 30 + 25 / 3)
    assert regulation_credit([0.9], interval_s=3600.0, **market).total_usd == pytest.approx(360.0)
    prices = regulation_credit([1.0, 1.0], capacity_mw=1, capability_price=[1.0, 2.0], performance_price=0.0)
    assert prices.credit_usd.tolist() == [1.0, 2.0]


def test_mileage() -> None:
    assert float(mileage([0.0, 0.5, -0.5, -0.5])) == 1.5
    assert mileage([[0.0, 1.0], [1.0, 1.0]]).tolist() == [1.0, 0.0]
    assert mileage_ratio([0.0, 1.0, 0.0], [0.0, 0.5, 0.5]) == 4.0
    with pytest.raises(UserError, match="never moves"):
        mileage_ratio([0.0, 1.0], [0.5, 0.5])


def test_thirty_percent_rule() -> None:
    power = [100, 104, 110, 95, 88, 100, 103, 97, 112, 100]
    result = tracking(np.full(10, 100.0), power, capacity_w=20.0)
    assert result.share_within == pytest.approx(0.7)
    assert not result.passed
    assert result.mae == pytest.approx(0.245)
    assert result.nrmse == pytest.approx(0.334290, abs=1e-6)
    assert result.bias == pytest.approx(9 / 200)
    assert result.mape == pytest.approx(0.049)
    # Sorted |e|/R ends in .5, .6, .6: the 95th percentile lies at position 8.55, between two 0.6.
    assert result.p95 == pytest.approx(0.6)
    # 0.1 + 0.2 is 0.30000000000000004: the limit itself counts as within.
    assert tracking([1.0], [1.0 + 0.1 + 0.2], capacity_w=1.0).passed


def test_mape_of_a_zero_target_is_refused_and_not_infinite() -> None:
    assert mape([10.0, 20.0], [11.0, 18.0]) == pytest.approx(0.1)
    with pytest.raises(UserError, match="sample 1 is 0"):
        mape([1.0, 0.0], [1.0, 1.0])
    assert np.isnan(tracking([1.0, 0.0], [1.0, 1.0], capacity_w=1.0).mape)


def test_ramp_compliance() -> None:
    power = [0.0, 10.0, 30.0, 30.0, 0.0]
    result = ramp_compliance(power, period_s=2.0, span_s=2.0, limit_w_per_s=10.0)
    assert (result.share_within, result.max_up_w_per_s, result.max_down_w_per_s) == (0.75, 10.0, 15.0)
    slow = ramp_compliance(power, period_s=2.0, span_s=4.0, limit_w_per_s=7.5, down_limit_w_per_s=1.0)
    # Over 4 s: +30, +20, -30 W, so 7.5, 5 and -7.5 W/s.
    assert (slow.share_within, slow.max_up_w_per_s, slow.max_down_w_per_s) == (pytest.approx(2 / 3), 7.5, 7.5)


def test_peak_event_limit_and_excess() -> None:
    """-25 % within 15 min from 100 kW, sampled every 5 min."""
    power = np.array([100.0, 92.0, 83.0, 76.0, 74.0])
    result = event_compliance(power, baseline_w=100.0, reduction=0.25, period_s=300.0, ramp_in_s=900.0, hold_s=3600.0)
    assert result.limit_w.tolist() == pytest.approx([100, 100 - 25 / 3, 100 - 50 / 3, 75, 75])
    assert result.excess_w.tolist() == pytest.approx([0, 1 / 3, 0, 1, 0])
    assert result.max_excess_w == pytest.approx(1.0)
    assert result.violation_share == pytest.approx(2 / 5)
    assert result.delivered_share == pytest.approx(1.0)  # (24 + 26) / 2 of 25
    assert result.time_to_target_s == 1200.0
    assert result.rebound_w == 0.0


def test_event_with_release_reports_rebound_and_judges_only_the_event() -> None:
    power = np.array([120.0, 100.0, 70.0, 70.0, 130.0, 100.0])
    result = event_compliance(
        power, baseline_w=100.0, reduction=0.3, period_s=10.0, ramp_in_s=10.0, hold_s=20.0, start_s=10.0
    )
    # The limit at 10, 20 and 30 s is 100, 70 and 70; 120 W before and 130 W after the event are no violation.
    assert np.isinf(result.limit_w).tolist() == [True, False, False, False, True, True]
    assert result.violation_share == 0.0
    assert result.delivered_share == pytest.approx(1.0)
    assert result.time_to_target_s == 10.0
    assert result.rebound_w == pytest.approx(30.0)


def test_event_with_no_response_delivers_nothing() -> None:
    result = event_compliance(
        np.full(5, 110.0), baseline_w=100.0, reduction=0.25, period_s=60.0, ramp_in_s=0.0, hold_s=300.0
    )
    assert result.delivered_share == 0.0
    assert result.time_to_target_s is None
    assert result.violation_share == 1.0
    assert result.mean_excess_w == pytest.approx(35.0)


def test_training_cost() -> None:
    assert throughput_retained(90.0, 120.0) == 0.75
    assert energy_per_token_j([100.0, 300.0], period_s=2.0, tokens=400.0) == 2.0


def test_actuations_count_changes_above_a_share_of_the_range() -> None:
    caps = [[300.0, 303.0, 303.0, 306.1, 300.0], [300.0, 300.0, 300.0, 300.0, 300.0]]
    # One percent of 300 W is 3 W: the first step is not more than that, the next two are. Five ticks of 2 s.
    assert actuations_per_hour(caps, period_s=2.0, range_w=300.0).tolist() == pytest.approx([2 * 360, 0.0])
    first = actuations_per_hour(caps, period_s=2.0, range_w=300.0, reference_w=[300.0, 200.0])
    assert first.tolist() == pytest.approx([2 * 360, 360])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regulation_credit([1.2], capacity_mw=1, capability_price=1, performance_price=1), "valid: 0 to 1"),
        (lambda: regulation_credit([1.0], capacity_mw=0, capability_price=1, performance_price=1), "capacity_mw"),
        (
            lambda: regulation_credit([1.0] * 3, capacity_mw=1, capability_price=[1, 2], performance_price=1),
            "2 values for 3 intervals",
        ),
        (lambda: tracking([], [], capacity_w=1.0), "at least one sample"),
        (lambda: tracking([1.0], [1.0, 2.0], capacity_w=1.0), "equally long"),
        (lambda: tracking([1.0], [float("nan")], capacity_w=1.0), "power: sample 0 is NaN"),
        (lambda: tracking([1.0], [1.0], capacity_w=-1.0), "capacity_w must be positive"),
        (lambda: mileage([2.0]), "valid: -1 to 1"),
        (lambda: ramp_compliance([1.0, 2.0], period_s=2, span_s=3, limit_w_per_s=1), "whole multiple"),
        (lambda: ramp_compliance([1.0], period_s=2, span_s=2, limit_w_per_s=1), "at least 2 samples"),
        (
            lambda: event_compliance([1.0], baseline_w=1, reduction=1.5, period_s=1, ramp_in_s=0, hold_s=1),
            "reduction must be in (0, 1]",
        ),
        (
            lambda: event_compliance([1.0], baseline_w=1, reduction=0.5, period_s=1, ramp_in_s=0, hold_s=1, start_s=9),
            "no sample within the event",
        ),
        (
            lambda: event_compliance([1.0], baseline_w=[1, 2], reduction=0.5, period_s=1, ramp_in_s=0, hold_s=1),
            "equally long",
        ),
        (lambda: throughput_retained(1.0, 0.0), "uncapped_tokens must be positive"),
        (lambda: throughput_retained(-1.0, 1.0), "tokens must be >= 0"),
        (lambda: energy_per_token_j([1.0], period_s=1.0, tokens=0.0), "tokens must be positive"),
        (lambda: energy_per_token_j([-1.0], period_s=1.0, tokens=1.0), "power: sample 0 is -1"),
        (lambda: actuations_per_hour([1.0], period_s=1.0, range_w=0.0), "range_w must be positive"),
    ],
)
def test_bad_input_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1e4), st.floats(0.1, 1e4))
def test_tracking_is_relative_to_the_capacity(seed: int, capacity: float, scale: float) -> None:
    rng = np.random.default_rng(seed)
    target = 1 + rng.random(50)
    power = target + rng.normal(0, 0.2, 50)
    one = tracking(target, power, capacity_w=capacity)
    other = tracking(target * scale, power * scale, capacity_w=capacity * scale)
    for name in ("nrmse", "mae", "p95", "bias", "mape"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-12)
    assert 0 <= one.mae <= one.nrmse + 1e-12
    assert abs(one.bias) <= one.mae + 1e-12
