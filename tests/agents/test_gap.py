"""The gap between emulator and live plant, from rollouts to figures and along the command line."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import yaml

from wattgym.agents.baselines import make_baseline
from wattgym.agents.episodes import METRICS
from wattgym.agents.gap import COMPARED, THROUGHPUT, Gap, GapRow, compare, emulate, gap_scenario
from wattgym.cli import main
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.phases import ComputeNoise, Spread, load_phase_families
from wattgym.envs.profile import PlantProfile, load_profile, nominal_profile, save_profile
from wattgym.errors import UserError
from wattgym.metrics.pjm import pjm_variant

SURFACE = "h100-sxm/assumed/compute_bound"
LEGACY = pjm_variant("legacy")


class Punctual:
    """Tick statistics of a live plant."""

    class ticks:  # noqa: N801
        lateness_s = [0.001] * 99 + [0.05]
        missed = 2


def profile(path, scale=1.0, speed=1.0):
    nominal = nominal_profile(SURFACE, 1)
    # A job that only ever computes, without noise: runs differ by nothing but the plant.
    still = ComputeNoise(sample_s=1.0, ar1=0.0, innovation_sd=0.0, dip_probability=0.0, dip_depth=0.0)
    family = load_phase_families()["lora_8xh100"]
    phases = family.model_copy(update={"compute_work_s": Spread(mean=1e6, sd=0.0), "noise": still, "ripple": None})
    changed = nominal.model_copy(
        update={
            "phases": phases,
            "power_w": tuple(scale * power for power in nominal.power_w),
            "throughput": tuple(speed * value for value in nominal.throughput),
        }
    )
    save_profile(PlantProfile(jobs=(changed, changed)), path)
    return str(path)


def scenario(path, seconds=900.0):
    env = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "signal": {"trace": "regd"}, "episode_s": seconds})
    return gap_scenario(env, path)


def rows(found):
    return {row.metric.name: row for row in found.rows}


def gap_of(emulated, live):
    return compare("PI", "regd", emulated, live, range(emulated.power_w.shape[0]), Punctual(), LEGACY)


def test_a_row_by_hand():
    composite = GapRow(METRICS["pjm_composite"], 0.80, 0.01, 0.84)
    assert composite.difference == pytest.approx(-0.04)
    assert composite.relative == pytest.approx(-0.04 / 0.84)
    assert composite.within_aim is True
    assert GapRow(METRICS["pjm_composite"], 0.80, 0.01, 0.86).within_aim is False
    # Throughput's aim is relative: 0.04 of 0.7 is more than 5 %.
    assert GapRow(THROUGHPUT, 0.74, None, 0.70).within_aim is False
    assert GapRow(THROUGHPUT, 0.73, None, 0.70).within_aim is True
    nothing = GapRow(METRICS["pjm_composite"], None, None, 0.8)
    assert nothing.difference is nothing.relative is nothing.within_aim is None
    assert GapRow(METRICS["nrmse"], 0.2, None, 0.1).within_aim is None
    assert GapRow(METRICS["nrmse"], 0.2, None, 0.0).relative is None


def test_an_aim_that_does_not_apply_is_not_missed():
    rows = (GapRow(METRICS["pjm_composite"], None, None, None), GapRow(THROUGHPUT, 0.7, 0.0, 0.7))
    gap = Gap("PI", "regd", 300.0, (0,), rows, 1.0, 0)
    assert gap.within_aim
    assert json.loads(json.dumps(gap.to_json()))["within_aim"] is True
    assert not Gap("PI", "regd", 300.0, (0,), (GapRow(THROUGHPUT, 0.9, 0.0, 0.7),), 1.0, 0).within_aim


def test_a_plant_like_its_profile_has_no_gap_and_another_one_has(tmp_path):
    controller = make_baseline("feed-forward")
    path = profile(tmp_path / "profile.yaml")
    emulated = emulate(controller, scenario(path), range(4))
    alike = gap_of(emulated, emulate(controller, scenario(path), [77]))
    assert alike.within_aim
    assert alike.duration_s == 900.0
    assert [row.metric for row in alike.rows] == list(COMPARED)
    found = rows(alike)
    # Four runs of 900 s: means, spreads and energies are those of the rollouts.
    assert found["energy_kwh"].emulated == pytest.approx(emulated.power_w.mean() * 0.25 / 1000.0)
    assert found["throughput"].emulated == pytest.approx(emulated.throughput.mean())
    assert found["throughput"].emulated_sd == pytest.approx(emulated.throughput.mean(axis=1).std(ddof=1))
    assert found["pjm_composite"].live is not None
    assert alike.missed == 2
    assert 1.0 < alike.lateness_p99_ms <= 50.0
    # A plant that really draws 12 % less and trains 10 % slower, under a controller that believes the profile.
    off = scenario(profile(tmp_path / "other.yaml", scale=0.88, speed=0.9))
    slower = rows(gap_of(emulated, emulate(controller, off, [77])))
    assert slower["throughput"].within_aim is False
    assert slower["energy_kwh"].difference > 0.1 * slower["energy_kwh"].live


def test_a_run_too_short_for_the_score_is_compared_by_the_rest(tmp_path):
    path = profile(tmp_path / "profile.yaml")
    controller = make_baseline("PI")
    short = scenario(path, 120.0)
    found = gap_of(emulate(controller, short, [1, 2]), emulate(controller, short, [3]))
    by_name = rows(found)
    assert by_name["pjm_composite"].emulated is by_name["pjm_composite"].live is None
    assert by_name["nrmse"].difference == pytest.approx(by_name["nrmse"].emulated - by_name["nrmse"].live)
    # One seed has no spread.
    assert rows(gap_of(emulate(controller, short, [1]), emulate(controller, short, [3])))["nrmse"].emulated_sd is None
    json.dumps(found.to_json(), allow_nan=False)


def test_the_scenario_is_the_live_runs_but_for_the_site(tmp_path):
    path = profile(tmp_path / "profile.yaml")
    env = PowerShapingConfig.model_validate(
        {"site": {"jobs": 2}, "signal": {"trace": "regd"}, "episode_s": 300.0, "action": {"kind": "delta"}}
    )
    found = gap_scenario(env, path)
    assert found.model_dump(exclude={"site"}) == env.model_dump(exclude={"site"})
    assert found.site.profile == path
    # Between a live controller and its actuator there is no network that could delay or lose a command.
    assert found.site.control_delay_periods == (0, 0)
    assert found.site.command_loss == 0.0
    with pytest.raises(UserError, match="jobs: describes 2 jobs, the plant has 3"):
        gap_scenario(env.model_copy(update={"site": env.site.model_copy(update={"jobs": 3})}), path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gap", "PI", "--profile", "none.yaml"], "none.yaml: cannot read"),
        (["gap", "PID", "--profile", "two.yaml"], "neither a policy bundle nor a baseline"),
        (["gap", "PI", "--profile", "two.yaml", "--duration", "soon"], "expected a positive time"),
        (["gap", "PI", "--profile", "two.yaml", "--device", "h100-sxm:0"], "describes 2 jobs, the plant has 1"),
        (["gap", "PI", "--profile", "two.yaml", "--device", "h100-sxm:0@x", "--device", "h100-sxm:1"], "h100-sxm:0@x"),
        (["gap", "PI", "--profile", "two.yaml", "--variant", "newest"], "newest"),
        (["hw", "calibrate", "--out", "p.yaml", "--minutes", "0.2"], "too short for 8 limits"),
        (["hw", "calibrate", "--out", "p.yaml", "--limits", "1"], "limits"),
        (["hw", "calibrate", "--out", "two.yaml/p.yaml"], "is no folder"),
        (["hw", "calibrate", "--out", "p.yaml", "--job", "huge"], "--job huge"),
        (["hw", "calibrate", "--out", "p.yaml", "--live", "none.yaml"], "none.yaml: cannot read"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    profile(tmp_path / "two.yaml")
    if arguments[0] == "gap":
        arguments = [*arguments, "--job", "tiny"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert {path.name for path in tmp_path.iterdir()} == {"two.yaml"}


@pytest.mark.slow
def test_calibrate_and_compare_a_real_training_loop(tmp_path, capsys):
    live = {
        "backend": "simulated",
        "jobs": [
            {
                "devices": ["h100-sxm:0@3"],
                "pace": 0.2,
                "training": {
                    "model": {"source": "tiny", "tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
                    "data": {"max_tokens": 192, "max_records": 100, "holdout": 8},
                    "samples_per_update": 4, "micro_batch": 2, "checkpoint_every": None, "device": "cpu",
                },
            }
        ],
    }  # fmt: skip
    (tmp_path / "live.yaml").write_text(yaml.safe_dump(live))
    plant = ["--live", str(tmp_path / "live.yaml")]
    path = tmp_path / "profile.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["hw", "calibrate", "--out", str(path), *plant, "--minutes", "0.31", "--limits", "2"])
    assert ended.value.code == 0
    assert "held-out error" in capsys.readouterr().out
    (job,) = load_profile(path).jobs
    # Board 3 as the seed draws it; what its sensor and meter say has a gain and an offset of up to 6 %.
    assert job.limit_w == (350.0, 700.0)
    assert job.power_w[0] == pytest.approx(0.975 * 350.0, rel=0.08)
    assert job.power_w[1] > 1.5 * job.power_w[0]
    # Three seconds twice, on a machine that does other things too: no more than plausible.
    assert 0.2 < job.throughput[0] <= 1.0
    assert job.delay_s < 0.6
    assert np.isfinite(job.full_samples_per_s)
    assert (job.model, job.device, job.samples_per_update) == ("tiny 1x32", "Simulated h100-sxm", 4)
    figures = tmp_path / "gap.json"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("gap", "feed-forward", "--profile", str(path), *plant, "--duration", "4s", "--seeds", "3"),
                *("--json", "--out", str(figures)),
            ]
        )
    assert ended.value.code == 0
    found = json.loads(figures.read_text())
    assert found == json.loads(capsys.readouterr().out)
    by_name = {row["metric"]: row for row in found["metrics"]}
    assert by_name["energy_kwh"]["live"] == pytest.approx(by_name["energy_kwh"]["emulated"], rel=0.25)
    assert by_name["pjm_composite"]["live"] is None
    assert found["seeds"] == [0, 1, 2]


@pytest.mark.slow
def test_a_calibration_that_is_ended_writes_nothing_and_leaves_nobody(tmp_path):
    arguments = ["hw", "calibrate", "--out", "profile.yaml", "--job", "tiny", "--device", "h100-sxm:5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wattgym", *arguments],
        cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        shown = b""
        # The bar counts the first limit when jobs train and it has been measured.
        while b" 1/" not in shown:
            found = process.stderr.read1(4096)
            assert found, shown
            shown += found
        (folder,) = tmp_path.glob("wattgym-calibrate-*")
        assert json.loads((folder / "job0" / "run.json").read_text())["status"] == "running"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode > 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not [*tmp_path.glob("wattgym-*"), *tmp_path.glob("profile*")]
