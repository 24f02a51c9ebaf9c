"""Learners drive discrete and continuous knobs in one vector; bundles say which, baselines leave them alone."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

from wattgym.agents.baselines import feedback_baseline
from wattgym.agents.bundle import BundleController, load_bundle
from wattgym.agents.config import TrainingConfig
from wattgym.agents.export import export_bundle
from wattgym.agents.fallback import FallbackConfig, FallbackController
from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.training import train
from wattgym.config import parse_config
from wattgym.envs.feedback import FeedbackGains
from wattgym.envs.knobs import KNOBS
from wattgym.errors import UserError

ENV = {
    "signal": {"families": {"synthetic_regd": 1}}, "site": {"jobs": 2}, "action": {"knobs": KNOBS},
    "knob_rules": {"min_duty": 0.0}, "period_s": 10.0, "episode_s": 370.0,
}  # fmt: skip
OFF_POLICY = {"learning_starts": 100, "batch_size": 32, "buffer_size": 2000, "train_freq": 8}
HYPERPARAMETERS = {"ppo": {"n_steps": 32, "n_epochs": 2}, "sac": OFF_POLICY, "tqc": OFF_POLICY}


def config(algorithm):
    data = {
        "env": ENV,
        "train": {
            "algorithm": algorithm, "total_steps": 256, "num_envs": 4, "checkpoint_steps": 128,
            "hyperparameters": HYPERPARAMETERS[algorithm],
        },
        "network": {"hidden": [16]},
        "validation": {"every_steps": 256, "scenarios": 2, "episode_s": 600.0},
    }  # fmt: skip
    return parse_config(TrainingConfig, data, "test")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(HYPERPARAMETERS))
def test_a_policy_over_all_knobs_is_trained_exported_and_run(algorithm, tmp_path):
    settings = config(algorithm)
    train(settings, tmp_path / "run")
    bundle = export_bundle(tmp_path / "run", tmp_path / "bundle", "last")
    contract = bundle.manifest.contract
    assert (contract.action.knobs, contract.actions, contract.jobs) == (KNOBS, 10, 2)
    assert contract.knob_rules.min_duty == 0.0
    assert bundle.manifest.parity.largest_difference <= 1e-6
    arena = Arena(settings.env)
    mine = arena.run(BundleController(load_bundle(tmp_path / "bundle")), [1, 2])
    theirs = arena.run(load_policy(tmp_path / "run", "last").controller, [1, 2])
    np.testing.assert_allclose(mine.limit, theirs.limit, atol=1e-5)
    np.testing.assert_allclose(mine.throughput, theirs.throughput, atol=1e-4)
    # A plant without one of the knobs is refused by the name of the field, and so is one under other rules.
    for change, field in (
        ({"action": settings.env.action.model_copy(update={"knobs": KNOBS[:3]})}, "action.knobs"),
        ({"knob_rules": settings.env.knob_rules.model_copy(update={"min_duty": 0.5})}, "knob_rules.min_duty"),
    ):
        other = Arena(settings.env.model_copy(update=change))
        with pytest.raises(UserError, match=f"the plant's {field}"):
            other.run(BundleController(bundle), [1])


def test_baselines_hold_other_knobs_neutral_and_stand_in_for_policies_that_fail():
    settings = config("ppo").env
    plain = settings.model_copy(update={"action": settings.action.model_copy(update={"knobs": KNOBS[:1]})})
    plain = plain.model_copy(update={"knob_rules": type(settings.knob_rules)()})

    def baseline():
        return feedback_baseline("feed-forward + PI", FeedbackGains())

    shaped, capped = (Arena(env).run(baseline(), [3, 4]) for env in (settings, plain))
    np.testing.assert_array_equal(shaped.power_w, capped.power_w)
    np.testing.assert_array_equal(shaped.throughput, capped.throughput)

    class Broken:
        name = "broken"

        def reset(self, task):
            self.actions = task.layout.actions

        def act(self, observation):
            return np.full((observation.shape[0], self.actions), np.nan)

    watched = FallbackController(Broken(), FallbackConfig(deadline_share=0.0), baseline())
    np.testing.assert_array_equal(Arena(settings).run(watched, [3, 4]).power_w, shaped.power_w)
