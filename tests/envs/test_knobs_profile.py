"""Profiling a plant's knobs: sweep, table, Pareto front, fitted profile, and what is read back from it."""

import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from wattgym.cli import app
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.knobs import KNOBS, Command
from wattgym.envs.live.knobs import check_knobs, live_table
from wattgym.envs.profile import JobProfile, MeasuredKnobs, load_profile
from wattgym.envs.profile_fit import fitted_jobs
from wattgym.envs.profiling import TOLERANCE, ProfilePlan, Sweep, pareto, table
from wattgym.errors import UserError
from wattgym.hw.presets import gpu_preset

CERTAIN = {"command_loss": 0.0, "control_delay_periods": (0, 0), "randomise": 0.0}
SITE = {
    "jobs": 2, "surfaces": ("a40/bert_base_sentiment/b128", "h100-sxm/assumed/compute_bound"), "gpus_per_job": (8,),
    **CERTAIN, "knobs": {"comm_share": (0.12, 0.12), "straggler_share": (0.04, 0.04)},
}  # fmt: skip
PLAN = ProfilePlan(limits=3, repeats=2, settle_s=4.0, dwell_s=20.0)


@pytest.fixture(scope="module")
def swept():
    config = PowerShapingConfig.model_validate({"site": SITE, "action": {"knobs": KNOBS}})
    plant = Emulator(config)
    plant.reset([np.random.default_rng(2)])  # one job of each surface
    sweep = Sweep(plant, KNOBS[1:], PLAN)
    assert list(sweep.run()) == list(range(1, sweep.visits + 1))
    return plant, sweep, table(sweep.rows)


def test_the_table_has_every_configuration_as_often_as_planned(swept):
    plant, sweep, found = swept
    counts = plant.spec.knobs.micro_batches[0]
    for j, own in found.groupby("job"):
        # Limits crossed with micro-batches; at the highest limit three shares of GPUs, two duties, four local steps.
        assert len(own) == 3 * counts[j] + 3 + 2 + 1
        assert (own["visits"] >= 2).all()
    assert len(sweep.rows) == 2 * sweep.visits == found["visits"].sum()


def test_the_table_tells_what_the_plant_does(swept):
    plant, _, found = swept
    for row in found.itertuples():
        command = Command(
            np.where(np.arange(2) == row.job, row.limit_w, plant.spec.max_limit_w[0])[None],
            **{
                name: np.where(np.arange(2) == row.job, getattr(row, column), neutral)[None]
                for name, column, neutral in (
                    ("micro_batch", "micro_batch", plant.spec.knobs.micro_batch[0, :, 0]),
                    ("active_gpus", "active_gpus", 8),
                    ("duty", "duty_cycle", 1.0),
                    ("local_steps", "local_steps", 1),
                )
            },
        )
        power, speed = plant.spec.response(command)
        assert row.power_w == pytest.approx(power[0, row.job], rel=0.05)
        assert row.throughput == pytest.approx(speed[0, row.job], rel=1e-6, abs=1e-9)


def test_the_fitted_profile_is_the_plant_and_builds_its_twin(swept, tmp_path):
    plant, _, found = swept
    jobs = fitted_jobs(plant.profiles, found, [0.7, None])
    assert {job.gpu for job in jobs} == {"a40", "h100-sxm"}
    for job in jobs:
        assert job.knobs.idle_w == pytest.approx(gpu_preset(job.gpu).context_idle_w.value, rel=0.02)
        assert (job.knobs.comm_share, job.knobs.straggler_share) == pytest.approx((0.12, 0.04), abs=0.01)
        assert (job.power_w, job.throughput) == (job.knobs.power_w[0], job.knobs.throughput[0])
        assert job.throughput[-1] == 1.0
    data = {"schema_version": 1, "jobs": [job.model_dump(mode="json") for job in jobs]}
    (tmp_path / "plant.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    assert load_profile(tmp_path / "plant.yaml").jobs == jobs
    site = {"jobs": 2, "profile": str(tmp_path / "plant.yaml"), **CERTAIN}
    twin = Emulator(PowerShapingConfig.model_validate({"site": site, "action": {"knobs": KNOBS}}))
    twin.reset([np.random.default_rng(0)])
    assert twin.spec.knobs.micro_batch.tolist() == plant.spec.knobs.micro_batch.tolist()
    np.testing.assert_allclose(
        twin.spec.knobs.throughput[0, :, :, [0, -1]], plant.spec.knobs.throughput[0, :, :, [0, -1]], rtol=1e-6
    )
    assert (twin._knobs._costs_s[:, 0] == [0.7, 0.7, 0.0, 0.7]).all()  # as told; configured where it was not
    assert (twin._knobs._costs_s[:, 1] == [0.2, 0.5, 0.0, 0.0]).all()
    # A live plant is told the same.
    limits = np.array([job.limit_w for job in jobs])
    told = live_table(jobs, limits)
    np.testing.assert_allclose(told.power_w[0, 0], 8.0 * np.array(jobs[0].knobs.power_w))
    assert told.comm_share[0, 0] == jobs[0].knobs.comm_share


def test_one_kind_of_setting_alone_leaves_shares_near_the_assumed_ones(swept):
    plant, _, found = swept
    few = found[(found["local_steps"] == 1) & (found["active_gpus"] == 8)]
    assert fitted_jobs(plant.profiles, few)[0].knobs.comm_share is None
    stuck = found.assign(throughput=0.0)
    with pytest.raises(UserError, match="job 0 made no progress"):
        fitted_jobs(plant.profiles, stuck)


def test_the_front_by_hand():
    power = np.array([100.0, 100.2, 150.0, 200.0, 200.0, 120.0])
    speed = np.array([0.5, 0.501, 0.7, 0.9, 0.8, 0.45])
    #   100 W and 100.2 W are the same within half a per cent; 0.501 stays. 120 W is slower than 100 W.
    assert pareto(power, speed).tolist() == [False, True, True, True, False, False]


points = st.lists(st.tuples(st.floats(50.0, 500.0), st.floats(0.0, 1.2)), min_size=1, max_size=30)


@given(points)
def test_the_front_keeps_the_best_and_nothing_on_it_is_clearly_beaten(given_points):
    power, speed = np.array(given_points).T
    front = pareto(power, speed)
    assert front.any()
    assert speed[front].max() >= speed.max() - TOLERANCE * max(speed.max(), 1e-12)
    slack = TOLERANCE * speed.max()
    for i in np.flatnonzero(front):
        assert not ((power < power[i] * (1 - TOLERANCE)) & (speed > speed[i] + slack)).any()


def test_a_plan_that_cannot_be_visited_is_refused():
    for values, message in (
        ({"duties": (0.05,)}, "duties: 0.05 cannot be visited; valid: 0"),
        ({"active_shares": (1.0,)}, "active_shares: 1 cannot be visited"),
        ({"local_steps": (1,)}, "local_steps: 1 cannot be visited"),
    ):
        with pytest.raises(ValueError, match=message):
            ProfilePlan(**values)


def test_profiles_with_knobs_that_do_not_fit_are_refused():
    job = {
        "gpu": "h100-sxm", "n_gpus": 1, "samples_per_update": 8, "limit_w": (350.0, 700.0), "power_w": (340.0, 620.0),
        "throughput": (0.6, 1.0),
    }  # fmt: skip
    knobs = {"micro_batch": (8, 4), "power_w": ((340.0, 620.0),) * 2, "throughput": ((0.6, 1.0), (0.5, 0.9))}
    assert JobProfile(**job, knobs=MeasuredKnobs(**knobs)).micro_batches == (8, 4)
    for change, message in (
        ({"micro_batch": (4, 8)}, "micro_batch must descend"),
        ({"micro_batch": (8, 3)}, "micro_batch 3 does not divide samples_per_update 8"),
        ({"power_w": ((340.0, 620.0),)}, "power_w needs a row .* for each of the 2 micro-batches"),
        ({"throughput": ((0.6, 1.0), (0.5,))}, "knobs.throughput needs 2 values a row"),
    ):
        with pytest.raises(ValueError, match=message):
            JobProfile(**job, knobs={**knobs, **change})
    with pytest.raises(UserError, match="p: micro_batch is 8, the plant's is 4; calibrate again"):
        JobProfile(**job, micro_batch=8).check_fits("p", micro_batch=4)


def test_idling_gpus_needs_a_rank_for_each():
    from wattgym.envs.live.config import LiveConfig

    config = LiveConfig.model_validate({"jobs": [{"devices": ["h100-sxm:0", "h100-sxm:1"]}]})
    check_knobs(config, ("power_limit", "micro_batch", "duty_cycle"))
    with pytest.raises(UserError, match=r"job 0 has 2 device\(s\) and 1 rank\(s\).* set training.ranks to 2"):
        check_knobs(config, KNOBS)


# The command


def test_the_command_writes_profile_table_and_figure(tmp_path):
    out = tmp_path / "plant.yaml"
    result = CliRunner().invoke(app, ["profile", "--out", str(out), "--limits", "2", "--repeats", "2", "--dwell", "6"])
    assert result.exit_code == 0, result.output
    profile = load_profile(out)
    found = pd.read_csv(tmp_path / "plant.configurations.csv")
    assert sorted(found["job"].unique()) == list(range(len(profile.jobs))) == [0, 1, 2, 3]
    assert (tmp_path / "plant.svg").read_text().count("<svg") == 1
    assert result.output.count(" on the front") == 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--knobs", "clock"], "unknown knob 'clock'; known: micro_batch, active_gpus, duty_cycle, local_steps"),
        (["--knobs", "power_limit"], "names no knob beside the power limit"),
        (["--repeats", "1"], "repeats"),
        (["--config", "x.yaml", "--job", "tiny"], "excludes the options of a live plant"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(arguments, message, tmp_path):
    result = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "p.yaml"), *arguments])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_sweep_leaves_its_table_and_no_profile(tmp_path):
    out = tmp_path / "p.yaml"
    command = [sys.executable, "-m", "wattgym", "profile", "--out", str(out), "--cross", "--repeats", "100"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        shown = ""
        while "visit/s" not in shown:
            shown += process.stderr.read(1)
        process.stderr.read(200)  # some visits more
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 130
    assert "interrupted; the visits so far are in" in rest
    assert len(pd.read_csv(tmp_path / "p.configurations.csv")) > 0
    assert not out.exists()
