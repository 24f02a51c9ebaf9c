"""Batched environments: equal to single ones bit for bit, and good citizens of both vector interfaces."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

import wattgym.envs  # noqa: F401 (registers the ids)
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.envs.reward import TERMS
from wattgym.envs.vector import PowerShapingVecEnv, PowerShapingVectorEnv
from wattgym.errors import UserError

SHORT = {"episode_s": 60.0}
CONFIGS = [
    {},
    {"site": {"jobs": 1, "sensor": "average", "control_delay_periods": (0, 3)}},
    {"site": {"jobs": 7, "sensor": "instant", "command_loss": 0.2, "host_w_per_gpu": 100.0}},
    {"site": {"jobs": 9}, "signal": {"families": {"rega": 1, "droop": 1, "emergency": 1}}},
    {"period_s": 0.5, "rules": {"interval_s": 0.5}, "site": {"jobs": 2, "sensor": "average", "surfaces": "test"}},
    {"action": {"kind": "residual"}, "observation": {"preview_periods": 4, "error_history": 1, "command_history": 3}},
    {"action": {"kind": "advice", "loop": {"split": "optimal"}}, "observation": {"preview_periods": 1}},
    {"action": {"kind": "delta"}, "rules": {"raise_window_s": 6.0, "dead_band_fraction": 0.1}},
]


def actions_of(seed, ticks, jobs):
    rng = np.random.default_rng(seed)
    # Held now and then, so that dead bands and raise allowances count.
    return np.repeat(rng.uniform(-1.0, 1.0, (ticks // 3 + 1, jobs)), 3, axis=0)[:ticks].astype(np.float32)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("data", CONFIGS, ids=str)
def test_each_environment_of_a_batch_is_the_single_one_across_episodes(data, batch):
    """Environment i of a batch seeded with s: an environment reset with seed s + i, then reset without a seed."""
    ticks = 30
    period_s = data.get("period_s", 2.0)
    config = {**data, "episode_s": ticks * period_s}
    vec = PowerShapingVecEnv(config, batch)
    jobs, watched = vec.action_space.shape[0], sorted({0, batch // 2, batch - 1})
    singles = [PowerShapingEnv(config) for _ in watched]
    vec.seed(100)
    observations = vec.reset()
    for i, env in zip(watched, singles, strict=True):
        np.testing.assert_array_equal(env.reset(seed=100 + i)[0], observations[i])
    actions = np.stack([actions_of(i, 2 * ticks + 5, jobs) for i in range(batch)], axis=1)
    for tick in range(2 * ticks + 5):
        observations, rewards, dones, infos = vec.step(actions[tick])
        for i, env in zip(watched, singles, strict=True):
            observation, reward, _, truncated, info = env.step(actions[tick, i])
            assert np.float32(reward) == rewards[i]
            assert bool(dones[i]) is truncated
            if truncated:
                np.testing.assert_array_equal(infos[i]["terminal_observation"], observation)
                observation, _ = env.reset()
            else:
                assert infos[i] == {}
                assert vec.outcome.power_w[i] == info["power_w"]
                assert dict(zip(TERMS, vec.outcome.terms[:, i], strict=True)) == info["reward_terms"]
            np.testing.assert_array_equal(observation, observations[i])


@pytest.mark.parametrize("data", CONFIGS[:4], ids=str)
def test_both_vector_interfaces_give_the_same_episodes(data):
    config = {**data, **SHORT}
    sb3, gymnasium = PowerShapingVecEnv(config, 5), PowerShapingVectorEnv(5, config)
    sb3.seed(7)
    first = sb3.reset()
    np.testing.assert_array_equal(first, gymnasium.reset(seed=7)[0])
    actions = np.stack([actions_of(i, 40, sb3.action_space.shape[0]) for i in range(5)], axis=1)
    for tick in range(40):
        ours, reward, dones, _ = sb3.step(actions[tick])
        theirs, their_reward, terminated, truncated, info = gymnasium.step(actions[tick])
        assert not terminated.any()
        np.testing.assert_array_equal(reward, their_reward.astype(np.float32))
        np.testing.assert_array_equal(dones, truncated)
        np.testing.assert_allclose(sum(info["reward_terms"].values()), their_reward)
        if dones.all():
            # Gymnasium's form starts the next episode in the step after, whose actions are ignored.
            theirs, their_reward, terminated, truncated, info = gymnasium.step(actions[tick])
            np.testing.assert_array_equal([their_reward, terminated, truncated], 0)
            assert info == {}
        np.testing.assert_array_equal(ours, theirs)


def test_the_end_of_an_episode_carries_what_sb3_needs():
    vec = PowerShapingVecEnv(SHORT, 3)
    vec.seed(0)
    vec.reset()
    rewards, terms = [], []
    for tick in range(30):
        _, reward, dones, infos = vec.step(np.zeros((3, 4)))
        rewards.append(vec.outcome.reward)
        terms.append(vec.outcome.terms)
        assert dones.all() == (tick == 29)
    assert reward.dtype == np.float32
    for i, info in enumerate(infos):
        assert info["TimeLimit.truncated"] is True
        assert info["terminal_observation"].shape == (vec.layout.size,)
        assert info["episode"]["l"] == 30
        assert info["episode"]["r"] == pytest.approx(np.sum(rewards, axis=0)[i])
        for k, name in enumerate(TERMS):
            assert info["episode"][f"mean_{name}"] == pytest.approx(np.mean(terms, axis=0)[k, i])
    assert vec.step(np.zeros((3, 4)))[3] == [{}, {}, {}]


def test_a_seed_holds_for_one_reset_and_unseeded_batches_differ():
    vec = PowerShapingVecEnv(SHORT, 2)
    vec.seed(5)
    first, second = vec.reset(), vec.reset()
    assert not np.array_equal(first, second)
    vec.seed(5)
    np.testing.assert_array_equal(first, vec.reset())
    np.testing.assert_array_equal(second, vec.reset())
    assert not np.array_equal(PowerShapingVecEnv(SHORT, 2).reset(), PowerShapingVecEnv(SHORT, 2).reset())


def test_environments_of_a_batch_differ_from_each_other():
    observations = PowerShapingVecEnv(SHORT, 16).reset()
    assert np.unique(observations, axis=0).shape[0] == 16


def test_vec_env_conforms_to_sb3():
    vec = PowerShapingVecEnv(SHORT, 4)
    assert vec.num_envs == 4
    assert vec.get_attr("config") == [vec.config] * 4
    assert vec.get_attr("render_mode", [1, 2]) == [None, None]
    assert vec.env_is_wrapped(Monitor) == [False] * 4
    assert vec.has_attr("layout")
    assert not vec.has_attr("nothing")
    with pytest.raises(UserError, match="cannot set 'period_s' of single environments"):
        vec.set_attr("period_s", 1.0)
    with pytest.raises(UserError, match="cannot call 'reset' on single environments"):
        vec.env_method("reset")
    with pytest.raises(RuntimeError, match="before the first reset"):
        _ = vec.task
    wrapped = VecNormalize(VecMonitor(vec))
    observations = wrapped.reset()
    assert observations.shape == (4, vec.layout.size)
    for _ in range(30):
        observations, _, dones, infos = wrapped.step(np.zeros((4, 4)))
    assert dones.all()
    assert infos[0]["episode"]["l"] == 30
    assert vec.task.base_w.shape == (4,)
    wrapped.close()


def test_sb3_learns_on_the_batch_and_evaluates_it():
    vec = VecMonitor(PowerShapingVecEnv(SHORT, 4))
    model = PPO("MlpPolicy", vec, n_steps=32, batch_size=64, n_epochs=1, seed=3, device="cpu")
    model.learn(256)
    assert len(model.ep_info_buffer) == 8
    mean, _ = evaluate_policy(model, vec, n_eval_episodes=4)
    assert np.isfinite(mean)


def test_gymnasium_makes_a_batch():
    envs = gym.make_vec("wattgym/PowerShaping-v0", num_envs=3, config={**SHORT, "site": {"jobs": 2}})
    assert envs.action_space.shape == (3, 2)
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP
    observations, info = envs.reset(seed=[4, 9, 4])
    assert info == {}
    assert envs.observation_space.contains(observations)
    np.testing.assert_array_equal(observations[0], observations[2])
    assert not np.array_equal(observations[0], observations[1])
    statistics = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    statistics.reset(seed=0)
    for _ in range(30):
        *_, truncated, info = statistics.step(envs.action_space.sample())
    assert truncated.all()
    assert info["episode"]["l"].tolist() == [30] * 3
    envs.close()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PowerShapingVecEnv({}, 0), "at least 1 environment, got 0"),
        (lambda: PowerShapingVectorEnv(2, {"sight": 1}), "unknown key 'sight'"),
        (lambda: PowerShapingVectorEnv(2, {}, jobs=3), "unknown argument 'jobs'"),
        (lambda: PowerShapingVectorEnv(2).reset(seed=[1]), "got 1 seeds for 2 environments"),
    ],
)
def test_bad_batches_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_a_bad_action_names_its_environment_and_leaves_the_batch_alone():
    struck, twin = PowerShapingVecEnv(SHORT, 3), PowerShapingVecEnv(SHORT, 3)
    for vec in (struck, twin):
        vec.seed(1)
        vec.reset()
    bad = np.zeros((3, 4))
    bad[2, 1] = np.nan
    with pytest.raises(UserError, match="environment 2, job 1 is nan"):
        struck.step(bad)
    with pytest.raises(UserError, match=r"shape \(3, 1\); valid: \(3, 4\)"):
        struck.step(np.zeros((3, 1)))
    good = np.full((3, 4), 0.3)
    np.testing.assert_array_equal(struck.step(good)[0], twin.step(good)[0])
