"""`wattgym evaluate` and `wattgym tune-baselines`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wattgym.agents.baselines import TunedGains
    from wattgym.agents.evaluation import EvaluationPlan
    from wattgym.agents.policy import TrainedPolicy
    from wattgym.envs.config import PowerShapingConfig


def evaluate(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Training runs or policy bundles; none: baselines alone.")
    ] = None,
    baselines: Annotated[str, typer.Option(help="all, none, or names separated by commas.")] = "all",
    families: Annotated[str, typer.Option(help="Signal families, separated by commas.")] = "regd,rega,droop",
    split: Annotated[str, typer.Option(help="Split of signals and plants: train, validation or test.")] = "test",
    seeds: Annotated[int, typer.Option(help="Scenarios per family.")] = 20,
    episode_s: Annotated[float, typer.Option(help="Length of a scenario, seconds.")] = 2400.0,
    variant: Annotated[str, typer.Option(help="Rules of the PJM score; see docs/scores.md.")] = "legacy",
    out: Annotated[Path, typer.Option(help="Folder for tables and report.html.")] = Path("evaluation"),
    config: Annotated[Path | None, typer.Option(help="Environment of a training configuration, without runs.")] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    gains: Annotated[Path | None, typer.Option(help="Tuned gains; default: the shipped ones.")] = None,
) -> None:
    """Judge policies against baselines on identical held-out scenarios; writes tables and report.html."""
    from rich.console import Console

    from wattgym.agents.baselines import load_tuned, select_baselines
    from wattgym.agents.evaluation import EvaluationPlan
    from wattgym.agents.evaluation import evaluate as run_evaluation
    from wattgym.agents.report import write_report
    from wattgym.agents.summary import print_summary
    from wattgym.config import parse_config

    plan = parse_config(
        EvaluationPlan,
        {
            "families": tuple(name.strip() for name in families.split(",")),
            "split": split,
            "seeds": seeds,
            "episode_s": episode_s,
            "variant": variant,
        },
        "evaluate",
    )
    chosen = select_baselines(baselines)
    tuned = load_tuned(gains) if gains else load_tuned()
    _check_folder(out)
    trained, env = _load_runs(runs or [], checkpoint, config)
    result = run_evaluation(
        env,
        {name: [policy.controller for policy in group] for name, group in trained.items()},
        chosen,
        plan,
        tuned=tuned,
        provenance=_provenance(plan, env, trained, tuned),
        progress=lambda text: print(f"evaluating {text}", file=sys.stderr),
    )
    result.save(out)
    write_report(result, out / "report.html")
    print_summary(result.summary, Console())
    typer.echo(f"tables and report: {out / 'report.html'}")


def tune_baselines(
    config: Annotated[Path, typer.Option(help="Training configuration whose environment is used.")],
    out: Annotated[Path, typer.Option(help="File for the gains, YAML.")],
    budget: Annotated[int, typer.Option(help="Settings tried per controller.")] = 64,
    scenarios: Annotated[int, typer.Option(help="Training scenarios per setting.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of settings and scenarios.")] = 0,
) -> None:
    """Tune the feedback baselines on training scenarios with a stated budget."""
    import yaml
    from tqdm import tqdm

    from wattgym.agents.config import TrainingConfig
    from wattgym.agents.tuning import TUNABLE
    from wattgym.agents.tuning import tune_baselines as run_tuning
    from wattgym.config import load_config
    from wattgym.files import atomic_write_text

    env = load_config(TrainingConfig, config).env
    _check_folder(out.parent)
    options = {"config": config, "budget": budget, "scenarios": scenarios, "seed": seed, "out": out}
    command = shlex.join(["wattgym", "tune-baselines", *(f"--{name}={value}" for name, value in options.items())])
    with tqdm(total=budget * len(TUNABLE), unit="setting", desc="tune", delay=0.5) as bar:
        tuned = run_tuning(
            env, budget=budget, scenarios=scenarios, seed=seed, command=command, progress=lambda *_: bar.update()
        )
    atomic_write_text(out, yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False))
    for name, best in tuned.gains.items():
        typer.echo(f"{name}: {best.model_dump()} -> {tuned.objective} {tuned.objective_value[name]:.4f}")


def _load_runs(
    runs: list[Path], checkpoint: str, config: Path | None
) -> tuple[dict[str, list[TrainedPolicy]], PowerShapingConfig]:
    """Policies by name, runs that differ in their seed alone under one, and the environment that they share."""
    from wattgym.agents.config import TrainingConfig
    from wattgym.agents.policy import load_policy
    from wattgym.config import load_config
    from wattgym.envs.config import PowerShapingConfig
    from wattgym.errors import UserError

    if checkpoint not in ("best", "last"):
        raise UserError(f"--checkpoint {checkpoint}: valid are best and last")
    env = load_config(TrainingConfig, config).env if config else None
    # A policy can be taken to another site, but not to another meaning of its observations and actions.
    must_agree = ("action", "observation", "period_s") if config else (
        "site", "action", "observation", "rules", "period_s"
    )  # fmt: skip
    groups: dict[str, list[TrainedPolicy]] = {}
    for path in runs:
        policy = load_policy(path, "best" if checkpoint == "best" else "last")
        env = env or policy.config.env
        for key in must_agree:
            if getattr(policy.config.env, key) != getattr(env, key):
                other = f"{config}" if config else f"{runs[0]}"
                raise UserError(f"{path}: was trained with another env.{key} than {other}; evaluate it alone")
        for group in groups.values():
            same_kind = type(group[0].controller) is type(policy.controller)
            if same_kind and group[0].config == policy.config.model_copy(update={"seed": group[0].config.seed}):
                group.append(policy)
                break
        else:
            groups[str(path)] = [policy]
    return {_group_name(group): group for group in groups.values()}, env or PowerShapingConfig()


def _group_name(group: list[TrainedPolicy]) -> str:
    """The run's name; of several training seeds what their names share before `-seed`."""
    names = [policy.controller.name for policy in group]
    shared = {re.sub(r"-seed\d+$", "", name) for name in names}
    return shared.pop() if len(group) > 1 and len(shared) == 1 else names[0]


def _provenance(
    plan: EvaluationPlan, env: PowerShapingConfig, trained: dict[str, list[TrainedPolicy]], tuned: TunedGains
) -> dict[str, Any]:
    from wattgym.runs import git_state, installed_versions

    git = git_state()
    by_split = isinstance(env.site.surfaces, str)
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "held out": f"signals{' and plants' if by_split else ''} of the {plan.split} split",
        "baseline tuning": f"{tuned.budget} settings x {tuned.scenarios} training scenarios, by {tuned.objective}",
        "scenarios": plan.model_dump(mode="json"),
        "environment": env.model_dump(mode="json"),
        "policies": {
            name: [
                {
                    "folder": str(policy.run.path),
                    "status": policy.run.info.status,
                    "seed": policy.run.info.seed,
                    "algorithm": policy.config.train.algorithm,
                    "trained steps": policy.steps,
                    "commit": policy.run.info.git.commit if policy.run.info.git else "unknown",
                    "config": policy.run.config,
                }
                for policy in group
            ]
            for name, group in trained.items()
        },
        "versions": installed_versions(),
    }


def _check_folder(out: Path) -> None:
    """Refuses an unusable output folder before minutes of work are spent; creates nothing."""
    from wattgym.errors import UserError

    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f"{out}: cannot write results there: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{out}: cannot write results there: no permission to write in {existing}")
