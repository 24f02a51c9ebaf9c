import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from wattgym.errors import UserError
from wattgym.metrics.statistics import bootstrap, iqm, paired_difference, probability_of_improvement

SCORES = hnp.arrays(np.float64, st.integers(1, 24), elements=st.floats(-100, 100).map(lambda x: round(x, 3)))
FAST = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0, 0, 1, 1, 2, 2, 100, 100], 1.5),  # middle four: 1, 1, 2, 2
        ([7.0], 7.0),
        ([1, 3], 2.0),  # half of each
        ([0, 3, 9], (0.25 * 0 + 3 + 0.25 * 9) / 1.5),  # middle 1.5 of 3
        ([0, 10, 20, 1000], 15.0),
        ([0, 4, 8, 16, 1000], (0.75 * 4 + 8 + 0.75 * 16) / 2.5),  # middle 2.5 of 5
        ([5, -1, 3, 100, 2, -50], (0.5 * -1 + 2 + 3 + 0.5 * 5) / 3),  # sorted: -50 -1 2 3 5 100
    ],
)
def test_iqm_by_hand(scores, expected):
    assert iqm(scores) == pytest.approx(expected, abs=1e-12)
    assert iqm(scores[::-1]) == pytest.approx(expected, abs=1e-12)


def test_iqm_agrees_with_trimmed_mean_where_a_quarter_is_whole():
    from scipy import stats

    scores = np.random.default_rng(1).normal(size=(5, 40))
    np.testing.assert_allclose(iqm(scores), stats.trim_mean(scores, 0.25, axis=1), atol=1e-12)
    np.testing.assert_allclose(iqm(scores, axis=0)[0], iqm(scores[:, 0]))


def test_bootstrap_of_one_task_with_two_scores_is_known():
    # Resamples of (0, 1) have mean 0, 1/2, 1 with probability 1/4, 1/2, 1/4.
    wide = bootstrap([0.0, 1.0], resamples=4000)
    assert (wide.value, wide.low, wide.high, wide.n) == (0.5, 0.0, 1.0, 2)
    narrow = bootstrap([0.0, 1.0], resamples=4000, confidence=0.4)
    assert (narrow.low, narrow.high) == (0.5, 0.5)


def test_bootstrap_is_stratified():
    # Between-task variation is no sampling variation: each task is constant, so every resample is the same.
    estimate = bootstrap([1, 1, 9, 9], ["a", "a", "b", "b"])
    assert estimate.value == estimate.low == estimate.high == 5.0
    pooled = bootstrap([1, 1, 9, 9])
    assert pooled.low < 5.0 < pooled.high


def test_bootstrap_width_of_the_mean_matches_theory():
    scores = np.random.default_rng(3).normal(10.0, 2.0, size=400)
    estimate = bootstrap(scores, statistic="mean", resamples=8000)
    half = 1.959964 * scores.std() / np.sqrt(scores.size)
    assert estimate.value == pytest.approx(scores.mean())
    assert (estimate.high - estimate.low) / 2 == pytest.approx(half, rel=0.05)


def test_training_runs_are_resampled_jointly_over_tasks():
    # Run 0 always scores 0 and run 1 always 1: both are drawn alike with probability 1/2, whatever the scenarios.
    table = np.repeat([[0.0], [1.0]], 6, axis=1)
    estimate = bootstrap(table, list("aabbcc"), resamples=4000)
    assert (estimate.value, estimate.low, estimate.high, estimate.n) == (0.5, 0.0, 1.0, 12)


def test_no_repetition_means_no_interval():
    estimate = bootstrap([0.3, 0.9], ["a", "b"])
    assert estimate.value == pytest.approx(0.6)
    assert np.isnan([estimate.low, estimate.high]).all()


def test_paired_difference_removes_shared_variation():
    baseline = np.random.default_rng(5).normal(0, 50, size=30)
    estimate = paired_difference(baseline + 0.25, baseline)
    assert estimate.value == pytest.approx(0.25)
    assert estimate.high - estimate.low < 1e-9
    runs = np.stack([baseline, baseline + 1.0])
    assert paired_difference(baseline, runs).value == pytest.approx(-0.5)


def test_probability_of_improvement_by_hand():
    # Task a: win, loss, tie -> 1/2. Task b: win -> 1. Tasks count alike: 3/4.
    ours, theirs, tasks = [1, 0, 2, 5], [0, 1, 2, 4], ["a", "a", "a", "b"]
    assert probability_of_improvement(ours, theirs, tasks).value == pytest.approx(0.75)
    lower = probability_of_improvement(ours, theirs, tasks, higher_is_better=False)
    assert lower.value == pytest.approx(0.25)
    # Two runs on two scenarios: three wins and one loss.
    assert probability_of_improvement([[1, 1], [1, -1]], [0, 0]).value == pytest.approx(0.75)


def test_nan_is_refused_or_counted():
    with pytest.raises(UserError, match=r"1 of 3 are NaN.*nan_policy='omit'"):
        bootstrap([1.0, np.nan, 2.0])
    assert bootstrap([1.0, np.nan, 2.0], nan_policy="omit").omitted == 1
    both = paired_difference([1.0, np.nan, 4.0], [0.0, 0.0, np.nan], nan_policy="omit")
    assert (both.value, both.n, both.omitted) == (1.0, 1, 2)
    won = probability_of_improvement([1.0, np.nan], [0.0, 0.0], nan_policy="omit")
    assert (won.value, won.omitted) == (1.0, 1)
    with pytest.raises(UserError, match="nothing is left"):
        bootstrap([np.nan], nan_policy="omit")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iqm([]), "at least one score"),
        (lambda: iqm([1.0, np.nan]), "must be finite"),
        (lambda: bootstrap([]), "at least one"),
        (lambda: bootstrap([1.0, np.inf]), "infinity"),
        (lambda: paired_difference([np.inf], [np.inf]), "infinity"),
        (lambda: bootstrap([1.0, 2.0], ["a"]), "one label for each of the 2"),
        (lambda: bootstrap([1.0, 2.0], resamples=10), "at least 100, got 10"),
        (lambda: bootstrap([1.0, 2.0], confidence=95), "between 0 and 1, got 95"),
        (lambda: bootstrap([1.0, 2.0], statistic="mode"), "valid: iqm, mean"),
        (lambda: bootstrap([1.0, 2.0], nan_policy="zero"), "valid: refuse, omit"),
        (lambda: paired_difference([1.0, 2.0], [1.0]), "2 scores against 1"),
    ],
)
def test_bad_input_is_one_line(call, message):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@FAST
@given(SCORES, st.floats(0.1, 10), st.floats(-100, 100), st.integers(0, 5))
def test_translation_and_scale(scores, scale, shift, seed):
    tasks = np.arange(scores.size) % 3
    before = bootstrap(scores, tasks, seed=seed, resamples=200)
    after = bootstrap(scale * scores + shift, tasks, seed=seed, resamples=200)
    for old, new in ((before.value, after.value), (before.low, after.low), (before.high, after.high)):
        np.testing.assert_allclose(new, scale * old + shift, atol=1e-8)


@FAST
@given(SCORES, st.integers(1, 4), st.integers(0, 5))
def test_interval_contains_the_estimate_and_stays_in_range(scores, kinds, seed):
    tasks = np.arange(scores.size) % kinds
    estimate = bootstrap(scores, tasks, seed=seed, resamples=500)
    assert scores.min() - 1e-9 <= estimate.value <= scores.max() + 1e-9
    if not np.isnan(estimate.low):
        assert estimate.low - 1e-9 <= estimate.value <= estimate.high + 1e-9


@FAST
@given(SCORES, st.randoms(use_true_random=False))
def test_order_does_not_matter(scores, random):
    tasks = np.arange(scores.size) % 3
    order = list(range(scores.size))
    random.shuffle(order)
    shuffled = bootstrap(scores[order], tasks[order], resamples=200)
    assert_same(bootstrap(scores, tasks, resamples=200), shuffled)


@FAST
@given(SCORES)
def test_identical_inputs_differ_by_nothing(scores):
    scores = np.tile(scores, 2)
    estimate = paired_difference(scores, scores)
    assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0)
    assert probability_of_improvement(scores, scores).value == pytest.approx(0.5)


@FAST
@given(SCORES, st.integers(0, 3))
def test_swapping_sides_mirrors_the_comparison(scores, seed):
    other = np.roll(scores, 1)
    tasks = np.arange(scores.size) % 2
    forth = paired_difference(scores, other, tasks, seed=seed, resamples=200)
    back = paired_difference(other, scores, tasks, seed=seed, resamples=200)
    assert forth.value == pytest.approx(-back.value, abs=1e-9)
    p = probability_of_improvement(scores, other, tasks).value
    assert p + probability_of_improvement(other, scores, tasks).value == pytest.approx(1.0)
    assert probability_of_improvement(scores, other, tasks, higher_is_better=False).value == pytest.approx(1 - p)


def test_seed_and_memory_chunks_do_not_change_the_method():
    scores = np.random.default_rng(0).normal(size=3000)  # needs several chunks
    first, again = bootstrap(scores, seed=4), bootstrap(scores, seed=4)
    other = bootstrap(scores, seed=5)
    assert first == again
    assert first.low != other.low
    assert first.low == pytest.approx(other.low, abs=0.01)


def test_result_does_not_depend_on_the_order_of_runs_and_scenarios():
    table = np.random.default_rng(2).normal(size=(4, 9))
    tasks = np.arange(9) % 3
    rows, columns = np.array([2, 0, 3, 1]), np.array([8, 3, 5, 0, 1, 7, 6, 2, 4])
    assert_same(bootstrap(table, tasks), bootstrap(table[np.ix_(rows, columns)], tasks[columns]))


def assert_same(one, two):
    np.testing.assert_allclose([one.value, one.low, one.high, one.n], [two.value, two.low, two.high, two.n], atol=1e-12)
