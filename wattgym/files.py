"""Writing files so that a crash, a full disk or a missing permission leaves nothing half-written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from wattgym.errors import UserError

T = TypeVar("T")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Lends a temporary path in the target's folder and moves it over the target when the block succeeds.

    For writers that want a file name (`DataFrame.to_parquet`, `Figure.savefig`, `model.save`). The temporary name
    keeps the target's suffix, because such writers look at it. Missing parent folders are created.

    Args:
        path: The file to write. A symbolic link is written through, not replaced.

    Yields:
        The temporary path; write the whole file there.

    Raises:
        UserError: The operating system refused (no space, no permission, a folder in the way).
    """
    wanted = Path(path)
    target = Path(os.path.realpath(wanted))
    temporary = target.with_name(f".tmp-{secrets.token_hex(8)}{target.suffix}")
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "is a folder, expected a file name")
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        flush(temporary)
        temporary.replace(target)
        flush(target.parent)
    except OSError as error:
        raise UserError(f"{wanted}: cannot write: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Writes a whole file or leaves the old one untouched.

    Raises:
        UserError: The operating system refused (no space, no permission, a folder in the way).
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Writes a whole UTF-8 file with the line ends given, or leaves the old one untouched.

    Raises:
        UserError: The operating system refused (no space, no permission, a folder in the way).
    """
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: Any) -> None:
    """Writes indented JSON, or leaves the old file untouched.

    Raises:
        ValueError: The value holds NaN or infinity, which JSON has no word for; callers write `None` instead.
        UserError: The operating system refused (no space, no permission, a folder in the way).
    """
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Reads a JSON file whose top level is an object.

    Raises:
        UserError: The file cannot be read, is not (or no longer whole) JSON, or holds something else.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text, expected JSON") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON, perhaps cut short: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def sha256(path: Path) -> str:
    """Checksum of a file's content, hexadecimal.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_whole(root: Path, folders: Iterable[Path], read: Callable[[Path], T]) -> T | None:
    """What the newest of several checkpoints holds that can be read; a damaged one is passed over for the one before.

    Args:
        root: Where they lie, for the message.
        folders: The checkpoints, newest first.
        read: Reads one; a `UserError` says that it is damaged.

    Returns:
        None where there is no checkpoint.

    Raises:
        UserError: There are checkpoints, but none is whole.
    """
    findings = []
    for folder in folders:
        try:
            return read(folder)
        except UserError as error:
            findings.append(str(error))
    if findings:
        raise UserError(f"{root}: no whole checkpoint to resume from: {findings[0]}")
    return None


def flush(path: Path) -> None:
    """Forces a file's or a folder's content to the disk, so that a power cut cannot undo the rename."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_folder(folder: Path) -> None:
    """Refuses an unusable output folder before minutes of work are spent; creates nothing.

    Raises:
        UserError: It, or what it would lie in, is no folder or cannot be written to.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{folder}: cannot write results there: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: cannot write results there: no permission to write in {existing}")
