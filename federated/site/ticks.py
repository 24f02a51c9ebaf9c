"""Every control period of a site's power controller as a line of CSV, readable at any moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

POWER_TICKS = "power.csv"
COLUMNS = ("unix_s", "power_w", "target_w", "available_w", "limit_w")


class PowerTicks:
    """Appends to the file, also to one that an earlier process of the site has begun.

    Each line goes to the operating system in one call; a full disk costs lines, but never the control of a device.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Args:
            path: The file.
        """
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(self._fd).st_size == 0:
            self._write(",".join(COLUMNS))

    def add(self, power_w: float, target_w: float, available_w: float, limit_w: float) -> None:
        """One period that has just ended.

        Args:
            power_w: Mean power by the meters, W.
            target_w: Target, W; NaN without one.
            available_w: Power that the site might draw, W.
            limit_w: Limit in force, W per device.
        """
        values = (power_w, target_w, available_w, limit_w)
        self._write(",".join([f"{time.time():.3f}", *(f"{value:.3f}" for value in values)]))

    def _write(self, line: str) -> None:
        try:
            os.write(self._fd, f"{line}\n".encode())
        except OSError:
            return
