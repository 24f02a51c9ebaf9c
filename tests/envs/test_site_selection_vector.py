"""The batched site-selection environment: bit for bit the single one, with episodes that end on their own."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from wattgym.envs.federation.reward import TERMS
from wattgym.envs.site_selection import SiteSelectionEnv
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv, SiteSelectionVectorEnv
from wattgym.errors import UserError

SHORT = {"goal": {"round_limit": 12}}
CONFIGS = [
    {"learning": {"s0": 3.0}},
    {"sites": {"count": [1, 1]}, "learning": {"s0": 1.0}, "goal": {"round_limit": 12}},
    {
        "sites": {"count": [4, 33], "slots": 40},
        "rounds": {"time_model": "B", "dropouts_per_hour": 20.0, "straggler_sigma": 0.5, "epochs": 30.0,
                   "deadline_s": 900.0},
        "power": {"u_max": 0.76, "min_gpus": 20.0},
        "learning": {"s0": 3.0, "phi_growth": 0.5, "evaluation": "population"},
        "goal": {"round_limit": 25},
    },
    {"power": {"u_max": 0.7}, "goal": {"time_limit_s": 6000.0}, "rounds": {"work_samples": 3e6}},
]  # fmt: skip


def actions_of(seed, rounds, slots):
    return np.random.default_rng(seed).uniform(-1.0, 0.6, (rounds, slots)).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 3, 24])
@pytest.mark.parametrize("config", CONFIGS, ids=["target", "one-site", "everything", "little-power"])
def test_each_environment_of_a_batch_is_the_single_one_across_episodes(config, batch):
    """Environment i of a batch seeded with s: an environment reset with seed s + i, then reset without a seed."""
    vec = SiteSelectionVecEnv(config, batch)
    slots, watched = vec.layout.slots, sorted({0, batch // 2, batch - 1})
    singles = [SiteSelectionEnv(config) for _ in watched]
    vec.seed(100)
    observations = vec.reset()
    for i, env in zip(watched, singles, strict=True):
        np.testing.assert_array_equal(env.reset(seed=100 + i)[0], observations[i])
    rounds, ended = 45, 0
    actions = np.stack([actions_of(i, rounds, slots) for i in range(batch)], axis=1)
    for k in range(rounds):
        observations, rewards, dones, infos = vec.step(actions[k])
        for i, env in zip(watched, singles, strict=True):
            observation, reward, terminated, truncated, info = env.step(actions[k, i])
            assert np.float32(reward) == rewards[i]
            assert bool(dones[i]) is (terminated or truncated)
            assert vec.outcome.loss[i] == info["loss"] or dones[i]
            assert dict(zip(TERMS, vec.outcome.terms[:, i].tolist(), strict=True)) == info["reward_terms"]
            if dones[i]:
                ended += 1
                np.testing.assert_array_equal(infos[i]["terminal_observation"], observation)
                assert infos[i]["TimeLimit.truncated"] is truncated
                observation, _ = env.reset()
            else:
                assert infos[i] == {}
            np.testing.assert_array_equal(observation, observations[i])
    assert ended > 0


def test_a_batch_mixes_federations_of_any_size_and_ends_them_one_by_one():
    vec = SiteSelectionVecEnv({"sites": {"count": [4, 57]}, "learning": {"s0": 5.0}}, 32)
    vec.seed(3)
    vec.reset()
    assert len(set(vec.task.count.tolist())) > 10
    together = set()
    for _ in range(40):
        _, _, dones, _ = vec.step(np.ones((32, 57), dtype=np.float32))
        together.add(int(dones.sum()))
    assert together - {0, 32}


def test_both_vector_interfaces_give_the_same_episodes():
    config = CONFIGS[0]
    sb3, gymnasium = SiteSelectionVecEnv(config, 5), SiteSelectionVectorEnv(5, config)
    sb3.seed(7)
    np.testing.assert_array_equal(sb3.reset(), gymnasium.reset(seed=7)[0])
    actions = np.stack([actions_of(i, 40, 20) for i in range(5)], axis=1)
    ends = 0
    for k in range(40):
        ours, reward, dones, infos = sb3.step(actions[k])
        theirs, their_reward, terminated, truncated, info = gymnasium.step(actions[k])
        np.testing.assert_array_equal(reward, their_reward.astype(np.float32))
        np.testing.assert_array_equal(dones, terminated | truncated)
        np.testing.assert_allclose(sum(info["reward_terms"].values()), their_reward)
        np.testing.assert_array_equal(ours, theirs)
        for row in np.flatnonzero(dones):
            ends += 1
            np.testing.assert_array_equal(info["final_obs"][row], infos[row]["terminal_observation"])
    assert ends > 3


def test_the_end_of_an_episode_carries_what_sb3_needs():
    vec = SiteSelectionVecEnv(SHORT, 3)
    vec.seed(0)
    vec.reset()
    rewards, terms = [], []
    for k in range(12):
        _, reward, dones, infos = vec.step(-np.ones((3, 20), dtype=np.float32))
        rewards.append(vec.outcome.reward)
        terms.append(vec.outcome.terms)
        assert dones.all() == (k == 11)
    assert reward.dtype == np.float32
    for i, info in enumerate(infos):
        assert info["TimeLimit.truncated"] is True
        assert info["episode"]["l"] == 12
        assert info["episode"]["r"] == pytest.approx(np.sum(rewards, axis=0)[i])
        for k, name in enumerate(TERMS):
            assert info["episode"][f"mean_{name}"] == pytest.approx(np.mean(terms, axis=0)[k, i])


def test_vec_env_conforms_to_sb3_and_learns():
    vec = SiteSelectionVecEnv(SHORT, 4)
    assert vec.get_attr("config") == [vec.config] * 4
    with pytest.raises(UserError, match="cannot call 'reset' on single environments"):
        vec.env_method("reset")
    with pytest.raises(RuntimeError, match="before the first reset"):
        _ = vec.task
    wrapped = VecNormalize(VecMonitor(vec))
    model = PPO("MlpPolicy", wrapped, n_steps=24, batch_size=48, n_epochs=1, seed=3, device="cpu")
    model.learn(192)
    assert len(model.ep_info_buffer) >= 8
    mean, _ = evaluate_policy(model, wrapped, n_eval_episodes=4)
    assert np.isfinite(mean)


def test_gymnasium_makes_a_batch_and_counts_its_episodes():
    envs = gym.make_vec("wattgym/SiteSelection-v0", num_envs=3, config=SHORT)
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.SAME_STEP
    observations, info = envs.reset(seed=[4, 9, 4])
    assert info == {}
    assert envs.observation_space.contains(observations)
    np.testing.assert_array_equal(observations[0], observations[2])
    assert not np.array_equal(observations[0], observations[1])
    for _ in range(12):
        *_, truncated, info = envs.step(envs.action_space.sample())
    assert truncated.all()
    assert info["_final_obs"].all()
    envs.close()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SiteSelectionVecEnv({}, 0), "at least 1 environment, got 0"),
        (lambda: SiteSelectionVectorEnv(2, {"site": 1}), "unknown key 'site', did you mean 'sites'"),
        (lambda: SiteSelectionVectorEnv(2, {}, jobs=3), "unknown argument 'jobs'"),
        (lambda: SiteSelectionVectorEnv(2).reset(seed=[1]), "got 1 seeds for 2 environments"),
    ],
)
def test_bad_batches_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
