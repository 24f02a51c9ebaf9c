import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from wattgym.agents.baselines import CORE, load_tuned
from wattgym.agents.config import TrainingConfig
from wattgym.agents.results import EvaluationResult
from wattgym.agents.training import train
from wattgym.cli import main
from wattgym.config import parse_config

TINY = {
    "env": {"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 300.0},
    "train": {"total_steps": 64, "num_envs": 4, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 64, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
}
SHORT = ("--seeds", "2", "--episode-s", "600")


def trained(folder, seed, **env):
    data = {**TINY, "env": {**TINY["env"], **env}, "seed": seed}
    train(parse_config(TrainingConfig, data, "test"), folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {
        "a0": trained(folder / "a-seed0", 0),
        "a1": trained(folder / "a-seed1", 1),
        "other": trained(folder / "other", 0, episode_s=600.0),
        "delta": trained(folder / "delta", 0, action={"kind": "delta"}),
        "quick": trained(folder / "quick", 0, site={"jobs": 1, "randomise": 0.5}),
    }


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code or 0


def refused(capsys, *arguments):
    before = sorted(Path.cwd().rglob("*"))
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert sorted(Path.cwd().rglob("*")) == before
    return err


def test_one_command_writes_tables_and_report(runs, capsys):
    assert run("evaluate", runs["a0"], *SHORT, "--baselines", "core", "--out", "e") == 0
    out, err = capsys.readouterr()
    assert {path.name for path in Path("e").iterdir()} == {
        "evaluation.json", "report.html", "results.csv", "summary.csv", "summary.json", "summary.md", "traces.parquet",
    }  # fmt: skip
    result = EvaluationResult.load("e")
    assert set(result.controllers) == {"a-seed0", *CORE}
    assert result.candidates == ("a-seed0",)
    assert len(pd.read_csv("e/results.csv")) == 3 * 2 * 8
    page = Path("e/report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "")
    provenance = json.loads(Path("e/evaluation.json").read_text())["provenance"]
    assert provenance["held out"] == "signals and plants of the test split"
    (policy,) = provenance["policies"]["a-seed0"]
    assert policy.items() >= {"seed": 0, "algorithm": "ppo", "status": "finished", "trained steps": 64}.items()
    assert policy["config"]["env"]["site"]["jobs"] == 1
    # A pipe gets one plain line per row, however long.
    assert "\x1b" not in out
    rows = [line for line in out.splitlines() if "(baseline)" in line]
    assert len(rows) == 7
    assert all(line.count("[") == 6 for line in rows)
    assert not set(out) & set("│┃╭━")
    assert out.splitlines()[-1] == "tables and report: e/report.html"
    assert "evaluating regd: a-seed0" in err


def test_an_evaluation_can_be_repeated_into_the_same_folder(runs, capsys):
    for _ in range(2):
        assert run("evaluate", runs["a0"], *SHORT, "--families", "rega", "--baselines", "PI", "--out", "e") == 0
        frame = pd.read_csv("e/results.csv")
        text = capsys.readouterr().out
    again = pd.read_csv("e/results.csv")
    pd.testing.assert_frame_equal(frame, again)
    assert "a-seed0" in text


def test_runs_that_differ_in_their_seed_alone_are_one_controller(runs):
    selection = ("--families", "rega", "--baselines", "none", "--out", "e")
    assert run("evaluate", runs["a0"], runs["other"], runs["a1"], *SHORT, *selection) == 0
    result = EvaluationResult.load("e")
    assert result.controllers == ("a", "other")
    assert result.scores("a", "nrmse").shape == (2, 2)
    assert {row.train_run for row in result.rows} == {"a-seed0", "a-seed1", ""}
    assert len(result.provenance["policies"]["a"]) == 2


def test_baselines_alone_and_the_environment_of_a_configuration(runs):
    assert run("evaluate", *SHORT, "--config", "tiny.yaml", "--baselines", "PI, uncapped", "--families", "droop",
               "--out", "e", "--split", "validation", "--variant", "five_minute") == 0  # fmt: skip
    result = EvaluationResult.load("e")
    assert set(result.controllers) == {"PI", "uncapped"}
    assert result.provenance["scenarios"]["variant"] == "five_minute"
    assert {row.plant_group for row in result.rows} == {"validation plants"}
    # A policy may be taken to a site other than the one it was trained on.
    assert run("evaluate", runs["quick"], *SHORT, "--config", "tiny.yaml", "--baselines", "none", "--families",
               "droop", "--out", "f", "--checkpoint", "last") == 0  # fmt: skip


def test_other_gains_can_be_used(runs, tmp_path):
    tuned = load_tuned().model_dump(mode="json")
    tuned["gains"]["PI"] = {"proportional": 0.0, "integral": 0.0, "rate": 1.0}
    Path("gains.yaml").write_text(yaml.safe_dump(tuned))
    command = ("evaluate", *SHORT, "--config", "tiny.yaml", "--families", "rega", "--baselines", "PI,static cap")
    assert run(*command, "--gains", "gains.yaml", "--out", "e") == 0
    result = EvaluationResult.load("e")
    # PI without gains is the static cap.
    assert result.scores("PI", "nrmse") == pytest.approx(result.scores("static cap", "nrmse"), rel=1e-6)


def test_mistakes_are_one_line_and_leave_nothing(runs, capsys):
    run_a, delta, quick = runs["a0"], runs["delta"], runs["quick"]
    Path("file").write_text("x")
    for message, *arguments in (
        ("no such run folder", "nowhere"),
        ("not a run folder", "."),
        ("unknown baseline 'Pi'; known: all, core, none, uncapped", run_a, "--baselines", "Pi"),
        ("'regdd' is unknown", run_a, "--families", "regd,regdd"),
        ("unknown score variant", run_a, "--variant", "legasy"),
        ("--checkpoint newest: valid are best and last", run_a, "--checkpoint", "newest"),
        ("seeds", run_a, "--seeds", 0),
        ("whole number of periods", run_a, "--episode-s", 605),
        ("too few", run_a, "--episode-s", 100),
        ("split", run_a, "--split", "tests"),
        ("with another env.action than", run_a, delta),
        ("with another env.site than", run_a, quick),
        ("with another env.action than tiny.yaml", delta, "--config", "tiny.yaml"),
        ("two training runs of 'a' have the same name", run_a, run_a),
        ("cannot read", "--config", "missing.yaml"),
        ("cannot read", run_a, "--gains", "missing.yaml"),
        ("is no folder", run_a, "--out", "file/e"),
        ("is no folder", run_a, "--out", "file"),
        ("nothing to evaluate", "--baselines", "none"),
    ):
        assert message in refused(capsys, "evaluate", *arguments), message
    two_jobs = {**TINY, "env": {**TINY["env"], "site": {"jobs": 2}}}
    Path("two.yaml").write_text(yaml.safe_dump(two_jobs))
    assert run("evaluate", run_a, "--config", "two.yaml", *SHORT) == 2
    expected = "'a-seed0': the environment's observation has 'job1.limit_1' where the policy expects 'job0.limit_2'"
    assert capsys.readouterr().err.splitlines()[-1] == f"wattgym: error: {expected}"
    assert not Path("evaluation").exists()


def test_runs_that_are_damaged_or_of_another_version_are_refused(runs, capsys, tmp_path):
    shutil.copytree(runs["a0"], "copy")
    record = json.loads(Path("copy/run.json").read_text())
    Path("copy/run.json").write_text(json.dumps({**record, "schema_version": 2}))
    assert "schema version 2, this WattGym reads version 1" in refused(capsys, "evaluate", "copy")
    Path("copy/run.json").write_text(json.dumps({**record, "kind": "federation"}))
    assert "kind 'federation', expected 'training'" in refused(capsys, "evaluate", "copy")
    Path("copy/run.json").write_text(json.dumps(record)[:50])
    assert "cut short" in refused(capsys, "evaluate", "copy")
    Path("copy/run.json").write_text(json.dumps(record))
    Path("copy/config.yaml").write_text("env: {sight: 1}")
    assert "did you mean 'site'" in refused(capsys, "evaluate", "copy")


FULL_DISK = """
import resource
import wattgym.agents.results as results
from wattgym.cli import main

original = results.EvaluationResult.save
def full(self, folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
    original(self, folder)
results.EvaluationResult.save = full
main(["evaluate", "--config", "tiny.yaml", "--baselines", "PI", "--families", "rega",
      "--seeds", "2", "--episode-s", "600", "--out", "e"])
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_no_half_evaluation():
    done = subprocess.run([sys.executable, "-c", FULL_DISK], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot write: File too large" in done.stderr.splitlines()[-1]
    assert not Path("e/evaluation.json").exists()
    assert list(Path("e").iterdir()) == []


def test_tuning_writes_a_file_that_names_its_command(capsys):
    assert run("tune-baselines", "--config", "tiny.yaml", "--out", "my gains.yaml", "--budget", 2,
               "--scenarios", 1, "--seed", 4, "--baselines", "PI,MPC") == 0  # fmt: skip
    tuned = load_tuned("my gains.yaml")
    assert tuned.command == (
        "wattgym tune-baselines --config=tiny.yaml --budget=2 --scenarios=1 --seed=4 '--out=my gains.yaml' "
        "--baselines=PI,MPC"
    )
    out = capsys.readouterr().out
    assert list(tuned.gains) == ["PI", "MPC"]
    assert out.startswith("PI: {'proportional': ")
    assert "mean reward" in out
    for message, *arguments in (
        ("budget and scenarios must be at least 1", "--budget", 0),
        ("is no folder", "--out", "tiny.yaml/gains.yaml"),
        ("cannot read", "--config", "missing.yaml"),
        ("'pause/resume' needs duty_cycle", "--baselines", "pause/resume"),
        ("no tunable baseline", "--baselines", "random"),
    ):
        options = {"--config": "tiny.yaml", "--out": "other.yaml", arguments[0]: arguments[1]}
        assert message in refused(capsys, "tune-baselines", *(item for pair in options.items() for item in pair))
