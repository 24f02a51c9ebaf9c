"""`wattgym federate` and `federated fit` from end to end, with real training in this process."""

import contextlib
import io
import json
import math
import shutil

import numpy as np
import pytest
import yaml

from wattgym.cli import main
from wattgym.federated.log import read_log

LOCAL = ("--engine", "local")
NETWORK = {"split": "all", "aggregator": "aws:us-east-1"}


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def sites_file(federation, tmp_path_factory):
    """A federation on the emulated clock, as a file."""
    config = federation(network=NETWORK, clock="emulated", selection={"goal": {"target_loss": 0.5}})
    path = tmp_path_factory.mktemp("federation") / "federation.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(sites_file, tmp_path_factory):
    """Folder of a run of six rounds, and what it printed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = call(
            "federate", "--sites", sites_file, "--policy", "all sites", "--rounds", 6, "--engine", "local", "--out", out
        )
    assert code == 0
    return out, shown.getvalue()


@pytest.mark.slow
def test_a_run_prints_its_rounds_and_leaves_log_adapter_scalars_and_report(finished):
    out, shown = finished
    lines = shown.splitlines()
    assert [line.split(" | ")[0] for line in lines[:6]] == [f"round {k}/6" for k in range(1, 7)]
    assert "trained: a, b, c" in lines[0]
    assert "s emulated (wall" in lines[0]
    records = [record for record, _ in read_log(out / "rounds.jsonl")]
    assert [record.round for record in records] == list(range(7))
    assert records[-1].evaluation.loss < records[0].evaluation.loss
    assert all(math.isfinite(record.noise_scale) for record in records[1:])
    summary = json.loads((out / "summary.json").read_text())
    assert summary["loss"] == records[-1].evaluation.loss
    assert (out / "report.html").stat().st_size > 10_000
    assert list((out / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_refuses_another_policy(finished, sites_file, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    before = (out / "rounds.jsonl").read_text()
    options = ("--sites", sites_file, "--engine", "local", "--out", out, "--resume")
    assert call("federate", "--policy", "all sites", "--rounds", 7, *options) == 0
    after = (out / "rounds.jsonl").read_text()
    assert after.startswith(before)
    assert [record.round for record, _ in read_log(out / "rounds.jsonl")] == list(range(8))
    capsys.readouterr()
    assert call("federate", "--policy", "single best", "--rounds", 8, *options) == 2
    assert "policy" in capsys.readouterr().err
    assert (out / "rounds.jsonl").read_text() == after


@pytest.mark.slow
def test_a_run_that_died_before_its_first_line_begins_where_its_checkpoint_stands(sites_file, tmp_path, monkeypatch):
    from wattgym.federated.log import RoundLog

    out = tmp_path / "run"
    options = ("--sites", sites_file, *LOCAL, "--out", out, "--policy", "all sites", "--rounds", 1)

    def die(log, record, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RoundLog, "append", die)
        assert call("federate", *options) != 0
    assert not (out / "rounds.jsonl").exists()
    assert len(list((out / "checkpoints").iterdir())) == 1
    assert call("federate", *options, "--resume") == 0
    assert [record.round for record, _ in read_log(out / "rounds.jsonl")] == [0, 1]


@pytest.mark.slow
def test_a_run_in_two_parts_has_the_same_bits_as_one_in_one(finished, sites_file, tmp_path):
    out = tmp_path / "run"
    options = ("--sites", sites_file, "--policy", "all sites", "--engine", "local", "--out", out)
    assert call("federate", "--rounds", 3, *options) == 0
    assert call("federate", "--rounds", 6, *options, "--resume") == 0

    def learned(folder):
        records = [record for record, _ in read_log(folder / "rounds.jsonl")]
        losses = [{each.site: (each.metrics.loss, each.delta_norm) for each in record.outcomes} for record in records]
        return losses, [(record.round, record.evaluation) for record in records]

    (sites, evaluations), expected = learned(out), learned(finished[0])
    assert sites == expected[0]
    assert [(number, vars(each)) for number, each in evaluations] == [(n, vars(each)) for n, each in expected[1]]
    adapter = "adapter/adapter_model.safetensors"
    assert (out / adapter).read_bytes() == (finished[0] / adapter).read_bytes()
    assert len({loss for site in sites for loss, _ in site.values()}) == 18  # no round is another's


@pytest.mark.slow
def test_the_learning_model_is_fitted_to_a_run_and_held_against_another(finished, sites_file, tmp_path, capsys):
    other = tmp_path / "other"
    assert call(
        "federate", "--sites", sites_file, "--policy", "random k", "--rounds", 6, "--engine", "local", "--out", other
    ) == 0  # fmt: skip
    capsys.readouterr()
    profile = tmp_path / "profile.yaml"
    assert call("federated", "fit", finished[0], "--out", profile, "--check", other) == 0
    shown = capsys.readouterr().out
    assert "noise scale" in shown
    told = float(shown.split("was not fitted: ")[1].split()[0])
    assert told < 0.2
    assert (
        yaml.safe_load(profile.read_text())["loss_start"]
        == read_log(finished[0] / "rounds.jsonl")[0][0].evaluation.loss
    )


@pytest.mark.slow
def test_the_live_environment_is_a_gymnasium_environment(federation):
    import gymnasium as gym
    from gymnasium.utils.passive_env_checker import check_action_space, check_observation_space

    import wattgym.envs  # noqa: F401

    config = federation(network=NETWORK, clock="emulated", selection={"goal": {"target_loss": 0.5}})
    with gym.make("wattgym/SiteSelectionLive-v0", federation=config, rounds=2) as env:
        check_observation_space(env.observation_space)
        check_action_space(env.action_space)
        runs = []
        for _ in range(2):
            observation, info = env.reset(seed=1)
            assert info["sites"] == ("a", "b", "c")
            assert env.observation_space.contains(observation)
            ends = []
            for _ in range(2):
                observation, reward, terminated, truncated, info = env.step(np.ones(3, dtype=np.float32))
                assert env.observation_space.contains(observation)
                assert reward == pytest.approx(sum(info["reward_terms"].values()))
                ends.append((terminated, truncated))
            assert ends == [(False, False), (False, True)]
            runs.append([info["record"].round, len(info["record"].outcomes)])
        assert runs == [[2, 3], [2, 3]]  # every reset is a new run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "nearest"), "'nearest' is neither a selector"),
        (("--policy", "all sites", "--engine", "ray"), "--engine ray: valid are local, process, flower"),
        (("--policy", "all sites", "--rounds", "0"), "--rounds 0: valid is 1 or more"),
        (("--policy", "all sites", "--superlink", "x:1"), "go with --engine flower"),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(sites_file, tmp_path, capsys, arguments, message):
    out = tmp_path / "out"
    assert call("federate", "--sites", sites_file, "--out", out, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
