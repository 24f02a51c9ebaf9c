"""Commands that hold devices end on SIGTERM and SIGHUP as they do on Ctrl-C: in good order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise `KeyboardInterrupt`; guards give their devices back first."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
