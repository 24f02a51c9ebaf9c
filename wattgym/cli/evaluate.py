"""`wattgym evaluate` and `wattgym tune-baselines`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def evaluate(
    runs: Annotated[list[Path] | None, typer.Argument(help="Training run folders; none: baselines alone.")] = None,
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
    policies, env, trained = _load_runs(runs or [], checkpoint, config)
    tuned = load_tuned(gains) if gains else load_tuned()
    _check_folder(out)
    result = run_evaluation(
        env,
        policies,
        select_baselines(baselines),
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
    command = (
        f"wattgym tune-baselines --config {config} --budget {budget} --scenarios {scenarios} --seed {seed} --out {out}"
    )
    with tqdm(total=budget * len(TUNABLE), unit="setting", desc="tune") as bar:
        tuned = run_tuning(
            env, budget=budget, scenarios=scenarios, seed=seed, command=command, progress=lambda *_: bar.update()
        )
    atomic_write_text(out, yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False))
    for name, best in tuned.gains.items():
        typer.echo(f"{name}: {best.model_dump()} -> {tuned.objective} {tuned.objective_value[name]:.4f}")


def _load_runs(runs: list[Path], checkpoint: str, config: Path | None) -> tuple[list[Any], Any, dict[str, Any]]:
    """Policies, the environment that they share, and what is recorded of each run."""
    from wattgym.agents.config import TrainingConfig
    from wattgym.agents.policy import load_policy
    from wattgym.config import load_config
    from wattgym.envs.config import PowerShapingConfig
    from wattgym.errors import UserError

    if checkpoint not in ("best", "last"):
        raise UserError(f"--checkpoint {checkpoint}: valid are best and last")
    policies, trained = [], {}
    env = load_config(TrainingConfig, config).env if config else None
    for path in runs:
        policy, training, run = load_policy(path, "best" if checkpoint == "best" else "last")
        if env is None:
            env = training.env
        elif training.env.model_copy(update={"signal": env.signal}) != env:
            raise UserError(f"{path}: trained in another environment than the first run or --config; evaluate it alone")
        policies.append(policy)
        trained[policy.name] = {
            "folder": str(path),
            "status": run.info.status,
            "seed": run.info.seed,
            "algorithm": training.train.algorithm,
            "total_steps": training.train.total_steps,
            "commit": run.info.git.commit if run.info.git else "unknown",
            "config": run.config,
        }
    return policies, env or PowerShapingConfig(), trained


def _provenance(plan: Any, env: Any, trained: dict[str, Any], tuned: Any) -> dict[str, Any]:
    from wattgym.runs import git_state, installed_versions

    git = git_state()
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "held out": f"signals and plants of the {plan.split} split",
        "baseline tuning": f"{tuned.budget} settings x {tuned.scenarios} training scenarios, by {tuned.objective}",
        "scenarios": plan.model_dump(mode="json"),
        "environment": env.model_dump(mode="json"),
        "policies": trained,
        "versions": installed_versions(),
    }


def _check_folder(out: Path) -> None:
    """Refuses an unusable output folder before minutes of work are spent."""
    from wattgym.errors import UserError

    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{out}: cannot write results there: {error.strerror or error}") from None
