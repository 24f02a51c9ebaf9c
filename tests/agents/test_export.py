import importlib.util
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import onnx
import pytest
import torch
from sb3_contrib import TQC, RecurrentPPO
from stable_baselines3 import PPO, SAC

from wattgym.agents import export
from wattgym.agents.bundle import BundleController, load_bundle
from wattgym.agents.checkpoint import STEADY, Checkpoint, Manifest, Normaliser, load_checkpoint, load_resume_state
from wattgym.agents.export import BundledPolicy, export_bundle, onnx_model, record, sample_observations, to_double
from wattgym.agents.job_policy import JobPolicy
from wattgym.agents.onnx_graph import OPERATORS
from wattgym.agents.onnx_policy import OnnxPolicy
from wattgym.agents.policy import checkpoint_folder, load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.training import train
from wattgym.envs.observation import BOUND
from wattgym.errors import UserError

ALGORITHMS = ("ppo", "recurrent_ppo", "sac", "tqc")


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("algorithms")
    return {
        name: train(tiny(name, train__total_steps=256), folder / name, progress=False).run.path for name in ALGORITHMS
    }


@pytest.fixture(scope="module")
def bundles(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    return {name: export_bundle(run, folder / name, "last") for name, run in runs.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bundle_acts_as_stable_baselines_does_on_what_its_own_normaliser_shows_it(algorithm, runs, bundles):
    bundle = bundles[algorithm]
    checkpoint = load_checkpoint(checkpoint_folder(load_policy(runs[algorithm]).run, "last"))
    normalise = load_resume_state(checkpoint)["normalise"]
    steps, batch = 100, 100
    rng = np.random.default_rng(5)
    features = len(bundle.manifest.contract.features)
    observations = rng.uniform(-BOUND, BOUND, (steps, batch, features)).astype(np.float32)
    observations[:, ::4] = rng.choice([-BOUND, 0.0, BOUND], (steps, 25, features))
    # Its network has learnt nothing of what did not vary in training: that stays at the mean.
    steady = normalise.obs_rms.var < STEADY**2
    shown = np.where(steady, np.float32(0.0), normalise.normalize_obs(observations))
    assert (np.abs(shown) == normalise.clip_obs).any()
    assert (np.abs(shown) < normalise.clip_obs).any()
    state = own = None
    for k in range(steps):
        expected, own = checkpoint.model.predict(shown[k], state=own, deterministic=True)
        action, state = bundle.policy.step(observations[k], state)
        assert np.abs(action - expected).max() <= 1e-6
    assert action.shape == (batch, 2)
    assert np.ptp(action) > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bundle_and_its_run_take_the_same_course_through_an_episode(algorithm, runs, bundles, tiny):
    arena = Arena(tiny().env)
    mine = arena.run(BundleController(bundles[algorithm]), [1, 2, 3])
    theirs = arena.run(load_policy(runs[algorithm], "last").controller, [1, 2, 3])
    np.testing.assert_allclose(mine.limit, theirs.limit, atol=1e-5)
    np.testing.assert_allclose(mine.reward, theirs.reward, atol=1e-4)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batches_of_any_size_give_the_same_actions(algorithm, bundles):
    policy = bundles[algorithm].policy
    observations = np.random.default_rng(1).uniform(-2, 2, (9, 7, len(bundles[algorithm].manifest.contract.features)))
    state, states = None, [None] * 7
    for observation in observations.astype(np.float32):
        together, state = policy.step(observation, state)
        for b in range(7):
            alone, states[b] = policy.step(observation[b : b + 1], states[b])
            np.testing.assert_allclose(alone[0], together[b], atol=1e-7)


def test_memory_lasts_within_an_episode_and_is_gone_in_the_next(bundles, tiny):
    controller = BundleController(bundles["recurrent_ppo"])
    task = started(tiny().env)
    observation = np.full((3, task.layout.size), 0.5, np.float32)
    controller.reset(task)
    first = [controller.act(observation) for _ in range(3)]
    assert np.abs(first[0] - first[2]).max() > 1e-6
    controller.reset(task)
    np.testing.assert_array_equal([controller.act(observation) for _ in range(3)], first)
    # A mask begins an episode for some sites of a batch alone.
    policy = bundles["recurrent_ppo"].policy
    _, state = policy.step(observation)
    action, _ = policy.step(observation, state, np.array([0, 1, 0], np.float32))
    np.testing.assert_allclose(action, [first[1][0], first[0][1], first[1][2]], atol=1e-7)


def started(env):
    arena = Arena(env)
    arena.draw([1])
    return arena._shaping.task


def test_the_manifest_says_what_the_policy_is_and_where_it_comes_from(runs, bundles):
    manifest = bundles["sac"].manifest
    run = load_policy(runs["sac"]).run
    assert (manifest.kind, manifest.name) == ("power_shaping", "sac")
    assert (manifest.training.algorithm, manifest.training.steps, manifest.training.checkpoint) == ("sac", 256, "last")
    assert manifest.training.run == run.info
    assert manifest.training.config == run.config
    contract = manifest.contract
    assert (contract.jobs, contract.period_s, contract.action.kind) == (2, 10.0, "absolute")
    assert contract.features[0].model_dump() == {
        "name": "target", "unit": "half band from its middle", "low": -5.0, "high": 5.0
    }  # fmt: skip
    assert contract.features[-1].name == "job1.knee"
    assert manifest.recurrence is None
    assert bundles["recurrent_ppo"].manifest.recurrence.model_dump() == {"layers": 1, "size": 8}
    assert manifest.parity.observations == 10_000
    assert 0 <= manifest.parity.largest_difference <= 1.2e-7
    assert 0 < manifest.parity.rounding < 1e-6
    assert {"torch", "stable-baselines3", "onnx", "onnxruntime"} <= manifest.packages.keys()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_network_is_one_file_of_listed_operators_that_the_reference_checker_accepts(algorithm, bundles):
    model = onnx.load(bundles[algorithm].folder / "policy.onnx", load_external_data=False)
    onnx.checker.check_model(model, full_check=True)
    assert {node.op_type for node in model.graph.node} <= OPERATORS
    assert {path.name for path in bundles[algorithm].folder.iterdir()} == {"bundle.json", "policy.onnx", "golden.npz"}


def test_golden_pairs_are_the_training_librarys_answers(runs, bundles):
    checkpoint = load_checkpoint(checkpoint_folder(load_policy(runs["tqc"]).run, "last"))
    with np.load(bundles["tqc"].folder / "golden.npz", allow_pickle=False) as golden:
        observation, action = golden["observation"][0], golden["action"][0]
    assert observation.shape == (256, len(bundles["tqc"].manifest.contract.features))
    seen = checkpoint.manifest.normaliser.apply(observation)
    np.testing.assert_allclose(action, checkpoint.model.predict(seen, deterministic=True)[0], atol=1e-6)
    with np.load(bundles["recurrent_ppo"].folder / "golden.npz", allow_pickle=False) as golden:
        assert golden["observation"].shape[:2] == (16, 16)
        assert set(np.unique(golden["episode_start"])) == {0.0, 1.0}
        assert np.abs(golden["hidden"]).max() > 0.5


class Unit(gymnasium.Env):
    """Spaces alone, with an action box whose ends differ in every dimension."""

    observation_space = gymnasium.spaces.Box(-5.0, 5.0, (6,), np.float32)
    action_space = gymnasium.spaces.Box(
        np.array([-0.5, -1.0, -0.25], np.float32), np.array([0.75, 1.0, 0.5], np.float32)
    )

    def reset(self, *, seed=None, options=None):
        return np.zeros(6, np.float32), {}


NORMALISER = Normaliser(
    mean=(0.3, -1.0, 0.0, 2.0, 1.0, 0.0), var=(2e-6, 1.0, 0.01, 4.0, 0.25, 0.0), epsilon=1e-8, clip=7.0
)
BOX = {"use_sde": True, "policy_kwargs": {"squash_output": True}}
VARIANTS = [
    (PPO, "MlpPolicy", {}),
    (PPO, "MlpPolicy", {"policy_kwargs": {"share_features_extractor": False, "activation_fn": torch.nn.ReLU}}),
    (PPO, "MlpPolicy", {"policy_kwargs": {"net_arch": []}}),
    (PPO, "MlpPolicy", BOX),
    (PPO, JobPolicy, {"policy_kwargs": {"jobs": 3, "site": 3, "hidden": (16, 16), "net_arch": None}}),
    (SAC, "MlpPolicy", {}),
    (SAC, "MlpPolicy", {"use_sde": True}),
    (TQC, "MlpPolicy", {"policy_kwargs": {"share_features_extractor": True}}),
    (RecurrentPPO, "MlpLstmPolicy", {"policy_kwargs": {"lstm_hidden_size": 8}}),
    (
        RecurrentPPO,
        "MlpLstmPolicy",
        {
            "policy_kwargs": {
                "lstm_hidden_size": 8,
                "n_lstm_layers": 2,
                "shared_lstm": True,
                "enable_critic_lstm": False,
            }
        },
    ),
]


def built(algorithm, policy, settings, normaliser=NORMALISER, seed=0):
    # Small, so that the rounding of single precision cannot be mistaken for a difference.
    settings = {**settings, "policy_kwargs": {"net_arch": [16, 16], **settings.get("policy_kwargs", {})}}
    model = algorithm(policy, Unit(), seed=seed, device="cpu", **settings)
    with torch.no_grad():
        # Actions from one end of the box to the other, also beyond it.
        mean = model.policy.actor.mu if hasattr(model.policy, "actor") else model.policy.action_net
        for parameter in mean.parameters():
            parameter.uniform_(-0.4, 0.4, generator=torch.Generator().manual_seed(seed))
    manifest = Manifest(
        schema_version=1, algorithm="ppo", steps=0, normaliser=normaliser, features=tuple("abcdef"), sha256={}
    )
    return Checkpoint(manifest, model, Path("nowhere"))


@pytest.mark.parametrize("normaliser", [NORMALISER, None])
@pytest.mark.parametrize(("algorithm", "policy", "settings"), VARIANTS)
def test_parity_holds_for_every_shape_of_policy(algorithm, policy, settings, normaliser):
    checkpoint = built(algorithm, policy, settings, normaliser)
    recurrence = export._recurrence(checkpoint.model.policy)
    before = {name: value.clone() for name, value in checkpoint.model.policy.state_dict().items()}
    network = OnnxPolicy(onnx_model(checkpoint, recurrence), 6, 3, recurrence)
    after = checkpoint.model.policy.state_dict()
    assert all(torch.equal(value, after[name]) and value.dtype == after[name].dtype for name, value in before.items())
    recorded = record(checkpoint, np.random.default_rng(2), 2500)
    assert recorded.difference(network) <= 1e-6
    to_double(checkpoint.model.policy)
    # Half the last digit of what both return.
    assert record(checkpoint, np.random.default_rng(2), 2500).difference(network) <= 1.2e-7
    low, high = Unit.action_space.low, Unit.action_space.high
    flat = recorded.action.reshape(-1, 3)
    assert (flat >= low).all()
    assert (flat <= high).all()
    assert (np.ptp(flat, axis=0) > 0.25 * (high - low)).all()


def test_compared_observations_reach_every_corner_of_what_a_policy_can_see():
    observations = sample_observations(np.random.default_rng(0), 10_000, 6, NORMALISER)
    assert observations.shape == (10_000, 6)
    assert observations.dtype == np.float32
    assert observations.min() == -BOUND
    assert observations.max() == BOUND
    shown = NORMALISER.apply(observations)
    clipped = (np.abs(shown) == NORMALISER.clip).mean(axis=0)
    # Features that hardly vary are clipped unless they are at their mean; those of unit spread never are; those that do
    # not vary at all are not shown.
    assert not shown[:, 5].any()
    assert clipped[0] > 0.3
    assert clipped[1] == 0.0
    assert 0.0 < clipped[2] < 0.7
    ordinary = (np.abs(shown[:, 1:5]) < 3).all(axis=1).mean()
    assert 0.3 < ordinary < 0.9


def test_a_steep_network_is_judged_by_what_it_computes_not_by_how_its_library_rounds():
    settings = {"policy_kwargs": {"activation_fn": torch.nn.ReLU, "net_arch": [256, 256]}}
    checkpoint = built(PPO, "MlpPolicy", settings)
    network = OnnxPolicy(onnx_model(checkpoint, None), 6, 3, None)
    single = record(checkpoint, np.random.default_rng(2), 2500)
    alone = [checkpoint.model.predict(NORMALISER.apply(x), deterministic=True)[0] for x in single.observation[0]]
    # The library contradicts itself by more than the tolerance, depending on the size of the batch.
    assert np.abs(alone - single.action[0]).max() > 1e-6
    to_double(checkpoint.model.policy)
    assert record(checkpoint, np.random.default_rng(2), 2500).difference(network) <= 1.2e-7


def no_clip(self, observation):
    return (observation.double() - self.mean) / self.spread


def no_squash(self, x):
    return torch.clamp(self.mean_action(self.latent(x)), -1.0, 1.0)


def halves_forgotten(self, x):
    return 0.5 * self.mean_action(self.latent(x))


@pytest.mark.parametrize(
    ("algorithm", "part", "wrong"),
    [("ppo", "_normalised", no_clip), ("sac", "_action", no_squash), ("recurrent_ppo", "_action", halves_forgotten)],
)
def test_a_network_that_acts_otherwise_is_not_written(algorithm, part, wrong, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(BundledPolicy, part, wrong)
    with pytest.raises(UserError, match=r"actions differ from the original's by .* no bundle was written"):
        export_bundle(runs[algorithm], tmp_path / "out" / "bundle", "last")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_filled_and_a_full_one_is_left_alone(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert export_bundle(runs["ppo"], empty).folder == empty
    assert load_bundle(empty).manifest.training.checkpoint == "best"
    before = {path.name: path.read_bytes() for path in empty.iterdir()}
    with pytest.raises(UserError, match="is not empty"):
        export_bundle(runs["ppo"], empty)
    assert {path.name: path.read_bytes() for path in empty.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        export_bundle(runs["ppo"], tmp_path / "file")
    with pytest.raises(UserError, match="cannot write the bundle"):
        export_bundle(runs["ppo"], tmp_path / "file" / "bundle")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}


def test_a_folder_that_fills_while_the_bundle_is_made_is_left_alone(runs, tmp_path, monkeypatch):
    out = tmp_path / "bundle"
    original = export.record

    def meanwhile(*arguments):
        out.mkdir(exist_ok=True)
        (out / "mine").write_text("x")
        return original(*arguments)

    monkeypatch.setattr(export, "record", meanwhile)
    with pytest.raises(UserError, match="cannot write the bundle"):
        export_bundle(runs["ppo"], out)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize("package", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, runs, tmp_path, monkeypatch):
    original = importlib.util.find_spec
    monkeypatch.setattr(export.util, "find_spec", lambda name: None if name == package else original(name))
    with pytest.raises(UserError, match=rf"needs {package}: pip install 'wattgym\[export\]'"):
        export_bundle(runs["ppo"], tmp_path / "bundle")


def test_exporting_says_nothing_beside_its_own_line(runs, tmp_path):
    """The exporter of torch and the runtime both like to talk on stderr."""
    command = [sys.executable, "-m", "wattgym", "export", str(runs["ppo"]), "--out", str(tmp_path / "bundle")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
