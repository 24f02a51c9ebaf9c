import re

import numpy as np
import pandas as pd
import pytest

from wattgym.agents.baselines import CORE, make_baseline
from wattgym.agents.evaluation import MATCH_TOLERANCE, EvaluationPlan, Stage, evaluate
from wattgym.agents.policy import load_policy
from wattgym.agents.report import render_report
from wattgym.agents.results import EvaluationResult
from wattgym.agents.training import train
from wattgym.config import parse_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.errors import UserError

ENV = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "period_s": 10.0})
PLAN = EvaluationPlan(seeds=3, episode_s=600.0, traced=2)


class Held:
    """A controller of a user's own: one limit position for every job."""

    def __init__(self, name, position):
        self.name, self._position = name, position

    def reset(self, task):
        self._jobs = task.layout.jobs
        self.tasks = [*getattr(self, "tasks", []), task]

    def act(self, observation):
        return np.full((observation.shape[0], self._jobs), 2 * self._position - 1)


def run(policies=None, baselines=(), plan=PLAN, env=ENV, **changes):
    return evaluate(env, policies or {}, baselines, plan, provenance={"made": "by a test"}, **changes)


@pytest.fixture(scope="module")
def result():
    return run({"held": [Held("held", 0.4)]}, CORE)


def test_every_controller_meets_every_scenario(result):
    scenarios = [f"{family}/test/{seed}" for family in PLAN.families for seed in (1000, 1001, 1002)]
    assert list(result.scenarios) == scenarios
    assert result.controllers == (*("held",), *(n for n in CORE if n in result.controllers))
    assert set(result.controllers) == {"held", *CORE}
    assert len(result.rows) == 9 * 8
    assert result.headline == "pjm_composite"
    assert result.candidates == ("held",)


def test_targets_are_identical_for_all_controllers(result):
    by_scenario = {}
    for trace in result.traces:
        by_scenario.setdefault(trace.scenario, []).append(trace)
    assert len(by_scenario) == 3 * PLAN.traced
    for traces in by_scenario.values():
        assert len(traces) == 8
        for trace in traces:
            np.testing.assert_array_equal(trace.target_w, traces[0].target_w)
            np.testing.assert_array_equal(trace.t_s, np.arange(60) * 10.0)
        assert len({trace.power_w.tobytes() for trace in traces}) == 8
    assert len({traces[0].target_w.tobytes() for traces in by_scenario.values()}) == len(by_scenario)


def test_an_evaluation_repeats_itself(result):
    again = run({"held": [Held("held", 0.4)]}, CORE)
    for metric in result.metrics:
        for name in result.controllers:
            np.testing.assert_array_equal(again.scores(name, metric), result.scores(name, metric))
    assert again.summary.to_dict() == result.summary.to_dict()


def test_uncapped_is_the_measure_of_throughput_and_energy(result):
    assert (result.scores("uncapped", "throughput_retained") == 1.0).all()
    assert (result.scores("uncapped", "energy_per_token_relative") == 1.0).all()
    assert (result.scores("held", "throughput_retained") < 1.0).all()


def test_the_energy_matched_cap_uses_as_much_energy_as_the_policy(result):
    ours, cap = result.scores("held", "energy_kwh"), result.scores("energy-matched cap", "energy_kwh")
    np.testing.assert_allclose(cap, ours, rtol=MATCH_TOLERANCE)


def test_the_energy_matched_cap_is_a_cap_and_matches_what_it_is_given():
    stage = Stage(ENV, "rega", PLAN)
    wanted = stage.baseline(make_baseline("feed-forward + PI")).power_w.mean(axis=1)
    matched = stage.energy_matched(wanted)
    np.testing.assert_allclose(matched.power_w.mean(axis=1), wanted, rtol=MATCH_TOLERANCE)
    assert np.ptp(matched.limit[:, 5:], axis=1).max() < 0.01
    # Beyond reach it stays at the highest limit.
    most = stage.energy_matched(wanted * 10)
    np.testing.assert_allclose(most.limit, 1.0)


def test_without_a_policy_the_cap_matches_the_strongest_baseline():
    result = run({}, ("energy-matched cap", "feed-forward + PI"))
    np.testing.assert_allclose(
        result.scores("energy-matched cap", "energy_kwh"),
        result.scores("feed-forward + PI", "energy_kwh"),
        rtol=MATCH_TOLERANCE,
    )


@pytest.mark.parametrize("action", [{"kind": "residual", "scale": 0.1}, {"kind": "delta", "scale": 0.05}])
def test_baselines_are_not_tied_by_what_a_policys_actions_mean(action, result):
    tied = ENV.model_copy(update={"action": type(ENV.action)(**action)})
    policy = Held("held", 0.5)
    other = run({"held": [policy]}, tuple(name for name in CORE if name != "energy-matched cap"), env=tied)
    assert {task.config.action.kind for task in policy.tasks} == {action["kind"]}
    for name in other.baselines:
        for metric in ("nrmse", "energy_kwh", "throughput_retained"):
            np.testing.assert_array_equal(other.scores(name, metric), result.scores(name, metric))


def test_scenarios_are_of_the_held_out_split():
    policy = Held("held", 0.4)
    run({"held": [policy]}, ())
    assert {task.config.signal.split for task in policy.tasks} == {"test"}
    assert {task.config.site.surfaces for task in policy.tasks} == {"test"}
    result = run({"held": [policy]}, (), PLAN.model_copy(update={"split": "validation", "families": ("rega",)}))
    assert {row.plant_group for row in result.rows} == {"validation plants"}
    listed = ENV.model_copy(update={"site": ENV.site.model_copy(update={"surfaces": ("a100-pcie-40g/gpt3",)})})
    with pytest.raises(UserError, match="a100"):
        run({"held": [policy]}, (), env=listed)


@pytest.mark.parametrize("family", ["renewable", "peak_event", "emergency"])
def test_services_that_no_market_scores_are_ranked_by_their_error(family):
    plan = PLAN.model_copy(update={"families": (family,), "episode_s": 1200.0})
    result = run({"held": [Held("held", 0.4)]}, ("uncapped", "feed-forward"), plan)
    assert result.headline == "nrmse"
    assert "pjm_composite" not in result.metrics
    assert np.isfinite(result.scores("held", "nrmse")).all()
    assert result.summary.ranking[0] == "feed-forward"
    mixed = run({}, ("uncapped",), plan.model_copy(update={"families": ("rega", family)}))
    assert mixed.headline == "nrmse"
    assert "pjm_composite" in mixed.metrics


def test_variants_score_differently():
    plans = [PLAN.model_copy(update={"variant": variant}) for variant in ("legacy", "precision_only")]
    one, other = (run({}, ("feed-forward",), plan).scores("feed-forward", "pjm_composite") for plan in plans)
    assert not np.allclose(one, other)


def test_several_training_runs_count_as_one_controller():
    group = [Held(f"held-seed{i}", position) for i, position in enumerate((0.3, 0.4, 0.5))]
    result = run({"held": group, "other": [Held("other", 0.2)]}, ("uncapped", "static cap"))
    assert result.candidates == ("held", "other")
    assert result.scores("held", "nrmse").shape == (3, 9)
    assert {row.train_run for row in result.rows if row.controller == "held"} == {h.name for h in group}
    assert {row.train_run for row in result.rows if row.controller != "held"} == {""}
    alone = run({"held": group[:1]}, ())
    np.testing.assert_array_equal(alone.scores("held", "nrmse")[0], result.scores("held", "nrmse")[0])
    wide, narrow = result.summary.estimates["held", "nrmse"], alone.summary.estimates["held", "nrmse"]
    assert wide.high - wide.low > narrow.high - narrow.low
    assert [trace.controller for trace in result.traces].count("held") == 3 * PLAN.traced
    assert "held" in render_report(result)


def test_policies_of_several_algorithms_side_by_side(ppo_run, tiny, tmp_path):
    sac = train(tiny("sac", train__total_steps=128), tmp_path / "sac", progress=False)
    policies = [load_policy(run.run.path).controller for run in (ppo_run, sac)]
    result = run({p.name: [p] for p in policies}, ("uncapped",), env=tiny().env)
    assert result.candidates == ("tiny-seed0", "sac")
    assert not np.array_equal(result.scores("sac", "nrmse"), result.scores("tiny-seed0", "nrmse"))


def test_a_saved_evaluation_is_whole(result, tmp_path):
    result.save(tmp_path)
    assert EvaluationResult.load(tmp_path).summary.to_dict() == result.summary.to_dict()
    frame = pd.read_csv(tmp_path / "results.csv")
    assert len(frame) == 72
    needed = ["throughput_retained", "nrmse", "energy_kwh", "guard_interventions_per_h", "reward_mean"]
    assert not frame[needed].isna().any().any()


@pytest.mark.parametrize(
    ("policies", "baselines", "message"),
    [
        ({"PI": [Held("a", 0.1)]}, ("PI",), "two controllers are named 'PI'"),
        ({}, ("PI", "PI"), "two controllers are named 'PI'"),
        ({"x": [Held("a", 0.1), Held("a", 0.2)]}, (), "two training runs of 'x' have the same name"),
        ({}, (), "nothing to evaluate"),
        ({}, ("LQR",), "unknown baseline 'LQR'"),
    ],
)
def test_names_are_checked(policies, baselines, message):
    with pytest.raises(UserError, match=re.escape(message)):
        run(policies, baselines)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"families": ("regdd",)}, "'regdd' is unknown or named twice; known: synthetic_regd, regd"),
        ({"families": ("regd", "regd")}, "'regd' is unknown or named twice"),
        ({"families": ()}, "families"),
        ({"variant": "legasy"}, "unknown score variant"),
        ({"seeds": 0}, "seeds"),
        ({"first_seed": -1}, "first_seed"),
        ({"episode_s": 0}, "episode_s"),
        ({"split": "tset"}, "split"),
    ],
)
def test_plans_are_checked(plan, message):
    with pytest.raises(UserError, match=message):
        parse_config(EvaluationPlan, plan, "evaluate")


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"episode_s": 605.0}, "whole number of periods"),
        ({"episode_s": 100.0}, "too few"),
        ({"episode_s": 86400.0}, "regd"),
        ({"families": ("rega", "synthetic_regd")}, "training only|train"),
        ({"families": ("recorded",)}, "recorded"),
    ],
)
def test_scenarios_that_cannot_be_drawn_show_before_anything_runs(plan, message):
    policy = Held("held", 0.4)
    with pytest.raises(UserError, match=message):
        run({"held": [policy]}, (), PLAN.model_copy(update=plan))
    assert not hasattr(policy, "tasks")
