"""`wattgym train`: train a controller from a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    config: Annotated[Path, typer.Option(help="Training configuration, YAML.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<config>-seed<seed>.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces the configuration's seed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Replaces train.total_steps.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Replaces one key, for example train.num_envs=32.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
) -> None:
    """Train a controller; Ctrl-C saves a checkpoint that --resume continues exactly."""
    from wattgym.agents.config import parse_training, with_family_files
    from wattgym.agents.training import train as run_training
    from wattgym.config import read_yaml

    data = read_yaml(config)
    if isinstance(data, dict):
        overrides = list(setting or [])
        overrides += [f"seed={seed}"] if seed is not None else []
        overrides += [f"train.total_steps={steps}"] if steps is not None else []
        data = _with_overrides(with_family_files(data, config.parent), overrides)
    resolved = parse_training(data, str(config))
    folder = out or Path("runs") / f"{config.stem}-seed{resolved.seed}"
    outcome = run_training(resolved, folder, resume=resume)
    if outcome.interrupted:
        typer.echo(f"interrupted after {outcome.steps:,} steps; continue with --resume --out {folder}")
        raise typer.Exit(130)
    best = "none" if outcome.best_reward is None else f"{outcome.best_reward:.4f}"
    typer.echo(f"trained {outcome.steps:,} steps; best validation reward {best}; run folder {folder}")


def _with_overrides(data: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The mapping with dotted keys replaced; unknown keys are left for the configuration to refuse."""
    from wattgym.config import parse_yaml
    from wattgym.errors import UserError

    for override in overrides:
        key, separator, text = override.partition("=")
        if not (separator and key):
            raise UserError(f"--set {override!r}: expected key=value, for example train.num_envs=32")
        value = parse_yaml(text, f"--set {key}")
        *path, last = key.split(".")
        branch = data
        for part in path:
            following = branch.get(part)
            if following is None:
                following = branch[part] = {}
            if not isinstance(following, dict):
                raise UserError(f"--set {override!r}: '{part}' holds no keys")
            branch = following
        branch[last] = value
    return data
