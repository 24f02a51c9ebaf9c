import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from wattgym.agents.policy import load_policy
from wattgym.cli import main
from wattgym.runs import RunFolder

ROOT = Path(__file__).parents[2]
TINY = {
    "env": {"site": {"jobs": 1}, "period_s": 10.0, "episode_s": 600.0},
    "train": {"total_steps": 256, "num_envs": 4, "checkpoint_steps": 64, "hyperparameters": {"n_steps": 16}},
    "network": {"hidden": [8]},
    "validation": {"every_steps": 128, "scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tiny.yaml", TINY)
    return tmp_path


def write(path, config):
    path.write_text(yaml.safe_dump(config))


def run(*arguments):
    """Exit code of the command in this process."""
    with pytest.raises(SystemExit) as caught:
        main(["train", *map(str, arguments)])
    return caught.value.code or 0


def refused(capsys, *arguments):
    """The one line of a refusal; nothing was made."""
    before = sorted(Path.cwd().iterdir())
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before
    return err


def test_train_writes_a_run_named_after_configuration_and_seed(capsys):
    assert run("--config", "tiny.yaml", "--seed", 3, "--steps", 64, "--set", "train.num_envs=2") == 0
    opened = RunFolder.open("runs/tiny-seed3", "training")
    assert opened.info.status == "finished"
    assert opened.info.seed == opened.config["seed"] == 3
    assert (opened.config["train"]["num_envs"], opened.config["train"]["total_steps"]) == (2, 64)
    assert {path.name for path in opened.path.iterdir()} == {
        "best", "checkpoints", "config.yaml", "run.json", "tensorboard", "validations.json",
    }  # fmt: skip
    out, err = capsys.readouterr()
    assert out.splitlines() == [out.strip()]
    assert "trained 64 steps; best validation reward" in out
    assert "train: 100%" in err


def test_set_takes_yaml_values(capsys):
    rate = "train.hyperparameters.learning_rate=1e-4"
    assert run("--config", "tiny.yaml", "--out", "a", "--steps", 64, "--set", rate, "--set", "network.hidden=[4, 4]",
               "--set", "env.signal.families={droop: 1}") == 0  # fmt: skip
    config = RunFolder.open("a").config
    assert config["train"]["hyperparameters"]["learning_rate"] == 1e-4
    assert config["network"]["hidden"] == [4, 4]
    assert config["env"]["signal"]["families"] == {"droop": 1.0}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.num_env=2", "unknown key 'train.num_env', did you mean 'num_envs'?"),
        ("trian.num_envs=2", "unknown key 'trian', did you mean 'train'?"),
        ("train.num_envs=many", "train.num_envs"),
        ("train.num_envs=0", "train.num_envs: Input should be greater than or equal to 1 (got 0)"),
        ("train=5", "train"),
        ("seed.x=1", "'seed' holds no keys"),
        ("train.num_envs", "expected key=value, for example train.num_envs=32"),
        ("=3", "expected key=value"),
        ("network.hidden=[4", "--set network.hidden: not valid YAML"),
        ("env.signal.families={regdd: 1}", "unknown signal family 'regdd'"),
        ("env.site.jobs=0", "env.site.jobs"),
        ("env.reward.tracking=.nan", "env.reward.tracking"),
        ("train.hyperparameters.learnig_rate=1e-4", "did you mean 'learning_rate'?"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(setting, message, capsys):
    extra = [] if setting.startswith("seed") else ["--seed", 0]
    Path("tiny.yaml").write_text(yaml.safe_dump({**TINY, "seed": 0}))
    assert message in refused(capsys, "--config", "tiny.yaml", *extra, "--set", setting)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("", "expected a mapping"),
        ("- a\n- b\n", "expected a mapping of keys to values, got list"),
        ("train: {total_steps: [}\n", "not valid YAML"),
        ("train: {total_stepz: 5}\n", "did you mean 'total_steps'?"),
        (b"\xff\xfe\x00\x01", "cannot read"),
    ],
)
def test_bad_files_are_one_line_and_leave_nothing(content, message, capsys):
    path = Path("bad.yaml")
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    err = refused(capsys, "--config", path)
    assert message in err
    assert "bad.yaml" in err


def test_usage_errors_exit_with_2(capsys):
    for arguments in ([], ["--config"], ["--config", "tiny.yaml", "--steps", "many"], ["--nonsense"]):
        assert run(*arguments) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_a_used_folder_is_refused_and_resume_continues_it(capsys):
    assert run("--config", "tiny.yaml", "--out", "a", "--steps", 64) == 0
    capsys.readouterr()
    assert "not empty" in refused(capsys, "--config", "tiny.yaml", "--out", "a")
    assert "'network.hidden' was [8], is now [4]" in refused(
        capsys, "--config", "tiny.yaml", "--out", "a", "--resume", "--set", "network.hidden=[4]"
    )
    assert run("--config", "tiny.yaml", "--out", "a", "--resume") == 0
    assert "trained 256 steps" in capsys.readouterr().out


def start(out, *arguments, script=("-m", "wattgym", "train"), steps=10_000_000):
    command = [sys.executable, *script, "--config", "tiny.yaml", "--out", out, "--steps", str(steps), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def wait_for_checkpoint(process, out):
    deadline = time.monotonic() + 120
    while not list(Path(out).glob("checkpoints/step_*/checkpoint.json")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_every_way_of_stopping_leaves_a_run_that_can_be_used_and_resumed(capsys):
    processes = {how: start(how) for how in ("SIGINT", "SIGTERM", "SIGKILL")}
    for how, process in processes.items():
        wait_for_checkpoint(process, how)
        process.send_signal(getattr(signal, how))
    for how, process in processes.items():
        out, err = process.communicate(timeout=120)
        assert "Traceback" not in err
        opened = RunFolder.open(how)
        if how == "SIGKILL":
            # Nobody was left to write another status.
            assert (process.returncode, opened.info.status) == (-signal.SIGKILL, "running")
        else:
            assert (process.returncode, opened.info.status) == (130, "interrupted")
            assert f"continue with --resume --out {how}" in out
        policy = load_policy(how, "last")
        assert policy.steps > 0
        assert load_policy(how, "best").controller is not None
        more = policy.steps + 64
        assert run("--config", "tiny.yaml", "--out", how, "--resume", "--steps", more) == 0
        assert RunFolder.open(how).info.status == "finished"
        assert load_policy(how, "last").steps == more
        assert f"trained {more:,} steps" in capsys.readouterr().out


SECOND = """
import os, signal
from wattgym.agents.callbacks import TrainingCallback
from wattgym.cli import main

def twice(self):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the second Ctrl-C did not stop")

TrainingCallback._on_step = twice
main(["train", "--config", "tiny.yaml", "--out", "run"])
"""


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once():
    done = subprocess.run(
        [sys.executable, "-c", SECOND], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert RunFolder.open("run").info.status == "interrupted"
    assert not Path("run/checkpoints").exists()
    # There is nothing to continue from, so the run begins again.
    assert run("--config", "tiny.yaml", "--out", "run", "--resume") == 0
    assert load_policy("run", "last").steps == 256


FULL_DISK = """
import resource, sys
from wattgym.agents.callbacks import TrainingCallback
from wattgym.cli import main

original = TrainingCallback._checkpoint
def then_full(self):
    original(self)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
TrainingCallback._checkpoint = then_full
main(["train", "--config", "tiny.yaml", "--out", "run"])
"""


@pytest.mark.slow
def test_a_full_disk_ends_training_with_one_line_and_the_last_checkpoint_whole():
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK], capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr.splitlines()[-1]
    assert load_policy("run", "last").steps == 64
    assert run("--config", "tiny.yaml", "--out", "run", "--resume") == 0
    assert load_policy("run", "last").steps == 256


@pytest.mark.slow
def test_the_script_at_the_root_is_the_same_command():
    script = str(ROOT / "train_controller.py")
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
    assert "--config" in done.stdout
    process = start("run", script=(script,), steps=64)
    assert process.wait(timeout=120) == 0
    assert RunFolder.open("run").info.status == "finished"
    process.communicate()
