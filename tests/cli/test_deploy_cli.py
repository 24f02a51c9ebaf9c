import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from wattgym.cli import main
from wattgym.hw.simulated import SimulatedDevice
from wattgym.runs import RunFolder

JOB = {
    "model": {"source": "tiny"},
    "data": {"max_records": 100, "holdout": 4},
    "samples_per_update": 4,
    "micro_batch": 1,
    "checkpoint_every": None,
}
DEFAULT_MW = 700_000


def refused(capsys, *arguments):
    """The one line of a refusal; nothing was made."""
    before = sorted(Path.cwd().iterdir())
    with pytest.raises(SystemExit) as caught:
        main(["deploy", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before
    return err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(JOB | {"micro_batches": 1}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "plant.yaml").write_text(yaml.safe_dump({"jobs": [{"devices": ["h100-sxm:0"], "training": JOB}]}))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "nobody: neither a policy bundle nor a baseline; baselines: uncapped, static cap, feed-forward"),
        (["energy-matched cap"], "needs a controller to match"),
        (["empty"], "empty: neither a policy bundle nor a baseline"),
        (["PI", "--signal", "regdd"], "no signal 'regdd'"),
        (["PI", "--duration", "41m"], "2460 s from 0 s is not inside"),
        (["PI", "--duration", "10m", "--start", "2000"], "600 s from 2000 s is not inside"),
        (["PI", "--duration", "ten"], "--duration ten: expected a positive time such as 90s, 10m or 2h"),
        (["PI", "--duration", "0s"], "expected a positive time"),
        (["PI", "--duration", "61s"], "must be a whole number of periods of 2 s"),
        (["PI", "--job", "large"], "--job large: expected lora, tiny or a YAML file"),
        (["PI", "--job", "bad.yaml"], "bad.yaml: unknown key 'micro_batches', did you mean 'micro_batch'?"),
        (["PI", "--job", "missing.yaml"], "missing.yaml: cannot read"),
        (["PI", "--backend", "rocm", "--job", "job.yaml"], "backend: Input should be 'simulated' or 'nvml'"),
        (["PI", "--actuator", "magic", "--job", "job.yaml"], "actuator: Input should be"),
        (["PI", "--device", "h100-sxm:0", "--jobs", "2"], "1 devices for 2 jobs"),
        (["PI", "--device", "h100-sxm:0", "--device", "h100-sxm:0", "--job", "job.yaml"], "share the device"),
        (["PI", "--device", "b999", "--jobs", "1", "--job", "job.yaml"], "simulated device 'b999'"),
        (["PI", "--live", "plant.yaml", "--job", "tiny"], "it excludes --job and --device"),
        (["PI", "--live", "plant.yaml", "--jobs", "3"], "plant.yaml: has 1 jobs, --jobs asks for 3"),
        (["PI", "--job", "job.yaml", "--out", "full"], "full: folder is not empty"),
        (["PI", "--job", "job.yaml", "--out", "job.yaml"], "is no folder"),
        (["PI", "--job", "job.yaml", "--log", "xlsx"], "--log xlsx: valid are csv and parquet"),
        (["PI", "--job", "job.yaml", "--reference", "nowhere"], "--reference nowhere: neither 'run' nor a folder"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_is_made(folder, capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_a_missing_extra_is_named(folder, capsys, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    assert 'pip install "wattgym[llm]"' in refused(capsys, "PI", "--job", "job.yaml")


def test_a_device_of_another_controller_is_refused(folder, capsys):
    from wattgym.hw.guard import ARM_VARIABLE, Guard
    from wattgym.hw.open import open_device

    state = folder / "state"
    device = open_device("h100-sxm:0", "simulated", state_dir=state)
    with Guard(device, arm=True, state_dir=state, environ={ARM_VARIABLE: "1"}):
        error = refused(capsys, "PI", "--jobs", "1", "--job", "job.yaml", "--state-dir", state)
    assert f"SIM-h100-sxm-0: PID {os.getpid()}" in error


class Deployed:
    """`wattgym deploy` in a process of its own."""

    def __init__(self, folder, name, *options, policy="feed-forward"):
        self.out = folder / name
        command = [
            sys.executable,
            "-m",
            "wattgym",
            "deploy",
            policy,
            "--jobs",
            "1",
            "--job",
            folder / "job.yaml",
        ]
        command += ["--period", "1", "--out", self.out, *options]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def rows(self):
        path = self.out / "ticks.csv"
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    @property
    def device(self):
        return SimulatedDevice.attach(self.out / "devices" / "SIM-h100-sxm-0.simulated")

    def wait_for_ticks(self, ticks):
        deadline = time.monotonic() + 150.0
        while len(self.rows) < ticks:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert self.device.requested_limit_mw() < DEFAULT_MW

    def ended(self):
        out, err = self.process.communicate(timeout=150.0)
        return self.process.returncode, out, err

    def given_back(self):
        deadline = time.monotonic() + 30.0
        while self.device.requested_limit_mw() != DEFAULT_MW and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.device.requested_limit_mw() == DEFAULT_MW


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """Five deployments side by side, because most of their time is loading."""
    folder = tmp_path_factory.mktemp("deploy")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    runs = {
        "whole": Deployed(folder, "whole", "--duration", "6s", "--log", "parquet"),
        "shaped": Deployed(folder, "shaped", "--duration", "6s", "--knobs", "duty_cycle", policy="pause/resume"),
        **{name: Deployed(folder, name, "--duration", "10m") for name in ("stopped", "killed", "orphaned")},
    }
    yield runs
    for run in runs.values():
        run.process.kill()
        run.process.communicate()


@pytest.mark.slow
def test_sigterm_gives_back_at_once_and_leaves_log_and_report(deployed):
    run = deployed["stopped"]
    run.wait_for_ticks(2)
    run.process.send_signal(signal.SIGTERM)
    code, out, err = run.ended()
    assert code == 128 + signal.SIGTERM
    assert run.given_back()
    assert err.strip() == "interrupted; the devices have been given back"
    assert RunFolder.open(run.out).info.status == "interrupted"
    # On a busy machine a period may be missed: it has no row, and is told.
    ticks = [int(row["tick"]) for row in run.rows]
    assert ticks == sorted(set(ticks))
    assert ticks[-1] - len(ticks) == int(re.search(r"(\d+) periods missed", out)[1])
    assert "report.html" in out
    assert (run.out / "report.html").is_file()
    assert RunFolder.open(run.out / "job0").info.status == "interrupted"


@pytest.mark.slow
def test_after_kill_9_the_watchdog_gives_back_and_the_log_is_whole(deployed):
    run = deployed["killed"]
    run.wait_for_ticks(2)
    run.process.kill()
    run.ended()
    assert run.given_back()
    assert len(run.rows) >= 2
    assert all(None not in row and None not in row.values() for row in run.rows)


@pytest.mark.slow
def test_a_training_process_that_dies_ends_the_run_in_one_line(deployed):
    run = deployed["orphaned"]
    run.wait_for_ticks(2)
    os.kill(job_pid(run), signal.SIGKILL)
    code, _, err = run.ended()
    assert code == 2
    assert err.count("\n") == 1
    assert "job 0 died: its process was killed by SIGKILL" in err
    assert run.given_back()
    assert RunFolder.open(run.out).info.status == "failed"
    assert len(run.rows) >= 2
    assert (run.out / "report.html").is_file()


def job_pid(run):
    """Process of the run's only job."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"wattgym.live.job" in words and str(run.out / "job0").encode() in words:
            return int(path.parent.name)
    raise AssertionError("no job")


@pytest.mark.slow
def test_a_whole_deployment_reports_scores_and_losses(deployed):
    import pandas as pd

    run = deployed["whole"]
    code, out, err = run.ended()
    assert code == 0, err
    assert "actuator: power_limit (the finest control that the devices allow)" in out
    assert "6/6 | target" in out
    assert run.given_back()
    assert RunFolder.open(run.out, "deployment").info.status == "finished"
    from wattgym.agents.results import EvaluationResult

    result = EvaluationResult.load(run.out)
    assert result.controllers == ("feed-forward",)
    assert result.headline == "nrmse"
    frame = pd.read_parquet(run.out / "ticks.parquet")
    assert len(frame) == len(run.rows)


@pytest.mark.slow
def test_a_baseline_sets_the_knobs_that_it_is_given(deployed):
    run = deployed["shaped"]
    code, _, err = run.ended()
    assert code == 0, err
    duties = {float(row["job0_duty_cycle"]) for row in run.rows}
    # It leaves limits at their ends and works, or pauses, by turns.
    assert duties != {1.0}
    assert "job0_micro_batch" not in run.rows[0]
    assert run.given_back()
