"""A site's power controller, in a process of its own: `python -m wattgym.federated.site.power`, started by the trainer.

Ticks of seconds, during rounds and between them. What the site may draw is the budget of the round, or what its trace
leaves free. Without a shaping controller the devices' limit follows it. With one, the controller follows its regulation
signal below it: base power plus offered capacity never exceed what is available. With less than the lowest limit draws,
the training is paused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wattgym.agents.fallback import FallbackController
from wattgym.config import load_config
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.live.config import LiveJob
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.plant import Command, PlantSpec
from wattgym.envs.shaping import PowerShaping
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.federated.power import AvailablePower
from wattgym.federated.site.client import JOB_FOLDER
from wattgym.federated.site.holder import PowerReading, as_line
from wattgym.federated.site.shaping import ShapingPlan, live_config
from wattgym.federated.site.ticks import POWER_TICKS, PowerTicks
from wattgym.live.channel import Knobs
from wattgym.live.handle import JobHandle

LEAST_CAPACITY = 0.02
"""Share of the feasible band below which there is nothing to offer: the devices keep the budget."""

_BUDGET_STEP = 0.01


class TrainerHandle(JobHandle):
    """The trainer, whose speed one thread sets and whose pauses another."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._lock = threading.Lock()

    def set_knobs(self, **knobs: Any) -> int:
        """See `JobHandle.set_knobs`."""
        with self._lock:
            return super().set_knobs(**knobs)


class SitePlant(LivePlant):
    """The live plant around a trainer that runs already.

    Attributes:
        handle: The trainer; None before the first reset.
    """

    handle: JobHandle | None = None

    def _open_job(self, job: LiveJob, index: int, environment: dict[str, str]) -> JobHandle:
        self.handle = TrainerHandle.attach(self._folder / JOB_FOLDER)
        return self.handle

    def close(self) -> None:
        """See `LivePlant.close`; the training is not held any more."""
        if self._coupling is not None:
            self._coupling.stop()
            self._coupling = None
        if self.handle is not None and self.handle.alive:
            self.handle.set_knobs(**Knobs().model_dump(include={"duty", "speed", "paused"}))
        self.handle = None
        super().close()


class Budget:
    """What the site may draw, as the trainer and the trace tell it; read by one thread, written by another."""

    def __init__(self, available: AvailablePower, name: str, begun_s: float) -> None:
        self._available = available
        self._name = name
        self._begun_s = begun_s
        self.assigned_w: float | None = None

    def now_w(self) -> float:
        """Power that may be drawn now, W."""
        assigned = self.assigned_w
        free = self._available.at(self._name, time.monotonic() - self._begun_s)
        return free if assigned is None else assigned


class SitePower:
    """Holds the site's power until it is interrupted."""

    def __init__(self, config: FederationConfig, name: str, folder: Path, begun_s: float) -> None:
        """Prepares.

        Raises:
            UserError: A trace, the controller or its signal cannot be used.
        """
        site = config.site(name)
        if site.shaping is None:
            raise UserError(f"site '{name}' has no devices to hold its power with")
        self._plan, self._shaping = ShapingPlan(site), site.shaping
        self.budget = Budget(AvailablePower(config), name, begun_s)
        self._begun_s = begun_s
        self.plant = SitePlant(
            live_config(config, name, folder),
            site.shaping.period_s,
            self._plan.rules,
            folder,
            site.shaping.controller or "budget",
            self._plan.knobs,
        )
        self._target_w = math.nan
        self._error_ws = self._shaped_s = 0.0
        self._ticks = PowerTicks(folder / POWER_TICKS)

    def run(self, begun: Callable[[], None]) -> None:
        """Controls until the plant is interrupted.

        Args:
            begun: Called once, when the devices are in control.

        Raises:
            KeyboardInterrupt: The plant was interrupted.
            UserError: A device or the trainer is gone, or the signal cannot be used.
        """
        self.plant.reset([np.random.default_rng(0)])
        begun()
        while True:
            spec, budget_w = self.plant.spec, self.budget.now_w()
            offer = self._offer(spec, budget_w)
            if offer is None:
                self._hold(spec, budget_w)
            else:
                self._shape(offer, budget_w)

    def reading(self) -> PowerReading:
        """The devices now; energy between meter readings is made up from the last power."""
        now_s = time.monotonic()
        seen = self.plant.sample()[0]
        energy_j = seen.energy_j + seen.sensor_w * min(max(now_s - seen.metered_s, 0.0), 2.0)
        return PowerReading(
            time_s=now_s,
            energy_j=energy_j,
            power_w=seen.sensor_w,
            limit_w=seen.limit_w,
            available_w=self.budget.now_w(),
            target_w=self._target_w,
            error_ws=self._error_ws,
            shaped_s=self._shaped_s,
            missed=self.plant.ticks.missed,
        )

    def _offer(self, spec: PlantSpec, budget_w: float) -> tuple[float, float] | None:
        """Base and capacity to offer, as positions in the feasible band; None where no controller can act."""
        if self._shaping.controller is None:
            return None
        floor_w, full_w = float(spec.floor_w[0]), float(spec.full_w[0])
        top = min(max((budget_w - floor_w) / (full_w - floor_w), 0.0), 1.0)
        capacity = min(self._shaping.capacity, top / 2.0)
        return (top - capacity, capacity) if capacity >= LEAST_CAPACITY else None

    def _hold(self, spec: PlantSpec, budget_w: float) -> None:
        """One period in which the limit follows the budget."""
        self._target_w = math.nan
        assert self.plant.handle is not None
        floor_w = float(spec.floor_w[0])
        paused = budget_w < floor_w
        if paused != self.plant.handle.knobs.paused:
            self.plant.handle.set_knobs(paused=paused)
        # The limit at which the job, computing, draws the budget.
        position = np.interp(budget_w, spec.power_table_w[0, 0] + float(spec.host_w[0]), spec.limit_grid)
        low, high = spec.min_limit_w[0], spec.max_limit_w[0]
        self.plant.apply(Command(limit_w=(low + position * (high - low))[None]))
        telemetry = self.plant.advance()
        power_w = float(telemetry.meter_w.sum() + telemetry.host_w.sum())
        self._ticks.add(power_w, math.nan, budget_w, float(telemetry.limit_w[0, 0]))

    def _shape(self, offer: tuple[float, float], budget_w: float) -> None:
        """One episode of the shaping controller, until the budget has moved or the signal has ended."""
        env = self._environment(offer)
        shaping = PowerShaping(env, self.plant, 1)
        controller = FallbackController(self._plan.controller())
        assert self.plant.handle is not None
        if self.plant.handle.knobs.paused:
            self.plant.handle.set_knobs(paused=False)
        observation = shaping.reset([0])
        assert shaping.task is not None
        controller.reset(shaping.task)
        full_w, done = float(self.plant.spec.full_w[0]), False
        while not done and abs(self.budget.now_w() - budget_w) <= _BUDGET_STEP * full_w:
            outcome = shaping.step(controller.act(observation))
            observation, done = outcome.observation, outcome.truncated
            self._target_w = float(outcome.target_w[0])
            power_w = float(outcome.power_w[0])
            self._error_ws += abs(power_w - self._target_w) * env.period_s
            self._shaped_s += env.period_s
            self._ticks.add(power_w, self._target_w, self.budget.now_w(), self.plant.sample()[0].limit_w)

    def _environment(self, offer: tuple[float, float]) -> PowerShapingConfig:
        """The controller's environment from now on; the signal goes on as the wall clock does."""
        shaping = self._shaping
        start_s = shaping.signal_start_s + time.monotonic() - self._begun_s
        start_s -= start_s % shaping.period_s
        try:
            return self._plan.environment(offer, start_s)
        except UserError:
            # The signal has come to its end: it begins again, and the next episode counts from there.
            self._begun_s = time.monotonic()
            return self._plan.environment(offer, shaping.signal_start_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Holds a site's power until its trainer ends.

    Returns:
        0 when the trainer ended or asked for it, 2 after one line on stderr.
    """
    parser = argparse.ArgumentParser(prog="python -m wattgym.federated.site.power")
    parser.add_argument("--federation", type=Path, required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--begun", type=float, required=True, help="monotonic time at which the site began, s")
    options = parser.parse_args(arguments)
    power = None
    try:
        config = load_config(FederationConfig, options.federation)
        power = SitePower(config, options.site, options.folder, options.begun)
        signal.signal(signal.SIGTERM, lambda number, frame: power.plant.interrupt("SIGTERM"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_listen, args=(power,), name="wattgym-orders", daemon=True).start()
        power.run(lambda: _say(power, 0))
    except KeyboardInterrupt:
        pass
    except UserError as error:
        print(f"wattgym site power: error: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        if power is not None:
            power.plant.close()
    return 0


def _listen(power: SitePower) -> None:
    """Takes orders until the trainer is gone, and answers each with a reading."""
    for line in sys.stdin:
        try:
            order = json.loads(line)
            power.budget.assigned_w = None if order["budget_w"] is None else float(order["budget_w"])
            answer = int(order["ask"])
        except (ValueError, KeyError, TypeError):
            continue
        _say(power, answer)
    power.plant.interrupt("the trainer has ended")


def _say(power: SitePower, answer: int) -> None:
    try:
        values = json.loads(as_line(power.reading()))
    except (UserError, IndexError, RuntimeError):
        return  # not in control yet, or not any more
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(values | {"answer": answer}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
