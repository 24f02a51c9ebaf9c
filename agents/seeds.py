"""Trainings that differ in their seed alone, side by side in processes of their own, and what they came to together."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from wattgym.agents.callbacks import VALIDATIONS
from wattgym.agents.checkpoint import read_manifest
from wattgym.agents.config import AnyTrainingConfig, parse_training
from wattgym.agents.policy import checkpoint_folder
from wattgym.agents.training import MAY_CHANGE, check_training, stop_requests, train
from wattgym.errors import UserError
from wattgym.files import atomic_write_json, atomic_write_text, read_json_object
from wattgym.metrics.statistics import Estimate, bootstrap
from wattgym.runs import RunFolder

GROUP = "training group"
"""Kind of the folder that holds one run folder for each seed."""

SUMMARY, TABLE = "seeds.json", "seeds.md"
SCHEMA_VERSION = 1

_POLL_S = 0.1
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class SeedResult:
    """One seed's training.

    Attributes:
        seed: The seed.
        folder: Its run folder.
        status: `finished`, `interrupted`, `failed` or `waiting` (not begun).
        steps: Environment steps of its last checkpoint.
        best_reward: Best mean reward on validation; None if none took place.
        error: Why it failed; else empty.
    """

    seed: int
    folder: Path
    status: str
    steps: int
    best_reward: float | None
    error: str = ""


@dataclass(frozen=True)
class SeedsOutcome:
    """What a group of trainings came to.

    Attributes:
        path: The group's folder.
        seeds: One result for each seed.
        interrupted: Whether it was stopped before its end.
    """

    path: Path
    seeds: tuple[SeedResult, ...]
    interrupted: bool

    @property
    def failed(self) -> tuple[SeedResult, ...]:
        """Seeds that failed."""
        return tuple(result for result in self.seeds if result.status == "failed")

    @property
    def estimate(self) -> Estimate | None:
        """Interquartile mean over finished seeds of the best validation reward, with its 95 % interval."""
        rewards = [r.best_reward for r in self.seeds if r.status == "finished" and r.best_reward is not None]
        return bootstrap(np.array(rewards)[:, None]) if rewards else None

    def table(self) -> str:
        """The results as a Markdown table."""
        rows = [
            f"| {r.seed} | {r.status} | {r.steps:,} | {'' if r.best_reward is None else f'{r.best_reward:.4f}'} |"
            for r in self.seeds
        ]
        lines = ["| seed | status | steps | best validation reward |", "|---|---|---|---|", *rows]
        if (found := self.estimate) is not None:
            interval = "" if math.isnan(found.low) else f" [{found.low:.4f}, {found.high:.4f}]"
            lines += ["", f"Interquartile mean over {found.n} finished seeds [95 %]: {found.value:.4f}{interval}"]
        return "\n".join(lines) + "\n"

    def save(self) -> None:
        """Writes `seeds.json` and `seeds.md` into the group's folder."""
        found = self.estimate
        plain = {
            "schema_version": SCHEMA_VERSION,
            "seeds": [
                {
                    "seed": r.seed,
                    "folder": r.folder.name,
                    "status": r.status,
                    "steps": r.steps,
                    "best_reward": r.best_reward,
                    "error": r.error,
                }
                for r in self.seeds
            ],
            "validation_reward": None
            if found is None
            else {
                "iqm": found.value,
                "ci_low": None if math.isnan(found.low) else found.low,
                "ci_high": None if math.isnan(found.high) else found.high,
                "seeds": found.n,
            },
        }
        atomic_write_json(self.path / SUMMARY, plain)
        atomic_write_text(self.path / TABLE, self.table())


def train_seeds(
    config: AnyTrainingConfig,
    out: str | Path,
    count: int,
    *,
    jobs: int = 1,
    resume: bool = False,
    progress: bool = True,
) -> SeedsOutcome:
    """Trains a configuration with several seeds, beginning with its own.

    Each seed has a process and a run folder `<out>/<out's name>-seed<seed>`; what it said is beside it, in `….log`. One
    that fails does not stop the others. Ctrl-C or SIGTERM stop all in good order, and so does the end of this process,
    however it ends: `resume` then skips what is finished and continues the rest.

    Args:
        config: What to train; its seed is the first.
        out: Group folder, new or empty unless resuming.
        count: Number of seeds; it may grow when resuming.
        jobs: Processes at a time.
        resume: Continue the group in the folder.
        progress: Show a progress bar on stderr.

    Raises:
        UserError: The configuration or the folder cannot be used, or a number is not positive.
    """
    for name, value in (("seeds", count), ("jobs", jobs)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    check_training(config)
    plain = config.model_dump(mode="json")
    group = RunFolder.create(out, plain, GROUP, config.seed, resume=resume, may_change=MAY_CHANGE)
    name = group.path.resolve().name
    waiting = [
        _Training(config.model_copy(update={"seed": seed}), group.path / f"{name}-seed{seed}")
        for seed in range(config.seed, config.seed + count)
    ]
    with stop_requests() as stop, _Bar(waiting, progress) as bar:
        try:
            _run(waiting, jobs, lambda: stop.requested, bar.update)
        finally:
            outcome = SeedsOutcome(group.path, tuple(training.result() for training in waiting), stop.requested)
            outcome.save()
            all_well = all(result.status == "finished" for result in outcome.seeds)
            group.set_status("finished" if all_well else "failed" if outcome.failed else "interrupted")
    return outcome


def group_runs(path: Path) -> tuple[Path, ...] | None:
    """The finished runs of a group of trainings; None where the folder is no group.

    Raises:
        UserError: It is a group, but none of its seeds is finished.
    """
    try:
        folder = RunFolder.open(path)
    except UserError:
        return None
    if folder.info.kind != GROUP:
        return None
    found = read_json_object(path / SUMMARY)["seeds"] if (path / SUMMARY).is_file() else []
    finished = tuple(path / str(seed["folder"]) for seed in found if seed["status"] == "finished")
    if not finished:
        raise UserError(f"{path}: none of its seeds is finished (status: {folder.info.status})")
    return finished


class _Training:
    """One seed: its process, while it runs, and what is known of it."""

    def __init__(self, config: AnyTrainingConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.steps = _trained(folder)[1]
        self.error = ""
        self._log = folder.with_name(f"{folder.name}.log")
        self._process: subprocess.Popen[str] | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return _trained(self.folder)[0] == "finished" and self.steps >= self.config.train.total_steps

    @property
    def running(self) -> bool:
        """Whether its process is alive; notes how it ended when it has."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._listener.join()
        self._process = None
        if code not in (0, 130):
            self.error = _last_line(self._log) or f"its process ended with code {code}"
        return False

    def start(self) -> None:
        """Starts its process, whose life depends on this one's: it stops in good order when its standard input ends."""
        request = {"config": self.config.model_dump(mode="json"), "out": str(self.folder)}
        environment = {"OMP_NUM_THREADS": str(self.config.train.threads), **os.environ}
        with self._log.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "wattgym.agents.seeds"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                # A Ctrl-C at the terminal is for this process to pass on, once.
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        self._listener = threading.Thread(target=self._listen, args=(process.stdout,), daemon=True)
        self._listener.start()
        self._process = process

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Asks for an orderly end, or with a repeated signal for an immediate one."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def result(self) -> SeedResult:
        """How it stands."""
        status, steps, best = _trained(self.folder)
        if self.error:
            status = "failed"
        elif status == "finished" and steps < self.config.train.total_steps:
            status = "interrupted"
        return SeedResult(self.config.seed, self.folder, status, steps, best, self.error)

    def _listen(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                # A library may print too.
                with suppress(ValueError):
                    self.steps = int(line)


def _run(trainings: Sequence[_Training], jobs: int, stopped: Callable[[], bool], update: Callable[[], None]) -> None:
    waiting = [training for training in trainings if not training.complete]
    running: list[_Training] = []
    asked = False
    try:
        while running or (waiting and not stopped()):
            running = [training for training in running if training.running]
            while waiting and len(running) < jobs and not stopped():
                running.append(waiting.pop(0))
                running[-1].start()
            if stopped() and not asked:
                asked = True
                for training in running:
                    training.stop()
            update()
            time.sleep(_POLL_S)
    finally:
        _end(running)


def _end(running: Sequence[_Training]) -> None:
    """Ends processes that are still there after a second Ctrl-C: at once, their last checkpoints stay."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for training in running:
            training.stop(number)
        until = time.monotonic() + _PATIENCE_S
        while any(training.running for training in running) and time.monotonic() < until:
            time.sleep(_POLL_S)


class _Bar:
    """Progress over all seeds."""

    def __init__(self, trainings: Sequence[_Training], show: bool) -> None:
        self._trainings = trainings
        self._show = show

    def __enter__(self) -> _Bar:
        from tqdm import tqdm

        total = sum(training.config.train.total_steps for training in self._trainings)
        self._bar = tqdm(
            total=total,
            initial=self._steps(),
            unit="step",
            unit_scale=True,
            desc=f"train {len(self._trainings)} seeds",
            disable=not self._show,
        )
        return self

    def __exit__(self, *unused: object) -> None:
        self.update()
        self._bar.close()

    def update(self) -> None:
        """Shows where they are."""
        if (new := self._steps() - self._bar.n) > 0:
            self._bar.update(new)

    def _steps(self) -> int:
        return sum(min(training.steps, training.config.train.total_steps) for training in self._trainings)


def _trained(folder: Path) -> tuple[str, int, float | None]:
    """Status, steps of the last checkpoint and best validation reward of a run, as far as it has them."""
    status, steps, best = "waiting", 0, None
    try:
        run = RunFolder.open(folder, "training")
        # A process that could not say how it ended was stopped by force.
        status = "interrupted" if run.info.status == "running" else str(run.info.status)
        steps = read_manifest(checkpoint_folder(run, "last")).steps
        rewards = [found["reward"] for found in read_json_object(folder / VALIDATIONS)["validations"]]
        best = max((float(reward) for reward in rewards if reward is not None), default=None)
    except (UserError, ValueError, KeyError):
        pass
    return status, steps, best


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _tell(steps: int) -> None:
    # Whoever listened may have been killed; that is for the other pipe to notice.
    with suppress(OSError):
        os.write(1, f"{steps}\n".encode())


def _child() -> int:
    """One seed's process: reads what to train from standard input, writes steps to standard output."""
    request: dict[str, Any] = json.loads(sys.stdin.readline())

    def watch_parent() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch_parent, daemon=True).start()
    try:
        config = parse_training(request["config"], "seeds")
        outcome = train(config, request["out"], resume=True, progress=_tell)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 130 if outcome.interrupted else 0


if __name__ == "__main__":
    sys.exit(_child())
