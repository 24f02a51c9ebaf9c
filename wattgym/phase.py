"""What a training job does at a moment: the one vocabulary of emulator, live job and telemetry."""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """What a training job does; only COMPUTE makes training progress."""

    LOAD = 0
    COMPUTE = 1
    EVALUATE = 2
    CHECKPOINT = 3
    IDLE = 4
