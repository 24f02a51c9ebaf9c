"""Training curves for TensorBoard, written in the training's own thread.

The usual writer hands its records to a background thread, in which a full disk ends as a traceback beside a training
that goes on without curves. This one fails where it is called.
"""

from __future__ import annotations

import socket
import time
from numbers import Real
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter


class EventLog(KVWriter):
    """Writes scalars as a TensorBoard event file; other values are left out."""

    def __init__(self, folder: Path) -> None:
        """Begins a file of its own, as each start of a run does.

        Args:
            folder: Folder of the run's event files.

        Raises:
            OSError: It cannot be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files of a folder in the order of their names.
        path = folder / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}"
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Writes one value per key.

        Args:
            key_values: Values by tag.
            key_excluded: Output formats that a tag is not for.
            step: Environment steps so far.

        Raises:
            OSError: The disk is full.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in key_values.items()
            if isinstance(value, Real) and "tensorboard" not in (key_excluded.get(tag) or ())
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
