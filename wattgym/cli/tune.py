"""`wattgym tune`: search a training's hyper-parameters on validation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def tune(
    config: Annotated[Path, typer.Option(help="Training configuration with a search section, YAML.")],
    study: Annotated[Path, typer.Option(help="Study file (Optuna journal); shared by all who name it.")],
    trials: Annotated[int, typer.Option(help="Trials the study shall hold, those of before and of others included.")],
    seeds: Annotated[int, typer.Option(help="Training seeds a trial; at least 3.")] = 3,
    jobs: Annotated[int, typer.Option(help="Processes at a time.")] = 1,
    runs: Annotated[Path | None, typer.Option(help="Folder for the trials' runs; default: runs/<study>.")] = None,
    out: Annotated[Path | None, typer.Option(help="Best configuration, YAML; default: <study>.best.yaml.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Replaces one key, for example train.total_steps=500000.")
    ] = None,
) -> None:
    """Search hyper-parameters: the best mean validation reward over several seeds; the same command goes on."""
    import yaml

    from wattgym.agents.search import search
    from wattgym.cli.train import resolve
    from wattgym.files import atomic_write_text, check_folder

    target = out or study.with_name(f"{study.name}.best.yaml")
    check_folder(target.parent)
    outcome = search(
        resolve(config, list(setting or [])),
        study,
        trials,
        runs or Path("runs") / study.stem,
        seeds=seeds,
        jobs=jobs,
        told=typer.echo,
    )
    if outcome.best is not None:
        head = (
            f"# Best of {outcome.trials} trials over {seeds} seeds: mean validation reward {outcome.best_value:.4f}\n"
        )
        text = yaml.safe_dump(outcome.best.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        atomic_write_text(target, head + text)
        typer.echo(f"best of {outcome.trials} trials: {outcome.best_value:.4f}, in {target}")
        for key, value in outcome.best_values.items():
            typer.echo(f"  {key}: {value}")
    else:
        typer.echo(f"no trial of {outcome.trials} is complete yet")
    if outcome.interrupted:
        typer.echo("interrupted; the same command goes on")
        raise typer.Exit(130)
