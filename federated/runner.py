"""A whole live federated run, from federation file to report, over any engine that is ready."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wattgym.agents.selection_rollout import SelectionEpisode
from wattgym.agents.selectors.selector import Selector
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig, load_federation
from wattgym.federated.engine import Engine
from wattgym.federated.federation import CHECKPOINTS, Federation
from wattgym.federated.log import LOG_FILE, RoundLog
from wattgym.federated.loop import Progress, run_rounds
from wattgym.federated.partition import Partition
from wattgym.federated.plan import selection_plan
from wattgym.federated.policy import live_selector
from wattgym.federated.report import FederatedRun, federated_result, write_federated_report
from wattgym.federated.view import progress_line, tensorboard
from wattgym.files import atomic_write_json
from wattgym.runs import RunFolder, git_state, installed_versions

KIND = "federated"
ADAPTER = "adapter"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True, eq=False)
class FederatedResult:
    """What a run came to.

    Attributes:
        selector: Who chose.
        episode: The whole run; None if not one round was played.
        report: The report; None without a round.
        stopped: Whether it was stopped from outside before its end.
    """

    selector: str
    episode: SelectionEpisode | None
    report: Path | None
    stopped: bool


def say_line(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(line, flush=True)


def run(
    engine: Engine,
    federation: str | Path | FederationConfig,
    policy: str,
    rounds: int,
    out: str | Path,
    *,
    seed: int = 0,
    resume: bool = False,
    join_s: float = 600.0,
    selector: Selector | None = None,
    say: Callable[[str], None] = say_line,
) -> FederatedResult:
    """Selects and trains until target, time limit, last round, Ctrl-C or SIGTERM; writes everything into `out`.

    The folder gets the resolved configuration, the round log, checkpoints, TensorBoard events, the adapter in peft's
    format, and tables and report in the evaluator's format.

    Args:
        engine: The engine; whoever made it closes it.
        federation: Federation file, or what it holds.
        policy: Selector by name, or the folder of a bundle or a training run.
        rounds: Rounds at most.
        out: Run folder, new or empty; or that of the run to resume.
        seed: Seed of what the emulated federation draws.
        resume: Go on with the run in `out`; a folder without one begins anew.
        join_s: Longest wait for sites that have not joined yet, s.
        selector: The selector, where `policy` is but its name because it has settings of its own.
        say: Told a line a round.

    Raises:
        UserError: Something named cannot be used, or the folder holds another run.
    """
    config = federation if isinstance(federation, FederationConfig) else load_federation(federation)
    if rounds < 1:
        raise UserError(f"rounds {rounds}; valid: 1 or more")
    selector = selector or live_selector(policy)
    folder = Path(out)
    resolved = {"policy": policy, "engine": engine.name, "federation": config.model_dump(mode="json")}
    run_folder = RunFolder.create(folder, resolved, KIND, seed, resume=resume, may_change=("engine",))
    log = RoundLog(folder / LOG_FILE)
    with run_folder.recording_status(), ExitStack() as stack:
        stop = stack.enter_context(stop_between_rounds())
        # A crash may have come between the first checkpoint and the first line of the log.
        begun = bool(log.lines) or (folder / CHECKPOINTS).is_dir()
        training = Federation(config, engine, folder, resume=resume and begun, join_s=join_s)
        _catch_up(log, training)
        domains = Partition(config).domains
        start = log.records[0].evaluation if log.lines else training.evaluate()
        plan = selection_plan(config, training.members(), domains, start.loss, rounds=rounds, seed=seed)
        scalars = stack.enter_context(tensorboard(folder / TENSORBOARD))

        def show(progress: Progress) -> None:
            say(progress_line(progress, plan))
            scalars(progress)

        episode = run_rounds(
            training,
            selector,
            plan,
            log,
            show=show,
            stop=stop.is_set,
        )
        training.save_adapter(folder / ADAPTER)
        report = None
        if episode is not None:
            result = federated_result([FederatedRun(selector.name, seed, episode)], _provenance(config, engine.name))
            report = write_federated_report(result, folder)
            atomic_write_json(folder / SUMMARY, _summary(selector.name, episode, training))
    return FederatedResult(selector.name, episode, report, stop.is_set())


@contextmanager
def stop_between_rounds() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the run after the round under way; a second one ends it at once.

    Yields:
        Set when the run is to end.
    """
    stop = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch_up(log: RoundLog, training: Federation) -> None:
    """Adds the round that was saved but not logged, where a crash came between."""
    if not log.lines or not training.records:
        return
    saved, last = training.records[0], log.records[-1]
    if (saved.round, saved.attempt) > (last.round, last.attempt) and saved.round > 0:
        log.append(saved)


def _summary(selector: str, episode: SelectionEpisode, training: Federation) -> dict[str, Any]:
    return {
        "selector": selector,
        "rounds": training.round,
        "reached": episode.reached,
        "time_s": float(episode.seconds.sum()),
        "start_loss": episode.start_loss,
        "loss": training.evaluation.loss,
        "accuracy": training.evaluation.accuracy,
        "domain_loss": dict(training.evaluation.domain_loss),
    }


def _provenance(config: FederationConfig, engine: str) -> dict[str, Any]:
    git = git_state()
    clock = "emulated (power, network and market of the emulated federation; training is real)"
    return {
        "command": shlex.join(sys.argv),
        "commit": f"{git.commit}{' (with local changes)' if git.dirty else ''}" if git else "unknown",
        "engine": engine,
        "clock": clock if config.clock == "emulated" else "wall",
        "network": "emulated from the network table" if config.network is not None else "as it is",
        "federation": config.model_dump(mode="json"),
        "versions": installed_versions(),
    }
