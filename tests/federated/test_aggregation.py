"""Means of adapters, the noise scale, and which updates are refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.federated.adapters import AdapterError, check_form, digest, from_bytes, initial, norm, shapes, to_bytes
from wattgym.federated.aggregation import NormLimit, aggregate, effective_sites, noise_scale
from wattgym.federated.config import AggregationConfig

A, B = "layer.lora_A.weight", "layer.lora_B.weight"


def adapters(n, rank=2, outputs=5, inputs=7, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"s{k}": {
            A: rng.standard_normal((rank, inputs)).astype(np.float32),
            B: rng.standard_normal((outputs, rank)).astype(np.float32),
        }
        for k in range(n)
    }


def test_factors_are_averaged_by_samples():
    one = {A: np.array([[1.0, 2.0]], np.float32), B: np.array([[3.0]], np.float32)}
    other = {A: np.array([[5.0, 0.0]], np.float32), B: np.array([[-1.0]], np.float32)}
    mean = aggregate("factors", {"x": one, "y": other}, {"x": 30, "y": 10})
    assert mean[A].tolist() == [[2.0, 1.5]]
    assert mean[B].tolist() == [[2.0]]


@pytest.mark.parametrize("method", ["factors", "svd"])
def test_the_order_of_replies_changes_no_bit(method):
    given_ = adapters(4)
    samples = {"s0": 7, "s1": 100, "s2": 13, "s3": 1}
    found = {
        digest(aggregate(method, {name: given_[name] for name in order}, samples))
        for order in itertools.permutations(given_)
    }
    assert len(found) == 1


def test_the_mean_of_products_is_exact_where_the_mean_of_factors_is_not():
    given_ = adapters(3, rank=4, outputs=5, inputs=7)
    samples = {"s0": 1, "s1": 2, "s2": 5}
    # Two sites' products of rank 2 sum to rank 4, which an adapter of rank 4 holds exactly.
    for name in given_:
        given_[name][A][2:] = 0.0
    given_["s2"] = {A: given_["s0"][A].copy(), B: given_["s0"][B] * 2}
    wanted = sum(samples[n] / 8 * given_[n][B].astype(np.float64) @ given_[n][A] for n in given_)
    exact, factors = aggregate("svd", given_, samples), aggregate("factors", given_, samples)
    assert exact[A].shape == given_["s0"][A].shape
    assert exact[B].shape == given_["s0"][B].shape
    np.testing.assert_allclose(exact[B] @ exact[A], wanted, atol=2e-6)
    assert np.abs(factors[B] @ factors[A] - wanted).max() > 0.3


def test_a_product_beyond_the_rank_is_the_nearest_of_that_rank():
    given_ = adapters(5)
    samples = dict.fromkeys(given_, 3)
    wanted = sum(given_[n][B].astype(np.float64) @ given_[n][A] / 5 for n in given_)
    u, s, vt = np.linalg.svd(wanted)
    best = (u[:, :2] * s[:2]) @ vt[:2]
    found = aggregate("svd", given_, samples)
    np.testing.assert_allclose(found[B] @ found[A], best, atol=2e-6)


def test_directions_without_any_learning_keep_a_factor_to_learn_with():
    fresh = initial({A: (4, 16), B: (8, 4)}, seed=1)
    again = aggregate("svd", {"x": fresh, "y": fresh}, {"x": 1, "y": 1})
    assert not again[B].any()
    assert np.linalg.matrix_rank(again[A]) == 4


def test_effective_sites():
    assert effective_sites([]) == 0.0
    assert effective_sites([10, 10, 10, 10]) == 4.0
    assert effective_sites([30, 10]) == pytest.approx(1.6)


def test_noise_scale_by_hand():
    # d1 = (2, 0), d2 = (0, 2): mean (1, 1), |m|^2 = 2, mean|d|^2 = 4, so |G|^2 = 0 and the scale has no bound.
    one, other = {A: np.array([2.0, 0.0], np.float32)}, {A: np.array([0.0, 2.0], np.float32)}
    assert noise_scale([one, other]) == math.inf
    # d1 = (2, 0), d2 = (2, 2): mean (2, 1), |m|^2 = 5, mean|d|^2 = 6: |G|^2 = 4, tr = 2.
    assert noise_scale([one, {A: np.array([2.0, 2.0], np.float32)}]) == pytest.approx(0.5)
    assert noise_scale([one, one]) == 0.0
    assert math.isnan(noise_scale([one]))


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 3.0), st.integers(0, 100))
def test_noise_scale_finds_what_was_put_in(ratio, seed):
    rng = np.random.default_rng(seed)
    size, k = 20_000, 8
    common = rng.standard_normal(size)
    deltas = [{A: (common + math.sqrt(ratio) * rng.standard_normal(size)).astype(np.float32)} for _ in range(k)]
    assert noise_scale(deltas) == pytest.approx(ratio, rel=0.1)


def test_updates_that_training_cannot_have_made_are_refused():
    reference = initial({A: (4, 16), B: (8, 4)}, seed=1)
    limit = NormLimit(AggregationConfig())
    weights = 4 * 16 + 8 * 4
    moved = {name: array + np.float32(0.001 * 5) for name, array in reference.items()}
    assert limit.check(moved, reference, 5, 0.001) == pytest.approx(0.005 * math.sqrt(weights), rel=1e-3)
    for factor in (1000.0, -1000.0):
        large = {name: array * np.float32(factor) for name, array in reference.items()}
        with pytest.raises(AdapterError, match="is plausible in 5 steps"):
            limit.check(large, reference, 5, 0.001)
    limit.learn([(0.005, 5)] * 3)
    far = {name: array + np.float32(0.005 * 5) for name, array in reference.items()}
    with pytest.raises(AdapterError, match="times as far as usual"):
        limit.check(far, reference, 5, 0.001)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop(A), f"has no '{A}'"),
        (lambda x: x.update(extra=x[A]), "unknown 'extra'"),
        (lambda x: x.update({A: x[A][:1]}), r"shape \(1, 16\), expected \(4, 16\)"),
        (lambda x: x.update({A: x[A].astype(np.float64)}), "is float64, expected float32"),
        (lambda x: x[B].__setitem__((0, 0), np.nan), "no finite number"),
        (lambda x: x[B].__setitem__((7, 3), -np.inf), "no finite number"),
    ],
)
def test_what_has_another_form_is_refused(change, message):
    adapter = initial({A: (4, 16), B: (8, 4)}, seed=1)
    expected = shapes(adapter)
    check_form(adapter, expected)
    change(adapter)
    with pytest.raises(AdapterError, match=message):
        check_form(adapter, expected)


def test_bytes_and_back_bit_by_bit():
    adapter = adapters(1)["s0"]
    again = from_bytes(to_bytes(adapter))
    assert digest(again) == digest(adapter)
    assert norm(again) == norm(adapter)
    assert to_bytes(dict(reversed(adapter.items()))) == to_bytes(adapter)
    for damaged in (b"", b"pickle", to_bytes(adapter)[:-3]):
        with pytest.raises(AdapterError, match="no safetensors"):
            from_bytes(damaged)
