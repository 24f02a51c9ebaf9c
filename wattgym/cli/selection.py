"""The site-selection side of `wattgym evaluate` and `wattgym tune-baselines`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from wattgym.agents.policy import TrainedPolicy
    from wattgym.agents.selection_evaluation import SelectionPlan
    from wattgym.agents.selectors import TunedSelectors
    from wattgym.envs.federation.config import SiteSelectionConfig

Families = dict[str, "SiteSelectionConfig"]


def families_of(policies: list[TrainedPolicy], config: Path | None) -> Families | None:
    """Scenario families, where the configuration (else the first policy's training) is one of site selection."""
    from wattgym.agents.config import SelectionTrainingConfig
    from wattgym.agents.selection_families import read_families

    if config is not None:
        return read_families(config)
    if policies and isinstance(policies[0].config, SelectionTrainingConfig):
        return {name: family.env for name, family in policies[0].config.families.items()}
    return None


def check_runs(loaded: list[tuple[Path, TrainedPolicy]]) -> None:
    """Refuses runs of the other problem.

    Raises:
        UserError: A run was trained for power shaping.
    """
    from wattgym.agents.config import SelectionTrainingConfig
    from wattgym.errors import UserError

    for path, policy in loaded:
        if not isinstance(policy.config, SelectionTrainingConfig):
            raise UserError(f"{path}: was trained for power shaping; evaluate it alone")


def evaluate_selection(
    found: Families,
    trained: dict[str, list[TrainedPolicy]],
    *,
    baselines: str,
    families: str | None,
    plan: dict[str, Any],
    gains: Path | None,
    out: Path,
) -> None:
    """Judges selectors on held-out federations; writes tables and the report.

    Args:
        found: Families that there are.
        trained: Policies by name.
        baselines: `all`, `none`, or names separated by commas.
        families: Names of some of the families, separated by commas; None: all of them.
        plan: Fields of the plan.
        gains: File of tuned settings; None: the shipped ones.
        out: Folder for the results.
    """
    from wattgym.agents.selection_evaluation import SelectionPlan, evaluate_selectors
    from wattgym.agents.selectors import load_tuned_selectors, select_selectors
    from wattgym.agents.selectors.selector import Observing
    from wattgym.cli.delivery import deliver
    from wattgym.config import parse_config

    resolved = parse_config(SelectionPlan, plan, "evaluate")
    chosen, names = _some(found, families), select_selectors(baselines)
    tuned = load_tuned_selectors(gains) if gains else load_tuned_selectors()
    result = evaluate_selectors(
        chosen,
        {name: [Observing(policy.controller) for policy in group] for name, group in trained.items()},
        names,
        resolved,
        tuned=tuned,
        provenance=_provenance(resolved, chosen, trained, tuned),
        progress=lambda text: print(f"evaluating {text}", file=sys.stderr),
    )
    deliver(result, out)


def tune(found: Families, *, budget: int, scenarios: int, seed: int, command: str, out: Path) -> None:
    """Tunes the selectors on training federations and writes the settings.

    Args:
        found: Families.
        budget: Settings per selector and family.
        scenarios: Scenarios per setting.
        seed: Seed of both.
        command: Recorded with the result.
        out: File, YAML.
    """
    import yaml
    from tqdm import tqdm

    from wattgym.agents.selection_tuning import SEARCH, tune_selectors
    from wattgym.files import atomic_write_text

    with tqdm(total=budget * len(SEARCH) * len(found), unit="setting", desc="tune", delay=0.5) as bar:
        tuned = tune_selectors(
            found, budget=budget, scenarios=scenarios, seed=seed, command=command, progress=lambda *_: bar.update()
        )
    atomic_write_text(out, yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False))
    for family, best in tuned.families.items():
        for name, settings in best.settings.items():
            typer.echo(f"{family}: {name}: {settings} -> {best.objective_value[name]:.4f}")


def _some(found: Families, names: str | None) -> Families:
    from wattgym.errors import UserError

    if names is None:
        return found
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in found:
            raise UserError(f"--families: unknown scenario family '{name}'; there are: {', '.join(found)}")
    return {name: found[name] for name in dict.fromkeys(chosen)}


def _provenance(
    plan: SelectionPlan, families: Families, trained: dict[str, list[TrainedPolicy]], tuned: TunedSelectors
) -> dict[str, Any]:
    from wattgym.cli.delivery import policies_provenance
    from wattgym.runs import git_state, installed_versions

    git = git_state()
    untuned = [name for name in families if name not in tuned.families]
    budget = f"{tuned.budget} settings x {tuned.scenarios} training scenarios per selector and family, by"
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "held out": f"power weeks, market weeks and places of the {plan.split} split",
        "baseline tuning": f"{budget} {tuned.objective}"
        + (f"; default settings for {', '.join(untuned)}" if untuned else ""),
        "scenarios": plan.model_dump(mode="json"),
        "families": {name: env.model_dump(mode="json") for name, env in families.items()},
        "selector settings": {name: dict(tuned.of(name)) for name in families if name not in untuned},
        "policies": policies_provenance(trained),
        "versions": installed_versions(),
    }
