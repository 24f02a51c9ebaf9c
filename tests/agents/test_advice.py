"""Advice to a predictive loop: what its zero is, what a right one is worth, and a policy that gives it."""

import pickle

import numpy as np
import pytest
import torch

from wattgym.agents.adviser import ADVISER, OracleAdviser
from wattgym.agents.baselines import make_tunable
from wattgym.agents.bundle import BundleController
from wattgym.agents.config import parse_training
from wattgym.agents.export import export_bundle
from wattgym.agents.job_policy import JobNetwork
from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.training import train
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.knobs import KNOBS
from wattgym.envs.shaping import PowerShaping
from wattgym.envs.vector import PowerShapingVecEnv
from wattgym.errors import UserError

ENV = {"site": {"jobs": 3}, "signal": {"families": {"rega": 1.0}}, "episode_s": 400.0}
ADVICE = {**ENV, "action": {"kind": "advice", "scale": 0.5, "loop": {"horizon": 3}}}


class Steady:
    """The same advice for every job, always."""

    name = "steady"

    def __init__(self, advice=0.0, knobs=0.0):
        self._advice, self._knobs = advice, knobs

    def reset(self, task):
        self._shape, self._actions = task.spec.min_limit_w.shape, task.layout.actions

    def act(self, observation):
        action = np.full((self._shape[0], self._actions), self._knobs)
        action[:, : self._shape[1]] = self._advice
        return action


def error_of(rollout):
    return np.abs((rollout.power_w - rollout.target_w) / rollout.capacity_w[:, None]).mean()


def test_right_advice_is_worth_much_and_wrong_advice_costs():
    arena, seeds = Arena(PowerShapingConfig.model_validate(ADVICE)), range(6)
    told, alone, misled = (arena.run(who, seeds) for who in (OracleAdviser(), Steady(), Steady(0.3)))
    assert error_of(told) < 0.9 * error_of(alone)
    assert error_of(misled) > 1.2 * error_of(alone)
    # More draw is expected, so limits fall.
    assert misled.limit.mean() < alone.limit.mean() - 0.05
    for rollout in (told, alone, misled):
        assert not rollout.changed.any()


def test_the_loop_sets_the_other_knobs_and_plans_for_what_is_set():
    action = {**ADVICE["action"], "knobs": list(KNOBS)}
    arena, seeds = Arena(PowerShapingConfig.model_validate({**ADVICE, "action": action})), range(6)
    told, alone = arena.run(OracleAdviser(), seeds), arena.run(Steady(), seeds)
    capped = Arena(PowerShapingConfig.model_validate(ADVICE)).run(OracleAdviser(), seeds)
    assert (told.throughput.mean(axis=1) > capped.throughput.mean(axis=1) + 0.02).all()
    assert error_of(told) < 0.9 * error_of(alone)
    assert error_of(told) < 1.1 * error_of(capped)
    # An action of 0 is the loop, knobs included; whoever moves them up to their ends has the loop with limits alone.
    assert (alone.knobs[:, 60:] < 1.0).any(axis=(0, 1, 2)).any()
    plain = Arena(PowerShapingConfig.model_validate(ADVICE)).run(Steady(), seeds)
    np.testing.assert_array_equal(arena.run(Steady(knobs=1.0), seeds).power_w, plain.power_w)


def test_no_advice_is_near_what_a_program_with_a_command_a_period_does():
    seeds = range(4)
    held = Arena(PowerShapingConfig.model_validate(ADVICE)).run(Steady(), seeds)
    free = Arena(PowerShapingConfig.model_validate(ENV)).run(make_tunable("MPC", {"horizon": 3}), seeds)
    assert abs(error_of(held) - error_of(free)) < 0.1 * error_of(free)


def test_an_action_is_found_for_limits_that_somebody_else_wants():
    """Whoever stands in for a policy commands limits; its advice makes the loop do that."""
    shaping = PowerShaping(config := PowerShapingConfig.model_validate(ADVICE), Emulator(config), 3)
    shaping.reset([1, 2])
    task = shaping.task
    span = task.spec.max_limit_w - task.spec.min_limit_w
    for k in range(20):
        wanted = np.full((2, 3), 0.5 + 0.2 * np.sin(k))
        outcome = shaping.step(task.action_for(wanted, np.zeros(2), wanted))
        reached = (outcome.telemetry.limit_w - task.spec.min_limit_w) / span
        if k > 3:
            # The first raises are limited by the rules; a job in a dip leaves its part to the others.
            np.testing.assert_allclose(reached, wanted, atol=0.02)


def test_a_sensor_that_says_nothing_leaves_the_loop_running():
    shaping = PowerShaping(config := PowerShapingConfig.model_validate(ADVICE), Emulator(config), 3)
    shaping.reset([1])
    for k in range(6):
        telemetry = shaping.step(np.zeros((1, 3))).telemetry
        telemetry.sensor_w = telemetry.sensor_w.copy()
        telemetry.sensor_w[0, k % 3] = np.nan
        shaping._foresee(telemetry)
        assert np.isfinite(shaping.task.predictive.advised(np.zeros((1, 3)))).all()


def test_a_live_plant_may_miss_periods_up_to_beyond_the_end():
    shaping = PowerShaping(config := PowerShapingConfig.model_validate(ADVICE), Emulator(config), 3)
    shaping.reset([1])
    telemetry = shaping.step(np.zeros((1, 3))).telemetry
    telemetry.tick = shaping.targets_w.shape[1] + 7
    assert np.isfinite(shaping._observe(telemetry)).all()


def test_a_stored_environment_goes_on_as_if_nothing_had_happened():
    batch = PowerShapingVecEnv(PowerShapingConfig.model_validate(ADVICE), 3)
    batch.seed(5)
    batch.reset()
    actions = np.random.default_rng(0).uniform(-0.2, 0.2, (20, 3, 3)).astype(np.float32)
    for action in actions[:10]:
        batch.step(action)
    stored = pickle.loads(pickle.dumps(batch))
    for action in actions[10:]:
        for mine, theirs in zip(batch.step(action)[:2], stored.step(action)[:2], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_jobs_share_their_weights():
    torch.manual_seed(0)
    network = JobNetwork(site=2, jobs=3, features=4, hidden=(8, 8), activation=torch.nn.Tanh)
    x = torch.randn(5, 2 + 3 * 4)
    own = x[:, 2:].reshape(5, 4, 3)
    swapped = torch.cat([x[:, :2], own[:, :, [2, 0, 1]].reshape(5, 12)], dim=1)
    torch.testing.assert_close(network(swapped), network(x)[:, [2, 0, 1]])


class Compared(OracleAdviser):
    """Plays right advice and remembers how far a policy's would have been from it."""

    def __init__(self, policy):
        self.policy, self.right, self.wrong = policy, [], []

    def reset(self, task):
        super().reset(task)
        self.policy.reset(task)

    def act(self, observation):
        advice = super().act(observation)
        self.right.append(advice)
        self.wrong.append(self.policy.act(observation) - advice)
        return advice


@pytest.mark.parametrize("knobs", [KNOBS[:1], KNOBS], ids=["limit", "all knobs"])
def test_a_policy_learns_to_advise_and_is_exported_with_its_loop(tmp_path, knobs):
    imitation = {"expert": ADVISER, "steps": 3200, "passes": 1, "epochs": 6, "batch_size": 256, "learning_rate": 3e-3}
    rates = {"n_steps": 16, "n_epochs": 1, "learning_rate": 1e-12}
    config = parse_training(
        {
            "env": {
                **ADVICE,
                "action": {**ADVICE["action"], "knobs": list(knobs)},
                "signal": {"families": {"synthetic_regd": 1}},
            },
            "imitation": imitation,
            "train": {"total_steps": 256, "num_envs": 16, "learning_rate_end": 1e-12, "hyperparameters": rates},
            "validation": {"scenarios": 1, "episode_s": 600.0, "families": ["rega"]},
            "network": {"architecture": "per_job", "hidden": [32], "zero_head": True},
        },
        "test",
    )
    train(config, tmp_path / "run", progress=False)
    bundle = export_bundle(tmp_path / "run", tmp_path / "bundle", "last")
    assert bundle.manifest.contract.action.loop == config.env.action.loop
    arena, seeds = Arena(config.env), range(50, 58)
    compared = Compared(load_policy(tmp_path / "run", "last").controller)
    exported = Compared(BundleController(bundle))
    for who in (compared, exported):
        arena.run(who, seeds)
    # Its advice is near the right one, and it leaves other knobs where the loop has them.
    wrong, right = (np.square(part).reshape(-1, len(knobs), 3) for part in (compared.wrong, compared.right))
    assert wrong[:, 0].mean() < 0.8 * right[:, 0].mean()
    assert (wrong[:, 1:] < 1e-3).all()
    np.testing.assert_allclose(exported.wrong, compared.wrong, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"imitation": {"expert": "MPC"}}, "'advice' go together"),
        ({"env": ENV, "imitation": {"expert": ADVISER}}, "'advice' go together"),
        ({"train": {"algorithm": "sac"}, "network": {"architecture": "per_job"}}, "goes with train.algorithm 'ppo'"),
    ],
)
def test_what_does_not_go_together_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        parse_training({"env": ADVICE, **change}, "test")
