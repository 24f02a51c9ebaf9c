"""The nominal site model that baselines share, and how it splits power."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.envs.knobs import Command, KnobTable
from wattgym.envs.plant import PlantSpec
from wattgym.envs.site_model import SiteModel


def spec(power, throughput, gpus=None, host=0.0):
    power, throughput = np.asarray(power, dtype=float), np.asarray(throughput, dtype=float)
    batch, jobs, points = power.shape
    n_gpus = np.ones((batch, jobs), dtype=np.int64) if gpus is None else np.array(gpus)
    limits = np.ones((batch, jobs))
    return PlantSpec(2.0, n_gpus, limits * 100, limits * 300, np.linspace(0, 1, points), power, throughput,
                     np.full(batch, host))  # fmt: skip


TWO = spec([[[100, 150, 200], [100, 150, 200]]], [[[0.5, 0.9, 1.0], [0.5, 0.6, 0.7]]], host=10.0)
"""Job 0 gains 0.4 by its first 50 W and 0.1 by the next; job 1 gains 0.1 by either."""


def test_a_proportional_split_has_one_position():
    model = SiteModel(TWO)
    np.testing.assert_allclose(model.positions(np.array([310.0])), [[0.5, 0.5]])
    assert model.floor_w == 210
    assert model.full_w == 410
    np.testing.assert_allclose(model.positions(np.array([100.0])), [[0.0, 0.0]])
    np.testing.assert_allclose(model.positions(np.array([900.0])), [[1.0, 1.0]])


@pytest.mark.parametrize(
    ("power_w", "expected"),
    [(210, [0, 0]), (235, [0.25, 0]), (260, [0.5, 0]), (285, [0.75, 0]), (310, [1, 0]), (360, [1, 0.5])],
)
def test_the_optimal_split_fills_the_steepest_steps_first(power_w, expected):
    # Ties (job 0's second step, job 1's steps) go to the first.
    np.testing.assert_allclose(SiteModel(TWO, "optimal").positions(np.array([float(power_w)])), [expected])


def test_gpus_weigh_throughput():
    weighed = spec([[[100, 200], [100, 200]]], [[[0.5, 1.0], [0.7, 1.0]]], gpus=[[1, 3]])
    # 3/4 * 0.3 per 100 W beats 1/4 * 0.5.
    np.testing.assert_allclose(SiteModel(weighed, "optimal").positions(np.array([250.0])), [[0.0, 0.5]])


def test_a_curve_that_bends_the_wrong_way_is_filled_as_a_whole():
    # Job 0: nothing for the first 50 W, 0.4 for the next: 0.4 per 100 W. Job 1: 0.15 per 50 W, 0.3 per 100 W.
    bent = spec([[[100, 150, 200], [100, 150, 200]]], [[[0.6, 0.6, 1.0], [0.7, 0.85, 1.0]]])
    np.testing.assert_allclose(SiteModel(bent, "optimal").positions(np.array([300.0])), [[1.0, 0.0]])


def test_gains_scale_power_and_leave_jobs_out():
    model = SiteModel(TWO)
    np.testing.assert_allclose(model.positions(np.array([10 + 150.0]), np.array([[1.0, 0.0]])), [[0.5, 0.5]])
    best = SiteModel(TWO, "optimal")
    np.testing.assert_allclose(best.positions(np.array([10 + 150.0]), np.array([[0.0, 1.0]]))[:, 1], [0.5])
    np.testing.assert_allclose(best.positions(np.array([10 + 500.0]), np.array([[2.0, 2.0]])), [[0.5, 0.0]])


def throughput(model, position):
    return (model._lookup(model.throughput, position) * model.weight).sum(axis=1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.0, 1.0), concave=st.booleans())
def test_splits_draw_what_was_asked_and_the_optimal_one_trains_most(seed, share, concave):
    rng = np.random.default_rng(seed)
    steps = rng.uniform(0.0, 50.0, (3, 4, 8))
    power = 100.0 + np.cumsum(np.concatenate([np.zeros((3, 4, 1)), steps], axis=2), axis=2)
    slopes = rng.uniform(0.0, 1.0, (3, 4, 8))
    slopes = -np.sort(-slopes, axis=2) if concave else slopes
    speed = np.cumsum(np.concatenate([np.full((3, 4, 1), 0.1), slopes * steps / 400], axis=2), axis=2)
    given_spec = spec(power, speed, gpus=rng.integers(1, 33, (3, 4)), host=5.0)
    common, best = SiteModel(given_spec), SiteModel(given_spec, "optimal")
    target = common.floor_w + share * (common.full_w - common.floor_w)
    for model in (common, best):
        position = model.positions(target)
        assert ((position >= 0) & (position <= 1)).all()
        np.testing.assert_allclose(model.job_power_w(position).sum(axis=1) + 5.0, target, rtol=1e-9)
    if concave:
        assert (throughput(best, best.positions(target)) >= throughput(best, common.positions(target)) - 1e-9).all()
        # No exchange of a little power between two jobs trains more: marginal returns are equal.
        position = best.positions(target)
        for other in rng.uniform(0.0, 1.0, (20, 3, 4)):
            mixed = np.clip(position + 0.2 * (other - 0.5), 0.0, 1.0)
            cheaper = best.job_power_w(mixed).sum(axis=1) + 5.0 <= target
            assert (throughput(best, mixed) <= throughput(best, position) + 1e-9)[cheaper].all()


def test_another_setting_has_other_tables_and_the_neutral_one_the_first_again():
    table = KnobTable(
        micro_batch=np.array([[[8, 4], [8, 4]]]),
        micro_batches=np.full((1, 2), 2),
        samples_per_update=np.full((1, 2), 8),
        power_w=np.stack([TWO.power_table_w, TWO.power_table_w - [[[20.0], [0.0]]]], axis=2),
        throughput=np.stack([TWO.throughput_table, TWO.throughput_table * [[[0.2], [1.0]]]], axis=2),
        idle_w=np.full((1, 2), 50.0),
        comm_share=np.zeros((1, 2)),
        straggler_share=np.zeros((1, 2)),
        max_local_steps=np.full((1, 2), 8),
    )
    model = SiteModel(shaped := replace(TWO, knobs=table), "optimal")
    first = model.positions(np.array([260.0]))
    # Job 0 in passes of 4 draws 20 W less and trains a fifth as fast: the watts go to job 1, which draws half of what
    # it has above idle power when it works half of the time.
    setting = Command(TWO.max_limit_w, np.array([[4, 8]]), duty=np.array([[1.0, 0.5]]))
    model.follow(setting)
    np.testing.assert_allclose(model.power_w, [[[80, 130, 180], [75, 100, 125]]])
    np.testing.assert_allclose(model.throughput, [[[0.1, 0.18, 0.2], [0.25, 0.3, 0.35]]])
    np.testing.assert_allclose(model.positions(np.array([10 + 80 + 100.0])), [[0.0, 0.5]])
    for share in (0.0, 0.3, 1.0):
        limit_w = TWO.min_limit_w + share * (TWO.max_limit_w - TWO.min_limit_w)
        power_w, speed = shaped.response(replace(setting, limit_w=limit_w))
        at = np.full((1, 2), share)
        np.testing.assert_allclose(model.job_power_w(at), power_w)
        np.testing.assert_allclose(model._lookup(model.throughput, at), speed)
    model.follow(Command(TWO.max_limit_w))
    np.testing.assert_array_equal(model.power_w, TWO.power_table_w)
    np.testing.assert_array_equal(model.positions(np.array([260.0])), first)


def test_slopes_are_those_of_the_table():
    model = SiteModel(TWO)
    middle = np.array([[0.5, 0.5]])
    np.testing.assert_allclose(model.slope_w(middle), [[100.0, 100.0]])
    np.testing.assert_allclose(model.slope_throughput(middle), [[0.25, 0.1]])
    np.testing.assert_allclose(model.throughput_per_w(middle), [0.35 / 200])
