"""`wattgym/SiteSelection-v0`: actions and repair, observations, rewards, ends, limits, configuration."""

import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3.common.env_checker import check_env as check_env_sb3

import wattgym.envs  # noqa: F401
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.federation.emulator import FederationEmulator
from wattgym.envs.federation.reward import TERMS
from wattgym.envs.selection import SiteSelection
from wattgym.envs.site_selection import SiteSelectionEnv
from wattgym.envs.site_selection_vector import SiteSelectionVecEnv
from wattgym.errors import UserError

ROOT = Path(__file__).parents[2]
SCENARIOS = tuple(sorted(p.stem for p in (ROOT / "configs" / "site_selection").glob("*.yaml") if p.stem != "ppo"))


@pytest.mark.parametrize("config", [{}, {"action": {"kind": "binary"}}, {"sites": {"count": [1, 1]}}], ids=str)
def test_checkers_pass(config):
    env = gym.make("wattgym/SiteSelection-v0", config=config).unwrapped
    check_env(env, skip_render_check=True)
    with warnings.catch_warnings():
        check_env_sb3(env)


def test_observation_matches_its_description():
    env = SiteSelectionEnv({"sites": {"count": [6, 6], "slots": 9}})
    observation, info = env.reset(seed=3)
    layout = env.layout
    assert observation.shape == (layout.size,) == (len(layout.features),)
    assert len({f.name for f in layout.features}) == layout.size
    assert len(info["sites"]) == 6
    for _ in range(4):
        observation, *_ = env.step(np.ones(9, dtype=np.float32))
    named = layout.as_dict(observation)
    assert layout.size == sum(np.size(v) for v in named.values())
    view, known, task = env.view, env.view.known, env.task
    np.testing.assert_array_equal(named["site.exists"], [1] * 6 + [0] * 3)
    for name, values in named.items():
        if name.startswith("site."):
            assert (values[6:] == 0).all(), name
    np.testing.assert_allclose(named["site.communication"][:6], np.log10(task.comm_s[0, :6] / 60), rtol=1e-5)
    alone = np.where(known.eligible, np.log10(view.alone_seconds() / 60), named["site.alone"])
    np.testing.assert_allclose(named["site.alone"], alone[0], rtol=1e-4)
    np.testing.assert_allclose(named["site.power"][:6], known.power_w[0, :6] / task.capacity_w[0, :6], rtol=1e-5)
    np.testing.assert_allclose(named["site.mix3"][:6], task.mix[0, :6, 3], rtol=1e-5)
    np.testing.assert_allclose(named["site.price"][:6], known.price_usd_per_mwh[0, :6] / 100, rtol=1e-5)
    took_part = known.last_seconds[0] > 0
    last = np.log10(known.last_seconds[0, took_part] / 60)
    np.testing.assert_allclose(named["site.last_time"][took_part], last, rtol=1e-4)
    assert (named["site.last_time"][~took_part] == 0).all()
    np.testing.assert_array_equal(named["site.presence"], took_part)
    np.testing.assert_allclose(named["site.absence"][:6], ~took_part[:6], atol=1e-6)
    np.testing.assert_allclose(named["global.round_sites"], known.eligible[0].sum() / 6)
    np.testing.assert_allclose(
        named["site.need"][:6], np.log((task.mix[0] @ known.domain_loss[0] / known.loss[0])[:6]), atol=1e-5
    )
    rate = view.rate[0, :6]
    np.testing.assert_allclose(named["site.share"][:6], rate / rate[known.eligible[0, :6]].mean() - 1, atol=1e-5)
    way = np.log(4.13) - np.log(0.6)
    assert named["global.remaining"] == pytest.approx((np.log(known.loss[0]) - np.log(0.6)) / way, rel=1e-5)


def test_running_statistics_of_power_by_hand():
    """Two sites with a power sample of 5 minutes a round: the mean and the spread forget with exp(-t / 30 min)."""
    sites = [
        {"name": n, "region": r, "capacity_w": 1e5} for n, r in (("t", "aws:ap-northeast-1"), ("u", "aws:us-east-1"))
    ]
    env = SiteSelectionEnv(
        {
            "sites": {"named": sites},
            "rounds": {"work_samples": 3e5},
            "learning": {"s0": 1e3},
            "goal": {"round_limit": 40},
        }
    )
    observation, _ = env.reset(seed=1)
    mean, square, before = env.view.known.power_w[0].copy(), np.zeros(2), 0
    federation, moved = env.selection.emulator.federation, 0
    for _ in range(40):
        named = env.layout.as_dict(observation)
        np.testing.assert_allclose(named["site.power_trend"] / 10 * 1e5, env.view.known.power_w[0] - mean, atol=0.5)
        np.testing.assert_allclose(named["site.power_spread"] / 10 * 1e5, np.sqrt(square), atol=0.5)
        observation, *_ = env.step(np.ones(2, dtype=np.float32))
        known = env.view.known
        step = int(known.time_s[0] / 300 + 1e-9)
        if step != before:
            keep, apart = np.exp(-(step - before) * 300 / 1800), known.power_w[0] - mean
            square, mean = keep * square + (1 - keep) * apart**2, mean + (1 - keep) * apart
            hour = (federation.start_of_day_s[0] + known.time_s[0]) / 3600 + np.array([9, -5])
            named = env.layout.as_dict(observation)
            np.testing.assert_allclose(named["site.day_sin"], np.sin(hour / 24 * 2 * np.pi), atol=1e-5)
            np.testing.assert_allclose(named["site.day_cos"], np.cos(hour / 24 * 2 * np.pi), atol=1e-5)
            before, moved = step, moved + 1
    assert moved > 5
    assert (square > 0).all()


def test_optional_features_can_be_left_out():
    full = SiteSelectionEnv({})
    lean = SiteSelectionEnv({"observation": {"domain_mix": False, "domain_loss": False, "market": False}})
    assert full.layout.size - lean.layout.size == 8 + (8 + 3) * 20
    a, b = full.reset(seed=1)[0], lean.reset(seed=1)[0]
    np.testing.assert_array_equal(full.layout.as_dict(a)["site.compute"], lean.layout.as_dict(b)["site.compute"])


def test_padding_is_never_chosen_and_never_matters():
    env = SiteSelectionEnv({"sites": {"count": [3, 3], "slots": 8}})
    env.reset(seed=0)
    _, _, _, _, info = env.step(np.ones(8, dtype=np.float32))
    assert set(info["chosen"]) <= {0, 1, 2}
    assert info["ineligible"] == 3 - len(info["chosen"])
    assert env.action_masks()[7::2].sum() == 0


def test_the_empty_choice_takes_the_best_predicted_site():
    env = SiteSelectionEnv({"sites": {"count": [12, 12]}})
    for seed in range(5):
        env.reset(seed=seed)
        alone, eligible = env.view.alone_seconds()[0], env.view.known.eligible[0]
        # Model A: the work is the same for everyone, so the best site alone is the fastest.
        best = int(np.where(eligible, alone, np.inf).argmin())
        _, _, _, _, info = env.step(np.full(12, -1.0, dtype=np.float32))
        assert info["repaired"]
        assert info["chosen"].tolist() == [best]
        assert info["round_s"] == pytest.approx(alone[best], rel=0.2)


def test_ineligible_sites_are_left_out_and_counted():
    config = {"sites": {"count": [20, 20]}, "power": {"min_gpus": 40.0}}
    env = SiteSelectionEnv(config)
    env.reset(seed=1)
    eligible = env.view.known.eligible[0]
    assert 0 < eligible.sum() < 20
    _, _, _, _, info = env.step(np.ones(20, dtype=np.float32))
    assert info["chosen"].tolist() == np.flatnonzero(eligible).tolist()
    assert info["ineligible"] == (~eligible).sum()
    assert not info["repaired"]


@pytest.mark.parametrize("form", ["rate", "net"])
def test_an_hour_without_an_eligible_site_is_waited_for(form):
    config = {"power": {"min_gpus": 1e9}, "goal": {"time_limit_s": 3600.0}, "reward": {"form": form}}
    env = SiteSelectionEnv(config)
    observation, _ = env.reset(seed=0)
    for k in range(12):
        observation, reward, terminated, truncated, info = env.step(np.ones(20, dtype=np.float32))
        assert info["waited"]
        assert info["round_s"] == 300.0
        assert np.isfinite(observation).all()
        assert reward == (0.0 if form == "rate" else pytest.approx(-300 / 3600))
        assert not terminated
        assert truncated == (k == 11)
    with pytest.raises(RuntimeError, match="an episode is over"):
        env.step(np.ones(20, dtype=np.float32))


def test_one_site_works_to_the_target():
    env = SiteSelectionEnv({"sites": {"count": [1, 1]}, "goal": {"time_limit_s": 2 * 86_400}, "learning": {"s0": 1.0}})
    env.reset(seed=2)
    for _ in range(2000):
        observation, _, terminated, truncated, info = env.step(np.ones(1, dtype=np.float32))
        assert np.isfinite(observation).all()
        if terminated or truncated:
            break
    assert terminated
    assert info["true_loss"] <= 0.6


def test_reaching_the_target_terminates_and_limits_truncate():
    env = SiteSelectionEnv({"goal": {"target_accuracy": 0.5}})
    env.reset(seed=0)
    over, target = False, env.task.target_loss
    while not over:
        _, _, over, truncated, info = env.step(np.ones(20, dtype=np.float32))
        assert over == (info["true_loss"] <= target)
        assert not truncated
    env = SiteSelectionEnv({"goal": {"round_limit": 3}})
    env.reset(seed=0)
    ends = [env.step(np.ones(20, dtype=np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_reward_terms_by_hand():
    weights = {"energy_per_kwh": 0.1, "carbon_per_kg": 0.2, "cost_per_usd": 0.3, "target": 5.0}
    for form in ("rate", "net"):
        env = SiteSelectionEnv({"reward": {"form": form, "time_scale_s": 1000.0, **weights}, "learning": {"s0": 1.0}})
        env.reset(seed=0)
        loss, over, total = np.log(4.13), False, 0.0
        while not over:
            _, reward, over, _, info = env.step(np.ones(20, dtype=np.float32))
            terms = info["reward_terms"]
            progress = (loss - np.log(info["true_loss"])) / (np.log(4.13) - np.log(0.6))
            loss = np.log(info["true_loss"])
            if form == "rate":
                expected = {"progress": progress / (info["round_s"] / 1000.0), "time": 0.0}
            else:
                expected = {"progress": progress, "time": -info["round_s"] / 1000.0}
            expected |= {
                "energy": -0.1 * info["energy_kwh"],
                "carbon": -0.2 * info["carbon_kg"],
                "cost": -0.3 * info["cost_usd"],
                "target": 5.0 * over,
            }
            assert terms == pytest.approx(expected)
            assert reward == pytest.approx(sum(terms.values()))
            total += progress
        assert total >= 1.0


def test_net_reward_orders_policies_by_their_time_to_the_target():
    returns, times = [], []
    for k in (1, 4, 12):
        env = SiteSelectionEnv({"sites": {"count": [12, 12]}, "reward": {"form": "net"}, "learning": {"s0": 5.0}})
        env.reset(seed=5)
        over, total = False, 0.0
        while not over:
            score = np.full(12, -1.0, dtype=np.float32)
            score[np.argsort(env.view.alone_seconds()[0])[:k]] = 1.0
            _, reward, terminated, truncated, info = env.step(score)
            over, total = terminated or truncated, total + reward
        assert terminated
        returns.append(total)
        times.append(info["time_s"])
    assert np.argmax(returns) == np.argmin(times)
    np.testing.assert_array_equal(np.argsort(returns), np.argsort(times)[::-1])


def test_maskable_ppo_never_picks_what_is_masked():
    vec = SiteSelectionVecEnv(
        {"action": {"kind": "binary"}, "power": {"min_gpus": 30.0}, "sites": {"count": [6, 10]}}, 4
    )
    masks = np.stack(vec.env_method("action_masks")) if vec.reset() is not None else None
    assert masks.shape == (4, 20)
    np.testing.assert_array_equal(masks[:, 1::2], vec.selection.eligible)
    assert masks[:, ::2].all()
    model = MaskablePPO("MlpPolicy", vec, n_steps=16, batch_size=32, n_epochs=1, seed=0, device="cpu")
    model.learn(128)
    observation = vec.reset()
    for _ in range(10):
        action, _ = model.predict(observation, action_masks=vec.action_masks())
        observation, _, _, _ = vec.step(action)
        assert (vec.outcome.ineligible == 0).all()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_run(name):
    text = (ROOT / f"configs/site_selection/{name}.yaml").read_text()
    config = SiteSelectionConfig.model_validate(yaml.safe_load(text)["env"])
    assert config.power.split == config.network.split == config.market.split == "train"
    selection = SiteSelection(config)
    selection.reset(range(16))
    rng = np.random.default_rng(0)
    for _ in range(5):
        outcome = selection.step(rng.uniform(-1, 1, (16, config.sites.size)))
        assert np.isfinite(outcome.observation).all()
        assert np.isfinite(outcome.reward).all()
        assert not (outcome.terminated | outcome.truncated).any()


def test_views_predict_what_happens_while_power_stands_still():
    for time_model in ("A", "B"):
        settings = {"time_model": time_model, "work_samples": 1000.0, "epochs": 0.01}
        env = SiteSelectionEnv({"rounds": settings, "sites": {"count": [9, 9]}})
        env.reset(seed=4)
        rng = np.random.default_rng(0)
        for _ in range(5):
            chosen = (rng.random((1, 9)) < 0.5) & env.view.known.eligible
            if not chosen.any():
                continue
            seconds = env.view.round_seconds(chosen)[0]
            candidates = env.view.round_seconds(np.stack([chosen, ~chosen], axis=1))
            assert candidates[0, 0] == seconds
            before = env.view.known.time_s[0] // 300
            _, _, _, _, info = env.step(np.where(chosen[0], 1.0, -1.0).astype(np.float32))
            if info["time_s"] // 300 == before:
                assert info["round_s"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sights": {}}, "unknown key 'sights', did you mean 'sites'"),
        ({"sites": {"count": [0, 5]}}, "count needs 1 <= fewest <= most <= 100, got 0, 5"),
        ({"sites": {"count": [5, 101]}}, "got 5, 101"),
        ({"sites": {"slots": 10}}, "slots 10 is fewer than the 20 sites"),
        (
            {"sites": {"named": [{"name": "a", "region": "aws:us-east-1", "capacity_w": 1e5}] * 2}},
            "two sites are named 'a'; names must be unique",
        ),
        (
            {"sites": {"named": [{"name": "a", "region": "aws:us-east-1", "capacity_w": 1e5, "mix": [1.0]}]}},
            "site 'a': mix has 1 shares for 8 domains",
        ),
        (
            {"sites": {"named": [{"name": "a", "region": "aws:moon-1", "capacity_w": 1e5}]}},
            "unknown region 'aws:moon-1'",
        ),
        ({"sites": {"gpus": ["h1000"]}}, "unknown GPU 'h1000'; known: "),
        ({"workload": {"model": "gpt-9"}}, "unknown 'gpt-9'; known: "),
        ({"goal": {"target_accuracy": 0.899}}, "above the model's ceiling of 0.8"),
        ({"goal": {"target_accuracy": 0.7, "target_loss": 0.6}}, "give either target_accuracy or target_loss"),
        ({"goal": {"target_loss": 5.0}}, "out of the model's reach"),
        ({"goal": {"time_limit_s": 13.9 * 86_400}}, "trace 'power-util/google-cella-pdu6' is shorter than the job"),
        ({"network": {"table": "/nowhere.csv"}}, "cannot read the network table"),
        ({"network": {"distinct_regions": [0, 4]}}, "distinct_regions needs 1 <= fewest <= most, got 0, 4"),
        ({"network": {"distinct_regions": [6, 4]}}, "got 6, 4"),
        (
            {
                "network": {"distinct_regions": [1, 1]},
                "sites": {"named": [{"name": "a", "region": "aws:us-east-1", "capacity_w": 1e5}]},
            },
            "distinct_regions is for sites that are drawn",
        ),
        ({"learning": {"profile": "/nowhere.yaml"}}, "/nowhere.yaml: cannot read"),
        ({"power": {"production_share": 0.5}}, "production_share has a meaning for reading 'non_production' only"),
    ],
)
def test_bad_input_is_refused_in_one_line(data, message):
    with pytest.raises(UserError, match=message) as caught:
        SiteSelectionEnv(data)
    assert "\n" not in str(caught.value)


def test_bad_actions_are_refused_and_leave_the_episode_alone():
    struck, twin = SiteSelectionEnv({}), SiteSelectionEnv({})
    for env in (struck, twin):
        env.reset(seed=1)
    bad = np.zeros(20, dtype=np.float32)
    bad[4] = np.nan
    with pytest.raises(UserError, match="environment 0, site 4 is nan"):
        struck.step(bad)
    with pytest.raises(UserError, match=r"shape \(1, 3\); valid: \(1, 20\)"):
        struck.step(np.zeros(3))
    good = np.ones(20, dtype=np.float32)
    np.testing.assert_array_equal(struck.step(good)[0], twin.step(good)[0])
    with pytest.raises(RuntimeError, match="an episode is over; call reset first"):
        SiteSelection(SiteSelectionConfig()).step(np.zeros((1, 20)))


def test_terms_are_those_of_the_reward():
    env = SiteSelectionEnv({})
    env.reset(seed=0)
    assert tuple(env.step(np.ones(20, dtype=np.float32))[4]["reward_terms"]) == TERMS
    assert isinstance(env.selection.emulator, FederationEmulator)
