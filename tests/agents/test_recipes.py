"""Every committed recipe trains, in a few steps, and its policy acts in the environment that it says."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.agents.baselines import make_baseline
from wattgym.agents.cloning import _returns, _Share
from wattgym.agents.config import TrainingConfig, parse_training
from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.search import check_ranges
from wattgym.agents.search_space import with_values
from wattgym.agents.training import train
from wattgym.errors import UserError
from wattgym.files import read_json_object

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def recipe(name):
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def shortened(name, **more):
    """The recipe with few steps, small networks and short episodes; all else as committed."""
    data = recipe(name)
    changes = {
        "env.episode_s": 600.0,
        "env.period_s": 10.0,
        "train.total_steps": 128,
        "train.num_envs": 4,
        "train.checkpoint_steps": 128,
        "network.hidden": [16],
        "validation": {"every_steps": 128, "scenarios": 1, "episode_s": 600.0},
        "env.observation.integral_leak": 0.9,
    }
    rates = data["train"].get("hyperparameters", {})
    if data["train"]["algorithm"] in ("sac", "tqc"):
        rates = {**rates, "learning_starts": 32, "batch_size": 16, "buffer_size": 500}
    else:
        rates = {**rates, "n_steps": 16, "n_epochs": 1}
    changes["train.hyperparameters"] = rates
    if data.get("imitation"):
        changes |= {"imitation.steps": 256, "imitation.passes": 1, "imitation.batch_size": 64}
    return parse_training(with_values(data, {**changes, **more}), name)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_and_its_policy_acts(name, tmp_path):
    outcome = train(shortened(name), tmp_path / "run", progress=False)
    assert outcome.run.info.status == "finished"
    assert math.isfinite(outcome.best_reward)
    policy = load_policy(tmp_path / "run", "last")
    rollout = Arena(policy.config.env).run(policy.controller, [1])
    assert np.isfinite(rollout.reward).all()
    assert read_json_object(tmp_path / "run" / "validations.json")["validations"][-1]["steps"] >= 128


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_trained_and_compared_alike(name):
    full, plain = parse_training(recipe(name), name), parse_training(recipe("ppo"), "ppo")
    assert isinstance(full, TrainingConfig)
    assert (full.env.signal, full.env.reward, full.env.rules) == (plain.env.signal, plain.env.reward, plain.env.rules)
    assert (full.validation.families, full.validation.scenarios) == (
        plain.validation.families, plain.validation.scenarios
    )  # fmt: skip
    if full.search:
        check_ranges(shortened(name))


@pytest.mark.parametrize("name", ["residual_pi", "residual_identified", "advice", "knobs"])
def test_an_untrained_residual_is_what_it_is_added_to(name, tmp_path):
    # A rate of practically nothing leaves the first policy as it was.
    still = {"train.hyperparameters.learning_rate": 1e-12, "train.learning_rate_end": 1e-12}
    config = shortened(name, **still, imitation={})
    train(config, tmp_path / "run", progress=False)
    policy = load_policy(tmp_path / "run", "last")
    observation = np.random.default_rng(0).normal(size=(5, len(policy.controller._features))).astype(np.float32)
    np.testing.assert_allclose(policy.controller.act(observation), 0.0, atol=1e-6)


def test_cloning_brings_the_policy_close_to_its_expert(tmp_path):
    settings = {
        "imitation.expert": "feed-forward + PI",
        "imitation.steps": 4096,
        "imitation.passes": 2,
        "imitation.epochs": 20,
        "network.hidden": [64],
    }
    few = {"train.hyperparameters.learning_rate": 1e-12, "train.learning_rate_end": 1e-12}
    config = shortened("imitation", **settings, **few)
    train(config, tmp_path / "run", progress=False)
    record = read_json_object(tmp_path / "run" / "imitation.json")
    assert (record["expert"], record["decisions"]) == (config.imitation.expert, 3 * 4096)
    policy = load_policy(tmp_path / "run", "last")
    arena, seeds = Arena(config.env), [11, 12, 13]
    errors = {
        name: np.abs(who.limit - arena.run(make_baseline(config.imitation.expert), seeds).limit).mean()
        for name, who in {
            "cloned": arena.run(policy.controller, seeds),
            "static": arena.run(make_baseline("static cap"), seeds),
        }.items()
    }
    assert errors["cloned"] < 0.5 * errors["static"]
    # The last share was the policy's own states; on them it was close before it learnt from them.
    assert record["error"] < 0.3


def test_returns_forget_neither_ends_nor_what_was_not_seen():
    reward = np.arange(1.0, 7.0)[:, None]
    share = _Share(
        np.zeros((6, 1, 1)), np.zeros((6, 1, 1)), reward, np.array([False, False, True, False, False, False])
    )
    found = _returns(share, 0.1)[:, 0]
    # 1 + 0.1 * (2 + 0.1 * 3); the end after the third step hides what follows it.
    np.testing.assert_allclose(found[:2], [1.23, 2.3])
    # The last step of an episode and of the share show only 90 % of their return's weight.
    assert np.isnan(found[[2, 5]]).all()
    np.testing.assert_allclose(found[3:5], [4.56, 5.6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"imitation.expert": "nobody"}, "imitation.expert 'nobody' is unknown or needs other knobs; known: uncapped"),
        ({"imitation.expert": "energy-matched cap"}, "is unknown"),
        ({"imitation.expert": None}, "imitation has settings but no expert"),
        ({"train.algorithm": "recurrent_ppo"}, "imitation goes with algorithms without memory"),
    ],
)
def test_imitations_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        parse_training(with_values(recipe("imitation"), changes), "test")
