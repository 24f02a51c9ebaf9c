import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from wattgym.agents.checkpoint import (
    STEADY,
    Normaliser,
    load_checkpoint,
    load_resume_state,
    policy_controller,
    replaced_folder,
    save_checkpoint,
)
from wattgym.agents.config import TrainingConfig
from wattgym.agents.policy import checkpoint_folder, load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.training import train
from wattgym.envs.observation import ObservationLayout
from wattgym.errors import UserError
from wattgym.runs import RunFolder


@pytest.fixture
def run(ppo_run, tmp_path):
    """A copy of a finished run that a test may damage."""
    folder = tmp_path / "run"
    shutil.copytree(ppo_run.run.path, folder)
    return folder


def last_of(run):
    return checkpoint_folder(RunFolder.open(run), "last")


def test_normaliser_is_the_wrappers_arithmetic():
    normaliser = Normaliser(mean=(1.0, -2.0), var=(4.0, 0.25), epsilon=0.0, clip=3.0)
    seen = normaliser.apply(np.array([[3.0, -2.0], [1.0, 2.0]], dtype=np.float32))
    np.testing.assert_array_equal(seen, [[1.0, 0.0], [0.0, 3.0]])
    assert seen.dtype == np.float32


def test_a_feature_that_never_varied_in_training_says_nothing_later():
    """A site's capacity, say, or the age of an emulated sensor: a tenth off its constant would be 1,000 spreads."""
    normaliser = Normaliser(mean=(0.7, 0.0, 0.0), var=(0.0, 1e-10, 1.0), epsilon=1e-8, clip=10.0)
    seen = normaliser.apply(np.array([[0.6, 0.05, 0.5], [5.0, -5.0, 0.5]], dtype=np.float32))
    np.testing.assert_allclose(seen, [[0.0, 0.0, 0.5]] * 2)


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "recurrent_ppo"])
def test_a_loaded_policy_acts_as_the_trained_model_on_normalised_observations(algorithm, tiny, tmp_path, ppo_run):
    folder = ppo_run.run.path
    if algorithm != "ppo":
        folder = train(tiny(algorithm, train__total_steps=256), tmp_path / "run", progress=False).run.path
    checkpoint = load_checkpoint(last_of(folder))
    wrapper = load_resume_state(checkpoint)["normalise"]
    controller = load_policy(folder, "last").controller
    arena = Arena(tiny().env)
    observed = []
    arena.run(Recorder(controller, observed), [1, 2, 3])
    state = None
    varied = wrapper.obs_rms.var >= STEADY**2
    assert 0 < np.count_nonzero(~varied) < varied.size / 2
    for observation, action in observed:
        shown = np.where(varied, wrapper.normalize_obs(observation), np.float32(0.0))
        expected, state = checkpoint.model.predict(shown, state=state, deterministic=True)
        np.testing.assert_allclose(action, expected, atol=1e-6)
    # The statistics matter: without them the policy acts otherwise.
    raw, _ = checkpoint.model.predict(observed[5][0], deterministic=True)
    assert np.abs(raw - observed[5][1]).max() > 1e-3


class Recorder:
    name = "recorder"

    def __init__(self, controller, observed):
        self._controller, self._observed = controller, observed

    def reset(self, task):
        self._controller.reset(task)

    def act(self, observation):
        action = self._controller.act(observation)
        self._observed.append((observation.copy(), action))
        return action


def test_a_recurrent_policy_forgets_the_last_episode(tiny, tmp_path):
    folder = train(tiny("recurrent_ppo", train__total_steps=128), tmp_path / "run", progress=False).run.path
    controller = load_policy(folder, "last").controller
    arena = Arena(tiny().env)
    first, second = (arena.run(controller, [4, 5]).power_w for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_policy_without_normaliser_sees_raw_observations(tiny, tmp_path):
    config = tiny(train__normalise_observations=False, train__total_steps=128)
    folder = train(config, tmp_path / "run", progress=False).run.path
    checkpoint = load_checkpoint(last_of(folder))
    assert checkpoint.manifest.normaliser is None
    observed = []
    Arena(config.env).run(Recorder(load_policy(folder).controller, observed), [1])
    for observation, action in observed:
        np.testing.assert_array_equal(action, checkpoint.model.predict(observation, deterministic=True)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env__site__jobs": 3}, "'job2.limit_1' where the policy expects 'job0.limit_2'"),
        ({"env__observation": {"preview_periods": 1}}, "'preview_1' where the policy expects 'error_1'"),
    ],
)
def test_a_policy_refuses_an_environment_that_shows_something_else(changes, message, ppo_run, tiny):
    controller = load_policy(ppo_run.run.path).controller
    with pytest.raises(UserError, match=message):
        Arena(tiny(**changes).env).run(controller, [1])


def test_manifest_names_the_features_in_order(ppo_run):
    manifest = load_checkpoint(last_of(ppo_run.run.path)).manifest
    layout = ObservationLayout(TrainingConfig.model_validate(ppo_run.run.config).env.observation, 2)
    assert manifest.features == tuple(feature.name for feature in layout.features)
    assert len(manifest.normaliser.mean) == layout.size
    assert manifest.algorithm == "ppo"


@pytest.mark.parametrize("file", ["policy.zip", "resume.pkl"])
def test_damage_is_refused_by_file(file, run):
    path = last_of(run) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"{file}: damaged"):
        load_policy(run, "last")
    path.unlink()
    with pytest.raises(UserError, match=f"'{file}' is missing"):
        load_policy(run, "last")


def test_a_damaged_checkpoint_can_be_put_aside(run, tiny):
    (last_of(run) / "policy.zip").write_bytes(b"")
    with pytest.raises(UserError, match="without this folder an earlier checkpoint of the run is used"):
        train(tiny(), run, resume=True, progress=False)
    shutil.rmtree(last_of(run))
    assert train(tiny(), run, resume=True, progress=False).steps == 1024


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"schema_version": 7}, "schema version 7, this WattGym reads version 1"),
        ({"features": "x"}, "features"),
        ({"surplus": 1}, "unknown key 'surplus'"),
    ],
)
def test_foreign_manifests_are_refused(content, message, run):
    path = last_of(run) / "checkpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
    with pytest.raises(UserError, match=message):
        load_policy(run, "last")


def test_cut_short_manifest_and_missing_checkpoints_are_refused(run):
    path = last_of(run) / "checkpoint.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match="cut short"):
        load_policy(run, "last")
    path.unlink()
    with pytest.raises(UserError, match=r"not a checkpoint \(it has no checkpoint.json\)"):
        load_policy(run, "last")
    shutil.rmtree(run / "checkpoints")
    assert load_policy(run).controller.name == "run"
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_policy(run, "last")
    with pytest.raises(UserError, match="not a run folder"):
        load_policy(run.parent)


def test_a_policy_to_use_holds_no_state_to_resume(run):
    with pytest.raises(UserError, match="no state to resume"):
        load_resume_state(load_checkpoint(run / "best"))


def test_a_crash_between_the_two_renames_loses_nothing(run):
    expected = load_policy(run).steps
    (run / "best").rename(replaced_folder(run / "best"))
    assert load_policy(run).steps == expected
    model = load_checkpoint(last_of(run)).model
    save_checkpoint(run / "best", model, "ppo", ("a",), None)
    assert load_checkpoint(run / "best").manifest.features == ("a",)
    assert not replaced_folder(run / "best").exists()


def test_drafts_of_a_killed_process_are_cleared_away(run):
    draft = run / ".best.k1ll3d"
    draft.mkdir()
    (draft / "policy.zip").write_text("half")
    save_checkpoint(run / "best", load_checkpoint(last_of(run)).model, "ppo", (), None)
    assert sorted(path.name for path in run.iterdir()) == [
        "best", "checkpoints", "config.yaml", "run.json", "tensorboard", "validations.json",
    ]  # fmt: skip


FULL_DISK = """
import resource, sys
from pathlib import Path
from wattgym.agents.checkpoint import load_checkpoint, save_checkpoint
from wattgym.errors import UserError

source, target = map(Path, sys.argv[1:3])
model = load_checkpoint(source).model
for room in sys.argv[3:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), resource.RLIM_INFINITY))
    try:
        save_checkpoint(target, model, "ppo", ("new",), {"anything": bytes(100_000)})
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint_whole(run):
    target = last_of(run)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    # A limit on the size of files fails as a full disk does: at the policy's first byte, within it, and after it.
    rooms = ["0", "700", str(len(before["policy.zip"]) + 5)]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, target, target, *rooms], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(rooms)
    assert all("cannot save the checkpoint: File too large" in line for line in lines)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert [path for path in target.parent.iterdir() if path.name.startswith(".")] == []
    assert load_policy(run, "last").steps == 1024


def test_a_checkpoint_that_cannot_be_placed_is_one_line(run, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot save the checkpoint"):
        save_checkpoint(tmp_path / "file" / "best", load_checkpoint(last_of(run)).model, "ppo", (), None)
    assert (tmp_path / "file").read_text() == "x"


def test_random_generators_are_restored(run):
    checkpoint = load_checkpoint(last_of(run))
    load_resume_state(checkpoint)
    first = torch.rand(3), np.random.rand(3), checkpoint.model.action_space.sample()  # noqa: NPY002
    load_resume_state(checkpoint)
    second = torch.rand(3), np.random.rand(3), checkpoint.model.action_space.sample()  # noqa: NPY002
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_in_training_acts_with_its_present_statistics(run, tiny):
    checkpoint = load_checkpoint(last_of(run))
    state = load_resume_state(checkpoint)
    state["normalise"].set_venv(state["env"])
    checkpoint.model.set_env(state["normalise"], force_reset=False)
    controller = policy_controller(checkpoint.model, checkpoint.manifest.features, "now")
    one, other = (Arena(tiny().env).run(c, [9]).power_w for c in (controller, load_policy(run, "last").controller))
    np.testing.assert_array_equal(one, other)
