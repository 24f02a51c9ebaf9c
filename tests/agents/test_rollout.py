import numpy as np
import pytest

from wattgym.agents.baselines import make_baseline
from wattgym.agents.rollout import INTERVENTIONS, Arena
from wattgym.agents.validation import Validation, held_out
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.surfaces import surface_library
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.envs.reward import TERMS
from wattgym.errors import UserError
from wattgym.hw.limits import Decision

CONFIG = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "period_s": 10.0, "episode_s": 300.0})


class Scripted:
    """The same random actions for any environment."""

    name = "scripted"

    def __init__(self):
        self.actions = np.random.default_rng(5).uniform(-1, 1, (30, 1, 2))

    def reset(self, task):
        self._tick = 0

    def act(self, observation):
        self._tick += 1
        return np.repeat(self.actions[self._tick - 1], observation.shape[0], axis=0)


def test_a_rollout_is_what_the_gymnasium_environment_does():
    controller = Scripted()
    env = PowerShapingEnv(CONFIG)
    _, info = env.reset(seed=7)
    rollout = Arena(CONFIG).run(controller, [info["episode_seed"], 8])
    steps = [env.step(action) for action in controller.actions[:, 0]]
    assert steps[-1][3]
    np.testing.assert_array_equal(rollout.reward[0], [reward for _, reward, *_ in steps])
    for name in ("power_w", "target_w", "throughput"):
        np.testing.assert_array_equal(getattr(rollout, name)[0], [step[4][name] for step in steps])
    for name in TERMS:
        mean = np.mean([step[4]["reward_terms"][name] for step in steps])
        assert rollout.terms[name][0] == pytest.approx(mean, abs=1e-12)


def test_shapes_and_totals():
    rollout = Arena(CONFIG).run(make_baseline("random"), [1, 2, 3])
    for name in ("signal", "target_w", "power_w", "throughput", "reward", "changed"):
        assert getattr(rollout, name).shape == (3, 30), name
    assert rollout.limit.shape == (3, 30, 2)
    assert rollout.limit.min() >= -1e-9
    assert rollout.limit.max() <= 1 + 1e-9
    np.testing.assert_allclose(sum(rollout.terms.values()), rollout.reward.mean(axis=1))
    np.testing.assert_allclose(rollout.target_w, rollout.base_w[:, None] - rollout.capacity_w[:, None] * rollout.signal)
    perfect = rollout.base_w[:, None] - rollout.capacity_w[:, None] * rollout.response
    np.testing.assert_allclose(perfect, rollout.power_w)
    assert rollout.families == ("synthetic_regd",) * 3


def test_equal_seeds_are_identical_scenarios_whatever_was_run_before():
    arena = Arena(CONFIG)
    first = arena.run(make_baseline("random"), [4, 5])
    other = arena.run(make_baseline("PI"), [4, 5])
    again = arena.run(make_baseline("random"), [4, 5])
    alone = Arena(CONFIG).run(make_baseline("uncapped"), [5])
    np.testing.assert_array_equal(first.target_w, other.target_w)
    np.testing.assert_array_equal(first.power_w, again.power_w)
    np.testing.assert_array_equal(alone.target_w[0], other.target_w[1])
    assert not np.array_equal(first.power_w, other.power_w)
    assert [signal.family for signal in arena.draw([4, 5])] == ["synthetic_regd"] * 2
    np.testing.assert_array_equal(arena.draw([4, 5])[0].values, first.signal[0])


def test_interventions_are_all_but_a_spared_write():
    assert not INTERVENTIONS & Decision.DEAD_BANDED
    for decision in (Decision.CLIPPED_LOW, Decision.CLIPPED_HIGH, Decision.TOO_SOON, Decision.RAISE_LIMITED):
        assert INTERVENTIONS & decision


def test_slow_raises_count_as_interventions():
    slow = CONFIG.model_copy(update={"rules": CONFIG.rules.model_copy(update={"raise_fraction_per_s": 0.001})})
    assert Arena(slow).run(make_baseline("random"), [1]).changed.mean() > 0.5
    assert Arena(slow).run(make_baseline("uncapped"), [1]).changed.sum() == 0


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_held_out_scenarios_use_the_splits_signals_and_plants(split):
    config = held_out(CONFIG, "droop", split, 600.0)
    assert config.signal.split == split
    assert config.signal.families == {"droop": 1.0}
    assert config.episode_s == 600.0
    arena = Arena(config)
    assert {signal.split for signal in arena.draw(range(5))} == {split}
    used = {surface.id for surface in arena._shaping.plant._library.surfaces}
    assert {surface_library().get(name).split for name in used} == {split}
    # Everything else stays as it was trained.
    for key in ("action", "observation", "reward", "rules", "period_s"):
        assert getattr(config, key) == getattr(CONFIG, key)


def test_listed_surfaces_and_offers_stay():
    surface = surface_library().select(split="train")[0].id
    offers = {"rega": {"base": 0.4, "capacity": 0.2}}
    env = PowerShapingConfig.model_validate({"site": {"surfaces": [surface]}, "signal": {"offers": offers}})
    config = held_out(env, "rega", "test", 600.0)
    assert config.site.surfaces == (surface,)
    assert config.signal.offer("rega").capacity == 0.2


def test_impossible_scenarios_are_one_line():
    with pytest.raises(UserError, match="test scenarios: signal: unknown signal family 'recorded'"):
        held_out(CONFIG, "recorded", "test", 600.0)
    with pytest.raises(UserError, match="whole number of periods"):
        held_out(CONFIG, "rega", "test", 605.0)


def test_validation_is_the_same_each_time_and_differs_from_training(tiny):
    validation = Validation(tiny())
    one, two = (validation.run(make_baseline("feed-forward")) for _ in range(2))
    assert one == two
    assert one.by_family.keys() == {"rega", "droop"}
    assert one.reward == pytest.approx(np.mean([f["reward_mean"] for f in one.by_family.values()]))
    assert validation.run(make_baseline("random")).reward < one.reward
    for arena in validation._arenas.values():
        assert arena.config.signal.split == arena.config.site.surfaces == "validation"
