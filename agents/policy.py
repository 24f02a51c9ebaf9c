"""The policy of a training run, or of the bundle made of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from wattgym.agents.bundle import MANIFEST, Bundle, BundleController, bundle_kind, is_bundle, load_bundle
from wattgym.agents.checkpoint import PolicyController, load_checkpoint, replaced_folder
from wattgym.agents.config import AnyTrainingConfig, parse_training
from wattgym.agents.controller import Controller
from wattgym.agents.selection_bundle import SelectionBundle, SelectionBundleController, load_selection_bundle
from wattgym.errors import UserError
from wattgym.runs import CONFIG_FILE, RunFolder

Which = Literal["best", "last"]


def training_config(run: RunFolder) -> AnyTrainingConfig:
    """The configuration that a training run resolved.

    Raises:
        UserError: The file does not fit this version.
    """
    return parse_training(run.config, str(run.path / CONFIG_FILE))


def checkpoint_folder(run: RunFolder, which: Which = "best") -> Path:
    """Where a run's policy lies: its best on validation, or its last checkpoint.

    Raises:
        UserError: The run has saved none yet.
    """
    best = run.path / "best"
    if which == "best":
        for folder in (best, replaced_folder(best)):
            if folder.is_dir():
                return folder
    steps = sorted((run.path / "checkpoints").glob("step_*"))
    if not steps:
        raise UserError(f"{run.path}: the run has no checkpoint yet (status: {run.info.status})")
    return steps[-1]


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A run's policy and where it comes from.

    Attributes:
        controller: The policy, named after its run folder (and " (bundle)" if it is one).
        config: The configuration it was trained under.
        run: The run.
        steps: Environment steps it was trained for.
    """

    controller: Controller
    config: AnyTrainingConfig
    run: RunFolder
    steps: int


def load_policy(path: str | Path, which: Which = "best") -> TrainedPolicy:
    """A run's policy: its best on validation, or its last checkpoint (also where nothing was validated yet).

    Args:
        path: Run folder, or a bundle, which holds but one policy.
        which: Checkpoint of a run.

    Raises:
        UserError: The folder is neither a training run nor a bundle, is of another version, or is damaged.
    """
    if is_bundle(path):
        return _bundled(Path(path))
    run = RunFolder.open(path, kind="training")
    config = training_config(run)
    checkpoint = load_checkpoint(checkpoint_folder(run, which))
    manifest = checkpoint.manifest
    name = run.path.resolve().name
    controller = PolicyController(checkpoint.model, manifest.normaliser, manifest.features, name)
    return TrainedPolicy(controller, config, run, manifest.steps)


def _bundled(path: Path) -> TrainedPolicy:
    bundle: Bundle | SelectionBundle
    controller: Any
    if bundle_kind(path) == "site_selection":
        bundle = load_selection_bundle(path)
        controller = SelectionBundleController(bundle, f"{bundle.manifest.name} (bundle)")
    else:
        bundle = load_bundle(path)
        controller = BundleController(bundle, f"{bundle.manifest.name} (bundle)")
    training = bundle.manifest.training
    config = parse_training(training.config, f"{path / MANIFEST}: training.config")
    run = RunFolder(path, training.run, training.config)
    return TrainedPolicy(controller, config, run, training.steps)
