import numpy as np
import pytest

from wattgym.agents.baselines import TUNABLE, TunedGains, make_tunable, tunable
from wattgym.agents.baselines.settings import Range
from wattgym.agents.rollout import Arena
from wattgym.agents.tuning import candidate_settings, tune_baselines
from wattgym.envs.config import ActionConfig, PowerShapingConfig
from wattgym.errors import UserError

CONFIG = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "period_s": 10.0, "episode_s": 300.0})
FEW = ("PI", "feed-forward + PI", "AQA-style rule")


def tune(config=CONFIG, **changes):
    options = {"budget": 6, "scenarios": 4, "seed": 3, "command": "by hand", "names": FEW, **changes}
    return tune_baselines(config, **options)


def test_the_best_candidate_wins_on_the_same_scenarios():
    seen = []
    tuned = tune(progress=lambda name, done: seen.append((name, done)))
    assert seen == [(name, done) for name in FEW for done in range(1, 7)]
    assert (tuned.command, tuned.budget, tuned.scenarios, tuned.objective) == ("by hand", 6, 4, "mean reward")
    seeds = np.random.default_rng(3).integers(2**62, size=4).tolist()
    arena = Arena(CONFIG)
    for name in FEW:
        candidates = candidate_settings(name, 6, 3)
        reached = [arena.run(make_tunable(name, settings), seeds).reward.mean() for settings in candidates]
        assert tuned.objective_value[name] == pytest.approx(max(reached), abs=1e-12)
        assert tuned.gains[name] == candidates[int(np.argmax(reached))]
        assert tuned.objective_value[name] > np.mean(reached) + 0.01


def test_tuning_repeats_itself_and_follows_its_seed():
    assert tune() == tune()
    assert candidate_settings("PI", 6, 4)[1:] != candidate_settings("PI", 6, 3)[1:]


def test_tuned_gains_survive_their_file():
    tuned = tune(budget=2, scenarios=1)
    assert TunedGains.model_validate(tuned.model_dump(mode="json")) == tuned


def test_gains_do_not_depend_on_what_actions_mean():
    residual = CONFIG.model_copy(update={"action": ActionConfig(kind="residual", scale=0.1)})
    assert tune(residual) == tune()


@pytest.mark.parametrize("name", TUNABLE)
def test_candidates_are_the_defaults_and_cover_the_box(name):
    entry = tunable(name)
    assert set(entry.search) <= set(entry.settings.model_fields)
    for budget in (1, 2, 5):
        assert len(candidate_settings(name, budget, 0)) == budget
    settings = candidate_settings(name, 65, 0)
    defaults = entry.settings()
    assert settings[0] == {key: getattr(defaults, key) for key in entry.search}
    assert len({tuple(s.values()) for s in settings}) == 65
    for key, box in entry.search.items():
        values = [s[key] for s in settings[1:]]
        assert box.low <= min(values) <= max(values) <= box.high
        if isinstance(values[0], float):
            scale = np.log if box.log else np.asarray
            edges = (scale(box.low), scale(box.high))
            assert np.histogram(scale(values), bins=8, range=edges)[0].min() >= 6, key
    for one in settings:
        make_tunable(name, one)


def test_ranges_by_hand():
    assert [Range(1.0, 3.0).at(share) for share in (0.0, 0.5, 1.0)] == [1.0, 2.0, 3.0]
    assert [Range(0.01, 1.0, log=True).at(share) for share in (0.0, 0.5, 1.0)] == [0.01, 0.1, 1.0]


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
