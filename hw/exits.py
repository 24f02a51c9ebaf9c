"""Hooks for the ordinary ways in which a process ends: interpreter exit, SIGTERM, SIGINT, SIGHUP."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ExitHooks:
    """Runs an action at the process's end and hands each signal on to whoever handled it before.

    Args:
        action: What to do; may run more than once.
        busy: Whether the thread that asks is in the middle of something that the action must not interrupt; a signal
            then waits for `run_pending`.
    """

    def __init__(self, action: Callable[[], None], busy: Callable[[], bool]) -> None:
        self._action = action
        self._busy = busy
        self._previous: dict[int, Any] = {}
        self._pending: list[int] = []

    def install(self) -> None:
        """Hooks in; signals only in the main thread (elsewhere Python allows none) and where they aren't ignored."""
        atexit.register(self._action)
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):
                    self._previous[number] = previous
                    signal.signal(number, self._on_signal)

    def remove(self) -> None:
        """Hooks out; a handler that somebody has wrapped stays and only hands signals on."""
        atexit.unregister(self._action)
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, previous)

    def run_pending(self) -> None:
        """Acts on signals that came while busy."""
        while self._pending and threading.current_thread() is threading.main_thread():
            self._on_signal(self._pending.pop(0), None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._busy():
            self._pending.append(number)
            return
        try:
            self._action()
        finally:
            previous = self._previous[number]
            if callable(previous):
                previous(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
