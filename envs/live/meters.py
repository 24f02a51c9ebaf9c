"""A device as the live plant reads it: the last good power with its age, and the energy since the start."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from wattgym.hw.device import Device, DeviceInfo, DeviceReading
from wattgym.hw.energy import EnergyMeter
from wattgym.hw.guard import Guard

KEPT = 64
"""Publications that are kept; at one in 0.1 s more than any window of a control period asks for."""


@dataclass(frozen=True)
class PowerSample:
    """What is known of a device at a moment.

    Attributes:
        power_w: The sensor's last good value, W.
        taken_s: When the sensor took it, monotonic seconds.
        energy_j: Energy metered by then, J; NaN where nothing is known yet.
    """

    power_w: float
    taken_s: float
    energy_j: float


class MeteredDevice:
    """Wraps a guard, or a device that is only read; the poller reads it, the control loop asks for what came of it.

    A reading without a plausible power changes nothing but the age of the last good one: a NaN that entered the
    observation's memory would never leave it.

    Args:
        source: Whom to read: the guard where there is one, because reading through it is its sign of life.
        in_control: Whether somebody still controls; if not, readings are no sign of life, and the guard's watchdog
            gives the device back.
    """

    def __init__(self, source: Guard | Device, in_control: Callable[[], bool] = lambda: True) -> None:
        self._source = source
        self._in_control = in_control
        self._info = source.info if isinstance(source, Guard) else source.info()
        self._meter = EnergyMeter()
        self._samples: deque[PowerSample] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def info(self) -> DeviceInfo:
        """The device's description."""
        return self._info

    def read(self) -> DeviceReading:
        """One reading.

        Raises:
            DeviceError: It failed.
        """
        source = self._source
        reading = source.read(alive=self._in_control()) if isinstance(source, Guard) else source.read()
        with self._lock:
            self._meter.add(reading)
            if reading.power_w is not None:
                taken_s = reading.t_s - (reading.age_s or 0.0)
                if self._samples and taken_s <= self._samples[-1].taken_s:
                    self._samples.pop()  # the same publication, read again
                self._samples.append(PowerSample(reading.power_w, taken_s, self._meter.energy_j))
        return reading

    @property
    def sample(self) -> PowerSample | None:
        """The last good sample; None before the first."""
        with self._lock:
            return self._samples[-1] if self._samples else None

    def steady_w(self, window_s: float) -> float | None:
        """Median of what the sensor published in the last seconds, W; None before the first good reading.

        A checkpoint or a stall of some hundredths of a second that a single reading happens to catch says nothing of
        the period; a controller that believes it answers with a swing of its own.

        Args:
            window_s: How far back from the newest publication.
        """
        with self._lock:
            if not self._samples:
                return None
            since_s = self._samples[-1].taken_s - window_s
            return median(sample.power_w for sample in self._samples if sample.taken_s >= since_s)
