"""Model-predictive control with what a learner may know: the nominal model, corrected by what is sensed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.baselines.program import TrackingProgram
from wattgym.agents.baselines.settings import Range
from wattgym.agents.controller import ObservedPower
from wattgym.envs.loop_settings import PredictiveSettings
from wattgym.envs.plant import FloatArray
from wattgym.envs.site_model import Split
from wattgym.envs.task import ControlTask

SEARCH = {
    "move": Range(0.002, 0.3, log=True),
    "throughput": Range(0.001, 0.3, log=True),
    "credit": Range(0.0, 1.0),
    "fill": Range(0.0, 1.0),
    "prior": Range(0.001, 0.3, log=True),
    "memory": Range(30.0, 1000.0, log=True),
    "ridge": Range(0.003, 3.0, log=True),
}
"""Where settings are searched; the horizon is not: beyond the dead time it changes little."""


class PredictiveControl:
    """Plans a few periods ahead and does the first of them.

    The plan is for the site's power as the corrected model has it (`PredictiveLoop`), solved as a quadratic program
    with a command for every period (`TrackingProgram`). Squared error, worth of throughput, price of moves, bounds and
    rates over a short horizon are the common form of power control by MPC (for servers: Wang and Chen, HPCA 2008).
    Where other knobs are enabled, a `SlowLoop` sets them, and the plan is for limits under what it has set.
    """

    def __init__(self, settings: PredictiveSettings, name: str = "MPC", split: Split = "proportional") -> None:
        """Configures the controller.

        Args:
            settings: Weights and memories.
            name: Name in tables.
            split: How power is split between jobs.
        """
        self.name = name
        self._settings = settings
        self._split: Split = split

    def reset(self, task: ControlTask) -> None:
        """Forgets what was learnt of the last site."""
        self._task, self._observed = task, ObservedPower(task)
        self._loop = task.predictive_loop(self._settings, self._split)
        self._program = TrackingProgram(task.base_w.size, self._settings.horizon)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Learns from the last period, plans, and splits the coming period's power between the jobs."""
        seen, loop = self._observed, self._loop
        position = seen.limits(observation)
        targets_w = np.concatenate([seen.target_w(observation)[:, None], seen.preview_w(observation)], axis=1)
        loop.see(position, seen.job_power_w(observation), targets_w, loop.setting)
        commands = self._program.solve(**loop.plan._asdict(), offset=np.zeros_like(loop.plan.target))
        limits = loop.limits(commands[:, 0])
        return self._task.action_for(limits, seen.feed_forward(observation), position, loop.knobs)
