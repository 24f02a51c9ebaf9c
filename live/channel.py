"""Shared memory between a training job and whoever watches it.

One memory-mapped file holds two cells, each with a single writer: the job's status and the controller's knobs. A cell
is two slots written in turn, each with a sequence number and a checksum. The newest slot whose checksum holds is the
value: a reader needs no lock, never sees a torn value, and a writer killed in the middle leaves the value before.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.files import atomic_path
from wattgym.phase import Phase

MAGIC = b"wattgym live job, channel 2\n"
SLOT_BYTES = 8192
_HEADER_BYTES = 64
_SIZE = _HEADER_BYTES + 4 * SLOT_BYTES
_SLOT = struct.Struct("<QII")  # sequence number, bytes of data, CRC-32 of both and the data
_TEXT_LIMIT = 500  # characters; as JSON at most six times as many bytes
_TRIES = 200

LocalSteps = Annotated[int, Field(ge=1, le=1024)]
"""Optimiser steps of a rank between two averages."""


class JobState(StrEnum):
    """How far a job is."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """The job has ended or is about to."""
        return self in (JobState.FINISHED, JobState.STOPPED, JobState.FAILED)


class Knobs(FrozenModel):
    """What a controller may change while the job runs; none of it changes what the job learns.

    Attributes:
        duty: Share of the time in which the job works, 0 to 1; it waits for the rest.
        speed: Speed as a fraction of its free speed, 0 to 1: how a power limit that is only simulated slows the job.
        micro_batch: Samples of one forward and backward pass; None leaves the job's own.
        paused: The job waits until this is taken back.
        active_ranks: Ranks that take part, the first so many; None: all. The others wait, and the samples of an
            update are shared among fewer.
        local_steps: Optimiser steps that a rank takes by itself before the adapters are averaged, weighted by samples;
            1: every step is taken together. One number: the fastest rank takes so many, the others as many as they
            can meanwhile. One a rank: exactly these.
    """

    duty: float = Field(1.0, ge=0, le=1)
    speed: float = Field(1.0, ge=0, le=1)
    micro_batch: int | None = Field(None, ge=1)
    paused: bool = False
    active_ranks: int | None = Field(None, ge=1)
    local_steps: LocalSteps | tuple[LocalSteps, ...] = 1


@dataclass(frozen=True)
class JobStatus:
    """What a job says of itself. Counters only grow while its process lives.

    Attributes:
        pid: The job's process.
        state: How far it is.
        phase: What it does now. Waiting for the sake of duty or speed belongs to the phase it interrupts.
        heartbeat_s: When this was written, on the machine's monotonic clock, seconds.
        steps: Optimiser steps, those before a resume included; with local steps, those of the busiest rank.
        samples: Samples trained on; grows with every micro-batch of rank 0, the others taken to keep pace with it
            until they meet.
        tokens: Tokens of those samples, prompts included, padding not.
        loss: Mean loss of the last step's answer tokens, nats; None before the first.
        loss_mean: Mean over the last 20 steps.
        eval_loss: Loss of the last evaluation; None before the first.
        eval_step: Step of that evaluation.
        step_time_s: Length of the last step, waiting for duty and speed included, pauses not.
        step_time_mean_s: Mean over the last 20 steps.
        free_step_time_s: Mean of the last 20 steps without that waiting.
        phase_s: Seconds spent in each phase, indexed by `Phase`.
        speed_held_s: Seconds waited for the sake of `speed`, in each step by the rank that held it up.
        duty_held_s: Seconds waited for the sake of `duty`, likewise.
        exchange_s: Seconds in which rank 0 waited for the others and exchanged gradients or weights with them.
        duty: Duty in force.
        speed: Speed in force.
        micro_batch: Micro-batch in force (of the running step).
        samples_per_update: Samples of a step.
        ranks: Ranks of the job.
        active_ranks: Ranks that take part.
        local_steps: Optimiser steps of the busiest rank between two averages; 1: every step is taken together.
        rank_steps: Those of each active rank in the running round.
        switches: Changes of micro-batch, active ranks or local steps since the process started.
        switch_s: Seconds these have cost: what the first step (or round of local steps) after a change took longer
            than the slowest of the next three, waiting left out.
        knobs_sequence: Sequence number of the newest knobs the job has read.
        checkpoint_step: Step of the newest checkpoint; None without one.
        device: Device and number format.
        warning: Something that needs attention while the job goes on, such as a full disk; else empty.
        error: Why it failed; else empty.
    """

    pid: int = 0
    state: JobState = JobState.STARTING
    phase: Phase = Phase.LOAD
    heartbeat_s: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    loss: float | None = None
    loss_mean: float | None = None
    eval_loss: float | None = None
    eval_step: int | None = None
    step_time_s: float | None = None
    step_time_mean_s: float | None = None
    free_step_time_s: float | None = None
    phase_s: tuple[float, ...] = field(default=(0.0,) * len(Phase))
    speed_held_s: float = 0.0
    duty_held_s: float = 0.0
    exchange_s: float = 0.0
    duty: float = 1.0
    speed: float = 1.0
    micro_batch: int = 0
    samples_per_update: int = 0
    ranks: int = 1
    active_ranks: int = 1
    local_steps: int = 1
    rank_steps: tuple[int, ...] = (1,)
    switches: int = 0
    switch_s: float = 0.0
    knobs_sequence: int = 0
    checkpoint_step: int | None = None
    device: str = ""
    warning: str = ""
    error: str = ""

    def at(self, now_s: float) -> JobStatus:
        """The same status with the time since the heartbeat counted to the current phase."""
        spent = list(self.phase_s)
        spent[self.phase] += max(0.0, now_s - self.heartbeat_s)
        return replace(self, phase_s=tuple(spent))


@dataclass(frozen=True)
class Progress:
    """What a job did between two readings of its status.

    Attributes:
        steps: Optimiser steps finished.
        samples: Samples trained on.
        tokens: Tokens of those samples.
        phase_s: Seconds in each phase, indexed by `Phase`.
        speed_held_s: Seconds waited for the sake of the speed.
        duty_held_s: Seconds waited for the sake of the duty.
    """

    steps: int
    samples: int
    tokens: int
    phase_s: tuple[float, ...]
    speed_held_s: float
    duty_held_s: float


def progress(before: JobStatus, after: JobStatus) -> Progress:
    """What the job did from one reading to the next.

    Raises:
        UserError: The readings are of two processes, whose counters have nothing to do with each other.
    """
    if before.pid not in (0, after.pid):
        raise UserError(f"status of process {after.pid} cannot follow one of process {before.pid}")
    # A phase that ended between the readings may have been credited a little too long at the first one.
    phase_s = tuple(max(0.0, b - a) for a, b in zip(before.phase_s, after.phase_s, strict=True))
    return Progress(
        steps=after.steps - before.steps,
        samples=after.samples - before.samples,
        tokens=after.tokens - before.tokens,
        phase_s=phase_s,
        speed_held_s=after.speed_held_s - before.speed_held_s,
        duty_held_s=after.duty_held_s - before.duty_held_s,
    )


class Cell:
    """One value of at most a slot's size with one writer and any number of readers."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._offsets = (offset, offset + SLOT_BYTES)
        newest = self._newest()
        self._sequence = newest[0] if newest else 0

    def write(self, data: bytes) -> int:
        """Publishes a value and returns its sequence number."""
        if len(data) > SLOT_BYTES - _SLOT.size:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {SLOT_BYTES}")
        self._sequence += 1
        checksum = zlib.crc32(data, zlib.crc32(struct.pack("<QI", self._sequence, len(data))))
        record = _SLOT.pack(self._sequence, len(data), checksum) + data
        offset = self._offsets[self._sequence % 2]
        self._memory[offset : offset + len(record)] = record
        return self._sequence

    def read(self) -> tuple[int, bytes]:
        """The newest value with its sequence number.

        Raises:
            UserError: No valid value can be found: the file was damaged.
        """
        for _ in range(_TRIES):
            newest = self._newest()
            if newest is not None:
                return newest
            time.sleep(0.001)  # both slots were rewritten while they were read
        raise UserError("the job's channel holds no valid value: the file was damaged")

    def _newest(self) -> tuple[int, bytes] | None:
        valid = [value for value in map(self._slot, self._offsets) if value is not None]
        return max(valid, default=None)

    def _slot(self, offset: int) -> tuple[int, bytes] | None:
        sequence, length, checksum = _SLOT.unpack(self._memory[offset : offset + _SLOT.size])
        start = offset + _SLOT.size
        data = self._memory[start : min(start + length, offset + SLOT_BYTES)]
        if sequence == 0 or zlib.crc32(data, zlib.crc32(struct.pack("<QI", sequence, length))) != checksum:
            return None
        return sequence, data


class Channel:
    """The mapped file: status written by the job, knobs written by its controller.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, memory: mmap.mmap, inode: int) -> None:
        self.path = path
        self._memory = memory
        self._inode = inode
        self._status = Cell(memory, _HEADER_BYTES)
        self._knobs = Cell(memory, _HEADER_BYTES + 2 * SLOT_BYTES)

    @classmethod
    def create(cls, path: Path, knobs: Knobs, status: JobStatus) -> Channel:
        """Makes a new file with first values; one that lies there is replaced, not reused.

        Raises:
            UserError: The operating system refused (no space, no permission).
        """
        with atomic_path(path) as temporary:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # A hole in the file would end the process by SIGBUS when the disk is full at the first write.
                os.posix_fallocate(handle, 0, _SIZE)
                os.pwrite(handle, MAGIC, 0)
                channel = cls(path, mmap.mmap(handle, _SIZE), os.fstat(handle).st_ino)
            finally:
                os.close(handle)
            channel.write_knobs(knobs)
            channel.write_status(status)
        return channel

    @classmethod
    def open(cls, path: Path) -> Channel:
        """Opens the channel of a running job.

        Raises:
            UserError: There is none, or it is not one.
        """
        try:
            handle = os.open(path, os.O_RDWR)
        except OSError as error:
            raise UserError(f"{path}: no job's channel: {error.strerror}") from None
        try:
            if not _has_form(handle):
                raise UserError(f"{path}: not a job's channel, or of another version")
            return cls(path, mmap.mmap(handle, _SIZE), os.fstat(handle).st_ino)
        finally:
            os.close(handle)

    def write_status(self, status: JobStatus) -> None:
        """Publishes the job's status."""
        values = {**vars(status), "warning": status.warning[:_TEXT_LIMIT], "error": status.error[:_TEXT_LIMIT]}
        self._status.write(json.dumps(values, ensure_ascii=False).encode("utf-8", "replace"))

    def read_status(self) -> JobStatus:
        """The newest status."""
        values: dict[str, Any] = json.loads(self._status.read()[1])
        values["state"] = JobState(values["state"])
        values["phase"] = Phase(values["phase"])
        values |= {name: tuple(values[name]) for name in ("phase_s", "rank_steps")}
        return JobStatus(**values)

    def write_knobs(self, knobs: Knobs) -> int:
        """Publishes knobs and returns their sequence number."""
        return self._knobs.write(knobs.model_dump_json().encode("ascii"))

    def read_knobs(self) -> tuple[int, Knobs]:
        """The newest knobs with their sequence number."""
        sequence, data = self._knobs.read()
        return sequence, Knobs.model_validate_json(data)

    def unlink(self) -> None:
        """Removes the file, if it is still this one; the mapping stays readable until it is closed."""
        try:
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        except OSError:
            return

    def close(self) -> None:
        """Unmaps the file."""
        self._memory.close()


def is_channel(path: Path) -> bool:
    """Whether a file is a job's channel."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _has_form(handle)
    finally:
        os.close(handle)


def _has_form(handle: int) -> bool:
    return os.fstat(handle).st_size == _SIZE and os.pread(handle, len(MAGIC), 0) == MAGIC
