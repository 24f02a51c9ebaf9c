"""Run folders: what was run, from which code, with which configuration and seed, and how it ended."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from wattgym.config import FrozenModel, parse_config, read_yaml
from wattgym.errors import UserError
from wattgym.files import atomic_write_json, atomic_write_text, read_json_object

SCHEMA_VERSION = 1
"""Version of the run folder's layout; a folder of another version is refused, never guessed at."""

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"

RECORDED_PACKAGES = (
    "wattgym",
    "gymnasium",
    "numpy",
    "scipy",
    "pandas",
    "torch",
    "stable-baselines3",
    "sb3-contrib",
    "onnxruntime",
    "nvidia-ml-py",
    "transformers",
    "peft",
    "flwr",
)
"""Libraries whose version can change a result; those not installed are left out of the record."""

Status = Literal["running", "finished", "interrupted", "failed"]


class GitState(FrozenModel):
    """Which source the run used.

    Attributes:
        commit: Full commit hash of the checkout that holds the package.
        dirty: Whether tracked files differed from that commit.
    """

    commit: str
    dirty: bool


class RunInfo(FrozenModel):
    """Content of `run.json`.

    Attributes:
        schema_version: Layout version of the folder.
        kind: What was run, for example `training` or `evaluation`.
        status: How far it came.
        seed: The one seed that everything random was derived from.
        created: Start, ISO 8601, UTC.
        updated: Last change of the record, ISO 8601, UTC.
        resumed: Times at which the run was taken up again.
        command: Command line as typed.
        python: Python version.
        platform: Operating system and processor.
        packages: Versions of the libraries that can change a result.
        git: State of the source checkout; None outside of one.
    """

    schema_version: int
    kind: str
    status: Status
    seed: int
    created: str
    updated: str
    resumed: tuple[str, ...] = ()
    command: str
    python: str
    platform: str
    packages: dict[str, str]
    git: GitState | None = None


class RunFolder:
    """A folder with `run.json`, `config.yaml` and whatever the run writes beside them.

    Attributes:
        path: The folder.
        info: Content of `run.json`.
        config: Resolved configuration, as plain values.
    """

    def __init__(self, path: Path, info: RunInfo, config: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self.config = config

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Mapping[str, Any],
        kind: str,
        seed: int,
        *,
        resume: bool = False,
        may_change: tuple[str, ...] = (),
    ) -> RunFolder:
        """Starts a run in a new or empty folder, or takes up an earlier one.

        Args:
            path: The folder; parents are created.
            config: Resolved configuration of plain values (`model_dump(mode="json")` of a pydantic model).
            kind: What is run, for example `training`.
            seed: The seed that everything random is derived from.
            resume: Take up the run that is already in the folder (same kind, seed and configuration), so that
                one command can be repeated until it is done; starts afresh if the folder is missing or empty.
            may_change: Dotted configuration keys that a resumed run may change, for example `total_steps`.

        Raises:
            UserError: The folder holds something and `resume` is not set, or the earlier run does not match,
                or the folder cannot be written.
        """
        folder = Path(path)
        if _holds_something(folder):
            if not resume:
                raise UserError(f"{folder}: folder is not empty; choose another one, or resume the run in it")
            return cls._take_up(folder, config, kind, seed, may_change)
        now = _now()
        info = RunInfo(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            status="running",
            seed=seed,
            created=now,
            updated=now,
            command=shlex.join(sys.argv),
            python=platform.python_version(),
            platform=platform.platform(),
            packages=installed_versions(),
            git=git_state(),
        )
        run = cls(folder, info, dict(config))
        run._write_config()
        run._write_info()
        return run

    @classmethod
    def open(cls, path: str | Path, kind: str | None = None) -> RunFolder:
        """Opens an existing run for reading.

        Args:
            path: The folder.
            kind: Refuse runs of another kind.

        Raises:
            UserError: The folder is missing, is not a run, was written by another schema version, is of another
                kind, or a file in it is damaged.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"{folder}: no such run folder")
        record = folder / RUN_FILE
        if not record.is_file():
            raise UserError(f"{folder}: not a run folder (it has no {RUN_FILE})")
        data = read_json_object(record)
        found = data.get("schema_version")
        if found != SCHEMA_VERSION:
            raise UserError(f"{record}: schema version {found!r}, this WattGym reads version {SCHEMA_VERSION}")
        info = parse_config(RunInfo, data, str(record))
        if kind is not None and info.kind != kind:
            raise UserError(f"{folder}: holds a run of kind '{info.kind}', expected '{kind}'")
        config = read_yaml(folder / CONFIG_FILE)
        if not isinstance(config, dict):
            raise UserError(f"{folder / CONFIG_FILE}: expected a mapping, got {type(config).__name__}")
        return cls(folder, info, config)

    @contextmanager
    def recording_status(self) -> Iterator[RunFolder]:
        """Records how the block ended: finished, interrupted (Ctrl-C) or failed; exceptions pass through."""
        try:
            yield self
        except KeyboardInterrupt:
            self.set_status("interrupted")
            raise
        except BaseException:
            self.set_status("failed")
            raise
        self.set_status("finished")

    def set_status(self, status: Status) -> None:
        """Writes the run's status.

        Raises:
            UserError: The folder cannot be written.
        """
        self.info = self.info.model_copy(update={"status": status, "updated": _now()})
        self._write_info()

    @classmethod
    def _take_up(
        cls, folder: Path, config: Mapping[str, Any], kind: str, seed: int, may_change: tuple[str, ...]
    ) -> RunFolder:
        run = cls.open(folder, kind)
        if run.info.seed != seed:
            raise UserError(f"{folder}: the run there has seed {run.info.seed}, cannot resume it with seed {seed}")
        old, new = _flatten(run.config), _flatten(config)
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key) and not any(key == k or key.startswith(f"{k}.") for k in may_change):
                raise UserError(
                    f"{folder}: cannot resume with another configuration: '{key}' was "
                    f"{old.get(key, 'not set')!r}, is now {new.get(key, 'not set')!r}"
                )
        run.config = dict(config)
        run.info = run.info.model_copy(update={"resumed": (*run.info.resumed, _now())})
        run._write_config()
        run.set_status("running")
        return run

    def _write_config(self) -> None:
        import yaml

        text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        atomic_write_text(self.path / CONFIG_FILE, text)

    def _write_info(self) -> None:
        atomic_write_json(self.path / RUN_FILE, self.info.model_dump(mode="json"))


def installed_versions() -> dict[str, str]:
    """Versions of those of `RECORDED_PACKAGES` that are installed."""
    versions = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state() -> GitState | None:
    """Commit and dirtiness of the checkout this package runs from; None when it runs from anywhere else."""
    here = Path(__file__)
    # An installed copy may lie inside somebody else's checkout; only a tracked file proves that this is ours.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git(here.parent, "rev-parse", "HEAD")
    changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return None
    return GitState(commit=commit, dirty=bool(changes))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _holds_something(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"{folder}: cannot be used as a run folder: {error.strerror or error}") from None


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested mappings; sequences compare as lists, because YAML has no tuples."""
    if isinstance(value, Mapping):
        pairs = (_flatten(item, f"{prefix}.{key}" if prefix else str(key)) for key, item in value.items())
        return {key: item for pair in pairs for key, item in pair.items()}
    return {prefix: list(value) if isinstance(value, tuple) else value}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
