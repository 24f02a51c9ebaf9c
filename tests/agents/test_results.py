import io
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from wattgym.agents.episodes import METRICS, EpisodeResult, PowerTrace
from wattgym.agents.results import EvaluationResult
from wattgym.agents.summary import format_estimate, heading, key_metrics, markdown, print_summary
from wattgym.errors import UserError
from wattgym.metrics.statistics import Estimate, iqm

SCORES = {
    # family, scenario: scores of the learned policy and of the two baselines
    ("regd", "regd-0"): (0.80, 0.85, 0.50),
    ("regd", "regd-1"): (0.70, 0.80, 0.52),
    ("regd", "regd-2"): (0.60, 0.66, 0.30),
    ("regd", "regd-3"): (0.90, 0.99, 0.61),
    ("rega", "rega-0"): (0.55, 0.60, 0.20),
    ("rega", "rega-1"): (0.40, 0.52, 0.10),
}
HEADER = "controller,train_run,scenario,family,plant_group,seed,nrmse\n"
NAMES = ("ppo", "ff-pi", "static cap")


def episode(controller="ppo", scenario="regd-0", family="regd", group="v100", seed=0, run="", **metrics):
    return EpisodeResult(controller, scenario, family, group, seed, metrics or {"pjm_composite": 0.5}, run)


def losing_rows():
    return [
        episode(name, scenario, family, pjm_composite=scores[i], nrmse=1 - scores[i])
        for i, name in enumerate(NAMES)
        for (family, scenario), scores in SCORES.items()
    ]


def trace(controller="ppo", scenario="regd-0", n=5):
    t = np.arange(n) * 2.0
    return PowerTrace(controller, scenario, t, 1000 + t, 990 + t / 3, np.full(n, 0.9))


def losing_result(**changes):
    arguments = {
        "rows": losing_rows(),
        "baselines": ("ff-pi", "static cap"),
        "traces": (trace(), trace("ff-pi")),
        "provenance": {"seed": 3, "config": {"jobs": 4}},
        "resamples": 500,
    }
    return EvaluationResult(**arguments | changes)


def test_a_losing_policy_is_shown_as_losing():
    summary = losing_result().summary
    assert summary.ranking == ("ff-pi", "ppo", "static cap")
    lost, won = summary.differences_for("ppo", "pjm_composite")
    # Differences to ff-pi: -.05 -.10 -.06 -.09 -.05 -.12; middle three of six sorted: half, full, full, half.
    assert lost.estimate.value == pytest.approx((0.5 * -0.10 - 0.09 - 0.06 + 0.5 * -0.05) / 3)
    assert (lost.verdict, lost.p_improvement) == ("worse", 0.0)
    assert (won.verdict, won.p_improvement) == ("better", 1.0)
    error_lost, error_won = summary.differences_for("ppo", "nrmse")  # lower is better: same verdicts
    assert (error_lost.verdict, error_lost.p_improvement) == ("worse", 0.0)
    assert (error_won.verdict, error_won.p_improvement) == ("better", 1.0)
    assert losing_result(headline="nrmse").summary.ranking == ("ff-pi", "ppo", "static cap")


def test_estimates_are_those_of_the_statistics_module():
    summary = losing_result().summary
    estimate = summary.estimates["ff-pi", "pjm_composite"]
    assert estimate.value == pytest.approx(float(iqm([scores[1] for scores in SCORES.values()])))
    assert estimate.low < estimate.value < estimate.high
    assert (summary.scenarios, summary.tasks, estimate.n) == (6, 2, 6)


def test_save_and_load_give_the_same_evaluation(tmp_path):
    result = losing_result()
    result.save(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "evaluation.json",
        "results.csv",
        "summary.csv",
        "summary.json",
        "summary.md",
        "traces.parquet",
    ]
    again = EvaluationResult.load(tmp_path / "out")
    assert list(again.rows) == list(result.rows)
    assert again.summary == result.summary
    assert again.provenance == result.provenance
    for one, two in zip(again.traces, result.traces, strict=True):
        assert (one.controller, one.scenario) == (two.controller, two.scenario)
        np.testing.assert_array_equal(one.power_w, two.power_w)
    again.save(tmp_path / "out")  # replacing an evaluation


TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXT, min_size=2, max_size=4, unique=True), st.floats(allow_infinity=False))
def test_any_name_and_number_survives_the_files(tmp_path_factory, names, number):
    folder = tmp_path_factory.mktemp("evaluation")
    rows = [episode(name, "NA", name, "1e3", pjm_composite=0.1, energy_kwh=number) for name in names[:1]]
    EvaluationResult(rows=rows, baselines=names[:1], resamples=100).save(folder)
    (row,) = EvaluationResult.load(folder).rows
    assert (row.controller, row.scenario, row.family, row.plant_group) == (names[0], "NA", names[0], "1e3")
    if not math.isnan(number):
        assert row.metrics["energy_kwh"] == number


def test_files_say_the_same_as_the_summary(tmp_path):
    result = losing_result()
    result.save(tmp_path)
    estimate = result.summary.estimates["ppo", "pjm_composite"]
    frame = pd.read_csv(tmp_path / "summary.csv", keep_default_na=False)
    alone = frame[(frame.controller == "ppo") & (frame.metric == "pjm_composite") & (frame.compared_to == "")]
    assert float(alone.value.iloc[0]) == pytest.approx(estimate.value)
    assert float(alone.ci_low.iloc[0]) == pytest.approx(estimate.low)
    data = json.loads((tmp_path / "summary.json").read_text())
    assert data["ranking"] == ["ff-pi", "ppo", "static cap"]
    assert data["controllers"]["ppo"]["pjm_composite"]["value"] == estimate.value
    assert {d["verdict"] for d in data["differences"] if d["baseline"] == "ff-pi"} == {"worse"}
    text = (tmp_path / "summary.md").read_text()
    assert f"| ppo | {format_estimate(estimate)} |" in text
    assert text.index("ff-pi (baseline)") < text.index("| ppo |") < text.index("static cap (baseline)")


def test_training_runs_are_kept_apart_and_averaged_in_the_table():
    rows = [
        episode("ppo", f"s{j}", run=run, pjm_composite=value)
        for run, value in (("seed-1", 0.2), ("seed-2", 0.8))
        for j in range(4)
    ]
    rows += [episode("ff-pi", f"s{j}", pjm_composite=0.5) for j in range(4)]
    result = EvaluationResult(rows=rows, baselines=("ff-pi",))
    assert result.scores("ppo", "pjm_composite").tolist() == [[0.2] * 4, [0.8] * 4]
    estimate = result.summary.estimates["ppo", "pjm_composite"]
    assert (estimate.value, estimate.low, estimate.high, estimate.n) == pytest.approx((0.5, 0.2, 0.8, 8))
    (difference,) = result.summary.differences
    assert (difference.verdict, difference.p_improvement) == ("no clear difference", 0.5)


def test_a_missing_value_leaves_the_scenario_out_for_everyone_and_says_so():
    rows = losing_rows()
    rows[1] = episode("ppo", "regd-1", "regd", pjm_composite=math.nan, nrmse=0.3)
    summary = losing_result(rows=rows).summary
    assert summary.estimates["ff-pi", "pjm_composite"].n == 5
    assert summary.estimates["ff-pi", "nrmse"].n == 6
    assert len(summary.notes) == 1
    assert "1 scenarios are left out" in summary.notes[0]
    assert "because ppo had no value" in summary.notes[0]
    # A metric that applies to nobody in a scenario needs no note.
    rows = [episode(name, s, nrmse=math.nan if s == "b" else 1.0, pjm_composite=0.5) for name in "xy" for s in "ab"]
    summary = EvaluationResult(rows=rows, resamples=100).summary
    assert (summary.notes, summary.estimates["x", "nrmse"].n) == ((), 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvaluationResult(rows=[]), "at least one episode"),
        (lambda: losing_result(rows=losing_rows()[:-1]), "'static cap' lacks 1 of 6 scenarios, first 'rega-1'"),
        (lambda: losing_result(rows=[*losing_rows(), losing_rows()[0]]), "ran scenario 'regd-0' twice"),
        (lambda: losing_result(rows=[*losing_rows()[1:], episode(seed=9)]), "'regd-0' differs between"),
        (lambda: losing_result(baselines=("pid",)), "'pid' has no results; there are: ppo"),
        (lambda: losing_result(traces=(trace("pid"),)), "'pid' has no results"),
        (lambda: losing_result(traces=(trace(scenario="x"),)), "unknown scenario 'x'"),
        (lambda: losing_result(headline="reward_mean"), "'reward_mean' is not among the results"),
        (lambda: losing_result().scores("pid", "nrmse"), "'pid' has no results"),
        (lambda: episode(score=1.0), "unknown metric 'score'; known: pjm_composite"),
        (lambda: episode(nrmse=math.inf), "'nrmse' is inf"),
        (lambda: episode(controller=""), "needs a controller"),
        (lambda: PowerTrace("a", "b", np.arange(3), np.arange(2), np.arange(3), np.arange(3)), "target_w has shape"),
        (lambda: PowerTrace("a", "b", *[np.array([])] * 4), "non-empty"),
    ],
)
def test_bad_results_are_refused_in_one_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "evaluation.json").unlink(), "no finished evaluation"),
        (
            lambda f: (f / "evaluation.json").write_text('{"schema_version": 9}'),
            "version 9, this WattGym reads version 1",
        ),
        (lambda f: (f / "evaluation.json").write_text('{"schema_version": 1}'), "'baselines' is missing"),
        (lambda f: (f / "evaluation.json").write_text("{"), "cut short"),
        (lambda f: (f / "results.csv").unlink(), "results.csv: cannot read"),
        (lambda f: (f / "results.csv").write_text(""), "column 'controller' is missing"),
        (lambda f: (f / "results.csv").write_bytes(b"\xff\xfe\x00\x01"), "results.csv: cannot read"),
        (lambda f: (f / "results.csv").write_text("controller,nrmse\na,1\n"), "'train_run' is missing"),
        (lambda f: (f / "results.csv").write_text((f / "results.csv").read_text()[:-30]), "row 18 has not as many"),
        (lambda f: (f / "results.csv").write_text((f / "results.csv").read_text() + "1,2"), "row 19 has not as many"),
        (lambda f: (f / "results.csv").write_text((f / "results.csv").read_text()[:-2] + "x"), "could not convert"),
        (lambda f: (f / "results.csv").write_text(HEADER), "at least one episode"),
        (lambda f: (f / "traces.parquet").write_bytes(b"PAR1"), "traces.parquet: cannot read"),
        (lambda f: (f / "traces.parquet").unlink(), "traces.parquet: cannot read"),
    ],
)
def test_damaged_evaluations_are_refused_in_one_line(tmp_path, damage, message):
    losing_result().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        EvaluationResult.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_interrupted_save_is_not_read_as_a_whole_one(tmp_path, monkeypatch):
    losing_result().save(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        losing_result(provenance={"x": float("nan")}).save(tmp_path)
    with pytest.raises(UserError, match="no finished evaluation"):
        EvaluationResult.load(tmp_path)


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        losing_result().save(tmp_path / "file")


def test_terminal_table_is_plain_when_piped():
    hostile = [episode("[bold red]x[/]", s, pjm_composite=0.5) for s in "abc"]
    for rows, baselines in ((losing_rows(), ("ff-pi",)), (hostile, ())):
        piped = io.StringIO()
        result = EvaluationResult(rows=rows, baselines=baselines, resamples=100)
        print_summary(result.summary, Console(file=piped, width=160))
        assert "\x1b" not in piped.getvalue()
        assert result.controllers[0] in piped.getvalue()
    screen = io.StringIO()
    print_summary(
        losing_result().summary, Console(file=screen, width=160, force_terminal=True, color_system="standard")
    )
    assert "\x1b[31mworse" in screen.getvalue()


def test_markdown_keeps_hostile_names_in_their_cell():
    rows = [episode("a|b\nc", s, pjm_composite=0.5) for s in "abc"]
    assert "| a\\|b c | 0.500 [0.500, 0.500] |" in markdown(EvaluationResult(rows=rows, resamples=100).summary)


def test_numbers_are_rounded_by_size_and_one_scenario_has_no_interval():
    assert format_estimate(Estimate(0.81234, 0.79, 0.83, 9)) == "0.812 [0.790, 0.830]"
    assert format_estimate(Estimate(-0.05, -0.1, 0.0, 9), signed=True) == "-0.050 [-0.100, +0.000]"
    assert format_estimate(Estimate(123.456, 100.0, 150.0, 9)) == "123.5 [100.0, 150.0]"
    assert format_estimate(Estimate(0.5, math.nan, math.nan, 1)) == "0.500 [no interval]"
    assert heading("energy_kwh") == "Energy (kWh) ↓"
    summary = EvaluationResult(rows=[episode()], resamples=100).summary
    assert summary.to_dict()["controllers"]["ppo"]["pjm_composite"]["ci_low"] is None
    assert key_metrics(summary) == ("pjm_composite",)


def test_every_metric_has_a_unit_a_direction_and_a_definition():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.better in ("higher", "lower")
        assert metric.unit
        assert metric.description.endswith(".")
