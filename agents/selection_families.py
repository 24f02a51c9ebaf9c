"""Scenario families of site selection, from the files that describe them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wattgym.agents.config import SelectionTrainingConfig, parse_training, with_family_files
from wattgym.config import FrozenModel, parse_config, read_yaml
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.errors import UserError


class ScenarioFile(FrozenModel):
    """A scenario file.

    Attributes:
        env: The family's environment.
    """

    env: SiteSelectionConfig


def read_families(path: str | Path) -> dict[str, SiteSelectionConfig] | None:
    """Families by name: of a folder of scenario files, one scenario file, or a site-selection training.

    A scenario file names its family by its own name. Trainings in a folder of scenario files are passed over.

    Args:
        path: Folder or file.

    Returns:
        Environments by family; None where the file configures power shaping.

    Raises:
        UserError: A file cannot be read or does not fit, or the folder holds none.
    """
    path = Path(path)
    if path.is_dir():
        found = {file: read_yaml(file) for file in sorted(path.glob("*.yaml"))}
        scenarios = {file: data for file, data in found.items() if not (isinstance(data, dict) and "problem" in data)}
        if not scenarios:
            raise UserError(f"{path}: holds no scenario file (*.yaml with the key env)")
        return {file.stem: parse_config(ScenarioFile, data, str(file)).env for file, data in scenarios.items()}
    data = read_yaml(path)
    if not isinstance(data, dict):
        return None
    if data.get("problem") == "site_selection":
        training = parse_training(with_family_files(data, path.parent), str(path))
        assert isinstance(training, SelectionTrainingConfig)
        return {name: family.env for name, family in training.families.items()}
    if "problem" not in data and _selects_sites(data.get("env")):
        return {path.stem: parse_config(ScenarioFile, data, str(path)).env}
    return None


def _selects_sites(env: Any) -> bool:
    """Whether an environment has a key that only site selection knows."""
    own = SiteSelectionConfig.model_fields.keys() - PowerShapingConfig.model_fields.keys()
    return isinstance(env, dict) and not own.isdisjoint(env)
