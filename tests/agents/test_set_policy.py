"""A policy over sites does not care about their order, about padding, or about how many there are."""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO

from wattgym.agents.checkpoint import policy_controller, shown_names
from wattgym.agents.set_features import DERIVED, SetLayout, split
from wattgym.agents.set_policy import SetPolicy
from wattgym.envs.observation import BOUND
from wattgym.envs.selection import SiteSelection
from wattgym.envs.site_selection import as_config
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv
from wattgym.errors import UserError

ARCHITECTURES = ("deep_sets", "set_attention")


@functools.cache
def federation(count, slots, time_model="A", kind="binary"):
    return SiteSelection(
        as_config(
            {
                "sites": {"count": [count, count], "slots": slots},
                "rounds": {"time_model": time_model},
                "action": {"kind": kind},
            }
        )
    )


def layout_of(selection):
    return SetLayout.of(selection.layout, selection.emulator.library.learning)


def fresh(selection, architecture, seed=0):
    """A policy with random weights that are far from those of a beginning, so that every input matters."""
    torch.manual_seed(seed)
    layout = layout_of(selection)
    policy = SetPolicy(
        gym.spaces.Box(-BOUND, BOUND, (selection.layout.size,), np.float32),
        gym.spaces.MultiBinary(selection.layout.slots),
        lambda _: 1e-3,
        layout=layout.plain(),
        architecture=architecture,
        hidden=(16, 16),
        heads=2,
    )
    with torch.no_grad():
        for weights in policy.parameters():
            weights.add_(0.3 * torch.randn_like(weights))
    policy.set_training_mode(False)
    return policy


def played(selection, seeds, rounds=3):
    """Observations some rounds into their episodes."""
    observation = selection.reset(seeds)
    for k in range(rounds):
        chosen = np.arange(selection.layout.slots) % 3 != k % 3
        observation = selection.step(np.broadcast_to(chosen, (len(seeds), chosen.size)).astype(float)).observation
    return observation


def outputs(policy, observation):
    with torch.no_grad():
        sites = policy.sites(torch.as_tensor(observation))
        return policy.actor(sites).numpy(), policy.critic(sites).numpy(), sites.eligible.numpy()


def by_site(layout, observation):
    first = len(layout.glob)
    return observation[:, :first], observation[:, first:].reshape(observation.shape[0], len(layout.site), -1)


def vector(glob, site):
    return np.concatenate([glob, site.reshape(site.shape[0], -1)], axis=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("time_model", ["A", "B"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_permuting_sites_permutes_logits_and_leaves_the_value(architecture, time_model, seed):
    selection = federation(9, 13, time_model)
    policy, layout = fresh(selection, architecture), layout_of(selection)
    observation = played(selection, [seed, seed + 1])
    order = np.random.default_rng(seed).permutation(13)
    glob, site = by_site(layout, observation)
    logits, value, eligible = outputs(policy, observation)
    permuted, same, _ = outputs(policy, vector(glob, site[:, :, order]))
    np.testing.assert_allclose(permuted, logits[:, order], atol=1e-4)
    np.testing.assert_allclose(same, value, atol=1e-4)
    # Sites differ, or the test would show nothing.
    assert np.ptp(logits[0][eligible[0]]) > 0.01


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("time_model", ["A", "B"])
def test_padding_changes_nothing(architecture, time_model):
    selection = federation(9, 9, time_model)
    policy, layout = fresh(selection, architecture), layout_of(selection)
    observation = played(selection, [3, 4, 5])
    glob, site = by_site(layout, observation)
    padded = vector(glob, np.concatenate([site, np.zeros((3, site.shape[1], 11), np.float32)], axis=2))
    wide = policy.for_slots(20)
    logits, value, _ = outputs(policy, observation)
    wide_logits, wide_value, wide_eligible = outputs(wide, padded)
    np.testing.assert_allclose(wide_logits[:, :9], logits, atol=1e-5)
    np.testing.assert_allclose(wide_value, value, atol=1e-5)
    assert not wide_eligible[:, 9:].any()
    assert not wide.predict(padded, deterministic=False)[0][:, 9:].any()
    np.testing.assert_array_equal(
        wide.predict(padded, deterministic=True)[0][:, :9], policy.predict(observation, deterministic=True)[0]
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_trained_at_20_sites_choose_among_57(architecture):
    small, large = federation(20, 20), federation(57, 57)
    policy = fresh(small, architecture)
    wide = policy.for_slots(57)
    assert {k: v.shape for k, v in wide.state_dict().items()} == {k: v.shape for k, v in policy.state_dict().items()}
    observation = played(large, [1, 2])
    action, _ = wide.predict(observation, deterministic=True)
    assert action.shape == (2, 57)
    assert set(np.unique(action)) <= {0, 1}
    outcome = large.step(action)
    assert not outcome.ineligible.any()
    logits, value, _ = outputs(wide, observation)
    assert np.isfinite(logits).all()
    assert np.isfinite(value).all()


def test_sites_that_are_not_eligible_are_never_chosen_and_add_nothing():
    selection = federation(12, 16)
    policy = fresh(selection, "deep_sets")
    observation = played(selection, list(range(40)))
    tensor = torch.as_tensor(observation)
    eligible = policy.sites(tensor).eligible
    assert int((~eligible[:, :12]).sum()) > 0
    chosen = np.stack([policy.predict(observation, deterministic=False)[0] for _ in range(50)])
    assert not chosen[:, ~eligible.numpy()].any()
    actions = torch.as_tensor(chosen[0]).float()
    value, likelihood, entropy = policy.evaluate_actions(tensor, actions)
    probability = torch.sigmoid(policy.actor(policy.sites(tensor)).double())
    each = torch.where(actions > 0, probability, 1.0 - probability).log() * eligible
    np.testing.assert_allclose(likelihood.detach(), each.sum(dim=1).detach(), atol=1e-4)
    spread = -(probability * probability.log() + (1 - probability) * (1 - probability).log()) * eligible
    np.testing.assert_allclose(entropy.detach(), spread.sum(dim=1).detach(), atol=1e-4)
    assert value.shape == (40, 1)


@pytest.mark.parametrize("time_model", ["A", "B"])
def test_derived_columns_agree_with_the_round_model(time_model):
    selection = federation(10, 12, time_model)
    selection.reset([7, 8, 9])
    observation = played(selection, [7, 8, 9])
    view, layout = selection.view, layout_of(selection)
    sites = split(layout, torch.as_tensor(observation))
    columns = dict(zip(DERIVED, sites.site[:, :, len(layout.site) :].double().numpy().transpose(2, 0, 1), strict=True))
    eligible = sites.eligible.numpy()
    cost = view.task.comm_s if time_model == "A" else view.alone_seconds()
    for row in range(3):
        open_ = np.flatnonzero(eligible[row])
        sets = np.zeros((3, open_.size, 12), dtype=bool)
        for i, site in enumerate(open_):
            sets[row, i] = eligible[row] & (cost[row] <= cost[row, site])
        minutes = view.round_seconds(sets)[row] / 60.0
        np.testing.assert_allclose(columns["round_time"][row, open_], np.log10(minutes), atol=2e-3)
        work = view.work(sets)[row]
        effective = work.sum(axis=1) ** 2 / (work**2).sum(axis=1)
        np.testing.assert_allclose(columns["cohort"][row, open_], 0.5 * np.log(effective), atol=2e-3)
        reference = view.task.learning.reference_samples
        alone = np.eye(12, dtype=bool)[open_]
        each = view.work(np.broadcast_to(alone, (3, *alone.shape)))[row].sum(axis=1)
        np.testing.assert_allclose(columns["work"][row, open_], np.log10(each / reference), atol=2e-3)
        # The base is one of the sets, and no other beats it.
        best = open_[columns["behind_best"][row, open_].argmax()]
        np.testing.assert_array_equal(columns["base"][row] > 0.5, eligible[row] & (cost[row] <= cost[row, best]))


def test_joining_says_what_a_change_of_the_base_brings():
    """Alike data and central parameters, so that the planner's model is the true one but for its linearisation."""
    config = as_config(
        {
            "sites": {"count": [8, 8], "alpha": 1000.0},
            "rounds": {"time_model": "B"},
            "action": {"kind": "binary"},
            "learning": {"randomise": 0.0},
        }
    )
    selection = SiteSelection(config)
    observation = selection.reset([0, 1, 2, 3])
    sites = split(layout_of(selection), torch.as_tensor(observation))
    columns = dict(zip(DERIVED, sites.site[:, :, -len(DERIVED) :].numpy().transpose(2, 0, 1), strict=True))
    base, eligible = columns["base"] > 0.5, sites.eligible.numpy()
    flipped = base[:, None, :] ^ np.eye(8, dtype=bool)
    worth = selection.emulator.imagine(np.concatenate([base[:, None], flipped], axis=1)).per_second
    change = np.log(np.maximum(worth[:, 1:], 1e-12)) - np.log(worth[:, :1])
    predicted = np.where(base, -1.0, 1.0) * columns["joining"] / 4.0
    sure = eligible & (np.abs(change) > 0.03) & (np.abs(predicted) < 3.0)
    assert sure.sum() > 10
    assert (np.sign(change[sure]) == np.sign(predicted[sure])).all()


@pytest.mark.parametrize("time_model", ["A", "B"])
@pytest.mark.parametrize("count", [10, 57])
def test_the_plan_cannot_be_bettered_by_one_site(time_model, count):
    """In the planner's own terms, which an environment with alike data and central parameters shares."""
    config = as_config(
        {
            "sites": {"count": [count, count], "alpha": 1000.0},
            "rounds": {"time_model": time_model, "work_samples": 8e5, "deadline_s": 86_400},
            "learning": {"randomise": 0.0, "forgetting": 0.0},
            "action": {"kind": "binary"},
        }
    )
    selection = SiteSelection(config)
    observation = selection.reset(range(12))
    sites = split(layout_of(selection), torch.as_tensor(observation))
    columns = dict(zip(DERIVED, sites.site[:, :, -len(DERIVED) :].numpy().transpose(2, 0, 1), strict=True))
    base, plan, eligible = columns["base"] > 0.5, columns["plan"] > 0.5, sites.eligible.numpy()
    assert (plan <= eligible).all()
    assert plan.any(axis=1).all()
    assert (plan != base).any() or (time_model, count) != ("A", 57)
    # No site would be better on the other side.
    assert (columns["change"][eligible & plan] > -0.2).all()
    assert (columns["change"][eligible & ~plan] < 0.2).all()
    worth = selection.emulator.imagine(np.stack([base, plan], axis=1), steady=True).per_second
    assert (worth[:, 1] >= worth[:, 0] * 0.995).all()
    flipped = plan[:, None, :] ^ np.eye(count, dtype=bool)
    around = selection.emulator.imagine(flipped, steady=True).per_second
    change = np.log(np.maximum(around, 1e-12)) - np.log(worth[:, 1:])
    predicted = np.where(plan, -1.0, 1.0) * columns["change"] / 4.0
    sure = eligible & (np.abs(change) > 0.03) & (np.abs(predicted) < 3.0)
    assert sure.sum() > 10
    assert (np.sign(change[sure]) == np.sign(predicted[sure])).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_how_many_sites_there_are_is_not_shown_to_the_network(architecture):
    selection = federation(9, 9)
    policy, layout = fresh(selection, architecture), layout_of(selection)
    observation = played(selection, [3, 4])
    among_many = observation.copy()
    among_many[:, layout.glob.index("sites")] = 1.0
    for mine, other in zip(outputs(policy, observation), outputs(policy, among_many), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saving_and_loading_keeps_every_action(architecture, tmp_path):
    env = SiteSelectionVecEnv({"sites": {"count": [4, 8]}, "action": {"kind": "binary"}}, 4)
    layout = SetLayout.of(env.layout, env.selection.emulator.library.learning)
    model = PPO(
        SetPolicy,
        env,
        n_steps=8,
        batch_size=16,
        n_epochs=1,
        seed=1,
        device="cpu",
        policy_kwargs={"layout": layout.plain(), "architecture": architecture, "hidden": (16, 16)},
    )
    model.learn(64)
    model.save(tmp_path / "model.zip")
    loaded = PPO.load(tmp_path / "model.zip", device="cpu")
    observation = env.reset()
    for _ in range(10):
        action, _ = model.predict(observation, deterministic=True)
        np.testing.assert_array_equal(loaded.predict(observation, deterministic=True)[0], action)
        observation, *_ = env.step(action)


@pytest.mark.parametrize("kind", ["binary", "score"])
def test_a_controller_takes_the_policy_to_any_federation(kind):
    selection = federation(6, 8)
    policy = fresh(selection, "deep_sets")

    class Model:
        def get_vec_normalize_env(self):
            return None

    model = Model()
    model.policy = policy
    controller = policy_controller(model, shown_names(selection.layout, over_sites=True), "policy")
    for count, slots in ((6, 8), (57, 57), (3, 4)):
        elsewhere = federation(count, slots, kind=kind)
        observation = elsewhere.reset([1, 2])
        controller.reset(elsewhere.task)
        action = controller.act(observation)
        assert action.shape == (2, slots)
        elsewhere.step(action)
    other = SiteSelection(as_config({"sites": {"count": [6, 6]}, "observation": {"market": False}}))
    other.reset([1])
    with pytest.raises(UserError, match=r"'site.mix0' where the policy expects 'site.price'"):
        controller.reset(other.task)
