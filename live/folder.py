"""A job's run folder: one job at a time in it, and nothing of a dead one left behind."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from wattgym.errors import UserError
from wattgym.live.channel import is_channel
from wattgym.live.config import MAY_CHANGE, JobConfig
from wattgym.runs import RunFolder

KIND = "live job"
CHANNEL_FILE = "job.channel"
LOCK_FILE = "job.lock"
LOG_FILE = "job.log"
RENDEZVOUS_FILE = "job.ranks"
"""By which the ranks of a job find each other."""


def prepare_folder(folder: Path, config: JobConfig, *, resume: bool) -> tuple[RunFolder, int]:
    """Makes a run folder, or takes up the run in it, for one job.

    The lock belongs to the open file: a process that inherits the descriptor keeps it, however its parent ends, and
    the operating system gives it back when the last of them is gone.

    Returns:
        The run and the descriptor that holds its lock.

    Raises:
        UserError: A job runs in the folder, or the folder cannot be used (see `RunFolder.create`).
    """
    if is_locked(folder):
        raise _running(folder)
    values = config.model_dump(mode="json")
    run = RunFolder.create(folder, values, KIND, config.seed, resume=resume, may_change=MAY_CHANGE)
    lock = _lock(folder)
    (folder / RENDEZVOUS_FILE).unlink(missing_ok=True)  # of a job that was killed
    return run, lock


def is_locked(folder: Path) -> bool:
    """Whether a job runs in the folder."""
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def remove_stale_channels(root: Path) -> list[Path]:
    """Removes the shared memory of dead jobs at and below a folder.

    Only needed where a job and its owner were both killed and nobody has started a job in that folder since.

    Returns:
        What was removed.
    """
    stale = [path for path in root.rglob(CHANNEL_FILE) if is_channel(path) and not is_locked(path.parent)]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _lock(folder: Path) -> int:
    try:
        handle = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{folder / LOCK_FILE}: cannot make the lock file: {error.strerror}") from None
    for _ in range(5):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.05)  # somebody who only looks holds it for a moment
        else:
            return handle
    os.close(handle)
    raise _running(folder)


def _running(folder: Path) -> UserError:
    return UserError(f"{folder}: a job is running in this folder; stop it or choose another folder")
