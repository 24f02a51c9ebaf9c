"""Hyper-parameter search with Optuna, in a study file that several processes and machines can share.

A trial is a training of several seeds; its value is the mean over them of the best reward on validation. The test split
is never read. After each seed the trial is compared with the others at that point and given up if it lies below their
median (Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", KDD 2019).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wattgym.agents.config import AnyTrainingConfig, TrainingConfig, parse_training
from wattgym.agents.search_space import SEARCHABLE, with_values
from wattgym.agents.seeds import SeedsOutcome, train_seeds
from wattgym.agents.training import check_training
from wattgym.errors import UserError

SCHEMA_VERSION = 1
"""Version of what a study holds beside Optuna's own; a study of another version is refused, never guessed at."""

STUDY = "wattgym"
"""Name of the one study in a file."""

LEAST_SEEDS = 3
"""Fewer seeds choose the luckiest seed and not the best setting."""

_ATTRIBUTE = "wattgym"
_ERROR = "error"


@dataclass(frozen=True)
class SearchOutcome:
    """Where a study stands.

    Attributes:
        trials: Trials that count: completed, given up or failed.
        best_value: Best mean validation reward; None before a trial is complete.
        best_values: The values that reached it, by key.
        best: The configuration with those values, ready to be trained; None likewise.
        interrupted: Whether it was stopped before its end.
    """

    trials: int
    best_value: float | None
    best_values: dict[str, Any]
    best: AnyTrainingConfig | None
    interrupted: bool


def search(
    config: AnyTrainingConfig,
    study_file: str | Path,
    trials: int,
    runs: str | Path,
    *,
    seeds: int = LEAST_SEEDS,
    jobs: int = 1,
    progress: bool = True,
    told: Callable[[str], object] = lambda text: None,
) -> SearchOutcome:
    """Goes on with a study until it holds a number of trials; begins it if there is none.

    Trials of other processes on the same file count too. A trial that is stopped is tried again, from its checkpoints
    if they are still there, by whoever goes on with the study first.

    Args:
        config: What to train, with its `search` ranges.
        study_file: Optuna journal.
        trials: Trials in all.
        runs: Folder for the trials' run folders.
        seeds: Training seeds a trial, counted up from the configuration's.
        jobs: Processes at a time.
        progress: Show progress bars on stderr.
        told: Told how each trial ended.

    Raises:
        UserError: Optuna is not installed, the ranges or numbers cannot be used, or the file is no study of this
            configuration and version.
    """
    if find_spec("optuna") is None:
        raise UserError("searching hyper-parameters needs optuna: pip install 'wattgym[tune]'")
    from optuna.trial import TrialState

    if seeds < LEAST_SEEDS:
        raise UserError(f"seeds must be at least {LEAST_SEEDS}, got {seeds}: fewer choose the luckiest seed")
    for name, number in (("trials", trials), ("jobs", jobs)):
        if number < 1:
            raise UserError(f"{name} must be at least 1, got {number}")
    check_ranges(config)
    study = _study(Path(study_file), config, seeds)
    base = config.model_dump(mode="json") | {"search": {}}
    if isinstance(config, TrainingConfig) and config.validation.reward is None:
        # What is searched must not change the yardstick.
        base = with_values(base, {"validation.reward": config.env.reward.model_dump(mode="json")})
    interrupted = False
    while _counted(study) < trials and not interrupted:
        trial = study.ask()
        values = {key: known.suggest(trial, key) for key, known in config.search.items()}
        folder = Path(runs) / f"trial-{_digest(values)[:12]}"
        trial.set_user_attr("folder", str(folder))
        label = f"trial {trial.number}: {', '.join(f'{key}={value}' for key, value in values.items())}"
        try:
            candidate = parse_training(with_values(base, values), label)
            value, interrupted = _evaluate(trial, candidate, folder, seeds, jobs, progress)
        except UserError as error:
            trial.set_user_attr(_ERROR, str(error))
            study.tell(trial, state=TrialState.FAIL)
            told(f"{label}: failed: {error}")
            continue
        except KeyboardInterrupt:
            _try_again(study, trial)
            raise
        if interrupted:
            _try_again(study, trial)
        elif value is None:
            study.tell(trial, state=TrialState.PRUNED)
            told(f"{label}: given up")
        else:
            study.tell(trial, value)
            told(f"{label}: {value:.4f}")
    return _outcome(study, config, base, interrupted)


def _try_again(study: Any, trial: Any) -> None:
    """Leaves a stopped trial's values to whoever goes on."""
    from optuna.trial import TrialState

    study.tell(trial, state=TrialState.FAIL)
    study.enqueue_trial(trial.params)


def check_ranges(config: AnyTrainingConfig) -> None:
    """Looks at all that can be wrong with a configuration's ranges.

    Raises:
        UserError: There are none, or one's key or values do not fit the configuration.
    """
    if not config.search:
        raise UserError("the configuration has no 'search' section: nothing to search")
    plain = config.model_dump(mode="json") | {"search": {}}
    for key, known in config.search.items():
        if not key.startswith(SEARCHABLE):
            raise UserError(
                f"search.{key}: cannot be searched; valid are keys that begin with {', '.join(SEARCHABLE)} "
                "(others would change what policies are compared on)"
            )
        for value in known.samples:
            parse_training(with_values(plain, {key: value}), f"search.{key}")
    check_training(config)


def _evaluate(
    trial: Any, config: AnyTrainingConfig, folder: Path, seeds: int, jobs: int, progress: bool
) -> tuple[float | None, bool]:
    """Mean of the best rewards (None if the trial is given up), and whether it was interrupted."""
    value = 0.0
    for count in [*range(jobs, seeds, jobs), seeds]:
        outcome = train_seeds(config, folder, count, jobs=jobs, resume=True, progress=progress)
        if outcome.interrupted:
            return None, True
        value = _mean(outcome)
        trial.report(value, count)
        if count < seeds and trial.should_prune():
            return None, False
    return value, False


def _mean(outcome: SeedsOutcome) -> float:
    if outcome.failed:
        raise UserError(f"seed {outcome.failed[0].seed}: {outcome.failed[0].error}")
    rewards = [result.best_reward for result in outcome.seeds if result.best_reward is not None]
    if len(rewards) < len(outcome.seeds):
        raise UserError(f"{outcome.path}: a seed was never validated; validation.every_steps exceeds train.total_steps")
    return sum(rewards) / len(rewards)


def _study(path: Path, config: AnyTrainingConfig, seeds: int) -> Any:
    import optuna
    from optuna.pruners import MedianPruner
    from optuna.samplers import TPESampler
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    mine = {
        "schema_version": SCHEMA_VERSION,
        "config_sha256": _digest({"config": config.model_dump(mode="json"), "seeds": seeds}),
    }
    if path.is_dir():
        raise UserError(f"{path}: is a folder, expected a study file")
    existed = path.exists() and path.stat().st_size > 0
    with _readable(path):
        if existed:
            _check_journal(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(path)))
        names = [summary.study_name for summary in optuna.get_all_study_summaries(storage)]
        if existed and names and STUDY not in names:
            raise UserError(f"{path}: holds the study '{names[0]}', none of 'wattgym tune'")
        study = optuna.create_study(
            storage=storage, study_name=STUDY, direction="maximize", load_if_exists=True, pruner=MedianPruner()
        )
    found = study.user_attrs.get(_ATTRIBUTE)
    if found is None and not study.trials:
        study.set_user_attr(_ATTRIBUTE, mine)
    elif not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
        version = found.get("schema_version") if isinstance(found, dict) else None
        raise UserError(f"{path}: study of schema version {version!r}, this WattGym goes on with {SCHEMA_VERSION}")
    elif found != mine:
        raise UserError(
            f"{path}: the study is of another configuration (ranges and number of seeds count too); "
            "go on with that one, or choose another --study"
        )
    # Processes that share the file must not all begin with the same values.
    study.sampler = TPESampler(seed=config.seed + len(study.trials))
    return study


def _check_journal(path: Path) -> None:
    """Refuses what is no journal before Optuna appends to it."""
    with path.open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    if not isinstance(first, dict) or "op_code" not in first:
        raise ValueError("no Optuna journal")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read as a study file: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be used as a study file: {error.strerror or error}") from None


def _counted(study: Any) -> int:
    from optuna.trial import TrialState

    return sum(
        trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
        or (trial.state == TrialState.FAIL and _ERROR in trial.user_attrs)
        for trial in study.trials
    )


def _outcome(study: Any, config: AnyTrainingConfig, base: dict[str, Any], interrupted: bool) -> SearchOutcome:
    from optuna.trial import TrialState

    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if not complete:
        return SearchOutcome(_counted(study), None, {}, None, interrupted)
    best = max(complete, key=lambda trial: float(trial.value))
    values = {key: config.search[key].value(parameter) for key, parameter in best.params.items()}
    return SearchOutcome(
        _counted(study), float(best.value), values, parse_training(with_values(base, values), "best"), interrupted
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
