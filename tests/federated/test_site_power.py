"""A site that holds its power: budget, shaping controller, and what happens when either process dies."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.federated.adapters import digest, initial
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.messages import Assignment, Fate, TrainRequest
from wattgym.federated.processes import ProcessEngine
from wattgym.federated.site.shaping import DEVICES
from wattgym.hw.open import open_devices

pytestmark = pytest.mark.slow


def wait_until(done, timeout_s=240.0):
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def controllers(folder):
    """Power controllers of a site."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"wattgym.federated.site.power" in words and str(folder).encode() in words:
            found.append(int(entry.name))
    return found


def limit_w(folder, preset):
    device = open_devices((preset,), "simulated", state_dir=folder / DEVICES)[0]
    try:
        return device.enforced_limit_mw() / 1000.0
    finally:
        device.close()


def test_power_is_held_and_given_back(federation, tmp_path):
    common = {"region": "r", "capacity_w": 450.0}
    shaping = {"period_s": 0.5, "pace": 0.5}
    sites = [
        {"name": "held", **common, "shaping": {**shaping, "devices": ["h100-sxm:0"]}},
        {
            "name": "shaped",
            **common,
            "shaping": {**shaping, "devices": ["h100-sxm:1"], "controller": "feed-forward + PI", "signal": "regd"},
        },
    ]
    config = federation(sites=sites)
    folders = {name: tmp_path / name for name in config.names}

    def ask(number, power_w=None, steps=30):
        work = Assignment(local_steps=steps, power_w=power_w)
        requests = {name: TrainRequest("power", number, adapter, work) for name in config.names}
        return {name: answer for name, (answer, _) in engine.exchange(requests, 120.0).items()}

    with ProcessEngine(config, tmp_path) as engine:
        wait_until(lambda: len(engine.members()) == 2)
        adapter = initial(engine.members()["held"].shapes, config.seed)
        wait_until(lambda: limit_w(folders["held"], "h100-sxm:0") < 600.0)
        # Long enough that the controller's way to the target counts for little, on a busy machine too.
        replies = ask(1, steps=200)
        for reply in replies.values():
            metrics = reply.metrics
            assert np.isfinite(metrics.energy_j), metrics
            assert metrics.energy_j == pytest.approx(metrics.power_w * metrics.train_s, rel=0.3)
            assert metrics.available_w == 450.0
            assert metrics.power_w < 1.1 * 450.0
        assert np.isnan(replies["held"].metrics.target_error_w)
        # What holds the power changes nothing of what is learned.
        with InProcessEngine(config) as plain:
            requests = {"held": TrainRequest("power", 1, adapter, Assignment(local_steps=200))}
            assert digest(plain.exchange(requests, 120.0)["held"][0].adapter) == digest(replies["held"].adapter)

        # A budget below what the lowest limit draws pauses the site: it is late; the next round goes on.
        requests = {"held": TrainRequest("power", 2, adapter, Assignment(local_steps=1000, power_w=10.0))}
        assert engine.exchange(requests, 4.0)["held"][0].fate is Fate.LATE
        replies = ask(3, steps=200)  # No fewer: some whole control periods have to lie within.
        assert np.isfinite(replies["shaped"].metrics.target_error_w)

        # The controller of one dies: its device is given back, it is replaced, and the round counts.
        for pid in controllers(folders["held"]):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: limit_w(folders["held"], "h100-sxm:0") == 700.0)
        reply = ask(4)["held"]
        assert reply.metrics.steps == 30
        wait_until(lambda: controllers(folders["held"]))

        # The trainer of the other dies: its controller ends and gives its device back.
        old = controllers(folders["shaped"])
        os.kill(engine.pids["shaped"], signal.SIGKILL)
        wait_until(lambda: not set(old) & set(controllers(folders["shaped"])))
        assert limit_w(folders["shaped"], "h100-sxm:1") == 700.0
    assert controllers(folders["held"]) == controllers(folders["shaped"]) == []
    assert limit_w(folders["held"], "h100-sxm:0") == 700.0
