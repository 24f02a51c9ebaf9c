"""`wattgym evaluate` and `wattgym tune-baselines`, for either control problem."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattgym.cli.delivery import deliver, policies_provenance
from wattgym.files import check_folder

if TYPE_CHECKING:
    from wattgym.agents.baselines import TunedGains
    from wattgym.agents.evaluation import EvaluationPlan
    from wattgym.agents.policy import TrainedPolicy
    from wattgym.envs.config import PowerShapingConfig

Loaded = list[tuple[Path, "TrainedPolicy"]]


def evaluate(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Training runs, groups of them (--seeds) or policy bundles; none: baselines alone."),
    ] = None,
    baselines: Annotated[str, typer.Option(help="all, core, none, or names separated by commas.")] = "all",
    families: Annotated[
        str | None, typer.Option(help="Families, separated by commas; default: regd,rega,droop, or all scenario files.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of what is drawn: train, validation or test.")] = "test",
    seeds: Annotated[int, typer.Option(help="Scenarios per family.")] = 20,
    episode_s: Annotated[float | None, typer.Option(help="Power shaping: length of a scenario, seconds; 2400.")] = None,
    variant: Annotated[str | None, typer.Option(help="Power shaping: rules of the PJM score; legacy.")] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Site selection: numbers of sites beside the families' own, by commas.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and report.html.")] = Path("evaluation"),
    config: Annotated[
        Path | None,
        typer.Option(help="Training configuration, scenario file or folder of those."),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best or last.")] = "best",
    gains: Annotated[Path | None, typer.Option(help="Tuned baselines; default: the shipped ones.")] = None,
) -> None:
    """Judge policies against baselines on identical held-out scenarios; writes tables and report.html."""
    from wattgym.cli import selection
    from wattgym.errors import UserError

    if checkpoint not in ("best", "last"):
        raise UserError(f"--checkpoint {checkpoint}: valid are best and last")
    check_folder(out)
    loaded = _load_runs(runs or [], checkpoint)
    plan: dict[str, Any] = {"split": split, "seeds": seeds}
    found = selection.families_of([policy for _, policy in loaded], config)
    if found is not None:
        _refuse({"--episode-s": episode_s, "--variant": variant}, "power shaping")
        plan["sizes"] = _numbers(sizes) if sizes else ()
        selection.check_runs(loaded)
        selection.evaluate_selection(
            found, _grouped(loaded), baselines=baselines, families=families, plan=plan, gains=gains, out=out
        )
        return
    _refuse({"--sizes": sizes}, "site selection")
    given = {"episode_s": episode_s, "variant": variant}
    plan |= {key: value for key, value in given.items() if value is not None}
    plan |= {"families": tuple(name.strip() for name in families.split(","))} if families else {}
    _evaluate_shaping(loaded, config, baselines, plan, gains, out)


def _evaluate_shaping(
    loaded: Loaded, config: Path | None, baselines: str, plan: dict[str, Any], gains: Path | None, out: Path
) -> None:
    from wattgym.agents.baselines import load_tuned, select_baselines
    from wattgym.agents.evaluation import EvaluationPlan
    from wattgym.agents.evaluation import evaluate as run_evaluation
    from wattgym.config import parse_config

    resolved = parse_config(EvaluationPlan, plan, "evaluate")
    tuned = load_tuned(gains)
    env = _environment(loaded, config)
    chosen = select_baselines(baselines, env.action.knobs)
    trained = _grouped(loaded)
    result = run_evaluation(
        env,
        {name: [policy.controller for policy in group] for name, group in trained.items()},
        chosen,
        resolved,
        tuned=tuned,
        provenance=_provenance(resolved, env, trained, tuned),
        progress=lambda text: print(f"evaluating {text}", file=sys.stderr),
    )
    deliver(result, out)


def tune_baselines(
    config: Annotated[Path, typer.Option(help="Training configuration whose environment is used.")],
    out: Annotated[Path, typer.Option(help="File for the gains, YAML.")],
    budget: Annotated[int, typer.Option(help="Settings tried per controller.")] = 64,
    scenarios: Annotated[int, typer.Option(help="Training scenarios per setting.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of settings and scenarios.")] = 0,
    baselines: Annotated[
        str, typer.Option(help="Power shaping: which, by commas; default: all that the configuration's knobs allow.")
    ] = "all",
) -> None:
    """Tune the baselines on training scenarios with a stated budget, the same for each."""
    import yaml
    from tqdm import tqdm

    from wattgym.agents.baselines import TUNABLE, select_baselines
    from wattgym.agents.config import TrainingConfig
    from wattgym.agents.tuning import tune_baselines as run_tuning
    from wattgym.cli import selection
    from wattgym.config import load_config
    from wattgym.errors import UserError
    from wattgym.files import atomic_write_text

    check_folder(out.parent)
    options = {"config": config, "budget": budget, "scenarios": scenarios, "seed": seed, "out": out}
    options |= {} if baselines == "all" else {"baselines": baselines}
    command = shlex.join(["wattgym", "tune-baselines", *(f"--{name}={value}" for name, value in options.items())])
    found = selection.families_of([], config)
    if found is not None:
        _refuse({"--baselines": None if baselines == "all" else baselines}, "power shaping")
        selection.tune(found, budget=budget, scenarios=scenarios, seed=seed, command=command, out=out)
        return
    env = load_config(TrainingConfig, config).env
    names = tuple(name for name in select_baselines(baselines, env.action.knobs) if name in TUNABLE)
    if not names:
        raise UserError(f"--baselines {baselines}: no tunable baseline among them; tunable: {', '.join(TUNABLE)}")
    with tqdm(total=budget * len(names), unit="setting", desc="tune", delay=0.5) as bar:
        tuned = run_tuning(
            env, budget=budget, scenarios=scenarios, seed=seed, command=command, names=names,
            progress=lambda *_: bar.update(),
        )  # fmt: skip
    atomic_write_text(out, yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False))
    for name, best in tuned.gains.items():
        typer.echo(f"{name}: {best} -> {tuned.objective} {tuned.objective_value[name]:.4f}")


def _load_runs(runs: list[Path], checkpoint: str) -> Loaded:
    from wattgym.agents.policy import load_policy
    from wattgym.agents.seeds import group_runs

    paths = [path for run in runs for path in group_runs(run) or (run,)]
    return [(path, load_policy(path, "best" if checkpoint == "best" else "last")) for path in paths]


def _environment(loaded: Loaded, config: Path | None) -> PowerShapingConfig:
    """The environment that all runs share: that of the configuration, of the first run, or the default."""
    from wattgym.agents.config import TrainingConfig
    from wattgym.config import load_config
    from wattgym.envs.config import PowerShapingConfig
    from wattgym.errors import UserError

    env = load_config(TrainingConfig, config).env if config else None
    # A policy can be taken to another site, but not to another meaning of its observations and actions.
    must_agree = ("action", "observation", "period_s") if config else (
        "site", "action", "observation", "rules", "period_s"
    )  # fmt: skip
    for path, policy in loaded:
        if not isinstance(policy.config, TrainingConfig):
            raise UserError(f"{path}: was trained for site selection; evaluate it alone")
        env = env or policy.config.env
        for key in must_agree:
            if getattr(policy.config.env, key) != getattr(env, key):
                other = f"{config}" if config else f"{loaded[0][0]}"
                raise UserError(f"{path}: was trained with another env.{key} than {other}; evaluate it alone")
    return env or PowerShapingConfig()


def _grouped(loaded: Loaded) -> dict[str, list[TrainedPolicy]]:
    """Policies by name, runs that differ in their seed alone under one."""
    groups: list[list[TrainedPolicy]] = []
    for _, policy in loaded:
        for group in groups:
            same_kind = type(group[0].controller) is type(policy.controller)
            if same_kind and group[0].config == policy.config.model_copy(update={"seed": group[0].config.seed}):
                group.append(policy)
                break
        else:
            groups.append([policy])
    names = [_group_name(group) for group in groups]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        from wattgym.errors import UserError

        raise UserError(f"two controllers are named '{doubled}'; names must be unique")
    return dict(zip(names, groups, strict=True))


def _refuse(given: dict[str, object], problem: str) -> None:
    """Options that nothing would read are refused."""
    from wattgym.errors import UserError

    for option, value in given.items():
        if value is not None:
            raise UserError(f"{option} goes with {problem} only")


def _numbers(text: str) -> tuple[int, ...]:
    from wattgym.errors import UserError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--sizes {text}: expected whole numbers separated by commas, for example 20,57") from None


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
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "held out": f"signals{' and plants' if env.site.by_split else ''} of the {plan.split} split",
        "baseline tuning": f"{tuned.budget} settings x {tuned.scenarios} training scenarios, by {tuned.objective}",
        "scenarios": plan.model_dump(mode="json"),
        "environment": env.model_dump(mode="json"),
        "policies": policies_provenance(trained),
        "versions": installed_versions(),
    }
