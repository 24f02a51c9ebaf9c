"""Small trainings that several test files look at; each runs once."""

import os

# Before torch is imported: small networks are fastest on one thread, and the test machine is shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import functools

import pytest

from wattgym.agents.config import TrainingConfig, parse_training
from wattgym.agents.training import train
from wattgym.config import parse_config

TINY = {
    "env": {
        "signal": {"families": {"synthetic_regd": 1, "rega": 1}, "split": "train"},
        "site": {"jobs": 2},
        "period_s": 10.0,
        "episode_s": 370.0,
    },
    "train": {
        "algorithm": "ppo",
        "total_steps": 1024,
        "num_envs": 4,
        "checkpoint_steps": 256,
        "hyperparameters": {"n_steps": 32, "n_epochs": 2},
    },
    "network": {"hidden": [16]},
    "validation": {"every_steps": 256, "scenarios": 2, "episode_s": 600.0},
}
FEDERATION = {
    "sites": {"count": [3, 6]},
    "action": {"kind": "binary"},
    "goal": {"target_loss": 2.5},
    "reward": {"form": "net"},
}
TINY_SELECTION = {
    "problem": "site_selection",
    "slots": 6,
    "families": {
        "a": {"env": {**FEDERATION, "rounds": {"time_model": "A"}}},
        "b": {"envs": 2, "env": {**FEDERATION, "rounds": {"time_model": "B", "dropouts_per_hour": 1.0}}},
    },
    "train": {
        "total_steps": 384,
        "num_envs": 6,
        "normalise_observations": False,
        "checkpoint_steps": 96,
        "hyperparameters": {"n_steps": 16, "n_epochs": 2, "batch_size": 48},
    },
    "network": {"architecture": "deep_sets", "hidden": [16, 16]},
    "imitation": {"expert": "oracle", "steps": 60, "passes": 2, "epochs": 2, "batch_size": 32},
    "validation": {"every_steps": 96, "scenarios": 2},
}
OFF_POLICY = {"learning_starts": 100, "batch_size": 32, "buffer_size": 2000, "train_freq": 8}


@pytest.fixture(scope="session")
def tiny():
    """A training configuration of seconds; dotted keys replace values."""

    def build(algorithm="ppo", **changes):
        data = copy.deepcopy(TINY)
        data["train"]["algorithm"] = algorithm
        if algorithm == "recurrent_ppo":
            data["network"]["lstm_hidden"] = 8
        if algorithm in ("sac", "tqc"):
            data["train"]["hyperparameters"] = dict(OFF_POLICY)
        return parse_config(TrainingConfig, changed(data, changes), "test")

    return build


@pytest.fixture(scope="session")
def tiny_selection():
    """The same for site selection."""
    return lambda **changes: parse_training(changed(copy.deepcopy(TINY_SELECTION), changes), "test")


def changed(data, changes):
    """The mapping with dotted keys (two underscores for a dot) replaced."""
    for key, value in changes.items():
        *path, last = key.split("__")
        branch = data
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return data


@pytest.fixture(scope="session")
def trained(tiny, tmp_path_factory):
    """A finished run of an algorithm, for reading only: whoever changes it works on a copy."""

    @functools.cache
    def run(algorithm):
        return train(tiny(algorithm), tmp_path_factory.mktemp(algorithm) / "tiny-seed0", progress=False)

    return run


@pytest.fixture(scope="session")
def ppo_run(trained):
    """A finished PPO run."""
    return trained("ppo")
