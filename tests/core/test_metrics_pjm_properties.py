"""Properties every regulation score must have, on random signals and responses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.metrics import PJM_VARIANTS, PjmVariant, pjm_score

LEGACY = PJM_VARIANTS["legacy"]
SETTINGS = settings(max_examples=40, deadline=None)

seeds = st.integers(0, 2**32 - 1)
variants = st.builds(
    PjmVariant,
    shift_rule=st.sampled_from(["joint", "correlation"]),
    windows=st.sampled_from(["block", "rolling"]),
    tail=st.sampled_from(["look_ahead", "truncate"]),
    normaliser=st.sampled_from(["hour", "block"]),
    grace_samples=st.sampled_from([0, 1]),
    constant_std=st.sampled_from([0.0, 0.01]),
    zero_delay=st.sampled_from(["not_positive", "constant_response", "never"]),
    missing=st.sampled_from(["pairwise", "hold", "zero"]),
    low_signal=st.sampled_from([0.0, 0.01]),
    interval_s=st.sampled_from([300.0, 600.0, 3600.0]),
)


def wander(rng: np.random.Generator, n: int = 150) -> np.ndarray:
    """A signal that varies in every window and repeats nowhere."""
    steps = np.cumsum(rng.normal(0, 0.25, n)) + rng.normal(0, 0.1, n)
    return np.asarray(np.sin(steps))


@SETTINGS
@given(seeds, variants, st.floats(0, 0.6), st.floats(0, 100))
def test_scores_lie_in_the_unit_interval_and_nan_never_spreads(
    seed: int, variant: PjmVariant, lost: float, size: float
) -> None:
    rng = np.random.default_rng(seed)
    signal = np.where(rng.random(150) < 0.2, 0.0, wander(rng)) * rng.choice([0.005, 1.0])
    response = np.where(rng.random(150) < lost, np.nan, size * rng.normal(size=150))
    result = pjm_score(signal, response, period_s=10.0, variant=variant)
    for name in ("correlation", "delay", "precision", "composite"):
        windows = getattr(result, f"window_{name}")
        assert np.array_equal(np.isnan(windows), ~result.counted)
        assert np.all((windows[result.counted] >= 0) & (windows[result.counted] <= 1))
        total = float(getattr(result, name))
        assert 0 <= total <= 1 if result.counted.any() else np.isnan(total)
    assert sum(result.summary()["windows_by_status"].values()) == result.status.size


@SETTINGS
@given(seeds, variants)
def test_a_perfect_response_scores_exactly_one(seed: int, variant: PjmVariant) -> None:
    signal = wander(np.random.default_rng(seed))
    perfect = np.concatenate([np.zeros(variant.grace_samples), signal])[: signal.size]
    result = pjm_score(signal, perfect, period_s=10.0, variant=variant)
    whole = variant.model_copy(update={"tail": "look_ahead"})
    if variant.grace_samples == 0:
        assert float(result.composite) == 1.0
    else:
        assert float(pjm_score(signal, perfect, period_s=10.0, variant=whole).composite) == 1.0


@SETTINGS
@given(seeds, variants, st.floats(1e-3, 1e6))
def test_a_common_scale_of_response_and_capacity_does_not_matter(seed: int, variant: PjmVariant, scale: float) -> None:
    rng = np.random.default_rng(seed)
    signal = wander(rng)
    response = signal + rng.normal(0, 0.3, signal.size)
    one = pjm_score(signal, response, period_s=10.0, variant=variant)
    other = pjm_score(signal, response * scale, period_s=10.0, capacity=scale, variant=variant)
    assert float(one.composite) == pytest.approx(float(other.composite), abs=1e-9)


@SETTINGS
@given(seeds, st.floats(0.01, 50), st.floats(-5, 5))
def test_correlation_and_delay_ignore_gain_and_offset(seed: int, gain: float, offset: float) -> None:
    rng = np.random.default_rng(seed)
    signal = wander(rng)
    response = np.roll(signal, 2) + rng.normal(0, 0.05, signal.size)
    one = pjm_score(signal, response, period_s=10.0)
    other = pjm_score(signal, gain * response + offset, period_s=10.0)
    np.testing.assert_allclose(one.window_correlation, other.window_correlation, atol=1e-9)
    np.testing.assert_array_equal(one.window_delay, other.window_delay)


@SETTINGS
@given(seeds, st.integers(0, 30))
def test_a_pure_delay_costs_a_thirtieth_per_sample_unless_an_earlier_shift_scores_more(seed: int, delay: int) -> None:
    # The response has a past of its own: an idle start would tie with the largest delay, and doing nothing is 0.
    history = wander(np.random.default_rng(seed), 180)
    signal, response = history[30:], history[30 - delay : 180 - delay]
    result = pjm_score(signal, response, period_s=10.0)
    total = result.window_correlation + result.window_delay
    assert np.all(total >= 2 - delay / 30 - 1e-9)
    exact = result.window_shift == delay
    np.testing.assert_allclose(result.window_correlation[exact], 1.0, atol=1e-9)
    np.testing.assert_allclose(result.window_delay[exact], 1 - delay / 30, atol=1e-12)
    assert np.all(result.window_shift <= delay)
    found = pjm_score(signal, response, period_s=10.0, variant=PjmVariant(shift_rule="correlation", tie_tolerance=1e-9))
    assert np.all(found.window_shift == delay)


@SETTINGS
@given(seeds, st.permutations(range(6)), st.sampled_from(["hour", "block"]))
def test_the_order_of_blocks_with_their_look_ahead_does_not_matter(
    seed: int, order: list[int], normaliser: str
) -> None:
    """Blocks of 5 min, each followed by 5 quiet minutes that are not scored."""
    rng = np.random.default_rng(seed)
    signal = np.zeros((6, 60))
    signal[:, :30] = np.stack([wander(rng, 30) for _ in range(6)])
    response = signal + rng.normal(0, 0.2, signal.shape)
    variant = PjmVariant(normaliser=normaliser)
    one = pjm_score(signal.ravel(), response.ravel(), period_s=10.0, variant=variant)
    other = pjm_score(signal[order].ravel(), response[order].ravel(), period_s=10.0, variant=variant)
    assert one.count("scored") == 6
    assert float(one.composite) == pytest.approx(float(other.composite), abs=1e-9)


@SETTINGS
@given(seeds, st.sampled_from(["block", "rolling"]))
def test_single_precision_input_moves_the_score_by_less_than_a_ten_thousandth(seed: int, windows: str) -> None:
    rng = np.random.default_rng(seed)
    signal = wander(rng)
    response = np.roll(signal, 1) + rng.normal(0, 0.1, signal.size)
    variant = PjmVariant(windows=windows)
    wide = pjm_score(signal, response, period_s=10.0, variant=variant)
    narrow = pjm_score(signal.astype(np.float32), response.astype(np.float32), period_s=10.0, variant=variant)
    assert float(wide.composite) == pytest.approx(float(narrow.composite), abs=1e-4)


@SETTINGS
@given(seeds, st.floats(0, 0.35))
def test_pairwise_deletion_equals_correlating_the_pairs_that_are_there(seed: int, lost: float) -> None:
    """Against a plain loop over windows and shifts."""
    rng = np.random.default_rng(seed)
    signal = wander(rng, 90)
    response = np.roll(signal, 2) + rng.normal(0, 0.2, 90)
    response[rng.random(90) < lost] = np.nan
    result = pjm_score(signal, response, period_s=10.0)
    for window, start in enumerate((0, 30)):
        best = -np.inf
        for k in range(31):
            s, r = signal[start : start + 30], response[start + k : start + k + 30]
            there = ~np.isnan(r)
            if there.sum() >= 24:
                best = max(best, np.corrcoef(s[there], r[there])[0, 1] + 1 - k / 30)
        if result.counted[window] and result.window_correlation[window] > 0:
            total = result.window_correlation[window] + result.window_delay[window]
            assert total == pytest.approx(best, abs=1e-9)
