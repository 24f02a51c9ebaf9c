import threading
import time

import numpy as np
import pytest

from wattgym.agents.baselines import make_baseline
from wattgym.agents.fallback import FallbackConfig, FallbackController, Reason
from wattgym.agents.rollout import Arena
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.observation import BOUND
from wattgym.envs.shaping import PowerShaping

CONFIG = PowerShapingConfig.model_validate({"site": {"jobs": 2}, "episode_s": 120.0})
INLINE = FallbackConfig(deadline_share=0.0, good_periods=2)


class Policy:
    """Answers 0.5 for every job, or what `answer` makes of it."""

    name = "policy"

    def __init__(self, answer=lambda policy, action: action):
        self.answer = answer
        self.seen = []
        self.resets = 0

    def reset(self, task):
        self.resets += 1
        self.jobs = task.layout.jobs

    def act(self, observation):
        self.seen.append(observation)
        return self.answer(self, np.full((observation.shape[0], self.jobs), 0.5))


@pytest.fixture
def stage():
    """Task and first observation of two sites."""
    shaping = PowerShaping(CONFIG, Emulator(CONFIG), 2)
    observation = shaping.reset([1, 2])
    return shaping.task, observation


def expected(task, observation):
    """What a fresh stand-in does."""
    controller = make_baseline("feed-forward + PI")
    controller.reset(task)
    return controller.act(observation)


def spoilt(task, observation, name, value, site=0):
    changed = observation.copy()
    changed[site, task.layout.site(name)] = value
    return changed


def test_the_policy_acts_while_all_is_well(stage):
    task, observation = stage
    controller = FallbackController(Policy(), INLINE)
    controller.reset(task)
    for _ in range(4):
        np.testing.assert_array_equal(controller.act(observation), np.full((2, 2), 0.5))
    assert controller.total == 0
    assert controller.reasons == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("age", 3.2, Reason.STALE),
        ("error_2", np.nan, Reason.NOT_FINITE),
        ("power", np.inf, Reason.NOT_FINITE),
        ("error_1", BOUND, Reason.OUT_OF_RANGE),
        ("error_1", -7.0, Reason.OUT_OF_RANGE),
    ],
)
def test_a_bad_observation_hands_over_one_site_and_comes_back_after_good_periods(stage, name, value, reason):
    task, observation = stage
    policy = Policy()
    controller = FallbackController(policy, INLINE)
    controller.reset(task)
    controller.act(observation)
    action = controller.act(spoilt(task, observation, name, value))
    assert np.isfinite(action).all()
    assert controller.reasons == (reason, None)
    assert not np.array_equal(action[0], [0.5, 0.5])
    np.testing.assert_array_equal(action[1], [0.5, 0.5])
    assert all(np.isfinite(seen).all() for seen in policy.seen)
    for _ in range(2):  # good_periods
        controller.act(observation)
        assert controller.reasons == (Reason.RECOVERING, None)
    np.testing.assert_array_equal(controller.act(observation), np.full((2, 2), 0.5))
    assert dict(controller.counts) == {reason: 1, Reason.RECOVERING: 2}


def test_three_periods_old_telemetry_is_still_acted_on(stage):
    task, observation = stage
    controller = FallbackController(Policy(), INLINE)
    controller.reset(task)
    controller.act(spoilt(task, observation, "age", 3.0))
    assert controller.total == 0


def test_stale_or_missing_telemetry_is_not_corrected_for(stage):
    task, observation = stage
    without_error = spoilt(task, observation, "error_1", 0.0)
    for name, value in (("age", 4.0), ("power", np.nan)):
        controller = FallbackController(Policy(), INLINE)
        controller.reset(task)
        controller.act(observation)
        shown = spoilt(task, spoilt(task, observation, "error_1", 1.5), name, value)
        np.testing.assert_allclose(controller.act(shown)[0], expected(task, without_error)[0])


def test_the_stand_in_starts_without_memory_and_then_is_the_tuned_loop(stage):
    task, observation = stage
    failing = FallbackController(Policy(lambda policy, action: action * np.nan), INLINE)
    failing.reset(task)
    reference = make_baseline("feed-forward + PI")
    reference.reset(task)
    for step in range(5):
        shown = spoilt(task, observation, "error_1", 0.1 * step)
        np.testing.assert_array_equal(failing.act(shown), reference.act(shown))
    assert dict(failing.counts) == {Reason.BAD_ACTION: 10}


def test_a_policy_whose_action_is_no_number_starts_afresh(stage):
    task, observation = stage
    policy = Policy(lambda policy, action: np.where(len(policy.seen) == 2, np.inf, action))
    controller = FallbackController(policy, INLINE)
    controller.reset(task)
    for _ in range(2):
        controller.act(observation)
    assert controller.reasons == (Reason.BAD_ACTION, Reason.BAD_ACTION)
    assert policy.resets == 2


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 3)])
def test_an_action_of_another_shape_is_a_failure(stage, shape):
    task, observation = stage
    controller = FallbackController(Policy(lambda policy, action: np.zeros(shape)), INLINE)
    controller.reset(task)
    np.testing.assert_array_equal(controller.act(observation), expected(task, observation))
    assert controller.reasons == (Reason.FAILED, Reason.FAILED)
    assert str(shape) in controller.last_failure


def test_whatever_a_policy_raises_the_loop_goes_on(stage):
    def fail(policy, action):
        raise RuntimeError("broken\nnetwork")

    task, observation = stage
    for config in (INLINE, FallbackConfig()):
        controller = FallbackController(Policy(fail), config)
        controller.reset(task)
        np.testing.assert_array_equal(controller.act(observation), expected(task, observation))
        assert controller.reasons == (Reason.FAILED, Reason.FAILED)
        assert controller.last_failure == "RuntimeError: broken network"


def test_a_hung_policy_is_left_alone_and_nobody_waits_for_it_twice(stage):
    release = threading.Event()

    def hang(policy, action):
        if len(policy.seen) == 2:
            release.wait(60.0)
        return action

    task, observation = stage
    policy = Policy(hang)
    controller = FallbackController(policy, FallbackConfig(deadline_share=0.5, good_periods=1))
    controller.reset(task)
    np.testing.assert_array_equal(controller.act(observation), np.full((2, 2), 0.5))
    for _ in range(3):
        np.testing.assert_array_equal(controller.act(observation).shape, (2, 2))
        assert controller.reasons == (Reason.LATE, Reason.LATE)
    assert len(policy.seen) == 2  # not asked again while it hangs
    release.set()
    while controller._thread.busy:
        time.sleep(0.01)
    controller.act(observation)
    assert controller.reasons == (Reason.RECOVERING, Reason.RECOVERING)
    np.testing.assert_array_equal(controller.act(observation), np.full((2, 2), 0.5))
    assert controller.counts[Reason.LATE] == 6


def test_a_late_answer_is_never_taken_for_a_later_one(stage):
    release = threading.Event()

    def slow_once(policy, action):
        if len(policy.seen) == 1:
            release.wait(60.0)
            return -action
        return action

    task, observation = stage
    controller = FallbackController(Policy(slow_once), FallbackConfig(deadline_share=0.1, good_periods=1))
    controller.reset(task)
    controller.act(observation)
    release.set()
    while controller._thread.busy:
        time.sleep(0.01)
    controller.act(observation)
    np.testing.assert_array_equal(controller.act(observation), np.full((2, 2), 0.5))


def test_in_the_emulator_a_wrapped_baseline_does_what_it_does_alone():
    arena = Arena(CONFIG)
    alone = arena.run(make_baseline("PI"), [1, 2, 3])
    wrapped = FallbackController(make_baseline("PI"), INLINE)
    np.testing.assert_array_equal(arena.run(wrapped, [1, 2, 3]).power_w, alone.power_w)
    assert wrapped.total == 0
    assert wrapped.name == "PI"


def test_in_the_emulator_a_broken_policy_is_worth_the_stand_in():
    arena = Arena(CONFIG)
    broken = FallbackController(Policy(lambda policy, action: action * np.nan), INLINE)
    stand_in = arena.run(make_baseline("feed-forward + PI"), [1, 2, 3])
    np.testing.assert_array_equal(arena.run(broken, [1, 2, 3]).power_w, stand_in.power_w)
    assert broken.counts[Reason.BAD_ACTION] == 3 * CONFIG.ticks
