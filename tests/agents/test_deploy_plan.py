import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.agents.bundle import load_bundle
from wattgym.agents.deploy import Ending, deploy, stoppable
from wattgym.agents.deploy_plan import DeployOptions, duration_s, plan_deployment
from wattgym.agents.deploy_report import compare_losses, write_losses
from wattgym.agents.export import export_bundle
from wattgym.agents.tick_log import TickLog, convert_to_parquet
from wattgym.envs.live.plant import LivePlant
from wattgym.errors import UserError
from wattgym.runs import RunFolder

TINY = {"model": {"source": "tiny"}, "data": {"max_records": 50, "holdout": 4}}


@pytest.fixture(scope="module")
def bundle(ppo_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles") / "bundle"
    export_bundle(ppo_run.run.path, folder, "best")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("42", 42)])
def test_durations(text, seconds):
    assert duration_s(text) == seconds


def test_a_bundle_brings_everything_but_the_signal_and_the_plant(bundle, folder):
    contract = load_bundle(bundle).manifest.contract
    found = plan_deployment(DeployOptions(str(bundle), duration="10m", job="job.yaml", out=folder / "out"))
    assert len(found.live.jobs) == found.env.site.jobs == contract.jobs
    assert found.env.period_s == contract.period_s
    assert (found.env.action, found.env.observation, found.env.rules) == (
        contract.action, contract.observation, contract.rules,
    )  # fmt: skip
    assert found.env.signal.trace == "regd"
    assert found.env.episode_s == 600.0
    assert [job.devices for job in found.live.jobs] == [(f"h100-sxm:{j}",) for j in range(contract.jobs)]
    assert sum(job.pace for job in found.live.jobs) == pytest.approx(0.9)
    assert found.live.state_dir == str(folder / "out" / "devices")
    assert not (folder / "out").exists()
    json.dumps(found.config())


def test_a_baseline_takes_jobs_from_devices_or_from_the_plant(folder):
    plan = plan_deployment(DeployOptions("PI", job="job.yaml", devices=("h100-sxm:0", "h100-sxm:1", "h100-sxm:2")))
    assert plan.env.site.jobs == 3
    (folder / "plant.yaml").write_text(yaml.safe_dump({"jobs": [{"devices": ["h100-sxm:0"], "training": TINY}]}))
    plan = plan_deployment(DeployOptions("PI", live=folder / "plant.yaml", actuator="duty_cycle", arm=True))
    assert (plan.env.site.jobs, plan.live.actuator, plan.live.arm) == (1, "duty_cycle", True)


def test_a_baseline_may_set_knobs_that_the_plant_has(folder):
    options = {"job": "job.yaml", "jobs": 2, "out": folder / "out"}
    plan = plan_deployment(DeployOptions("PowerMorph (reconstruction)", knobs=("micro_batch", "duty_cycle"), **options))
    assert plan.env.action.knobs == ("power_limit", "micro_batch", "duty_cycle")
    # Beside it, whoever limits nothing sets nothing either.
    assert plan.env_for(plan.uncapped()).action.knobs == ("power_limit",)
    assert plan_deployment(DeployOptions("pause/resume", knobs=("duty_cycle",), **options)).controller.name
    with pytest.raises(UserError, match="'pause/resume' needs duty_cycle; name it with --knobs"):
        plan_deployment(DeployOptions("pause/resume", **options))
    (folder / "plant.yaml").write_text(
        yaml.safe_dump({"jobs": [{"devices": ["h100-sxm:0", "h100-sxm:1"], "training": {**TINY, "ranks": 2}}]})
    )
    ranked = {"live": folder / "plant.yaml", "out": folder / "out"}
    assert plan_deployment(DeployOptions("GPU-count scaling", knobs=("active_gpus",), **ranked)).env.site.jobs == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"knobs": ("duty_cycle",)}, "--knobs is for baselines"),
        ({"jobs": 7}, "--jobs 7: "),
        ({"period_s": 1.5}, "--period 1.5: "),
        ({"live": "plant.yaml"}, "plant.yaml: has 1 jobs, "),
    ],
)
def test_a_bundle_refuses_what_it_cannot_control(bundle, folder, options, message):
    (folder / "plant.yaml").write_text(yaml.safe_dump({"jobs": [{"devices": ["h100-sxm:0"], "training": TINY}]}))
    job = {} if "live" in options else {"job": "job.yaml"}
    with pytest.raises(UserError, match=message):
        plan_deployment(DeployOptions(str(bundle), **options, **job))


@pytest.mark.parametrize("name", ["simulated", "nvml"])
def test_shipped_plants_are_valid(name):
    from wattgym.config import load_config
    from wattgym.envs.live.config import LiveConfig

    load_config(LiveConfig, Path(__file__).parents[2] / "configs" / "live" / f"{name}.yaml")


def steps(folder, losses):
    folder.mkdir(parents=True)
    rows = [f"{i},{4 * i},{loss!r}" for i, loss in enumerate(losses, start=1)]
    (folder / "steps.csv").write_text("step,samples,loss\n" + "\n".join(rows) + "\n")


def test_losses_are_compared_at_equal_samples(folder):
    steps(folder / "a" / "job0", [3.0, 2.0, 1.0])
    steps(folder / "b" / "job0", [3.0, 2.5])
    (found,) = compare_losses(folder / "a", folder / "b", 1)
    assert found.samples.tolist() == [4, 8]
    assert found.summary() == {
        "job": 0, "samples": 8, "loss": 2.5, "uncontrolled": 2.75, "largest_difference": 0.5,
    }  # fmt: skip
    write_losses([found], folder)
    assert (folder / "losses.csv").read_text().splitlines() == [
        "job,samples,loss,uncontrolled_loss", "0,4,3.0,3.0", "0,8,2.0,2.5",
    ]  # fmt: skip
    with pytest.raises(UserError, match="cannot read the losses"):
        compare_losses(folder / "a", folder / "c", 1)


@pytest.mark.parametrize(
    ("error", "raised"), [(RuntimeError("a bug"), RuntimeError), (UserError("no such model"), UserError)]
)
def test_whatever_ends_a_run_the_plant_is_closed_and_the_run_marked_as_failed(folder, monkeypatch, error, raised):
    closed = []

    def fail(plant, rngs):
        raise error

    monkeypatch.setattr(LivePlant, "reset", fail)
    monkeypatch.setattr(LivePlant, "close", lambda plant: closed.append(plant))
    with pytest.raises(raised, match=str(error)):
        deploy(DeployOptions("PI", job="job.yaml", out=folder / "out"))
    assert len(closed) == 1
    assert RunFolder.open(folder / "out", "deployment").info.status == "failed"
    assert (folder / "out" / "ticks.csv").read_text() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_for_an_end_and_the_second_one_insists(number):
    class Plant:
        asked = ""

        def interrupt(self, reason):
            self.asked = reason

    plant, ending, before = Plant(), Ending(), signal.getsignal(number)
    with stoppable(plant, ending):
        os.kill(os.getpid(), number)
        assert (plant.asked, ending.signal) == (number.name, number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_log_keeps_whole_rows_when_the_disk_refuses(folder, monkeypatch):
    path = folder / "ticks.csv"
    real = os.write
    with TickLog(path) as log:
        log.write({"tick": 1, "loss": None, "power_w": 0.1 + 0.2, "why": "a, b"})
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        log.write({"tick": 2, "loss": 1.0, "power_w": 1.0, "why": ""})
        monkeypatch.setattr(os, "write", real)
        log.write({"tick": 3, "loss": np.nan, "power_w": 2.0, "why": ""})
        assert log.lost == 1
    assert path.read_text() == 'tick,loss,power_w,why\n1,,0.30000000000000004,"a, b"\n3,,2.0,\n'
    import pandas as pd

    assert pd.read_parquet(convert_to_parquet(path))["tick"].tolist() == [1, 3]
    with pytest.raises(UserError, match="cannot write the log"):
        TickLog(path)
