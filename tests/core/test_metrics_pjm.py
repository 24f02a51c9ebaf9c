"""Worked cases of the regulation performance score; every number to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest

from wattgym.errors import UserError
from wattgym.metrics import PJM_VARIANTS, PjmScore, PjmVariant, pjm_score, pjm_variant

NAN = float("nan")
LEGACY = PJM_VARIANTS["legacy"]


def variant(**changes: object) -> PjmVariant:
    return PjmVariant(**{**LEGACY.model_dump(), **changes})


def score(signal: np.ndarray, response: np.ndarray, **changes: object) -> PjmScore:
    return pjm_score(signal, response, period_s=10.0, variant=variant(**changes))


def parts(result: PjmScore) -> list[float]:
    return [float(x) for x in (result.correlation, result.delay, result.precision, result.composite)]


def check(result: PjmScore, expected: tuple[float, ...], shift: int | None = None) -> None:
    assert parts(result) == pytest.approx(list(expected), abs=1e-6)
    if shift is not None:
        assert result.window_shift[0] == shift


def delayed(values: np.ndarray, samples: int) -> np.ndarray:
    return np.concatenate([np.zeros(samples), values[: values.size - samples]]) if samples else values


PULSE = np.zeros(60)
PULSE[5:15] = 1.0
SQUARE = np.tile(np.repeat([1.0, -1.0], 15), 2)


def noise() -> np.ndarray:
    """First-order filter over a linear congruential generator: the same digits on every platform."""
    x, out = 1, np.zeros(390)
    draws = []
    for _ in range(390):
        x = (1103515245 * x + 12345) % 2**31
        draws.append(x / 2**31)
    for n in range(1, 390):
        out[n] = np.clip(0.9 * out[n - 1] + 0.4 * (draws[n] - 0.5), -1.0, 1.0)
    return out


NOISE = noise()


def test_noise_generator_is_the_documented_one() -> None:
    assert pytest.approx([0, -0.129703, -0.193273, -0.160132, 0.034933, -0.099866], abs=1e-6) == NOISE[:6].tolist()
    assert np.abs(NOISE[:360]).mean() == pytest.approx(0.229556, abs=1e-6)


@pytest.mark.parametrize(
    ("response", "expected", "shift"),
    [
        (PULSE, (1, 1, 1, 1), 0),
        (0.5 * PULSE, (1, 1, 0.5, 0.833333), 0),
        (delayed(PULSE, 1), (1, 0.966667, 0.8, 0.922222), 1),
        # Six of 30 samples wrong by 1 against a mean request of 1/3: precision 1 - 0.2 * 3.
        (delayed(PULSE, 3), (1, 0.9, 0.4, 0.766667), 3),
        (delayed(PULSE, 6), (1, 0.8, 0, 0.6), 6),
        (3 * PULSE, (1, 1, 0, 0.666667), 0),
        (PULSE + 0.1, (1, 1, 0.7, 0.9), 0),
        (-PULSE, (0.1**0.5, 0.666667, 0, 0.327631), 10),
        (0 * PULSE, (0, 0, 0, 0), -1),
        (np.full(60, 0.25), (0, 0, 0, 0), -1),
    ],
    ids=["A1", "A2", "A3", "A4", "A5", "A6", "A7", "A8", "A9", "A10"],
)
def test_pulse(response: np.ndarray, expected: tuple[float, ...], shift: int) -> None:
    check(score(PULSE, response), expected, shift)


@pytest.mark.parametrize("level", [0.1, 1 / 3, 0.7, -0.9, 1e5 / 3])
def test_a_constant_response_is_constant_whatever_its_rounding(level: float) -> None:
    """The mean of thirty 0.7 is not exactly 0.7; what is left must not be correlated."""
    for response in (np.full(60, level), np.where(np.arange(60) == 50, NAN, level)):
        result = score(PULSE, response, zero_delay="never")
        assert (result.correlation, result.delay) == (0, 1)
        assert score(PULSE, response).window_shift[0] == -1


def test_without_the_zero_delay_rule_doing_nothing_earns_a_third() -> None:
    """A9b: why the rule is there."""
    check(score(PULSE, 0 * PULSE, zero_delay="never"), (0, 1, 0, 1 / 3), 0)
    check(score(PULSE, 0 * PULSE, zero_delay="constant_response"), (0, 0, 0, 0))


@pytest.mark.parametrize(
    ("response", "changes", "expected", "shift"),
    [
        (SQUARE, {}, (1, 1, 1, 1), 0),
        (np.roll(SQUARE, 1), {}, (1, 0.966667, 0.866667, 0.944444), 1),
        (np.roll(SQUARE, 3), {}, (1, 0.9, 0.6, 0.833333), 3),
        (-SQUARE, {}, (1, 0.5, 0, 0.5), 15),
        (np.roll(SQUARE, 1), {"grace_samples": 1}, (1, 1, 1, 1), 1),
        (np.roll(SQUARE, 3), {"grace_samples": 1}, (1, 0.933333, 0.733333, 0.888889), 3),
        (SQUARE, {"grace_samples": 1}, (1, 1, 0.866667, 0.955556), 0),
    ],
    ids=["B1", "B2", "B3", "B4", "B5", "B6", "B7"],
)
def test_square_wave(response: np.ndarray, changes: dict[str, object], expected: tuple[float, ...], shift: int) -> None:
    check(score(SQUARE, response, **changes), expected, shift)


@pytest.mark.parametrize(
    ("request_level", "response", "expected"),
    [
        (0.5, np.full(60, 0.5), (1, 1, 1, 1)),
        (0.5, np.full(60, 0.4), (1, 1, 0.8, 0.933333)),
        (0.5, np.zeros(60), (1, 1, 0, 0.666667)),
        (0.5, 0.5 + 0.01 * np.arange(60), (0.99, 1, 0.71, 0.9)),
        (0.0, np.zeros(60), (1, 1, 1, 1)),
        (0.0, np.full(60, 0.1), (1, 1, 0.9, 0.966667)),
    ],
    ids=["C1", "C2", "C3", "C4", "C5", "C6"],
)
def test_constant_request(request_level: float, response: np.ndarray, expected: tuple[float, ...]) -> None:
    check(score(np.full(60, request_level), response, low_signal=0.0), expected)


def test_low_signal_is_not_scored_under_the_one_percent_rule() -> None:
    for response in (np.zeros(60), np.full(60, 0.1)):
        result = score(np.zeros(60), response)
        assert result.count("low_signal") == 1
        assert not result.counted.any()
        assert np.isnan(result.composite)
        assert result.summary()["composite"] is None
    assert score(np.full(60, 0.01), np.full(60, 0.01)).counted.all()  # exactly one percent is a signal


def test_constant_rule_off_gives_no_credit_for_a_flat_request() -> None:
    assert score(np.full(60, 0.5), np.full(60, 0.5), constant_std=0.0).correlation == 0


@pytest.mark.parametrize(
    ("amplitude", "policy", "expected"),
    [
        (0.5, "pairwise", (1, 1, 0.5, 0.833333)),
        (0.5, "zero", (0.852803, 1, 0.4, 0.750934)),  # wrong on purpose: why gaps are never zero-filled
        (0.5, "hold", (1, 1, 0.5, 0.833333)),
        (1.0, "pairwise", (1, 1, 1, 1)),
        (1.0, "zero", (0.852803, 1, 0.8, 0.884268)),
    ],
    ids=["D1", "D2", "D3", "D4", "D5"],
)
def test_missing_samples(amplitude: float, policy: str, expected: tuple[float, ...]) -> None:
    response = amplitude * PULSE
    response[[7, 8, 20]] = NAN
    check(score(PULSE, response, missing=policy), expected)


@pytest.mark.parametrize("policy", ["pairwise", "hold", "zero"])
def test_fewer_than_24_pairs_of_30_are_not_scored(policy: str) -> None:
    response = PULSE.copy()
    response[20:26] = NAN
    assert score(PULSE, response, missing=policy).count("scored") == 1
    response[26] = NAN
    result = score(PULSE, response, missing=policy)
    assert result.count("missing") == 1
    assert np.isnan(result.composite)


@pytest.mark.parametrize(
    ("period", "changes", "expected", "shift"),
    [
        (10, {}, (1, 0.9, 0, 0.633333), 3),
        (10, {"shift_rule": "correlation", "tie_tolerance": 1e-9}, (1, 0.9, 0, 0.633333), 3),
        (30, {}, (np.cos(np.radians(12)), 0.933333, 1 - 2 * np.sin(np.radians(18)), 0.764482), 2),
        (30, {"shift_rule": "correlation", "tie_tolerance": 1e-9}, (1, 0.9, 0.381966, 0.760655), 3),
    ],
    ids=["E1", "E3", "E4", "E5"],
)
def test_sines(period: int, changes: dict[str, object], expected: tuple[float, ...], shift: int) -> None:
    n = np.arange(60)
    signal = np.sin(2 * np.pi * n / period)
    check(score(signal, np.sin(2 * np.pi * (n - 3) / period), **changes), expected, shift)


def test_exact_maximum_of_a_periodic_signal_is_one_of_the_tied_periods() -> None:
    """E2: which of the tied shifts 3, 13 and 23 wins depends on the platform's rounding."""
    n = np.arange(60)
    signal, response = np.sin(2 * np.pi * n / 10), np.sin(2 * np.pi * (n - 3) / 10)
    result = score(signal, response, shift_rule="correlation", tie_tolerance=0.0)
    assert result.correlation == pytest.approx(1, abs=1e-9)
    assert int(result.window_shift[0]) in {3, 13, 23}
    assert result.delay == pytest.approx(1 - result.window_shift[0] / 30)


def first_order_lag(values: np.ndarray) -> np.ndarray:
    out = np.zeros_like(values)
    for n in range(1, values.size):
        out[n] = out[n - 1] + (1 - np.exp(-0.5)) * (values[n] - out[n - 1])
    return out


@pytest.mark.parametrize(
    ("response", "changes", "expected"),
    [
        (NOISE, {}, (1, 1, 1, 1)),
        (NOISE, {"windows": "rolling"}, (1, 1, 1, 1)),
        (0.5 * NOISE, {}, (1, 1, 0.5, 0.833333)),
        (delayed(NOISE, 3), {}, (1, 0.9, 0.281777, 0.727259)),
        (delayed(NOISE, 3), {"normaliser": "block"}, (1, 0.9, 0.250815, 0.716938)),
        (delayed(NOISE, 3), {"windows": "rolling"}, (0.997602, 0.900278, 0.281777, 0.726552)),
        (-NOISE, {}, (0.552656, 0.533333, 0, 0.361996)),
        (0 * NOISE, {}, (0, 0, 0, 0)),
        (first_order_lag(NOISE), {}, (0.928503, 0.980556, 0.681527, 0.863529)),
    ],
    ids=["F1", "F1-rolling", "F2", "F3", "F4", "F5", "F6", "F7", "F8"],
)
def test_one_hour(response: np.ndarray, changes: dict[str, object], expected: tuple[float, ...]) -> None:
    result = score(NOISE, response, **changes)
    check(result, expected)
    assert result.status.size == (360 if changes.get("windows") == "rolling" else 12)
    assert result.interval_composite.size == 1


@pytest.mark.parametrize("normaliser", ["hour", "block"])
def test_one_dead_block_of_twelve_costs_a_twelfth(normaliser: str) -> None:
    """H."""
    signal = np.concatenate([np.tile(PULSE[:30], 12), np.zeros(30)])
    response = signal.copy()
    response[:30] = 0.0
    result = score(signal, response, normaliser=normaliser)
    check(result, (11 / 12,) * 4)
    assert result.window_composite.tolist() == pytest.approx([0] + [1] * 11)


def test_outage_of_fifteen_minutes_scores_zero_a_shorter_one_is_left_out() -> None:
    signal = np.concatenate([np.tile(PULSE[:30], 12), np.zeros(30)])
    short, long = signal.copy(), signal.copy()
    short[60:149] = NAN  # 14 min 50 s
    long[60:150] = NAN
    left_out = score(signal, short)
    # The third of the three holes keeps its last sample only, so it too has too few pairs.
    assert (left_out.count("missing"), left_out.count("outage")) == (3, 0)
    check(left_out, (1, 1, 1, 1))
    punished = score(signal, long)
    assert (punished.count("missing"), punished.count("outage")) == (0, 3)
    check(punished, (9 / 12,) * 4)
    assert np.isnan(punished.window_composite).sum() == 0


def test_warm_up_windows_are_not_scored() -> None:
    bad_start = NOISE.copy()
    bad_start[:60] = 0.0
    result = score(NOISE, bad_start, warmup_s=600.0)
    assert result.count("warmup") == 2
    check(result, (1, 1, 1, 1))


def test_five_minute_intervals_forfeit_below_a_quarter_but_not_at_it() -> None:
    signal = np.concatenate([np.tile(PULSE[:30], 3), np.zeros(30)])
    response = signal.copy()
    response[30:60] *= 0.25
    response[60:90] *= 0.2499
    result = pjm_score(signal, response, period_s=10.0, variant=PJM_VARIANTS["precision_only"])
    assert result.interval_composite.tolist() == pytest.approx([1, 0.25, 0.2499], abs=1e-9)
    assert result.forfeited.tolist() == [False, False, True]
    assert result.composite == pytest.approx((1 + 0.25 + 0.2499) / 3, abs=1e-9)
    assert result.summary()["assumed"] is True
    assert result.summary()["intervals_forfeited"] == 1


def test_partial_last_interval_counts_by_its_windows() -> None:
    signal = np.concatenate([np.tile(PULSE[:30], 18), np.zeros(30)])
    response = signal.copy()
    response[360:540] = 0.0
    result = score(signal, response)
    assert result.interval_composite.tolist() == pytest.approx([1, 0])
    check(result, (12 / 18,) * 4)


def test_truncated_tail_scores_to_the_end() -> None:
    assert score(SQUARE, SQUARE, tail="truncate").status.size == 2
    assert score(SQUARE, SQUARE, tail="truncate", windows="rolling").status.size == 31
    check(score(SQUARE, SQUARE, tail="truncate"), (1, 1, 1, 1))


def test_resampling_from_two_seconds_is_explicit() -> None:
    fine = np.repeat(NOISE, 5)
    shifted = fine.copy()
    shifted[0::5] = 0.0  # only the first sample of each group is wrong
    kept = pjm_score(fine, shifted, period_s=2.0, variant=variant(decimate_offset=1))
    check(kept, (1, 1, 1, 1))
    assert pjm_score(fine, shifted, period_s=2.0).composite == 0
    averaged = pjm_score(fine, shifted, period_s=2.0, variant=variant(resample="average"))
    check(averaged, (1, 1, 0.8, 2.8 / 3))
    fine_gap = fine.copy()
    fine_gap[3::5] = NAN
    check(pjm_score(fine, fine_gap, period_s=2.0, variant=variant(resample="average")), (1, 1, 1, 1))


def test_batch_is_the_single_scores_side_by_side() -> None:
    responses = np.stack([NOISE, delayed(NOISE, 3), -NOISE, 0 * NOISE, np.where(np.arange(390) % 40 == 3, NAN, NOISE)])
    for windows in ("block", "rolling"):
        v = variant(windows=windows)
        batch = pjm_score(np.tile(NOISE, (5, 1)), responses, period_s=10.0, variant=v)
        for row in range(5):
            single = pjm_score(NOISE, responses[row], period_s=10.0, variant=v)
            for name in ("composite", "precision", "window_correlation", "window_shift", "status", "forfeited"):
                np.testing.assert_allclose(getattr(batch, name)[row], getattr(single, name), atol=1e-12)
    with pytest.raises(UserError, match="batch of 5"):
        batch.summary()


def test_capacity_scales_the_response() -> None:
    """J: base 100 MW, 10 MW of regulation, u = 0, 1, 0.5, -1."""
    from wattgym.signals import response, target_w

    u = np.array([0.0, 1.0, 0.5, -1.0])
    assert target_w(100.0, 10.0, u).tolist() == [100, 90, 95, 110]
    short = PjmVariant(sample_s=10, window_s=20, max_delay_s=20, constant_std=0.0)
    delivered = 100.0 - np.array([100.0, 90.0, 95.0, 110.0])
    assert delivered.tolist() == [0, 10, 5, -10]
    assert pjm_score(u, delivered, period_s=10, capacity=10.0, variant=short).precision == 1.0
    inverted = response(100.0, [100.0, 110.0, 105.0, 90.0], 10.0)
    assert inverted.tolist() == [0, -1, -0.5, 1]
    assert pjm_score(u, inverted, period_s=10, variant=short).precision == 0.0


def test_laboratory_variant_keeps_negative_correlation_and_block_norm() -> None:
    ramp = np.linspace(0.1, 0.9, 60)
    result = pjm_score(ramp, -ramp, period_s=10.0, variant=pjm_variant("lab"))
    assert result.correlation == pytest.approx(-1)
    assert pjm_score(PULSE, 0 * PULSE, period_s=10.0, variant=pjm_variant("lab")).composite == 0


@pytest.mark.parametrize(
    ("signal", "response", "options", "message"),
    [
        ([], [], {}, "signal: needs at least one sample"),
        (PULSE, PULSE[:59], {}, "signal has 60 samples and response has 59 samples"),
        (PULSE * 1.5, PULSE, {}, "signal: sample 5 is 1.5; valid: -1 to 1"),
        (np.where(np.arange(60) == 4, NAN, PULSE), PULSE, {}, "signal: sample 4 is NaN"),
        (PULSE, np.where(np.arange(60) == 4, np.inf, PULSE), {}, "response: sample 4 is inf; must be finite"),
        (PULSE, PULSE, {"capacity": 0.0}, "capacity must be positive"),
        (PULSE, PULSE, {"capacity": NAN}, "capacity must be positive"),
        (PULSE, PULSE, {"period_s": 3.0}, "cannot be scored every 10 s"),
        (PULSE, PULSE, {"period_s": 0.0}, "period_s must be positive"),
        (PULSE[:59], PULSE[:59], {}, "needs 600 s"),
        ("abc", PULSE, {}, "signal: not an array of numbers"),
        (np.zeros((2, 2, 60)), np.zeros((2, 2, 60)), {}, "shape"),
    ],
)
def test_bad_input_is_one_line(signal: object, response: object, options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError) as caught:
        pjm_score(signal, response, **{"period_s": 10.0, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variants_are_checked() -> None:
    with pytest.raises(UserError, match="legacy"):
        pjm_variant("legcy")
    for changes in ({"weights": (0.5, 0.5, 0.5)}, {"window_s": 305.0}, {"interval_s": 100.0}, {"unknown": 1}):
        with pytest.raises(ValueError, match=r"weights|multiple|shorter|[Ee]xtra"):
            variant(**changes)
    assert {name for name, v in PJM_VARIANTS.items() if v.assumed} == {"precision_only", "five_minute"}
