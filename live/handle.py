"""Starting, watching, pacing and stopping a training job from another process; needs no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from wattgym.config import parse_config
from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.config import JobConfig, checked_micro_batch, checked_ranks
from wattgym.live.folder import CHANNEL_FILE, KIND, LOG_FILE, RENDEZVOUS_FILE, is_locked, prepare_folder
from wattgym.live.models import check_available
from wattgym.live.records import read_examples
from wattgym.phase import Phase
from wattgym.runs import RunFolder

_POLL_S = 0.02


class JobHandle:
    """A training job in a process of its own.

    Made by `start` or `attach`. As a context manager it stops the job at the end (an attached one goes on).

    Attributes:
        folder: The job's run folder.
    """

    def __init__(self, folder: Path, channel: Channel, process: subprocess.Popen[bytes] | None, knobs: Knobs) -> None:
        self.folder = folder
        self._channel = channel
        self._process = process
        self._knobs = knobs
        self._asked_to_stop = False
        self._closed: JobStatus | None = None

    @classmethod
    def start(
        cls,
        config: JobConfig,
        folder: str | Path,
        *,
        resume: bool = False,
        knobs: Knobs | None = None,
        die_with_owner: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> JobHandle:
        """Starts a job; it loads in the background (see `wait_ready`).

        Args:
            config: What to train.
            folder: Run folder, new or empty; or, with `resume`, of an earlier run of the same configuration.
            resume: Take up the run in the folder from its newest checkpoint.
            knobs: Knobs from the first step on.
            die_with_owner: The job saves its state and ends when this process dies, however it dies.
            environment: Variables set for the job only, for example `CUDA_VISIBLE_DEVICES`.

        Raises:
            UserError: A library, the model or the data is missing or no such thing, a knob is out of range, or the
                folder cannot be used. Nothing has been written then.
        """
        knobs = knobs or Knobs()
        first = first_status(config)
        _check_knobs(knobs, first)
        preflight(config)
        path = Path(folder)
        run, lock = prepare_folder(path, config, resume=resume)
        command = [sys.executable, "-P", "-m", "wattgym.live.job", "--out", str(path.absolute())]
        command += ["--owner", str(os.getpid() if die_with_owner else 0)]
        try:
            channel = Channel.create(path / CHANNEL_FILE, knobs, replace(first, heartbeat_s=time.monotonic()))
            with (path / LOG_FILE).open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **offline_environment(config.threads), **(environment or {})},
                    pass_fds=(lock,),  # the job inherits the folder's lock and keeps it while it lives
                    start_new_session=True,  # Ctrl-C reaches the owner, who decides what becomes of the job
                )
        except (OSError, UserError) as error:
            with contextlib.suppress(UserError):
                run.set_status("failed")
            raise UserError(f"{path}: cannot start the job: {error}") from None
        finally:
            os.close(lock)
        return cls(path, channel, process, knobs)

    @classmethod
    def attach(cls, folder: str | Path) -> JobHandle:
        """Takes over a running job whose owner is gone; there must be one controller at a time.

        Raises:
            UserError: No job runs in the folder.
        """
        path = Path(folder)
        RunFolder.open(path, KIND)
        if not is_locked(path):
            raise UserError(f"{path}: no job is running in this folder")
        channel = Channel.open(path / CHANNEL_FILE)
        return cls(path, channel, None, channel.read_knobs()[1])

    @property
    def alive(self) -> bool:
        """The job's process lives."""
        if self._closed is not None:
            return False
        return self._process.poll() is None if self._process is not None else is_locked(self.folder)

    @property
    def knobs(self) -> Knobs:
        """The knobs set last; `JobStatus.knobs_sequence` tells whether the job has read them."""
        return self._knobs

    def status(self) -> JobStatus:
        """The job's newest status; a job that died without a word is `FAILED`, with the reason as far as known."""
        if self._closed is not None:
            return self._closed
        if self.alive:
            return self._channel.read_status().at(time.monotonic())
        status = self._channel.read_status()
        if status.state.final:
            return status
        if self._asked_to_stop and self._process is not None and self._process.returncode == -signal.SIGTERM:
            return replace(status, state=JobState.STOPPED, phase=Phase.IDLE)  # before it could handle the signal
        return replace(status, state=JobState.FAILED, phase=Phase.IDLE, error=self._last_words())

    def check(self) -> JobStatus:
        """The job's status.

        Raises:
            UserError: The job has failed; the message is its own.
        """
        status = self.status()
        if status.state is JobState.FAILED:
            raise UserError(f"training job in {self.folder} failed: {status.error}")
        return status

    def wait_ready(self, timeout_s: float = 600.0) -> JobStatus:
        """Waits until the job trains (or is paused, or has ended well).

        Raises:
            UserError: It failed, or it is still loading after the time given.
        """
        deadline = time.monotonic() + timeout_s
        while (status := self.check()).state is JobState.STARTING:
            if time.monotonic() > deadline:
                raise UserError(f"training job in {self.folder} is still loading after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Waits until the job's process has ended.

        Raises:
            UserError: It failed, or it still runs after the time given.
        """
        if not self._ended_within(timeout_s):
            raise UserError(f"training job in {self.folder} still runs after {timeout_s:g} s")
        return self.check()

    def set_knobs(
        self,
        *,
        duty: float | None = None,
        speed: float | None = None,
        micro_batch: int | None = None,
        paused: bool | None = None,
        active_ranks: int | None = None,
        local_steps: int | Sequence[int] | None = None,
    ) -> int:
        """Changes the knobs that are given; duty, speed and pause act within a micro-batch, the rest at the next step.

        Args:
            duty: Share of the time in which the job works, 0 to 1.
            speed: Speed as a fraction of its free speed, 0 to 1.
            micro_batch: Samples of one pass; divides the samples of an update.
            paused: Whether the job waits.
            active_ranks: Ranks that take part, the first so many.
            local_steps: Optimiser steps between two averages, of the fastest rank or of each; 1: none are averaged.

        Returns:
            The sequence number that `JobStatus.knobs_sequence` has once the job has read them.

        Raises:
            UserError: A value is out of range; nothing has changed then.
        """
        given = {
            "duty": duty, "speed": speed, "micro_batch": micro_batch, "paused": paused,
            "active_ranks": active_ranks, "local_steps": local_steps,
        }  # fmt: skip
        changed = {name: value for name, value in given.items() if value is not None}
        knobs = parse_config(Knobs, {**self._knobs.model_dump(), **changed}, "job knobs")
        _check_knobs(knobs, self._channel.read_status())
        self._knobs = knobs
        return self._channel.write_knobs(knobs)

    def stop(self, timeout_s: float = 60.0) -> JobStatus:
        """Lets the job save its state and end; ends it by force after the time given.

        Returns:
            The last status; `FAILED` if the job had failed or had to be ended by force.
        """
        self._asked_to_stop = True
        self._signal(signal.SIGTERM)
        if not self._ended_within(timeout_s):
            self.kill()
        return self.status()

    def kill(self) -> None:
        """Ends the job at once; what it did since its last checkpoint is lost."""
        self._signal(signal.SIGKILL)
        self._ended_within(None)

    def detach(self) -> None:
        """Lets go of the job without stopping it; only sensible for one started with `die_with_owner=False`."""
        if self._process is not None:
            self._process.poll()
            if self._process.returncode is None:
                self._process.returncode = 0  # tells Popen that nobody is going to wait for this child
        self._closed = self._channel.read_status()
        self._channel.close()

    def close(self) -> None:
        """Stops a job that this handle started, records its end and removes its shared memory; once is enough.

        `status` goes on to tell how the job ended.
        """
        if self._closed is not None:
            return
        if self._process is None:
            self.detach()
            return
        status = self.stop()
        with contextlib.suppress(UserError):
            run = RunFolder.open(self.folder, KIND)
            if run.info.status == "running":  # the job could not record its end itself
                run.set_status("failed" if status.state is JobState.FAILED else "interrupted")
        self._closed = status
        (self.folder / RENDEZVOUS_FILE).unlink(missing_ok=True)  # of a job that was killed
        self._channel.unlink()
        self._channel.close()

    def __enter__(self) -> JobHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        if not self.alive:
            return
        if self._process is not None:
            self._process.send_signal(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._channel.read_status().pid, number)

    def _ended_within(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.alive:
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _last_words(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = " (often the kernel's work when memory runs out)" if name == "SIGKILL" else ""
            return f"its process was killed by {name}{hint}"
        try:
            lines = (self.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        ended = "its process is gone" if code is None else f"its process ended with exit code {code}"
        return f"{ended}; last line of {LOG_FILE}: {last}"


def preflight(config: JobConfig) -> None:
    """Looks for everything a job needs that can be checked without loading it.

    Raises:
        UserError: A library, the model or the data is missing or is no such thing.
    """
    check_available(config.model)
    read_examples(config.data)


def first_status(config: JobConfig) -> JobStatus:
    """What a job says of itself before it does anything."""
    return JobStatus(
        micro_batch=config.micro_batch,
        samples_per_update=config.samples_per_update,
        ranks=config.ranks,
        active_ranks=config.ranks,
        rank_steps=(1,) * config.ranks,
    )


def _check_knobs(knobs: Knobs, status: JobStatus) -> None:
    if knobs.micro_batch is not None:
        checked_micro_batch(knobs.micro_batch, status.samples_per_update)
    checked_ranks(knobs.active_ranks or status.ranks, status.ranks, knobs.local_steps)


def offline_environment(threads: int) -> dict[str, str]:
    """Settings that the numeric libraries read when they are imported: few threads, no network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
