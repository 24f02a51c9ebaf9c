from itertools import pairwise

import numpy as np
import pytest

from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selection_scoring import episode_metrics, expense
from wattgym.agents.selectors import make_selector
from wattgym.agents.selectors.selector import Observing
from wattgym.envs.federation.config import SelectionRewardConfig, SiteSelectionConfig
from wattgym.envs.site_selection import SiteSelectionEnv

CONFIG = SiteSelectionConfig.model_validate(
    {
        "sites": {"count": [3, 6]},
        "rounds": {"dropouts_per_hour": 2.0, "straggler_sigma": 0.2},
        "learning": {"s0": 6.0},
        "goal": {"time_limit_s": 1500},
    }
)


@pytest.fixture(scope="module")
def arena():
    return SelectionArena(CONFIG)


def assert_same(one, other):
    for name in ("seconds", "chosen", "counted", "true_loss", "energy_kwh", "cost_usd", "reward", "repaired"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert (one.sites, one.reached, one.start_loss) == (other.sites, other.reached, other.start_loss)


def test_an_episode_is_what_the_gymnasium_environment_does(arena):
    env = SiteSelectionEnv(CONFIG)
    _, info = env.reset(seed=3)
    (episode,) = arena.run(make_selector("PowerTrip predicted"), [info["episode_seed"]])
    sites = len(info["sites"])
    assert episode.sites == tuple(info["sites"])
    for k, chosen in enumerate(episode.chosen):
        *_, reward, terminated, truncated, info = env.step(np.pad(chosen, (0, 6 - sites)).astype(np.float32))
        assert info["chosen"].tolist() == np.flatnonzero(chosen).tolist()
        assert info["counted"].tolist() == np.flatnonzero(episode.counted[k]).tolist()
        pairs = {"seconds": "round_s", "communication_s": "communication_s", "true_loss": "true_loss"}
        pairs |= {name: name for name in ("energy_kwh", "unused_kwh", "carbon_kg", "cost_usd")}
        for ours, theirs in pairs.items():
            assert getattr(episode, ours)[k] == info[theirs], ours
        assert episode.reward[k] == reward
        assert (terminated or truncated) == (k == len(episode.chosen) - 1)
    assert episode.reached == terminated


@pytest.mark.parametrize("name", ["random k", "Oort", "UCB per site", "PowerTrip measured", "PowerTrip static"])
def test_episodes_end_on_their_own_and_do_not_depend_on_each_other(arena, name):
    together = arena.run(make_selector(name), [4, 5, 6, 7])
    again = arena.run(make_selector(name), [4, 5, 6, 7])
    assert len({e.seconds.size for e in together}) > 1
    for one, other in zip(together, again, strict=True):
        assert_same(one, other)
    (alone,) = arena.run(make_selector(name), [4])
    assert_same(alone, together[0])


def test_every_selector_meets_the_same_federations(arena):
    for one, other in zip(
        arena.run(make_selector("all sites"), [8, 9]), arena.run(make_selector("single best"), [8, 9]), strict=True
    ):
        assert (one.sites, one.start_loss) == (other.sites, other.start_loss)
        assert not np.array_equal(one.chosen.sum(axis=1)[:1], other.chosen.sum(axis=1)[:1])


def test_a_policy_sees_the_observation(arena):
    class Everybody:
        name = "everybody"

        def reset(self, task):
            self.layout = task.layout

        def act(self, observation):
            return observation[:, self.layout.of_sites("eligible")] - 0.5

    for one, other in zip(
        arena.run(Observing(Everybody()), [8, 9]), arena.run(make_selector("all sites"), [8, 9]), strict=True
    ):
        assert_same(one, other)


def test_metrics_by_hand(arena):
    episodes = arena.run(make_selector("fastest k"), range(10))
    for episode in episodes:
        metrics = episode_metrics(episode)
        played = episode.chosen[~episode.waited]
        assert metrics["rounds"] + metrics["waits"] == episode.seconds.size
        assert metrics["participants_mean"] == pytest.approx(played.sum() / metrics["rounds"])
        total = episode.seconds.sum()
        assert metrics["time_to_target_s"] == (total if episode.reached else 1500.0)
        changes = sum(int((a != b).sum()) for a, b in pairwise(played))
        assert metrics["site_churn_per_h"] == pytest.approx(changes / (total / 3600.0))
        assert 0.0 < metrics["communication_share"] < 1.0
        assert 0.0 <= metrics["unused_power_share"] < 1.0
        assert metrics["final_loss"] == episode.true_loss[-1]
        assert 0.0 < metrics["final_accuracy"] < 0.9
    assert {e.reached for e in episodes} == {True, False}


def test_expense_prices_what_the_reward_prices_and_doubles_what_was_missed():
    metrics = {"time_to_target_s": 7200.0, "target_reached": 1.0, "energy_kwh": 10.0, "carbon_kg": 4.0, "cost_usd": 3.0}
    weights = SelectionRewardConfig(time_scale_s=3600.0, energy_per_kwh=0.1, carbon_per_kg=0.5, cost_per_usd=2.0)
    assert expense(metrics, weights) == pytest.approx(2.0 + 1.0 + 2.0 + 6.0)
    assert expense({**metrics, "target_reached": 0.0}, weights) == pytest.approx(4.0 + 1.0 + 2.0 + 6.0)
