"""The policy of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from wattgym.agents.checkpoint import PolicyController, load_checkpoint
from wattgym.agents.config import TrainingConfig
from wattgym.config import parse_config
from wattgym.errors import UserError
from wattgym.runs import CONFIG_FILE, RunFolder

Which = Literal["best", "last"]


def training_config(run: RunFolder) -> TrainingConfig:
    """The configuration that a training run resolved.

    Raises:
        UserError: The file does not fit this version.
    """
    return parse_config(TrainingConfig, run.config, str(run.path / CONFIG_FILE))


def checkpoint_folder(run: RunFolder, which: Which = "best") -> Path:
    """Where a run's policy lies: its best on validation, or its last checkpoint.

    Raises:
        UserError: The run has saved none yet.
    """
    best = run.path / "best"
    if which == "best" and best.is_dir():
        return best
    steps = sorted((run.path / "checkpoints").glob("step_*"))
    if not steps:
        raise UserError(f"{run.path}: the run has no checkpoint yet (status: {run.info.status})")
    return steps[-1]


def load_policy(path: str | Path, which: Which = "best") -> tuple[PolicyController, TrainingConfig, RunFolder]:
    """A run's policy with the configuration it was trained under.

    Raises:
        UserError: The folder is no training run, is of another version, or is damaged.
    """
    run = RunFolder.open(path, kind="training")
    config = training_config(run)
    checkpoint = load_checkpoint(checkpoint_folder(run, which))
    manifest = checkpoint.manifest
    name = run.path.resolve().name
    return PolicyController(checkpoint.model, manifest.normaliser, manifest.features, name), config, run
