"""What must survive a controller: the lock of each device and the limit to give back.

One folder per machine holds, per device, a lock file, a session file while a controller is at work, and a keep file
where `wattgym hw set` left a limit in place. Nothing here touches a device, and nothing but the standard library is
imported: the watchdog is built on it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from wattgym.errors import UserError

STATE_DIR_VARIABLE = "WATTGYM_STATE_DIR"
VERSION = 1
_SESSION, _KEPT = ".session.json", ".kept.json"
DYING_S = 1.0
"""How long the lock of a killed process is waited for, s: its threads may still be on their way out."""


class LockedError(UserError):
    """Another controller owns the device."""


class StateError(UserError):
    """The state folder or a file in it cannot be used."""


def default_state_dir() -> Path:
    """The folder for locks, saved limits and the audit log.

    `WATTGYM_STATE_DIR` if set. Else for root `/var/lib/wattgym`, one for the machine, because every process that
    can write a limit must meet the same lock; for other users `$XDG_STATE_HOME/wattgym`, usually
    `~/.local/state/wattgym`. Not the run-time folder: it vanishes when a user logs out, while a job may go on.
    """
    named = os.environ.get(STATE_DIR_VARIABLE)
    if named:
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/wattgym")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "wattgym"


def boot_id() -> str:
    """Identifies this boot of the machine: limits do not outlive it, so neither does a saved state."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def file_stem(uuid: str) -> str:
    """The device's UUID as a file name."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", uuid)


@dataclass(frozen=True)
class DeviceAddress:
    """How another process finds the same device.

    Attributes:
        backend: `nvml` or `simulated`.
        uuid: The device's UUID.
        state_path: File through which processes share a simulated device.
    """

    backend: str
    uuid: str
    state_path: str | None = None


@dataclass(frozen=True)
class SavedState:
    """What one controller found, and what it wrote.

    Attributes:
        address: The device.
        session: Identity of the controller's guard.
        pid: The controller's process.
        saved_mw: Limit before the first write: what is given back.
        ours_mw: Values that the controller may have put into the device: the last that was confirmed, and while a
            write is under way the one that is coming. A limit that is not among them is somebody else's.
        clocks_locked: The controller locked the clocks.
        boot: The boot in which this was true.
    """

    address: DeviceAddress
    session: str
    pid: int
    saved_mw: int
    ours_mw: tuple[int, ...] = ()
    clocks_locked: bool = False
    boot: str = field(default_factory=boot_id)

    @property
    def free_mw(self) -> tuple[int, ...]:
        """Limits that need no judgement: those in force, and the one to give back."""
        return (*self.ours_mw, self.saved_mw)

    def with_ours(self, *limits_mw: int) -> SavedState:
        """The same session with other values that may be in the device."""
        return replace(self, ours_mw=tuple(dict.fromkeys(limits_mw)))


class StateDir:
    """The folder and its files.

    Args:
        path: The folder; the default one if `None`. It is made where it is needed, not here.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else default_state_dir()

    @property
    def audit_path(self) -> Path:
        """The audit log."""
        return self.path / "audit.jsonl"

    def lock_path(self, uuid: str) -> Path:
        """The lock file of a device; it stays, empty of meaning, when nobody holds it."""
        return self.path / f"{file_stem(uuid)}.lock"

    def session_path(self, uuid: str) -> Path:
        """The file of a controller at work, or of one that died."""
        return self.path / f"{file_stem(uuid)}{_SESSION}"

    def kept_path(self, uuid: str) -> Path:
        """The file of a limit that was left in place on purpose."""
        return self.path / f"{file_stem(uuid)}{_KEPT}"

    def make(self) -> None:
        """Makes the folder.

        Raises:
            StateError: It cannot be made or written to.
        """
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise StateError(
                f"{self.path}: the state folder cannot be written ({error.strerror}), so nothing was changed; "
                f"make it writable or name another with --state-dir or {STATE_DIR_VARIABLE}"
            ) from None

    def states(self) -> list[Path]:
        """All session and keep files, sessions first; none if there is no folder.

        Raises:
            StateError: The folder cannot be read.
        """
        try:
            names = sorted(file.name for file in self.path.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateError(f"{self.path}: cannot read the state folder ({error.strerror})") from None
        return [self.path / n for ending in (_SESSION, _KEPT) for n in names if n.endswith(ending) and n[0] != "."]


def write_state(path: Path, state: SavedState, *, durable: bool = True) -> None:
    """Replaces a state file in one step.

    Args:
        path: The file.
        state: What to write.
        durable: Wait until file and folder are on the disk. The first write of a session must; later ones need
            not, because they only have to outlive the process, and a limit does not outlive the machine.

    Raises:
        StateError: The folder cannot be written.
    """
    # One name is enough: only the holder of the device's lock writes, and a crash leaves at most this one file.
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"version": VERSION, **asdict(state)}, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StateError(f"{path}: cannot save the state ({error.strerror})") from None


def remove_state(path: Path) -> None:
    """Removes a state file, durably.

    Raises:
        StateError: It cannot be removed.
    """
    try:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise StateError(f"{path}: cannot remove the state file ({error.strerror})") from None


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(path: Path) -> SavedState | None:
    """Reads a state file; `None` if there is none.

    Raises:
        StateError: It is there but cannot be understood.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path}: cannot read the state file ({error})") from None
    try:
        return _parse_state(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(
            f"{path}: the state file is damaged ({error.__class__.__name__}: {error}), so the limit to give back is "
            "unknown and nothing was changed; set the limit by hand (nvidia-smi -pl WATTS) and remove the file"
        ) from None


def _parse_state(data: Any) -> SavedState:
    data = dict(data)
    if data.pop("version") != VERSION:
        raise ValueError("unknown version")
    address = DeviceAddress(**data.pop("address"))
    state = SavedState(address=address, **{**data, "ours_mw": tuple(data["ours_mw"])})
    whole = (state.pid, state.saved_mw, *state.ours_mw)
    if not all(type(value) is int and value > 0 for value in whole):
        raise ValueError("limits and PID must be positive whole numbers")
    if not all(isinstance(v, str) for v in (state.session, state.boot, address.backend, address.uuid)):
        raise ValueError("session, boot, backend and UUID must be text")
    if not isinstance(state.clocks_locked, bool):
        raise ValueError("clocks_locked must be true or false")
    return state


@dataclass(frozen=True)
class LockHolder:
    """Who wrote the lock file last; they hold the device only while the lock itself is held."""

    pid: int
    session: str
    program: str


class DeviceLock:
    """An advisory lock that the kernel drops when the process ends, however it ends.

    Args:
        path: The lock file.
        session: Identity of the guard that wants it.
    """

    def __init__(self, path: Path, session: str) -> None:
        self._path = path
        self._session = session
        self._descriptor = -1

    def acquire(self) -> LockHolder | None:
        """Takes the lock.

        Returns:
            The dead controller that had it last and never let go, if there was one.

        Raises:
            LockedError: A live controller holds it; the message names its PID.
            StateError: The lock file cannot be opened.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StateError(
                f"{self._path}: cannot open the lock file ({error.strerror}), so nothing was changed"
            ) from None
        last = read_holder(self._path)
        end = time.monotonic() + DYING_S
        while not _try_lock(descriptor):
            if last is None or is_alive(last.pid) or time.monotonic() > end:
                os.close(descriptor)
                who = f"PID {last.pid} ({last.program})" if last else "another process"
                raise LockedError(
                    f"{self._path.stem}: {who} already controls this device; stop it first, nothing was changed"
                )
            time.sleep(0.01)
        self._descriptor = descriptor
        program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
        self._write(json.dumps({"pid": os.getpid(), "session": self._session, "program": program}))
        # A forked child shares the lock: without this the device would stay locked until the last child is gone.
        os.register_at_fork(after_in_child=self._drop)
        return last

    def release(self) -> None:
        """Lets go; the emptied file says that it was done in good order."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._write("")
            self._drop()

    def _write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet collected does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def read_holder(path: Path) -> LockHolder | None:
    """Who took a lock last; `None` if it was let go in good order or the file cannot be understood."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return LockHolder(int(data["pid"]), str(data["session"]), str(data["program"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None
