from pathlib import Path

import pytest
import yaml

from wattgym.agents.config import parse_training
from wattgym.cli import main
from wattgym.config import read_yaml

pytest.importorskip("optuna")

TINY = {
    "env": {"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 600.0},
    "train": {"total_steps": 64, "num_envs": 4, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 64, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
    "search": {"train.hyperparameters.gamma": {"low": 0.5, "high": 0.9}, "network.hidden": {"choices": [[4], [8, 8]]}},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))


def tune(*arguments):
    with pytest.raises(SystemExit) as caught:
        main(["tune", "--config", "tiny.yaml", "--study", "s.journal", *map(str, arguments)])
    return caught.value.code or 0


@pytest.mark.slow
def test_a_study_trains_its_trials_and_writes_a_configuration_that_is_ready_to_train(capsys):
    assert tune("--trials", 1, "--jobs", 3) == 0
    out = capsys.readouterr().out
    assert out.startswith("trial 0: ")
    assert "train.hyperparameters.gamma=0." in out
    assert "best of 1 trials: -" in out
    best = parse_training(read_yaml("s.journal.best.yaml"), "best")
    assert best.network.hidden in ((4,), (8, 8))
    assert 0.5 <= best.train.hyperparameters["gamma"] <= 0.9
    assert best.validation.reward == best.env.reward
    (trial,) = Path("runs/s").iterdir()
    assert len(list(trial.glob("*-seed?/best/policy.zip"))) == 3
    # The same command has nothing left to do, and says the same.
    assert tune("--trials", 1, "--jobs", 3) == 0
    assert capsys.readouterr().out.splitlines() == out.splitlines()[1:]
    assert len(list(Path("runs/s").iterdir())) == 1


def test_what_cannot_be_searched_is_one_line(capsys):
    Path("s.journal").write_text("mine\n")
    for arguments, message in (
        (("--trials", 1), "cannot be read as a study file"),
        (("--trials", 1, "--seeds", 2), "at least 3, got 2"),
        (("--trials", 1, "--set", "search={}"), "no 'search' section"),
        (("--trials", 1, "--out", "tiny.yaml/x"), "is no folder"),
    ):
        assert tune(*arguments) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert (out, err.count("\n")) == ("", 1)
    assert Path("s.journal").read_text() == "mine\n"
