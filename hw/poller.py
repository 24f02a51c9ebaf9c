"""One thread that reads several devices, and tells how old and how good the last readings are.

Calls into the driver serialise on its locks and may hang, so nobody else should poll, and nobody who controls should
wait for a reading: a controller takes the last good one and looks at its age.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from wattgym.errors import UserError
from wattgym.hw.clock import Clock, MonotonicClock
from wattgym.hw.device import Device, DeviceError, DeviceReading, DeviceTimeoutError

MIN_INTERVAL_S = 0.1
"""Shortest time between readings, s: sensors of most boards publish every 100 ms, and polling takes driver locks."""


@dataclass(frozen=True)
class Polled:
    """What the poller knows of one device.

    Attributes:
        reading: Last good reading; `None` before the first.
        age_s: Time since that reading came back, seconds; infinite before the first.
        failures: Failed readings since then.
        error: The last failure; `None` after a good reading.
        waiting_s: How long the call that is under way has not come back, seconds; 0 if none is.
    """

    reading: DeviceReading | None
    age_s: float
    failures: int
    error: DeviceError | None
    waiting_s: float


@dataclass
class _Slot:
    reading: DeviceReading | None = None
    read_at_s: float = float("-inf")
    failures: int = 0
    error: DeviceError | None = None
    called_at_s: float | None = None


class DevicePoller:
    """Reads devices in turn from one thread; a context manager that starts and stops it.

    Args:
        devices: Devices, each with a UUID of its own.
        interval_s: Time from one round of readings to the next, at least 0.1 s.
        timeout_s: After this long, a call that has not come back counts as hung.
        clock: For tests; the thread itself waits in real time.

    Raises:
        UserError: Interval too short, or time-out not positive.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        interval_s: float = MIN_INTERVAL_S,
        timeout_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        if not MIN_INTERVAL_S <= interval_s < float("inf"):
            raise UserError(f"polling interval {interval_s} s: at least {MIN_INTERVAL_S} s, polling slows the driver")
        if not timeout_s > 0.0:
            raise UserError(f"polling time-out {timeout_s} s must be above 0")
        self._devices = {device.info().uuid: device for device in devices}
        self._slots = {uuid: _Slot() for uuid in self._devices}
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._lock = threading.Lock()
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> DevicePoller:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the thread; harmless when it runs already."""
        if self._thread is None:
            self._stop = threading.Event()
            # A daemon: a call that never comes back must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="wattgym-poller", daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Stops the thread.

        Returns:
            Whether it ended; False when a call into the driver is hung, which nothing can interrupt.
        """
        thread, stop = self._thread, self._stop
        self._thread = self._stop = None
        if thread is None or stop is None:
            return True
        stop.set()
        thread.join(self._timeout_s)
        return not thread.is_alive()

    def latest(self, uuid: str) -> Polled:
        """What is known of one device, at once.

        Raises:
            UserError: The poller does not have this device.
        """
        if uuid not in self._slots:
            raise UserError(f"poller has no device '{uuid}'; it has: {', '.join(self._slots) or 'none'}")
        with self._lock:
            slot, now_s = self._slots[uuid], self._clock.now_s()
            waiting_s = 0.0 if slot.called_at_s is None else now_s - slot.called_at_s
            error = slot.error
            if self._thread is not None and not self._thread.is_alive():
                error = DeviceError(f"{uuid}: the polling thread has died; its traceback is on stderr")
            elif waiting_s > self._timeout_s:
                error = DeviceTimeoutError(f"{uuid}: the driver has not answered for {waiting_s:.1f} s")
            return Polled(slot.reading, now_s - slot.read_at_s, slot.failures, error, waiting_s)

    def poll_once(self) -> None:
        """Reads every device once, in the calling thread."""
        for uuid, device in self._devices.items():
            slot = self._slots[uuid]
            with self._lock:
                slot.called_at_s = self._clock.now_s()
            reading: DeviceReading | None = None
            error: DeviceError | None = None
            try:
                reading = device.read()
            except DeviceError as caught:
                error = caught
            with self._lock:
                slot.called_at_s = None
                slot.error = error
                slot.failures = 0 if error is None else slot.failures + 1
                if reading is not None:
                    slot.reading, slot.read_at_s = reading, self._clock.now_s()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            started_s = self._clock.now_s()
            self.poll_once()
            # Never less than half the interval of rest: a slow driver must not be polled without a pause.
            rest_s = self._interval_s - (self._clock.now_s() - started_s)
            stop.wait(max(rest_s, self._interval_s / 2))
