"""The learning model and its fit."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.envs.federation.config import GoalConfig, LearningConfig
from wattgym.envs.federation.fit import fit_learning
from wattgym.envs.federation.learning import (
    Curve,
    accuracy,
    cohort_factor,
    domain_loss,
    domain_progress,
    local_work,
    resolved,
    target_loss,
)
from wattgym.errors import UserError

CONFIG = LearningConfig(reference_samples=100.0, loss_floor=0.1)


def curve(config=CONFIG, batch=1):
    def full(value):
        return np.full(batch, value)

    weights = np.full((batch, config.domains), 1.0 / config.domains)
    return Curve(s0=full(config.s0), beta=full(config.beta), phi=full(config.phi), weights=weights)


def even(n, config=CONFIG):
    return np.full((1, n, config.domains), 1.0 / config.domains)


def rounds_of(config, samples, mix, count):
    progress, losses = np.zeros((1, config.domains)), []
    for _ in range(count):
        loss = domain_loss(config, curve(config), progress).mean(axis=1)
        progress, _ = domain_progress(config, curve(config), progress, loss, samples, mix)
        losses.append(domain_loss(config, curve(config), progress)[0])
    return progress[0], np.array(losses)


def test_cohort_factor_ends():
    phi = np.array(6.3)
    assert cohort_factor(np.array(1.0), phi) == pytest.approx(1.0)
    assert cohort_factor(np.array(1e12), phi) == pytest.approx(7.3)
    assert cohort_factor(np.array(8.0), phi) == pytest.approx(8 * 7.3 / 14.3)


def test_local_work_is_proportional_up_to_the_reference_and_slower_beyond():
    np.testing.assert_allclose(local_work(np.array([0.0, 0.5, 1.0, 4.0]), 0.5), [0.0, 0.5, 1.0, 2.0])
    np.testing.assert_allclose(local_work(np.array([0.5, 4.0]), 1.0), [0.5, 4.0])


@pytest.mark.parametrize("sites", [1, 4, 20])
def test_iid_rounds_reduce_to_one_curve(sites):
    """Even mixes and reference work: S = r s(K) in every domain, L = E + (L0 - E)(1 + S/S0)^-beta."""
    progress, losses = rounds_of(CONFIG, np.full((1, sites), 100.0), even(sites), 7)
    expected = 7 * sites * 7.3 / (sites + 6.3)
    np.testing.assert_allclose(progress, expected)
    np.testing.assert_allclose(losses[-1], 0.1 + 4.03 * (1 + expected / 13.3) ** -1.04)


def test_weights_of_samples_decide_the_effective_number_of_sites():
    _, k_eff = domain_progress(
        CONFIG, curve(), np.zeros((1, 8)), np.array([4.13]), np.array([[300.0, 100.0, 0.0]]), even(3)
    )
    assert k_eff[0] == pytest.approx(400**2 / (300**2 + 100**2))


def test_a_starved_domain_stalls_without_transfer_and_is_forgotten():
    config = CONFIG.model_copy(update={"transfer": 0.0, "forgetting": 0.1})
    mix = np.zeros((1, 2, 8))
    mix[0, :, 0] = 1.0
    progress, losses = rounds_of(config, np.full((1, 2), 100.0), mix, 5)
    assert progress[0] > 0
    assert (progress[1:] == 0).all()
    assert (losses[:, 1] == 4.13).all()
    # What was learned fades by a tenth a round while the domain is left out.
    before = np.full((1, 8), 50.0)
    after, _ = domain_progress(config, curve(config), before, np.array([1.0]), np.full((1, 2), 100.0), mix)
    np.testing.assert_allclose(after[0, 1:], 45.0)


def test_coverage_beats_the_same_sites():
    mix = np.zeros((1, 8, 8))
    mix[0, np.arange(8), np.arange(8)] = 1.0
    same = np.array([[100.0] * 2 + [0.0] * 6])
    progress_same, _ = rounds_of(CONFIG, same, mix, 24)
    progress = np.zeros((1, 8))
    for r in range(24):
        samples = np.zeros((1, 8))
        samples[0, [(2 * r) % 8, (2 * r + 1) % 8]] = 100.0
        progress, _ = domain_progress(CONFIG, curve(), progress, np.array([1.0]), samples, mix)
    mean = [domain_loss(CONFIG, curve(), np.atleast_2d(p)).mean() for p in (progress_same, progress)]
    assert mean[1] < 0.8 * mean[0]


def test_nothing_contributed_changes_nothing():
    before = np.full((1, 8), 3.0)
    after, k_eff = domain_progress(CONFIG, curve(), before, np.array([2.0]), np.zeros((1, 5)), even(5))
    np.testing.assert_array_equal(after, before)
    assert k_eff[0] == 0


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.floats(0.1, 50), st.floats(0.05, 5))
def test_loss_falls_with_sites_and_with_work(sites, phi, work):
    config = CONFIG.model_copy(update={"phi": phi})

    def loss(n, w):
        samples = np.full((1, n), 100.0 * w)
        return rounds_of(config, samples, even(n), 3)[1][-1].mean()

    assert loss(sites + 1, work) < loss(sites, work)
    assert loss(sites, work * 1.5) < loss(sites, work)


def test_noise_scale_may_grow_with_training():
    config = CONFIG.model_copy(update={"phi_growth": 1.0})
    samples = np.full((1, 20), 100.0)
    args = (np.zeros((1, 8)), np.array([4.13 / 2]), samples, even(20))
    grown, _ = domain_progress(config, curve(), *args)
    np.testing.assert_allclose(grown[0], 20 * 13.6 / 32.6)


def test_accuracy_and_its_target():
    loss = target_loss(CONFIG, GoalConfig(target_accuracy=0.7))
    assert accuracy(CONFIG, np.array(loss)) == pytest.approx(0.7)
    assert accuracy(CONFIG, np.array(1.2)) == pytest.approx(0.45)
    ceiling = float(accuracy(CONFIG, np.array(0.1)))
    with pytest.raises(UserError, match=rf"target_accuracy 0.89 is above the model's ceiling of {ceiling:.4f}"):
        target_loss(CONFIG, GoalConfig(target_accuracy=0.89))
    with pytest.raises(UserError, match="already reached before the first round"):
        target_loss(CONFIG, GoalConfig(target_accuracy=0.0001))
    for out in (0.1, 4.13):
        with pytest.raises(UserError, match=rf"target_loss {out} is out of the model's reach.*ceiling {ceiling:.4f}"):
            target_loss(CONFIG, GoalConfig(target_loss=out))


def recorded(s0, beta, phi, floor, start, cohorts, rounds=30, noise=0.05, seed=0):
    rng, rows = np.random.default_rng(seed), []
    for run, sites in enumerate(cohorts):
        effective = np.arange(rounds + 1) * sites * (1 + phi) / (sites + phi)
        loss = floor + (start - floor) * (1 + effective / s0) ** -beta
        loss[1:] *= np.exp(noise * rng.standard_normal(rounds))
        rows += [{"run": run, "round": r, "loss": loss[r], "sites": sites} for r in range(rounds + 1)]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    "truth", [(13.3, 1.04, 6.3, 0.05, 4.13), (7.3, 1.12, 2.6, 0.0, 4.13), (20.0, 0.8, 4.0, 0.3, 2.0)]
)
def test_fit_recovers_known_parameters(truth):
    s0, beta, phi, _, start = truth
    fit = fit_learning(recorded(*truth, [1, 2, 4, 8, 1, 2, 4, 8]))
    assert fit.profile.phi == pytest.approx(phi, rel=0.2)
    assert fit.early_slope == pytest.approx(beta / s0, rel=0.2)
    assert fit.profile.loss_start == pytest.approx(start)
    assert fit.rms_log_residual == pytest.approx(0.05, rel=0.1)
    assert fit.phi_identified
    assert fit.rounds == 240


def test_fit_says_when_the_cohort_never_varied_and_rows_may_come_in_any_order():
    table = recorded(13.3, 1.04, 6.3, 0.05, 4.13, [4, 4])
    fit = fit_learning(table)
    assert not fit.phi_identified
    assert fit.profile.phi == pytest.approx(4.0, rel=1e-3)
    assert fit_learning(table.sample(frac=1.0, random_state=1)).profile == fit.profile


def test_a_saved_fit_is_a_profile(tmp_path):
    fit = fit_learning(recorded(13.3, 1.04, 6.3, 0.05, 4.13, [1, 4, 8]))
    fit.save(tmp_path / "profile.yaml")
    config = resolved(LearningConfig(profile=str(tmp_path / "profile.yaml"), transfer=0.2))
    assert config.s0 == fit.profile.s0
    assert config.transfer == 0.2
    (tmp_path / "bad.yaml").write_text("loss_start: 1\nloss_floor: 2\ns0: 1\nbeta: 1\nphi: 1\n")
    with pytest.raises(UserError, match=r"bad.yaml.*loss_floor 2 must lie below loss_start 1"):
        resolved(LearningConfig(profile=str(tmp_path / "bad.yaml")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns="sites"), "no column 'sites'"),
        (lambda t: t[t["round"] > 0], "no round 0"),
        (lambda t: t[t["round"] < 3], "2 rounds of training; a fit needs at least 5"),
        (lambda t: t.assign(loss=t["loss"].where(t["round"] != 3, -1.0)), "loss is -1 in round 3; valid: above 0"),
        (lambda t: t.assign(sites=0), "sites is 0 in round 1"),
        (lambda t: t.assign(work=0.0), "work is 0 in round 0"),
    ],
)
def test_bad_tables_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        fit_learning(change(recorded(13.3, 1.04, 6.3, 0.05, 4.13, [4])))
