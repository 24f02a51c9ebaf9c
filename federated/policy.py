"""Who selects: a rule by its name, or a learned policy from a bundle or a training run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattgym.agents.bundle import is_bundle
from wattgym.agents.config import SelectionTrainingConfig
from wattgym.agents.policy import load_policy
from wattgym.agents.selectors import ORACLES, SELECTORS, make_selector
from wattgym.agents.selectors.selector import Observing, Selector
from wattgym.errors import UserError
from wattgym.runs import RUN_FILE

LIVE_SELECTORS = tuple(name for name in SELECTORS if name not in ORACLES)
"""Selectors that need to know nothing that a live federation does not tell."""


def live_selector(policy: str, settings: Mapping[str, Any] | None = None) -> Selector:
    """The selector that a command line names.

    Args:
        policy: A name of `LIVE_SELECTORS`, or the folder of a bundle or a training run.
        settings: Settings of a selector by name.

    Raises:
        UserError: There is no such selector or folder, it is an oracle, or it was trained for power shaping.
    """
    folder = Path(policy)
    if is_bundle(folder) or (folder / RUN_FILE).is_file():
        if settings:
            raise UserError(f"{policy}: a learned policy has no settings, got {', '.join(settings)}")
        loaded = load_policy(folder)
        if not isinstance(loaded.config, SelectionTrainingConfig):
            raise UserError(f"{policy}: was trained for power shaping, not for site selection")
        return Observing(loaded.controller)
    if policy in ORACLES:
        raise UserError(f"'{policy}' sees the true federation, which only an emulated one has; {_known()}")
    if policy not in LIVE_SELECTORS:
        raise UserError(f"'{policy}' is neither a selector nor the folder of a bundle or training run; {_known()}")
    return make_selector(policy, settings)


def _known() -> str:
    return f"selectors: {', '.join(LIVE_SELECTORS)}"
