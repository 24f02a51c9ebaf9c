"""How fast, how punctual and how light live control is; prints numbers and ratios within one run.

    python benchmarks/live.py [--bundle FOLDER] [--rounds 3] [--seconds 30]

Without a bundle, a policy of the usual size is trained for a moment and exported: its answers are worthless, its
latency is that of a trained one. Everything live runs on one simulated device with a tiny model.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

TRAINING = {
    "model": {"source": "tiny"},
    "data": {"max_records": 200},
    "samples_per_update": 4,
    "micro_batch": 1,
    "checkpoint_every": None,
}
MEGABYTE = 1e6


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="policy bundle")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of training with and without control")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = options.bundle or make_bundle(folder)
        print_latency(bundle)
        print_memory(bundle, folder)
        print_throughput(folder, options.rounds, options.seconds)


def make_bundle(folder: Path) -> Path:
    """A bundle with networks of the default size, from a training of a moment; in a process of its own."""
    code = (
        "import sys; from wattgym.agents.config import TrainingConfig; from wattgym.agents.training import train; "
        "from wattgym.agents.export import export_bundle; from pathlib import Path; "
        "config = TrainingConfig.model_validate({'train': {'total_steps': 1024, 'num_envs': 8, 'hyperparameters': "
        "{'n_steps': 16}}, 'validation': {'every_steps': 10**9}}); "
        "train(config, Path(sys.argv[1]) / 'run', progress=False); "
        "export_bundle(Path(sys.argv[1]) / 'run', Path(sys.argv[1]) / 'bundle', 'last')"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / "bundle"


def print_latency(bundle: Path) -> None:
    """Decision latency of a bundle, alone and inside its fallback with the thread that guards the loop."""
    from wattgym.agents.bundle import BundleController, load_bundle
    from wattgym.agents.fallback import FallbackController
    from wattgym.config import parse_config
    from wattgym.envs.config import PowerShapingConfig
    from wattgym.envs.emulator.emulator import Emulator
    from wattgym.envs.shaping import PowerShaping

    loaded = load_bundle(bundle)
    config = parse_config(PowerShapingConfig, loaded.manifest.training.config["env"], str(bundle))
    shaping = PowerShaping(config, Emulator(config), config.site.jobs)
    observation = shaping.reset([0])
    assert shaping.task is not None
    for name, controller in (
        ("bundle alone", BundleController(loaded)),
        ("bundle with fallback", FallbackController(BundleController(loaded))),
    ):
        controller.reset(shaping.task)
        for _ in range(200):
            controller.act(observation)
        times_ms = []
        for _ in range(5000):
            begun_s = time.perf_counter()
            controller.act(observation)
            times_ms.append(1000 * (time.perf_counter() - begun_s))
        p50, p99 = np.percentile(times_ms, [50, 99])
        print(f"decision latency, {name:<21} p50 {p50:.3f} ms   p99 {p99:.3f} ms   (aim: p99 below 1 ms)")


def print_memory(bundle: Path, folder: Path) -> None:
    """Largest resident memory of `wattgym deploy` until its first periods are over; jobs are processes of their own."""
    out = folder / "deployed"
    command = [sys.executable, "-m", "wattgym", "deploy", str(bundle), "--job", "tiny", "--duration", "10m"]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    periods = 0
    for line in process.stdout:
        periods += " | target " in line
        if periods == 5:
            break
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    process.send_signal(signal.SIGTERM)
    process.communicate()
    size_mb = int(fields["VmHWM"].split()[0]) * 1024 / MEGABYTE
    print(f"memory of the controller         {size_mb:.0f} MB at most   (aim: below 250 MB)")


def print_throughput(folder: Path, rounds: int, seconds: float) -> None:
    """Training with a controller whose cap never binds over the same job alone, by turns; and the ticks' lateness."""
    from wattgym.envs.live.config import LiveConfig
    from wattgym.envs.live.plant import LivePlant
    from wattgym.envs.plant import Command
    from wattgym.hw.limits import CommandRules

    live = LiveConfig.model_validate({"jobs": [{"devices": ["h100-sxm:0"], "training": TRAINING, "pace": 1.0}]})
    alone: list[float] = []
    controlled: list[float] = []
    lateness_ms: list[float] = []
    used_s = spent_s = 0.0
    for turn in range(rounds):
        alone.append(free_speed(folder / f"alone{turn}", seconds))
        with LivePlant(live, 2.0, CommandRules(), folder / f"controlled{turn}") as plant:
            plant.reset([np.random.default_rng(0)])
            limit = plant.spec.max_limit_w
            (before,), begun_s, used_before_s = plant.job_status, time.monotonic(), time.process_time()
            for _ in range(max(round(seconds / 2.0), 1)):
                plant.apply(Command(limit))
                plant.advance()
            (after,) = plant.job_status
            elapsed_s = time.monotonic() - begun_s
            controlled.append((after.samples - before.samples) / elapsed_s)
            used_s, spent_s = used_s + time.process_time() - used_before_s, spent_s + elapsed_s
            lateness_ms += [1000 * late for late in plant.ticks.lateness_s]
        print(f"  round {turn + 1}: alone {alone[-1]:.1f} samples/s, controlled {controlled[-1]:.1f} samples/s")
    print(f"tick lateness                    p50 {np.percentile(lateness_ms, 50):.2f} ms   "
          f"p99 {np.percentile(lateness_ms, 99):.2f} ms")  # fmt: skip
    print(f"processor time of control        {100 * used_s / spent_s:.1f} % of one core")
    ratio = np.sum(controlled) / np.sum(alone)
    print(f"throughput with the controller   {ratio:.3f} of that without   (aim: at least 0.98)")


def free_speed(folder: Path, seconds: float) -> float:
    """Samples per second of the job without anybody who watches it."""
    from wattgym.config import parse_config
    from wattgym.live.config import JobConfig
    from wattgym.live.handle import JobHandle

    with JobHandle.start(parse_config(JobConfig, TRAINING, "benchmark"), folder) as job:
        job.wait_ready()
        while (before := job.status()).steps < 3:
            time.sleep(0.05)
        begun_s = time.monotonic()
        time.sleep(seconds)
        after: Any = job.check()
        return float((after.samples - before.samples) / (time.monotonic() - begun_s))


if __name__ == "__main__":
    main()
