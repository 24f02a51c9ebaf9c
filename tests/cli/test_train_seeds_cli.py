import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.agents.config import parse_training
from wattgym.agents.policy import load_policy
from wattgym.agents.seeds import group_runs
from wattgym.agents.training import train
from wattgym.cli import main
from wattgym.errors import UserError
from wattgym.metrics.statistics import iqm
from wattgym.runs import RunFolder

TINY = {
    "env": {"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 600.0},
    "train": {"total_steps": 256, "num_envs": 4, "checkpoint_steps": 64, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 128, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))


def run(*arguments):
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    return caught.value.code or 0


def group(*arguments):
    return run("train", "--config", "tiny.yaml", "--seeds", 3, "--jobs", 2, "--out", "g", *arguments)


@pytest.mark.slow
def test_one_failed_seed_does_not_lose_the_others_and_resuming_trains_only_what_is_left(capsys):
    # Something else lies where the second seed's run belongs.
    assert run("train", "--config", "tiny.yaml", "--steps", 64, "--seeds", 1, "--out", "g") == 0
    (Path("g") / "g-seed1").mkdir()
    (Path("g") / "g-seed1" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert group("--resume") == 2
    out, err = capsys.readouterr()
    assert "1 of 3 seeds failed" in err
    assert "not a run folder" in err.splitlines()[-1]
    assert [line.split(" | ")[1] for line in out.splitlines()[2:5]] == ["finished", "failed", "finished"]
    assert RunFolder.open("g").info.status == "failed"
    # The others can be used already.
    assert group_runs(Path("g")) == (Path("g/g-seed0"), Path("g/g-seed2"))
    kept = load_policy("g/g-seed2", "last")
    (Path("g") / "g-seed1" / "notes.txt").unlink()
    (Path("g") / "g-seed1").rmdir()

    assert group("--resume") == 0
    assert "2 of" not in capsys.readouterr().err
    assert len(RunFolder.open("g/g-seed2").info.resumed) == len(kept.run.info.resumed)
    summary = json.loads(Path("g/seeds.json").read_text())
    assert [seed["status"] for seed in summary["seeds"]] == ["finished"] * 3
    assert [seed["steps"] for seed in summary["seeds"]] == [256] * 3
    rewards = [seed["best_reward"] for seed in summary["seeds"]]
    assert summary["validation_reward"]["iqm"] == pytest.approx(float(iqm(np.array(rewards))))
    assert summary["validation_reward"]["ci_low"] <= summary["validation_reward"]["iqm"]
    # A seed of the group is the very training that it would be alone; the first was parted and resumed.
    for seed in (0, 1):
        alone = train(parse_training({**TINY, "seed": seed}, "test"), f"alone{seed}", progress=False)
        assert rewards[seed] == pytest.approx(alone.best_reward, abs=1e-6)

    # An evaluation takes all seeds as training runs of one controller.
    judged = ("--baselines", "static cap", "--families", "rega", "--seeds", 2, "--episode-s", 600)
    assert run("evaluate", "g", *judged) == 0
    rows = Path("evaluation/results.csv").read_text().splitlines()
    assert sum(row.startswith("g,g-seed") for row in rows) == 3 * 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopping_the_group_stops_every_seed_in_good_order(how):
    command = [sys.executable, "-m", "wattgym", "train", "--config", "tiny.yaml", "--seeds", "3", "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--steps", "10000000", "--out", "g"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    running = (Path("g/g-seed0"), Path("g/g-seed1"))
    deadline = time.monotonic() + 600
    try:
        while not all(list(path.glob("checkpoints/step_*/checkpoint.json")) for path in running):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(how)
        _, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert "Traceback" not in err
    assert process.returncode == (130 if how == signal.SIGINT else -how)
    # Nobody is left to wait for the orphans of a kill; they end by themselves, with a checkpoint of the moment.
    while any(RunFolder.open(path).info.status == "running" for path in running):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [RunFolder.open(path).info.status for path in running] == ["interrupted"] * 2
    assert not Path("g/g-seed2").exists()
    with pytest.raises(UserError, match="none of its seeds is finished"):
        group_runs(Path("g"))
    assert all(load_policy(path, "last").steps > 0 for path in running)


def test_what_cannot_be_trained_is_one_line_and_leaves_nothing(capsys):
    before = sorted(Path.cwd().iterdir())
    for arguments, message in (
        (("--seeds", 0), "seeds must be at least 1, got 0"),
        (("--seeds", 2, "--jobs", 0), "jobs must be at least 1, got 0"),
        (("--jobs", 2), "--jobs goes with --seeds"),
        (("--seeds", 2, "--set", "train.hyperparameters.gamm=1"), "did you mean 'gamma'?"),
    ):
        assert run("train", "--config", "tiny.yaml", "--out", "g", *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err
        assert err.count("\n") == 1
        assert sorted(Path.cwd().iterdir()) == before
