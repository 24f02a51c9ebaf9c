import json
import math
import shutil

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from wattgym.agents import training
from wattgym.agents.callbacks import StopTraining, TrainingCallback
from wattgym.agents.checkpoint import load_checkpoint
from wattgym.agents.policy import checkpoint_folder, load_policy
from wattgym.agents.training import train
from wattgym.agents.validation import SHOWN, ValidationScores
from wattgym.envs.reward import TERMS
from wattgym.errors import UserError


def weights(folder, which="last"):
    model = load_checkpoint(checkpoint_folder(training.RunFolder.open(folder), which)).model
    return {name: tensor.numpy().copy() for name, tensor in model.policy.state_dict().items()}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], atol=1e-6, err_msg=name)


def scalars(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def stop_at(monkeypatch):
    """Makes a training stop in good order once it has reached a number of steps, as the first Ctrl-C does."""

    def arrange(steps):
        original = TrainingCallback._on_rollout_start

        def patched(self):
            self._stop.requested = self._stop.requested or self.model.num_timesteps >= steps
            original(self)

        monkeypatch.setattr(TrainingCallback, "_on_rollout_start", patched)

    yield arrange
    monkeypatch.undo()


@pytest.mark.parametrize("algorithm", ["ppo", "recurrent_ppo", "sac", "tqc"])
def test_every_algorithm_trains_and_its_policy_acts(algorithm, trained, tiny, tmp_path):
    outcome = train(tiny(algorithm), tmp_path / "run", progress=False)
    assert outcome.steps == 1024
    assert not outcome.interrupted
    assert outcome.run.info.status == "finished"
    assert training.RunFolder.open(tmp_path / "run", "training").info.status == "finished"
    policy = load_policy(tmp_path / "run", "last")
    assert policy.steps == 1024
    assert policy.controller.name == "run"
    assert math.isfinite(outcome.best_reward)
    other = trained(algorithm)
    assert other.best_reward == outcome.best_reward
    assert_same_weights(weights(tmp_path / "run"), weights(other.run.path))


# In the middle of an episode; for SAC once while its actions are still random and once after.
@pytest.mark.parametrize(
    ("algorithm", "stop"), [("ppo", 300), ("recurrent_ppo", 300), ("sac", 64), ("sac", 300), ("tqc", 300)]
)
def test_resuming_continues_as_if_nothing_had_happened(algorithm, stop, trained, tiny, tmp_path, stop_at, monkeypatch):
    straight = trained(algorithm)
    path = straight.run.path
    stop_at(stop)
    parted = train(tiny(algorithm), tmp_path / "parted", progress=False)
    assert parted.interrupted
    assert stop <= parted.steps < 1024
    assert training.RunFolder.open(tmp_path / "parted").info.status == "interrupted"
    monkeypatch.undo()
    # Whatever else drew random numbers in between must not matter.
    torch.rand(7), np.random.rand(7)  # noqa: NPY002
    resumed = train(tiny(algorithm), tmp_path / "parted", resume=True, progress=False)
    assert (resumed.steps, resumed.best_reward) == (straight.steps, straight.best_reward)
    assert resumed.run.info.status == "finished"
    assert_same_weights(weights(path), weights(tmp_path / "parted"))
    assert_same_weights(weights(path, "best"), weights(tmp_path / "parted", "best"))
    one, other = scalars(path), scalars(tmp_path / "parted")
    for tag in (tag for tag in one if tag.startswith("validation")):
        np.testing.assert_allclose(other[tag], one[tag], atol=1e-6, err_msg=tag)
    one, other = (load_policy(name, "last").controller._normaliser for name in (path, tmp_path / "parted"))
    assert one == other


def test_a_finished_run_goes_on_with_more_steps(ppo_run, tiny, tmp_path):
    train(tiny(train__total_steps=512), tmp_path / "parted", progress=False)
    more = train(tiny(), tmp_path / "parted", resume=True, progress=False)
    assert more.steps == 1024
    assert len(more.run.info.resumed) == 1
    assert_same_weights(weights(ppo_run.run.path), weights(tmp_path / "parted"))


def test_resuming_a_complete_run_changes_nothing(ppo_run, tiny, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ppo_run.run.path, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.json"}
    again = train(tiny(), folder, resume=True, progress=False)
    assert (again.steps, again.best_reward) == (1024, ppo_run.best_reward)
    assert again.run.info.status == "finished"
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.json"}
    assert before == after


def test_resume_starts_a_run_where_there_is_none(tiny, tmp_path):
    outcome = train(tiny(train__total_steps=128), tmp_path / "new", resume=True, progress=False)
    assert outcome.steps == 128


def test_resume_refuses_another_configuration_by_key(ppo_run, tiny, tmp_path):
    with pytest.raises(UserError, match=r"'network.hidden' was \[16\], is now \[32\]"):
        train(tiny(network__hidden=[32]), ppo_run.run.path, resume=True, progress=False)
    with pytest.raises(UserError, match="seed"):
        train(tiny(seed=5), ppo_run.run.path, resume=True, progress=False)
    with pytest.raises(UserError, match="not empty"):
        train(tiny(), ppo_run.run.path, progress=False)
    assert training.RunFolder.open(ppo_run.run.path).info.status == "finished"


def test_stop_in_the_last_rollout_is_a_finished_run(tiny, tmp_path, monkeypatch):
    class Late(TrainingCallback):
        def _on_step(self):
            self._stop.requested = self.model.num_timesteps >= 1000
            return super()._on_step()

    monkeypatch.setattr(training, "TrainingCallback", Late)
    outcome = train(tiny(), tmp_path / "run", progress=False)
    assert not outcome.interrupted
    assert outcome.run.info.status == "finished"
    assert outcome.steps == 1024


def test_status_says_failed_when_training_breaks(tiny, tmp_path, monkeypatch):
    def broken(self):
        raise RuntimeError("broken")

    monkeypatch.setattr(TrainingCallback, "_on_step", broken)
    with pytest.raises(RuntimeError):
        train(tiny(), tmp_path / "run", progress=False)
    assert training.RunFolder.open(tmp_path / "run").info.status == "failed"
    assert issubclass(StopTraining, KeyboardInterrupt)


def test_best_policy_is_the_one_of_the_best_validation(tiny, tmp_path, monkeypatch):
    rewards = iter([-3.0, -1.0, -2.0, -1.0, -5.0])
    seen = []

    def run(self, controller):
        seen.append(controller._model.policy.state_dict()["action_net.bias"].numpy().copy())
        return ValidationScores(next(rewards), {"rega": {"reward_mean": 0.0}})

    monkeypatch.setattr("wattgym.agents.validation.Validation.run", run)
    outcome = train(tiny(), tmp_path / "run", progress=False)
    assert outcome.best_reward == -1.0
    # Of equal ones the earlier is kept.
    np.testing.assert_array_equal(weights(tmp_path / "run", "best")["action_net.bias"], seen[1])
    assert load_policy(tmp_path / "run").steps == 512
    assert load_policy(tmp_path / "run", "last").steps == 1024


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_tensorboard_holds_every_term_and_score(algorithm, trained):
    tags = scalars(trained(algorithm).run.path)
    for name in (*TERMS, "total"):
        assert all(math.isfinite(value) for _, value in tags[f"reward/{name}"])
    sums = zip(*(tags[f"reward/{name}"] for name in TERMS), strict=True)
    for parts, (step, total) in zip(sums, tags["reward/total"], strict=True):
        assert {part[0] for part in parts} == {step}
        assert sum(part[1] for part in parts) == pytest.approx(total, abs=1e-5)
    # In ten minutes of droop the signal is too low for a score.
    scores = {("rega", name) for name in SHOWN} | {("droop", name) for name in SHOWN if not name.startswith("pjm")}
    for family, name in scores:
        assert len(tags[f"validation_{family}/{name}"]) == 4
    assert [step for step, _ in tags["validation/reward"]] == [256, 512, 768, 1024]
    assert {"rollout/mae_over_r", "rollout/throughput", "rollout/ep_rew_mean"} <= tags.keys()


def test_logged_error_uses_the_capacity_of_its_own_episode(tiny, tmp_path):
    # Episodes of one period: were it divided by the next episode's capacity, sites of other sizes would show.
    config = tiny(env__episode_s=10.0, env__site__jobs=1, env__site__gpus_per_job=[1, 64], train__total_steps=512)
    folder = train(config, tmp_path / "run", progress=False).run.path
    values = [value for _, value in scalars(folder)["rollout/mae_over_r"]]
    # Power lies between nothing and full; capacity is 35 % of the band, so errors stay below a few capacities.
    assert max(values) < 6.0


def test_only_the_last_checkpoints_are_kept(ppo_run):
    folder = ppo_run.run.path / "checkpoints"
    assert [path.name for path in sorted(folder.iterdir())] == ["step_000000000768", "step_000000001024"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__hyperparameters": {"learningrate": 1}}, "unknown key 'learningrate' of ppo, did you mean 'learning_"),
        ({"train__hyperparameters": {"seed": 1}}, "unknown key 'seed'"),
        ({"train__hyperparameters": {"learning_rate": "fast"}}, "learning_rate: 'fast' is no number"),
        ({"train__hyperparameters": {"gamma": 1.5}}, "gamma: 1.5 is no number from 0 to 1"),
        ({"train__hyperparameters": {"n_steps": 0}}, "n_steps: 0 is no positive"),
        ({"train__hyperparameters": {"n_steps": 32, "batch_size": 50}}, "mini-batch size of 50"),
        ({"validation__families": ["regaa"]}, "regaa"),
        ({"validation__families": ["regd"]}, "nothing in the validation split"),
        ({"validation__episode_s": 601.0}, "601"),
        ({"validation__episode_s": 200.0}, "too few"),
        ({"validation__episode_s": 500_000.0}, "rega"),
        ({"env__signal__families": {"rega": 1e-9, "synthetic_regd": 1}, "env__episode_s": 500_000.0}, "rega"),
        ({"env__signal__families": {"regd": 1}}, "nothing in the train split"),
        ({"env__site__surfaces": ["no-such-gpu"]}, "no-such-gpu"),
    ],
)
def test_bad_configurations_are_refused_before_a_folder_is_made(changes, message, tiny, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        train(tiny(**changes), tmp_path / "run", progress=False)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env__signal__split": "test"}, "env.signal.split must be 'train'"),
        ({"env__site__surfaces": "test"}, "held-out split 'test'"),
        ({"algorithm": "sac", "network__log_std_init": 0.0}, "network.log_std_init has no meaning for 'sac'"),
        ({"network__lstm_hidden": 3}, "network.lstm_hidden has no meaning for 'ppo'; it goes with recurrent_ppo"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(changes, message, tiny):
    with pytest.raises(UserError, match=message):
        tiny(**changes)


def test_a_small_batch_gets_a_fitting_mini_batch(tiny, tmp_path):
    config = tiny(train__num_envs=1, train__hyperparameters={"n_steps": 6}, train__total_steps=12)
    assert train(config, tmp_path / "run", progress=False).steps == 12


def test_an_unusable_folder_is_one_line(tiny, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="file"):
        train(tiny(), tmp_path / "file" / "run", progress=False)


def test_a_run_of_another_schema_version_is_refused(ppo_run, tiny, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(ppo_run.run.path, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "schema_version": 99}))
    for action in (lambda: load_policy(folder), lambda: train(tiny(), folder, resume=True, progress=False)):
        with pytest.raises(UserError, match="schema version 99, this WattGym reads version 1"):
            action()
