import numpy as np
import pytest

from wattgym.agents.baselines import TunedGains, feedback_baseline
from wattgym.agents.rollout import Arena
from wattgym.agents.tuning import TUNABLE, candidate_gains, tune_baselines
from wattgym.envs.config import ActionConfig, PowerShapingConfig
from wattgym.errors import UserError

CONFIG = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "period_s": 10.0, "episode_s": 300.0})


def tune(config=CONFIG, **changes):
    options = {"budget": 6, "scenarios": 4, "seed": 3, "command": "by hand", **changes}
    return tune_baselines(config, **options)


def test_the_best_candidate_wins_on_the_same_scenarios():
    seen = []
    tuned = tune(progress=lambda name, done: seen.append((name, done)))
    assert seen == [(name, done) for name in TUNABLE for done in range(1, 7)]
    assert (tuned.command, tuned.budget, tuned.scenarios, tuned.objective) == ("by hand", 6, 4, "mean reward")
    seeds = np.random.default_rng(3).integers(2**62, size=4).tolist()
    arena = Arena(CONFIG)
    for name in TUNABLE:
        reached = [arena.run(feedback_baseline(name, g), seeds).reward.mean() for g in candidate_gains(6, 3)]
        assert tuned.objective_value[name] == pytest.approx(max(reached), abs=1e-12)
        assert tuned.gains[name] == candidate_gains(6, 3)[int(np.argmax(reached))]
        assert tuned.objective_value[name] > np.mean(reached) + 0.01


def test_tuning_repeats_itself_and_follows_its_seed():
    assert tune() == tune()
    assert tune(seed=4).gains != tune().gains


def test_tuned_gains_survive_their_file():
    tuned = tune(budget=2, scenarios=1)
    assert TunedGains.model_validate(tuned.model_dump(mode="json")) == tuned


def test_gains_do_not_depend_on_what_actions_mean():
    residual = CONFIG.model_copy(update={"action": ActionConfig(kind="residual", scale=0.1)})
    assert tune(residual) == tune()


@pytest.mark.parametrize("budget", [1, 2, 5, 64])
def test_candidates_cover_the_box(budget):
    gains = candidate_gains(budget, 0)
    assert len(gains) == len({(g.proportional, g.integral, g.rate) for g in gains}) == budget
    for name, low in (("proportional", 0.0), ("integral", 0.01), ("rate", 0.1)):
        values = [getattr(g, name) for g in gains]
        assert low <= min(values) <= max(values) <= 1.0
        if budget == 64:
            assert np.histogram(values, bins=8, range=(low, 1.0))[0].min() >= 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"signal": {"families": {"rega": 1}, "split": "validation"}}, "training split only"),
        ({"signal": {"families": {"rega": 1}, "split": "test"}}, "training split only"),
        ({"site": {"surfaces": "test"}}, "training split only"),
    ],
)
def test_only_training_data_may_be_tuned_on(changes, message):
    with pytest.raises(UserError, match=message):
        tune(PowerShapingConfig.model_validate({**CONFIG.model_dump(), **changes}))


@pytest.mark.parametrize("changes", [{"budget": 0}, {"scenarios": 0}])
def test_budgets_are_checked(changes):
    with pytest.raises(UserError, match="budget and scenarios must be at least 1"):
        tune(**changes)
