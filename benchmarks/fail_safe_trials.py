"""The trials of the fail-safe benchmark: a controller, a machine, and ways to end the one on the other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEASE_S = 1.0
RETRY_S = 0.6
PATIENCE_S = 15.0
"""How long a restore is waited for before it counts as missing, s; a loaded machine must not fail a trial."""


# --- the controller: a process that moves a limit until it is ended


def control(options: dict[str, Any]) -> None:
    """Runs as a controller; reports on standard output, one JSON object per line."""
    from wattgym.errors import UserError
    from wattgym.hw.guard import Guard
    from wattgym.hw.limits import CommandRules
    from wattgym.hw.nvml import NvmlDevice
    from wattgym.hw.preflight import GuardConfig
    from wattgym.hw.telemetry import GuardState

    def say(event: str, **details: Any) -> None:
        print(json.dumps({"event": event, "t": time.monotonic(), **details}), flush=True)

    rules = CommandRules(interval_s=0.2, dead_band_w=1.0, dead_band_fraction=0.0, raise_fraction_per_s=1.0)
    config = GuardConfig(rules=rules, lease_s=options["lease_s"], retry_s=RETRY_S)
    rng = random.Random(options["seed"])
    try:
        guard = Guard(NvmlDevice(options["uuid"]), arm=True, config=config, state_dir=options["state_dir"])
    except UserError as error:
        say("refused", why=str(error))
        sys.exit(2)
    with guard:
        for step in range(10_000):
            if guard.telemetry.state is GuardState.ARMED:
                guard.set_limit_w(rng.uniform(guard.lowest_w, guard.highest_w))
                with contextlib.suppress(UserError):
                    guard.read()
            if guard.telemetry.state is GuardState.FROZEN:
                say("frozen", why=guard.telemetry.why)
                time.sleep(1000)
            if step == 1:
                say("ready", pid=os.getpid(), watchdog=guard.watchdog_pid)
            if step == options["end_at"]:
                say("ending")
                _end(options["end"])
            time.sleep(0.05)


def _end(how: str) -> None:
    if how == "exception":
        raise RuntimeError("a fault in the controller")
    if how == "os._exit":
        os._exit(3)
    if how == "return":
        sys.exit(0)
    time.sleep(1000)  # a hang


class Controller:
    """A controller process seen from outside."""

    def __init__(self, machine: Machine, *, end: str = "never", end_at: int = -1, lease_s: float = 30.0) -> None:
        options = {
            "uuid": machine.uuid,
            "state_dir": str(machine.state_dir),
            "lease_s": lease_s,
            "seed": machine.rng.randrange(2**31),
            "end": end,
            "end_at": end_at,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            env=machine.standin.env(WATTGYM_ARM="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def expect(self, event: str, timeout_s: float = 60.0) -> dict[str, Any]:
        """The next report, which must be this one."""
        said = self._said.get(timeout=timeout_s)
        if said["event"] != event:
            raise RuntimeError(f"the controller said {said} instead of '{event}'")
        return said

    def signal(self, number: int) -> float:
        """Signals its process group and returns when."""
        now = time.monotonic()
        os.killpg(self.pid, number)
        return now

    def reap(self) -> None:
        """Ends what is left of it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


# --- trials


@dataclass
class Outcome:
    """What a trial showed.

    Attributes:
        case: Name of the case.
        restored: Whether the limit came back; `None` where nothing of ours was left to restore.
        seconds: How long that took.
        foreign_overwritten: A limit that somebody else had set was lost.
        wrong: Anything else that was not as it must be; empty if all was well.
    """

    case: str
    restored: bool | None = None
    seconds: float | None = None
    foreign_overwritten: bool = False
    wrong: str = ""


@dataclass
class Machine:
    """One simulated machine with one GPU under test.

    Attributes:
        standin: The stand-in and its hooks.
        state_dir: State folder of guards.
        rng: Source of chance.
        saved_mw: The limit before the trial.
    """

    standin: Any
    state_dir: Path
    rng: random.Random
    saved_mw: int = 0
    controllers: list[Controller] = field(default_factory=list)

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""
        return str(self.standin.uuid(0))

    @property
    def limit_mw(self) -> int:
        """The limit in the device now."""
        return int(self.standin.get(0, "requested_mw"))

    def prepare(self) -> None:
        """A healthy GPU whose owner has set some limit of their own."""
        for key, value in {"lost": 0, "set_delay_ms": 0, "set_hold_ms": 0, "load": 1}.items():
            self.standin.set(0, key, value)
        self.saved_mw = 1000 * self.rng.randrange(400, 700)
        self.standin.set(0, "requested_mw", self.saved_mw)

    def start(self, **options: Any) -> tuple[Controller, dict[str, Any]]:
        """Starts a controller and waits until it has moved the limit."""
        controller = Controller(self, **options)
        self.controllers.append(controller)
        return controller, controller.expect("ready")

    def pause(self, longest_s: float = 0.3) -> None:
        """Waits for a random time, so that the blow falls anywhere in the controller's loop."""
        time.sleep(self.rng.uniform(0.0, longest_s))

    def restored_after(self, since: float) -> float | None:
        """Seconds from `since` until the limit is as before and the watchdog has cleared up; `None` if never."""
        while time.monotonic() < since + PATIENCE_S:
            if self.limit_mw == self.saved_mw:
                return time.monotonic() - since
            time.sleep(0.002)
        return None

    def wait_until_settled(self) -> None:
        """Waits until no watchdog is at work on the GPU."""
        end = time.monotonic() + PATIENCE_S
        while list(self.state_dir.glob("*.session.json")) and time.monotonic() < end:
            time.sleep(0.01)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `wattgym hw …`."""
        line = [sys.executable, "-m", "wattgym", "hw", *arguments, "--state-dir", str(self.state_dir)]
        return subprocess.run(line, env=self.standin.env(), capture_output=True, text=True, timeout=60, check=False)

    def clear(self) -> None:
        """Ends all controllers and the state that a trial may leave on purpose."""
        for controller in self.controllers:
            controller.reap()
        self.controllers.clear()
        self.standin.set(0, "lost", 0)


def _by_signal(number: int) -> Callable[[Machine, Outcome], None]:
    def trial(machine: Machine, outcome: Outcome) -> None:
        machine.standin.set(0, "set_delay_ms", machine.rng.choice([0, 0, 20]))
        machine.standin.set(0, "set_hold_ms", machine.rng.choice([0, 0, 20]))
        controller, _ = machine.start()
        machine.pause()
        _note_restore(machine, outcome, controller.signal(number))

    return trial


def _by_end(how: str) -> Callable[[Machine, Outcome], None]:
    def trial(machine: Machine, outcome: Outcome) -> None:
        controller, _ = machine.start(end=how, end_at=machine.rng.randrange(3, 8))
        _note_restore(machine, outcome, controller.expect("ending")["t"])

    return trial


def _hang(machine: Machine, outcome: Outcome) -> None:
    if machine.rng.random() < 0.5:
        controller, _ = machine.start(end="hang", end_at=machine.rng.randrange(3, 8), lease_s=LEASE_S)
        _note_restore(machine, outcome, controller.expect("ending")["t"])
        return
    controller, _ = machine.start(lease_s=LEASE_S)
    machine.pause()
    _note_restore(machine, outcome, controller.signal(signal.SIGSTOP))
    controller.signal(signal.SIGCONT)  # it wakes up, perhaps in the middle of a write, and must not win
    why = controller.expect("frozen")["why"]
    if "watchdog" not in why:
        outcome.wrong = f"after the hang the guard said: {why}"
    if machine.restored_after(time.monotonic()) is None:
        outcome.wrong = "the controller that woke up changed the limit again"


def _watchdog_first(machine: Machine, outcome: Outcome) -> None:
    controller, ready = machine.start()
    machine.pause()
    os.kill(ready["watchdog"], signal.SIGKILL)
    _note_restore(machine, outcome, time.monotonic())
    if "watchdog" not in controller.expect("frozen")["why"]:
        outcome.wrong = "the guard did not notice that its watchdog died"


def _both_killed(machine: Machine, outcome: Outcome) -> None:
    controller, ready = machine.start()
    machine.pause()
    controller.signal(signal.SIGSTOP)  # so that it cannot notice
    os.kill(ready["watchdog"], signal.SIGKILL)
    controller.signal(signal.SIGKILL)
    controller.reap()
    if machine.limit_mw == machine.saved_mw:
        outcome.wrong = "nothing was left to restore: the trial shows nothing"
    started = time.monotonic()
    first = machine.command("restore")
    _note_restore(machine, outcome, started)
    again = machine.command("restore")
    if first.returncode or again.returncode or "nothing to restore" not in again.stdout:
        outcome.wrong = f"hw restore: {first.stdout}{first.stderr}{again.stdout}{again.stderr}"


def _two_controllers(machine: Machine, outcome: Outcome) -> None:
    controller, _ = machine.start()
    second = Controller(machine)
    machine.controllers.append(second)
    why = second.expect("refused")["why"]
    if f"PID {controller.pid}" not in why:
        outcome.wrong = f"the second controller was told: {why}"
    machine.pause()
    _note_restore(machine, outcome, controller.signal(signal.SIGTERM))


def _foreign(machine: Machine, outcome: Outcome) -> None:
    controller, _ = machine.start()
    machine.pause()
    foreign_mw = machine.rng.randrange(200_000, 700_000)
    machine.standin.set(0, "requested_mw", foreign_mw)
    _left_alone(machine, outcome, controller, foreign_mw)


def _driver_reload(machine: Machine, outcome: Outcome) -> None:
    controller, _ = machine.start()
    machine.pause()
    machine.standin.set(0, "driver_reload")
    _left_alone(machine, outcome, controller, 700_000)


def _left_alone(machine: Machine, outcome: Outcome, controller: Controller, present_mw: int) -> None:
    """The guard must stop; guard, watchdog and `hw restore` must leave the limit as somebody else has set it."""
    try:
        controller.expect("frozen", timeout_s=10.0)
    except queue.Empty:  # its write came between our look and theirs: the foreign limit is gone, and nobody noticed
        outcome.foreign_overwritten = True
        return
    controller.signal(machine.rng.choice([signal.SIGTERM, signal.SIGKILL]))
    controller.reap()
    machine.wait_until_settled()
    machine.command("restore")
    outcome.foreign_overwritten = machine.limit_mw != present_mw


def _lost(machine: Machine, outcome: Outcome) -> None:
    controller, _ = machine.start()
    machine.pause()
    machine.standin.set(0, "lost")
    controller.expect("frozen")
    back_in_time = machine.rng.random() < 0.5
    time.sleep(0.2 if back_in_time else 3 * RETRY_S + 1.0)
    machine.standin.set(0, "lost", 0)
    started = time.monotonic()
    if not back_in_time:
        controller.signal(signal.SIGKILL)
        controller.reap()
        machine.command("restore")
    _note_restore(machine, outcome, started)


def _slow_setter(machine: Machine, outcome: Outcome) -> None:
    machine.standin.set(0, "set_delay_ms", 500)
    controller, _ = machine.start()
    machine.pause(0.6)
    _note_restore(machine, outcome, controller.signal(machine.rng.choice([signal.SIGKILL, signal.SIGTERM])))


def _note_restore(machine: Machine, outcome: Outcome, since: float) -> None:
    outcome.seconds = machine.restored_after(since)
    outcome.restored = outcome.seconds is not None


CASES: dict[str, Callable[[Machine, Outcome], None]] = {
    "SIGKILL": _by_signal(signal.SIGKILL),
    "SIGTERM": _by_signal(signal.SIGTERM),
    "SIGINT": _by_signal(signal.SIGINT),
    "SIGHUP": _by_signal(signal.SIGHUP),
    "exception": _by_end("exception"),
    "os._exit": _by_end("os._exit"),
    "hang": _hang,
    "watchdog killed first": _watchdog_first,
    "both killed, hw restore": _both_killed,
    "two controllers": _two_controllers,
    "foreign writer": _foreign,
    "driver reload": _driver_reload,
    "device lost": _lost,
    "setter blocks 0.5 s": _slow_setter,
}


def run_trial(case: str, machine: Machine) -> Outcome:
    """Runs one trial from a healthy GPU to a settled one."""
    outcome = Outcome(case)
    machine.prepare()
    try:
        CASES[case](machine, outcome)
    except (RuntimeError, queue.Empty) as error:
        outcome.wrong = f"{type(error).__name__} {error}"
        if outcome.restored is None:
            outcome.restored = False
    finally:
        machine.clear()
    machine.wait_until_settled()
    if outcome.restored and machine.limit_mw != machine.saved_mw:
        outcome.restored = False
        outcome.wrong = outcome.wrong or f"the limit went from {machine.saved_mw} to {machine.limit_mw} mW at the end"
    return outcome


if __name__ == "__main__":
    control(json.loads(sys.argv[1]))
