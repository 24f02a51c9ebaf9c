"""Training for site selection: through the same code as power shaping, with the same promises."""

import json
import shutil

import numpy as np
import pytest
import torch

from wattgym.agents import training
from wattgym.agents.callbacks import StopTraining, TrainingCallback
from wattgym.agents.checkpoint import load_checkpoint
from wattgym.agents.config import (
    ImitationConfig,
    SelectionTrainingConfig,
    TrainingConfig,
    parse_training,
    with_family_files,
)
from wattgym.agents.imitation import _returns, imitate
from wattgym.agents.policy import checkpoint_folder, load_policy
from wattgym.agents.problem import problem_of, shared_out
from wattgym.agents.selectors.selector import Observing, Turn
from wattgym.agents.training import train
from wattgym.agents.validation import SelectionValidation, held_out_federation
from wattgym.envs.federation.learning import domain_loss, remaining_progress
from wattgym.envs.mixed import MixedVecEnv
from wattgym.envs.selection import SiteSelection
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv
from wattgym.errors import UserError


class Go:
    requested = False


def weights(folder, which="last"):
    model = load_checkpoint(checkpoint_folder(training.RunFolder.open(folder), which)).model
    return {name: tensor.numpy().copy() for name, tensor in model.policy.state_dict().items()}


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def run(tiny_selection, tmp_path_factory):
    return train(tiny_selection(), tmp_path_factory.mktemp("selection") / "tiny", progress=False)


@pytest.mark.parametrize(
    "changes", [{}, {"network__architecture": "set_attention"}, {"imitation__expert": "powertrip"}]
)
def test_one_seed_one_training(tiny_selection, changes, run, tmp_path):
    one = train(tiny_selection(**changes), tmp_path / "one", progress=False) if changes else run
    torch.rand(5), np.random.rand(5)  # noqa: NPY002
    other = train(tiny_selection(**changes), tmp_path / "other", progress=False)
    assert one.best_reward == other.best_reward
    assert one.run.info.status == "finished"
    assert_same_weights(weights(one.run.path), weights(tmp_path / "other"))


@pytest.mark.parametrize("changes", [{}, {"network": {"hidden": [16]}, "imitation": {}}])
def test_resuming_continues_as_if_nothing_had_happened(tiny_selection, changes, run, tmp_path, monkeypatch):
    straight = train(tiny_selection(**changes), tmp_path / "straight", progress=False) if changes else run
    original = TrainingCallback._on_rollout_start

    def stop(self):
        self._stop.requested = self._stop.requested or self.model.num_timesteps >= 150
        original(self)

    monkeypatch.setattr(TrainingCallback, "_on_rollout_start", stop)
    parted = train(tiny_selection(**changes), tmp_path / "parted", progress=False)
    assert parted.interrupted
    assert parted.steps == 192
    monkeypatch.undo()
    torch.rand(5), np.random.rand(5)  # noqa: NPY002
    resumed = train(tiny_selection(**changes), tmp_path / "parted", resume=True, progress=False)
    assert (resumed.steps, resumed.best_reward) == (straight.steps, straight.best_reward)
    for which in ("last", "best"):
        assert_same_weights(weights(straight.run.path, which), weights(tmp_path / "parted", which))


def test_a_stop_in_the_warm_start_begins_it_anew(tiny_selection, run, tmp_path, monkeypatch):
    class Stop:
        requested = True

    with pytest.raises(StopTraining):
        imitate(
            training._fresh(tiny_selection(), problem_of(tiny_selection())), tiny_selection(), Stop(), progress=False
        )
    calls = []

    def interrupted(*arguments, **keywords):
        calls.append(1)
        raise StopTraining

    with monkeypatch.context() as patch:
        patch.setattr("wattgym.agents.imitation._sweep", interrupted)
        assert train(tiny_selection(), tmp_path / "run", progress=False).interrupted
    assert calls
    resumed = train(tiny_selection(), tmp_path / "run", resume=True, progress=False)
    assert resumed.best_reward == run.best_reward
    assert_same_weights(weights(tmp_path / "run"), weights(run.run.path))


def test_the_record_states_the_warm_start(run):
    record = json.loads((run.run.path / "imitation.json").read_text())
    assert record["expert"] == "oracle"
    assert record["decisions"] == 3 * 60
    assert 0.5 < record["agreement"] <= 1.0
    assert (run.run.path / "best").is_dir()


def test_the_saved_policy_acts_as_the_trained_one_on_any_number_of_sites(run, tmp_path):
    shutil.copytree(run.run.path, tmp_path / "copy")
    one, other = (load_policy(path, "last") for path in (run.run.path, tmp_path / "copy"))
    assert isinstance(one.config, SelectionTrainingConfig)
    for count in (5, 23):
        env = one.config.envs["a"].model_copy(deep=True)
        sites = env.sites.model_copy(update={"count": (count, count), "slots": None})
        selection = SiteSelection(held_out_federation(env.model_copy(update={"sites": sites}), "test"))
        observation = selection.reset([1, 2, 3])
        for policy in (one.controller, other.controller):
            Observing(policy).reset(selection.task)
        first, second = (Observing(p.controller).act(Turn(selection.view, observation)) for p in (one, other))
        np.testing.assert_array_equal(first, second)
        assert first.shape == (3, count)
        assert not selection.step(first).ineligible.any()


def test_imitating_an_expert_learns_its_choices(tiny_selection):
    config = tiny_selection(imitation__passes=0, imitation__steps=1500, imitation__epochs=12)
    model = training._fresh(config, problem_of(config))
    record = imitate(model, config, Go(), progress=False)
    assert record.agreement > 0.85
    assert record.value_error < 0.5


def test_counterfactuals_beat_chance_and_the_untrained(tiny_selection):
    config = tiny_selection(imitation__steps=1200, imitation__passes=3)
    model = training._fresh(config, problem_of(config))
    validation = SelectionValidation(tiny_selection(validation__scenarios=12))
    from wattgym.agents.checkpoint import policy_controller

    problem = problem_of(config)
    features = problem.features(model.get_env().venv)
    before = validation.run(policy_controller(model, features, "before")).reward
    imitate(model, config, Go(), progress=False)
    after = validation.run(policy_controller(model, features, "after")).reward
    assert after > before + 0.05


def test_discounted_rewards_end_with_the_episode():
    reward = np.array([[1.0], [2.0], [4.0], [8.0]])
    ended = np.array([[False], [True], [False], [False]])
    np.testing.assert_array_equal(_returns(reward, ended, 0.5)[:, 0], [2.0, 2.0, np.nan, np.nan])


def test_remaining_progress_leads_to_the_target(tiny_selection):
    selection = SiteSelection(tiny_selection().envs["a"])
    selection.reset([1, 2, 3])
    emulator = selection.emulator
    learning, curve, target = emulator.library.learning, emulator.curve, emulator.library.target_loss
    progress = np.random.default_rng(0).uniform(0.0, 5.0, (3, learning.domains))
    missing = remaining_progress(learning, curve, progress, target)
    reached = (domain_loss(learning, curve, progress + missing[:, None]) * curve.weights).sum(axis=1)
    np.testing.assert_allclose(reached, target, rtol=1e-9)
    assert (missing > 0.0).all()
    np.testing.assert_array_equal(remaining_progress(learning, curve, progress + 1000.0, target), 0.0)


def test_validation_moves_to_held_out_weeks_and_places_and_compares_with_the_greedy(tiny_selection):
    from wattgym.agents.selectors import REFERENCE, make_selector

    env = held_out_federation(tiny_selection().envs["a"], "validation")
    assert (env.power.split, env.network.split, env.market.split) == ("validation",) * 3
    config = tiny_selection()
    validation = SelectionValidation(config)

    class Greedy:
        name = "greedy"
        selector = make_selector(REFERENCE)

        def reset(self, task):
            self.selector.reset(task)

        def act(self, observation):
            return self.selector.act(Turn(validation._arenas[self.family].selection.view, observation))

    greedy = Greedy()
    scores = {}
    for family in validation._arenas:
        greedy.family = family
        one = SelectionValidation(tiny_selection(families={family: config.families[family].model_dump()}))
        one._arenas = {family: validation._arenas[family]}
        scores[family] = one.run(greedy).reward
    assert scores == {"a": 0.0, "b": 0.0}


def test_a_mixed_batch_is_its_parts_side_by_side(tiny_selection):
    envs = tiny_selection().envs
    parts = {name: SiteSelectionVecEnv(env, n) for (name, env), n in zip(envs.items(), (2, 3), strict=True)}
    mixed = MixedVecEnv(parts)
    alone = SiteSelectionVecEnv(envs["b"], 3)
    mixed.seed(10)
    alone.seed(12)
    first, second = mixed.reset(), alone.reset()
    for k in range(60):
        np.testing.assert_array_equal(first[2:], second)
        action = (np.arange(30).reshape(5, 6) + k) % 3 > 0
        first, reward, over, infos = mixed.step(action)
        second, own, ended, own_infos = alone.step(action[2:])
        np.testing.assert_array_equal(reward[2:], own)
        np.testing.assert_array_equal(over[2:], ended)
        assert [i.get("episode") for i in infos[2:]] == [i.get("episode") for i in own_infos]
    masks = mixed.env_method("action_masks", indices=[0, 4])
    np.testing.assert_array_equal(masks[1], alone.action_masks()[2])
    with pytest.raises(UserError, match="'b' has other observations"):
        MixedVecEnv({"a": parts["a"], "b": SiteSelectionVecEnv({"sites": {"count": [2, 3]}}, 1)})
    with pytest.raises(UserError, match="at least one"):
        MixedVecEnv({})


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [(6, [1, 2], [2, 4]), (7, [1, 1, 1], [3, 2, 2]), (2, [1, 1, 1], [1, 1, 1]), (10, [8, 1, 1], [8, 1, 1])],
)
def test_environments_are_shared_out(total, shares, expected):
    assert shared_out(total, shares) == expected


def test_families_by_file(tmp_path):
    (tmp_path / "plain.yaml").write_text("env:\n  sites: {count: [2, 4]}\n  rounds: {time_model: B}\n")
    data = {"families": {"p": "plain.yaml", "q": {"file": "plain.yaml", "envs": 3, "env": {"sites": {"alpha": 0.1}}}}}
    families = with_family_files(data, tmp_path)["families"]
    assert families["p"] == {"env": {"sites": {"count": [2, 4]}, "rounds": {"time_model": "B"}}}
    assert families["q"]["envs"] == 3
    assert families["q"]["env"]["sites"] == {"count": [2, 4], "alpha": 0.1}
    with pytest.raises(UserError, match="nowhere"):
        with_family_files({"families": {"p": "nowhere.yaml"}}, tmp_path)
    (tmp_path / "empty.yaml").write_text("seed: 1\n")
    with pytest.raises(UserError, match=r"families.p: .*holds no 'env'"):
        with_family_files({"families": {"p": "empty.yaml"}}, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem": "site-selection"}, "valid: power_shaping, site_selection"),
        ({"families": {}}, "families"),
        ({"families__a__env__sites__countt": 3}, "unknown key"),
        ({"families__a__env__power": {"split": "test"}}, r"families.a.env.power.split must be 'train'"),
        ({"families__b__env__network": {"split": "all"}}, r"families.b.env.network.split must be 'train'"),
        ({"slots": 5}, "has up to 6 sites, slots is 5"),
        ({"families__b__env__action": {"kind": "score"}}, "families.b.env.action differs"),
        ({"families__b__env__learning": {"domains": 4}}, "families.b.env.learning.domains differs"),
        ({"families__b__env__observation": {"market": False}}, "families.b.env.observation differs"),
        ({"train__algorithm": "recurrent_ppo"}, "goes with train.algorithm 'ppo'"),
        ({"train__normalise_observations": True}, "normalise_observations must be false"),
        ({"network__hidden": [16, 32]}, "one size"),
        ({"network__heads": 2}, "set_attention"),
        ({"network": {"architecture": "set_attention", "hidden": [10]}}, "no multiple of 4"),
        ({"network": {"hidden": [16]}}, "imitation goes with a network over sites"),
    ],
)
def test_bad_configurations_are_one_line(tiny_selection, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        tiny_selection(**changes)
    assert "\n" not in str(caught.value)


def test_score_actions_are_refused_for_a_network_over_sites(tiny_selection):
    score = {"env": {"action": {"kind": "score"}, "sites": {"count": [3, 6]}}}
    with pytest.raises(UserError, match="chooses with bits"):
        tiny_selection(families={"a": score})


def test_power_shaping_refuses_a_network_over_sites():
    with pytest.raises(UserError, match="goes with problem 'site_selection'"):
        parse_training({"network": {"architecture": "deep_sets"}}, "test")
    assert isinstance(parse_training({}, "test"), TrainingConfig)
    assert ImitationConfig().expert is None


def test_bad_scenarios_are_refused_before_a_folder_is_made(tiny_selection, tmp_path):
    config = tiny_selection(families__a__env__network={"regions": ["nowhere:mars"]})
    with pytest.raises(UserError, match="mars"):
        train(config, tmp_path / "run", progress=False)
    assert list(tmp_path.iterdir()) == []
