import math

import numpy as np
import pytest

from wattgym.agents.episodes import METRICS
from wattgym.agents.rollout import Arena, Rollout
from wattgym.agents.scoring import REGULATION, check_scorable, quarter_hour_mape, scenario_metrics
from wattgym.envs.config import PowerShapingConfig
from wattgym.errors import UserError
from wattgym.metrics.pjm import PJM_VARIANTS, pjm_score


def rollout(power_w, target_w, throughput, limit, *, base_w=1000.0, capacity_w=100.0, family="renewable", **changes):
    """One scenario of hours: power, target and throughput of four quarters of an hour unless it says otherwise."""
    power = np.atleast_2d(np.asarray(power_w, dtype=float))
    target = np.broadcast_to(np.asarray(target_w, dtype=float), power.shape)
    values = {
        "period_s": 900.0,
        "signal": (base_w - target) / capacity_w,
        "target_w": target,
        "power_w": power,
        "throughput": np.broadcast_to(np.asarray(throughput, dtype=float), power.shape),
        "reward": np.zeros_like(power),
        "terms": {},
        "limit": (positions := np.asarray(limit, dtype=float).reshape(power.shape[0], power.shape[1], -1)),
        "knobs": np.empty((*positions.shape, 0)),
        "changed": np.zeros_like(power),
        "base_w": np.full(power.shape[0], base_w),
        "capacity_w": np.full(power.shape[0], capacity_w),
        "families": (family,) * power.shape[0],
    }
    return Rollout(**{**values, **changes})


FULL = rollout([1200, 1200, 1200, 1200], 1000, 1.0, np.ones((4, 2)))


def test_every_metric_by_hand():
    # Errors: 0, 30, -60, 110 W of 100 W capacity. Targets 1000 W but for one 800 W. Two jobs: the first changes its
    # limit twice by more than 1 % of the range, the second once (the 0.005 does not count).
    limits = [[0.5, 1.0], [0.4, 1.0], [0.4, 1.005], [0.9, 0.2]]
    ours = rollout(
        [1000, 1030, 940, 910],
        [1000, 1000, 1000, 800],
        [0.8, 0.9, 0.7, 0.6],
        limits,
        changed=np.array([[1.0, 0.0, 1.0, 0.0]]),
        reward=np.array([[0.1, 0.2, -0.3, 0.4]]),
    )
    metrics = {name: float(values[0]) for name, values in scenario_metrics(ours, FULL).items()}
    assert metrics.keys() <= METRICS.keys()
    assert metrics["nrmse"] == pytest.approx(math.sqrt((0.0 + 0.09 + 0.36 + 1.21) / 4))
    assert metrics["mae_over_r"] == pytest.approx((0.0 + 0.3 + 0.6 + 1.1) / 4)
    # An error of exactly 30 % is within.
    assert metrics["share_within_30pct"] == 0.5
    assert metrics["mape"] == pytest.approx((0.0 + 30 / 1000 + 60 / 1000 + 110 / 800) / 4)
    assert metrics["mape_15min"] == pytest.approx(metrics["mape"])  # a period is a quarter of an hour here
    # One hour at a mean of 970 W.
    assert metrics["energy_kwh"] == pytest.approx(0.97)
    assert metrics["throughput_retained"] == pytest.approx(3.0 / 4.0)
    assert metrics["energy_per_token_relative"] == pytest.approx((3880 / 3.0) / (4800 / 4.0))
    assert metrics["actuations_per_h_per_job"] == pytest.approx((2 + 1) / 2)
    assert metrics["guard_interventions_per_h"] == 2.0
    assert metrics["reward_mean"] == pytest.approx(0.1)
    assert "shortfall_w" not in metrics
    # Following the sun is no regulation service.
    assert math.isnan(metrics["pjm_composite"])


def test_errors_within_a_quarter_of_an_hour_cancel():
    # Quarters of three periods: the first is 1,030 W on average, the second 940 W, and the last period is no whole one.
    ours = rollout([1030, 970, 1090, 900, 900, 1020, 5000], 1000, 1.0, np.ones((7, 2)), period_s=300.0)
    assert quarter_hour_mape(ours) == pytest.approx([(0.03 + 0.06) / 2])
    assert math.isnan(quarter_hour_mape(rollout([900, 900], 900, 1.0, np.ones((2, 2)), period_s=300.0))[0])


def test_every_knob_is_an_actuator_and_what_is_out_of_reach_is_told():
    # The limit moves once; of the first job's two knobs one moves twice, the other by less than 1 %; the second rests.
    first, second = [[1.0, 0.5], [0.5, 0.5], [0.5, 0.505], [1.0, 0.5]], np.ones((4, 2))
    knobs = np.stack([first, second], axis=1)[None]
    ours = rollout([900] * 4, 900, 1.0, [[1.0, 1.0], [1.0, 0.8], [1.0, 0.8], [1.0, 0.8]], knobs=knobs)
    assert scenario_metrics(ours, None)["actuations_per_h_per_job"] == pytest.approx([(2 + 1) / 2])
    cut = rollout([900] * 4, 900, 1.0, np.ones((4, 2)), shortfall_w=np.array([12.5]))
    assert scenario_metrics(cut, None)["shortfall_w"] == [12.5]


def test_uncapped_against_itself_is_one():
    metrics = scenario_metrics(FULL, FULL)
    assert metrics["throughput_retained"][0] == 1.0
    assert metrics["energy_per_token_relative"][0] == 1.0


def test_without_the_uncapped_run_relative_metrics_are_left_out():
    assert not {"throughput_retained", "energy_per_token_relative"} & scenario_metrics(FULL, None).keys()


def test_scenarios_without_training_have_no_relative_metrics():
    nothing = rollout([1200] * 4, 1000, 0.0, np.ones((4, 2)))
    metrics = scenario_metrics(nothing, nothing)
    assert math.isnan(metrics["throughput_retained"][0])
    assert math.isnan(metrics["energy_per_token_relative"][0])
    stalled = scenario_metrics(nothing, FULL)
    assert stalled["throughput_retained"][0] == 0.0
    assert math.isnan(stalled["energy_per_token_relative"][0])


@pytest.mark.parametrize("variant", ["legacy", "precision_only"])
def test_regulation_is_scored_by_the_chosen_rules_scenario_by_scenario(variant):
    rng = np.random.default_rng(2)
    signal = np.clip(np.cumsum(rng.normal(size=(3, 720)), axis=1) / 20, -1, 1)
    target = 1000 - 100 * signal
    power = np.roll(target, 5, axis=1) + rng.normal(size=(3, 720))
    rules = PJM_VARIANTS[variant]
    families = ("regd", "peak_event", "droop")
    ours = rollout(power, target, 1.0, np.ones((3, 720, 1)), period_s=2.0, families=families)
    metrics = scenario_metrics(ours, None, rules)
    for i in (0, 2):
        alone = pjm_score(signal[i], (1000 - power[i]) / 100, period_s=2.0, variant=rules)
        for name in ("composite", "correlation", "delay", "precision"):
            np.testing.assert_allclose(metrics[f"pjm_{name}"][i], getattr(alone, name), atol=1e-12)
    assert np.isnan(metrics["pjm_composite"][1])


def test_a_perfect_response_scores_one():
    signal = np.sin(np.arange(720) / 40)[None]
    target = 1000 - 100 * signal
    ours = rollout(target, target, 1.0, np.ones((720, 1)), period_s=2.0, family="regd")
    metrics = scenario_metrics(ours, None)
    assert metrics["pjm_composite"][0] == pytest.approx(1.0)
    assert metrics["nrmse"][0] == metrics["mape"][0] == 0.0


def test_what_cannot_be_scored_shows_before_anything_runs():
    def arena(family, **changes):
        return Arena(PowerShapingConfig.model_validate({"signal": {"families": {family: 1}}, **changes}))

    check_scorable(arena("rega", episode_s=600.0), 0)
    # Without a score, no minimum.
    check_scorable(arena("emergency", episode_s=20.0), 0)
    with pytest.raises(UserError, match="too few"):
        check_scorable(arena("rega", episode_s=500.0), 0)
    with pytest.raises(UserError, match="3"):
        check_scorable(arena("rega", episode_s=600.0, period_s=3.0), 0)
    assert "renewable" not in REGULATION
