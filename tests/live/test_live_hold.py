"""A control loop that hangs while its plant's threads live on."""

import time

import numpy as np
import pytest

from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.plant import Command
from wattgym.hw.limits import CommandRules
from wattgym.hw.simulated import SimulatedDevice
from wattgym.hw.telemetry import GuardState

pytestmark = pytest.mark.slow

LOW_W = 400.0


def wait_until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come about"
        time.sleep(0.05)


def test_the_last_command_is_held_for_a_while_and_then_the_device_is_given_back(tmp_path):
    training = {"model": {"source": "tiny"}, "data": {"max_records": 50, "holdout": 4}, "checkpoint_every": None}
    settings = LiveConfig.model_validate(
        {
            "jobs": [{"devices": ["h100-sxm:0"], "training": training, "pace": 0.4}],
            "state_dir": str(tmp_path / "devices"),
            "guard": {"lease_s": 1.0},
            "hold_s": 2.0,
        }
    )
    with LivePlant(settings, 0.5, CommandRules(interval_s=0.2), tmp_path / "jobs") as plant:
        plant.reset([np.random.default_rng(0)])
        device = SimulatedDevice.attach(tmp_path / "devices" / "SIM-h100-sxm-0.simulated")
        plant.apply(Command(np.array([[LOW_W]])))
        plant.advance()
        assert device.requested_limit_mw() == LOW_W * 1000
        # Longer than the lease, as while a learner updates: the poller's readings are the sign of life.
        time.sleep(1.5)
        assert device.requested_limit_mw() == LOW_W * 1000
        # Nobody comes back: the watchdog gives the device back, and the guard writes nothing more.
        wait_until(lambda: device.requested_limit_mw() == 700_000)
        plant.apply(Command(np.array([[LOW_W]])))
        plant.advance()
        wait_until(lambda: plant.guards[0].state is GuardState.FROZEN)
        assert device.requested_limit_mw() == 700_000
