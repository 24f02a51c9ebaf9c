"""The trainer's side of its power controller: starts it, tells it each round's budget, asks what the devices drew."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.files import atomic_write_json
from wattgym.live.channel import Channel, Knobs

POWER_LOG = "power.log"
_CONFIG = "power.json"
_ANSWER_S = 10.0
_CLOSE_S = 20.0


@dataclass(frozen=True)
class PowerReading:
    """What the controller tells of its devices.

    Attributes:
        time_s: When, monotonic, s.
        energy_j: Energy by the meters since the controller started, J.
        power_w: Power by the sensors, W.
        limit_w: Limit in force, W per device.
        available_w: Power that the site may draw, W.
        target_w: Target of the shaping controller, W; NaN without one.
        error_ws: Sum of the absolute differences of power and target, times their periods, W s.
        shaped_s: Time over which these were taken, s.
        missed: Control periods that came too late.
    """

    time_s: float
    energy_j: float
    power_w: float
    limit_w: float
    available_w: float
    target_w: float
    error_ws: float
    shaped_s: float
    missed: int

    def since(self, before: PowerReading) -> dict[str, float]:
        """Values for a round's metrics: what happened between two readings of one controller."""
        elapsed_s, energy_j = self.time_s - before.time_s, self.energy_j - before.energy_j
        shaped_s = self.shaped_s - before.shaped_s
        if elapsed_s <= 0.0 or energy_j < 0.0:
            return {"available_w": self.available_w}  # the controller was started anew in between
        return {
            "energy_j": energy_j,
            "power_w": energy_j / elapsed_s,
            "available_w": self.available_w,
            "target_error_w": (self.error_ws - before.error_ws) / shaped_s if shaped_s > 0.0 else math.nan,
        }


def as_line(reading: PowerReading) -> str:
    """A reading as a line of JSON."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in asdict(reading).items()})


def from_values(values: Mapping[str, Any]) -> PowerReading:
    """A reading from what a line held.

    Raises:
        KeyError: A value is missing.
    """
    told: dict[str, Any] = {each.name: values[each.name] for each in fields(PowerReading)}
    known: dict[str, Any] = {name: math.nan if value is None else value for name, value in told.items()}
    return PowerReading(**known)


class PowerHolder:
    """A power controller in a process of its own, which ends with the trainer, however that ends.

    They talk in lines of JSON over its standard input and output; when one side is gone the other reads the end of
    file. A controller that dies loses its devices to their watchdog, and is started anew before the next round.

    Attributes:
        last: Newest reading, as plain values; None before the first.
    """

    def __init__(self, config: FederationConfig, name: str, folder: Path, channel: Channel) -> None:
        self.last: dict[str, Any] | None = None
        self._name = name
        self._folder = folder
        self._channel = channel
        self._process: subprocess.Popen[str] | None = None
        self._budget_w: float | None = None
        self._news = threading.Condition()
        self._answered = 0
        self._asked = 0
        self._ready = False
        self._begun_s = time.monotonic()
        atomic_write_json(folder / _CONFIG, config.model_dump(mode="json"))

    @property
    def ready(self) -> bool:
        """It controls."""
        return self._ready

    @property
    def alive(self) -> bool:
        """Its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process."""
        command = [sys.executable, "-P", "-m", "wattgym.federated.site.power"]
        command += ["--federation", str((self._folder / _CONFIG).absolute()), "--site", self._name]
        command += ["--folder", str(self._folder.absolute()), "--begun", str(self._begun_s)]
        self._ready = False
        with (self._folder / POWER_LOG).open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(self._process,), name="wattgym-power", daemon=True).start()

    def check(self) -> None:
        """Refuses to go on without control.

        Raises:
            UserError: The controller has ended; the message is its own.
        """
        if not self.alive:
            raise UserError(f"site '{self._name}': no power control: {self._last_words()}")

    def begin(self, budget_w: float | None) -> PowerReading | None:
        """Tells a round's budget; starts the controller anew if it was killed.

        Returns:
            What the devices tell now; None where they cannot.

        Raises:
            UserError: The controller has refused to go on; the message is its own.
        """
        code = self._process.poll() if self._process is not None else None
        if code is not None and code > 0:
            self.check()
        if not self.alive:
            # What the dead one last asked of the training holds no more; its devices are the watchdog's.
            self._channel.write_knobs(Knobs())
            self.start()
        self._budget_w = budget_w
        return self._ask()

    def end(self) -> PowerReading | None:
        """Ends the round's budget: until the next, the site's own source says what it may draw."""
        reading = self._ask()
        self._budget_w = None
        self._tell()
        return reading

    def close(self) -> None:
        """Lets the controller give its devices back and end; by force if it does not."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its devices are the watchdog's then
            process.wait()

    def _ask(self) -> PowerReading | None:
        with self._news:
            self._asked += 1
            wanted = self._asked
            self._tell()
            self._news.wait_for(lambda: self._answered >= wanted or not self.alive, _ANSWER_S)
            if self._answered < wanted or self.last is None:
                return None
            return from_values(self.last)

    def _tell(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            process.stdin.write(json.dumps({"budget_w": self._budget_w, "ask": self._asked}) + "\n")
            process.stdin.flush()
        except OSError:
            return  # it is dead; whoever waits for an answer finds out

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                values = json.loads(line)
                answered, reading = int(values.pop("answer")), from_values(values)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            with self._news:
                if process is self._process:
                    self._ready = True
                    self._answered = max(self._answered, answered)
                    self.last = json.loads(as_line(reading))
                self._news.notify_all()
        process.wait()
        with self._news:
            self._news.notify_all()

    def _last_words(self) -> str:
        try:
            lines = (self._folder / POWER_LOG).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")
