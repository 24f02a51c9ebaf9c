import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.agents.episodes import METRICS, SelectionTrace
from wattgym.agents.report import render_report
from wattgym.agents.results import EvaluationResult
from wattgym.agents.selection_evaluation import SelectionPlan, evaluate_selectors, of_size
from wattgym.agents.selection_families import read_families
from wattgym.agents.selection_tuning import SEARCH, candidate_settings, tune_selectors
from wattgym.agents.selectors import REFERENCE, SELECTORS, TunedSelectors, make_selector, settings_of
from wattgym.cli import main
from wattgym.config import parse_config
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.errors import UserError

ENV = {"sites": {"count": [3, 6]}, "learning": {"s0": 6.0}, "goal": {"time_limit_s": 6000}}
NARROW = {**ENV, "network": {"bandwidth_share": 0.01}}
BASELINES = ("all sites", "random k", REFERENCE)


def build(env):
    return SiteSelectionConfig.model_validate(env)


@pytest.fixture(scope="module")
def result():
    return evaluate_selectors(
        {"wide": build(ENV), "narrow": build(NARROW)},
        {"ours": [make_selector("nearest-only top k")]},
        BASELINES,
        SelectionPlan(seeds=4, sizes=(10,)),
        provenance={"command": "test"},
    )


def test_every_selector_meets_every_task(result):
    assert result.problem == "site_selection"
    assert result.controllers == ("ours", *BASELINES)
    assert set(result.tasks) == {
        f"{family} × {group}" for family in ("wide", "narrow") for group in ("3-6 sites", "10 sites")
    }
    assert len(result.scenarios) == 16
    np.testing.assert_array_equal(result.scores(REFERENCE, "time_to_target_relative"), 1.0)
    ratio = result.scores("ours", "time_to_target_s") / result.scores(REFERENCE, "time_to_target_s")
    np.testing.assert_allclose(result.scores("ours", "time_to_target_relative"), ratio)


def test_summary_compares_by_task_and_overall(result):
    summary = result.summary
    assert summary.headline == "time_to_target_relative"
    assert summary.task_names == tuple(dict.fromkeys(result.tasks))
    assert {d.task for d in summary.task_differences} == set(summary.task_names)
    share = summary.estimates["ours", "target_reached"].value
    assert share == pytest.approx(result.scores("ours", "target_reached").mean())
    for task in summary.task_names:
        assert summary.by_task[REFERENCE, task].value == 1.0
    plain = summary.to_dict()
    assert plain["by_task"]["wide × 10 sites"][REFERENCE]["value"] == 1.0
    json.dumps(plain)


def test_results_survive_the_disk(result, tmp_path):
    result.save(tmp_path)
    loaded = EvaluationResult.load(tmp_path)
    assert loaded.problem == "site_selection"
    assert [dict(row.metrics) for row in loaded.rows] == [dict(row.metrics) for row in result.rows]
    assert len(loaded.traces) == 4 * 4
    for ours, theirs in zip(result.traces, loaded.traces, strict=True):
        assert isinstance(theirs, SelectionTrace)
        assert (ours.controller, ours.scenario, ours.sites) == (theirs.controller, theirs.scenario, theirs.sites)
        for name in ("t_s", "loss", "accuracy", "chosen"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    summary = (tmp_path / "summary.md").read_text()
    assert "Relative time to target ↓ by task" in summary
    assert "| narrow × 10 sites |" in summary


def test_report_shows_the_rounds(result):
    first = result.scenarios[0]
    page = render_report(replace(result, traces=[trace for trace in result.traces if trace.scenario == first]))
    assert "Evaluation of site selectors" in page
    assert "Rounds of a federation" in page
    assert page.count("Which sites trained in which round") == 1
    assert "Target against power" not in page
    assert "{{" not in page


def test_held_out_tasks_use_held_out_weeks_and_places(result):
    regions = {name.rsplit("/", 1)[0] for trace in result.traces for name in trace.sites}
    train = evaluate_selectors(
        {"wide": build(ENV)}, {}, ("all sites",), SelectionPlan(seeds=4, split="train", traced=4), provenance={}
    )
    trained = {name.rsplit("/", 1)[0] for trace in train.traces for name in trace.sites}
    assert not regions & trained


def test_what_cannot_be_evaluated_is_refused():
    plan = SelectionPlan(seeds=1)
    for arguments, message in (
        (({"wide": build(ENV)}, {}, ()), "nothing to evaluate: name a run"),
        (({}, {}, ("all sites",)), "name at least one scenario family"),
        (({"wide": build(ENV)}, {"all sites": [make_selector("all sites")]}, ("all sites",)), "two controllers"),
        (({"wide": build({**ENV, "sites": {"count": [9, 9]}})}, {}, ("horizon planner",)), "at most 8 sites"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_selectors(*arguments, plan, provenance={})
    with pytest.raises(UserError, match="0 is no number of sites"):
        parse_config(SelectionPlan, {"sizes": (0,)}, "x")
    named = {"named": [{"name": "a", "region": "aws:us-east-1", "capacity_w": 1e5}]}
    with pytest.raises(UserError, match="1 named sites cannot be evaluated at 57"):
        of_size(build({"sites": named}), 57)


def test_settings_cover_the_box_and_keep_their_kind():
    for name, box in SEARCH.items():
        model = settings_of(name)
        found = candidate_settings(name, 8, seed=0)
        assert len(found) == 8
        for settings in found:
            assert set(settings) == set(box)
            assert model.model_validate(settings)
    assert isinstance(candidate_settings("PowerTrip predicted", 2, 0)[0]["patience"], int)
    assert isinstance(candidate_settings("PowerTrip measured", 2, 0)[0]["on_power"], bool)


def test_tuning_finds_the_best_of_what_it_tries(monkeypatch):
    monkeypatch.setattr("wattgym.agents.selection_tuning.SEARCH", {"nearest-only top k": {"share": (0.05, 1.0)}})
    calls = []
    tuned = tune_selectors(
        {"narrow": build(NARROW)}, budget=4, scenarios=6, seed=1, command="test",
        progress=lambda name, tried: calls.append(tried),
    )  # fmt: skip
    assert calls == [1, 2, 3, 4]
    values = [
        tune_selectors({"narrow": build(NARROW)}, budget=n, scenarios=6, seed=1, command="test").families["narrow"]
        for n in (1, 2)
    ]
    best = tuned.families["narrow"].objective_value["nearest-only top k"]
    assert best <= min(v.objective_value["nearest-only top k"] for v in values)
    assert TunedSelectors.model_validate(tuned.model_dump(mode="json")) == tuned


def test_tuning_stays_on_training_data():
    env = build({**ENV, "power": {"split": "test"}})
    with pytest.raises(UserError, match=r"wide: .*set power\.split to train"):
        tune_selectors({"wide": env}, budget=1, scenarios=1, seed=0, command="x")
    with pytest.raises(UserError, match="at least 1"):
        tune_selectors({"wide": build(ENV)}, budget=0, scenarios=1, seed=0, command="x")


@pytest.fixture
def scenarios(tmp_path):
    folder = tmp_path / "scenarios"
    folder.mkdir()
    for name, env in (("wide", ENV), ("narrow", NARROW)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"env": env}))
    return folder


def test_families_come_from_files(scenarios, tmp_path):
    assert list(read_families(scenarios)) == ["narrow", "wide"]
    assert read_families(scenarios / "wide.yaml") == {"wide": build(ENV)}
    shaping = tmp_path / "shaping.yaml"
    shaping.write_text("env: {site: {jobs: 2}}\n")
    assert read_families(shaping) is None
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="holds no scenario file"):
        read_families(empty)
    (scenarios / "odd.yaml").write_text("env: {sights: {}}\n")
    with pytest.raises(UserError, match=r"odd\.yaml: unknown key 'env\.sights', did you mean 'sites'"):
        read_families(scenarios)


def run_cli(*arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    return stopped.value.code


def test_command_line_from_tuning_to_report(scenarios, tmp_path, capsys):
    gains, out = tmp_path / "tuned.yaml", tmp_path / "out"
    assert run_cli("tune-baselines", "--config", scenarios, "--budget", 1, "--scenarios", 2, "--out", gains) == 0
    written = yaml.safe_load(gains.read_text())
    assert set(written["families"]) == {"wide", "narrow"}
    assert set(written["families"]["wide"]["settings"]) == set(SEARCH)
    names = "all sites,PowerTrip predicted,PowerTrip measured"
    options = ("--families", "narrow", "--seeds", 2, "--sizes", "9", "--baselines", names, "--gains", gains)
    assert run_cli("evaluate", "--config", scenarios, *options, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "Relative time to target ↓ by task" in printed
    assert "narrow × 9 sites" in printed
    found = EvaluationResult.load(out)
    assert found.provenance["selector settings"]["narrow"] == written["families"]["narrow"]["settings"]
    assert (out / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--families", "mars"), "unknown scenario family 'mars'; there are: narrow, wide"),
        (("--episode-s", "600"), "--episode-s goes with power shaping only"),
        (("--sizes", "a,b"), "--sizes a,b: expected whole numbers"),
        (("--sizes", "0"), "0 is no number of sites"),
        (("--baselines", "PI"), "unknown selector 'PI'"),
        (("--split", "mars"), "split"),
    ],
)
def test_mistakes_are_one_line(scenarios, tmp_path, capsys, options, message):
    assert run_cli("evaluate", "--config", scenarios, *options, "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sizes_are_not_for_power_shaping(tmp_path, capsys):
    shaping = tmp_path / "shaping.yaml"
    shaping.write_text("env: {site: {jobs: 2}}\n")
    assert run_cli("evaluate", "--config", shaping, "--sizes", "57", "--out", tmp_path / "out") == 2
    assert "--sizes goes with site selection only" in capsys.readouterr().err


def test_the_page_lists_every_selector_and_metric(result):
    page = (Path(__file__).parents[2] / "docs" / "selectors.md").read_text()
    for name in SELECTORS:
        assert f"| {name} |" in page
    for name in result.metrics:
        (line,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.endswith(f"| {METRICS[name].better} |")
