"""`wattgym train`: train a controller from a configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from wattgym.agents.config import AnyTrainingConfig


def train(
    config: Annotated[Path, typer.Option(help="Training configuration, YAML.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<config>-seed<seed>.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces the configuration's seed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Replaces train.total_steps.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Replaces one key, for example train.num_envs=32.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Train that many seeds, counted up from the configuration's, into a group.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="With --seeds: processes at a time; 1.")] = None,
) -> None:
    """Train a controller; Ctrl-C saves a checkpoint that --resume continues exactly."""
    from wattgym.agents.training import train as run_training
    from wattgym.errors import UserError

    overrides = list(setting or [])
    overrides += [f"seed={seed}"] if seed is not None else []
    overrides += [f"train.total_steps={steps}"] if steps is not None else []
    resolved = resolve(config, overrides)
    if seeds is not None:
        _train_group(resolved, out or Path("runs") / config.stem, seeds, 1 if jobs is None else jobs, resume)
        return
    if jobs is not None:
        raise UserError("--jobs goes with --seeds: one seed is trained in one process")
    folder = out or Path("runs") / f"{config.stem}-seed{resolved.seed}"
    outcome = run_training(resolved, folder, resume=resume)
    if outcome.interrupted:
        typer.echo(f"interrupted after {outcome.steps:,} steps; continue with --resume --out {folder}")
        raise typer.Exit(130)
    best = "none" if outcome.best_reward is None else f"{outcome.best_reward:.4f}"
    typer.echo(f"trained {outcome.steps:,} steps; best validation reward {best}; run folder {folder}")


def _train_group(config: AnyTrainingConfig, folder: Path, seeds: int, jobs: int, resume: bool) -> None:
    from wattgym.agents.seeds import train_seeds
    from wattgym.errors import UserError

    outcome = train_seeds(config, folder, seeds, jobs=jobs, resume=resume)
    typer.echo(outcome.table())
    if outcome.interrupted:
        typer.echo(f"interrupted; continue with --resume --seeds {seeds} --out {folder}")
        raise typer.Exit(130)
    if outcome.failed:
        first = outcome.failed[0]
        raise UserError(
            f"{len(outcome.failed)} of {seeds} seeds failed, the others are whole; seed {first.seed}: {first.error}"
        )
    typer.echo(f"group folder {folder}; evaluate all its seeds with: wattgym evaluate {folder}")


def resolve(config: Path, overrides: list[str]) -> AnyTrainingConfig:
    """A training configuration from a file, single keys replaced.

    Args:
        config: YAML file.
        overrides: `key=value`, dotted keys, YAML values.

    Raises:
        UserError: It cannot be read or does not fit.
    """
    from wattgym.agents.config import parse_training, with_family_files
    from wattgym.config import read_yaml

    data = read_yaml(config)
    if isinstance(data, dict):
        data = _with_overrides(with_family_files(data, config.parent), overrides)
    return parse_training(data, str(config))


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
