"""Whether power control costs accuracy: losses under moving knobs, and held-out loss with unequal local steps.

    python benchmarks/accuracy.py [--seeds 5] [--steps 120]

Everything is trained for real, on a CPU: a tiny model by two ranks. Seeds change the model's start, the adapter's start
and the order of the data. A figure is a mean over the seeds, differences are paired by seed, intervals are 95 % by
Student's t. Run-to-run noise is the standard deviation of the synchronous runs over the seeds.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from wattgym.live.channel import Channel, JobStatus, Knobs
from wattgym.live.config import JobConfig
from wattgym.live.folder import CHANNEL_FILE, prepare_folder
from wattgym.live.pacing import StopFlag

TRAINING = {
    "model": {"source": "tiny"},
    "data": {"source": "gsm8k", "max_tokens": 192, "max_records": 1500, "holdout": 64},
    "lora": {"targets": "all-linear"},
    "optimiser": {"learning_rate": 1e-2, "warmup_steps": 10},
    "samples_per_update": 16,
    "micro_batch": 8,
    "checkpoint_every": None,
    "device": "cpu",
}
UNEQUAL = {"local steps 4 and 2": (4, 2), "local steps 4 and 1": (4, 1)}

Schedule = Callable[[int], Knobs]
FloatArray = NDArray[np.float64]


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="seeds, 2 at least")
    parser.add_argument("--steps", type=int, default=120, help="optimiser steps of each run")
    options = parser.parse_args()
    if options.seeds < 2 or options.steps < 1:
        parser.error("an interval needs 2 seeds, a run 1 step")
    with tempfile.TemporaryDirectory() as name:
        print_moving_knobs(Path(name), options.steps)
        print_unequal_steps(Path(name), range(options.seeds), options.steps)


def print_moving_knobs(folder: Path, steps: int) -> None:
    """Losses of one seed while knobs move at random before every step, beside those of the uncontrolled run."""
    draw = random.Random(0)
    moving: Mapping[str, Schedule] = {
        "duty and speed": lambda step: Knobs(duty=draw.uniform(0.3, 1.0), speed=draw.uniform(0.5, 1.0)),
        "micro-batch": lambda step: Knobs(micro_batch=draw.choice([1, 2, 4, 8, 16])),
        "active ranks": lambda step: Knobs(active_ranks=draw.choice([1, 2])),
        "all of these": lambda step: Knobs(
            duty=draw.uniform(0.3, 1.0),
            speed=draw.uniform(0.5, 1.0),
            micro_batch=draw.choice([1, 2, 4, 8, 16]),
            active_ranks=draw.choice([1, 2]),
        ),
    }
    steps = min(steps, 40)
    losses, _ = run(folder / "uncontrolled", 0, steps)
    print(f"Losses of {steps} steps beside the uncontrolled run, knobs moving before every step")
    print(f"  {'moving':<16} {'equal losses':>14} {'largest relative difference':>29}")
    for name, schedule in moving.items():
        found, _ = run(folder / name.replace(" ", "-"), 0, steps, schedule)
        difference = np.abs(found - losses) / losses
        print(f"  {name:<16} {f'{(found == losses).sum()} of {steps}':>14} {difference.max():>29.1e}")


def print_unequal_steps(folder: Path, seeds: range, steps: int) -> None:
    """Held-out loss after the last step with unequal local steps, beside synchronous training."""
    ways: Mapping[str, int | tuple[int, ...]] = {"synchronous": 1, **UNEQUAL}
    final: dict[str, FloatArray] = {}
    for way, local_steps in ways.items():
        knobs = Knobs(local_steps=local_steps)
        folders = [(folder / f"{way.replace(' ', '-')}-{seed}", seed) for seed in seeds]
        final[way] = np.array([run(path, seed, steps, lambda step, knobs=knobs: knobs)[1] for path, seed in folders])
    reference = final["synchronous"]
    noise = reference.std(ddof=1)
    print(f"\nHeld-out loss after {steps} steps, nats a token, {len(seeds)} seeds; run-to-run noise {noise:.4f}")
    print(f"  {'way':<22} {'loss':>8} {'paired difference, 95 % interval':>36} {'within noise':>13}")
    print(f"  {'synchronous':<22} {reference.mean():>8.4f}")
    for name in UNEQUAL:
        low, high = paired_interval(final[name] - reference)
        difference = f"{(final[name] - reference).mean():+.4f} [{low:+.4f}, {high:+.4f}]"
        within = "yes" if max(-low, high) <= noise else "no"
        print(f"  {name:<22} {final[name].mean():>8.4f} {difference:>36} {within:>13}")


def paired_interval(differences: FloatArray) -> tuple[float, float]:
    """95 % interval of the mean of paired differences, by Student's t."""
    n = differences.size
    half = stats.t.ppf(0.975, n - 1) * differences.std(ddof=1) / np.sqrt(n)
    return float(differences.mean() - half), float(differences.mean() + half)


def run(folder: Path, seed: int, steps: int, schedule: Schedule = lambda step: Knobs()) -> tuple[FloatArray, float]:
    """Trains by two ranks; returns the loss of each step and the held-out loss after the last one.

    Args:
        folder: Run folder.
        seed: Seed.
        steps: Steps.
        schedule: Knobs before the step after so many.
    """
    from wattgym.live.job import run_job

    config = JobConfig.model_validate(
        {**TRAINING, "seed": seed, "ranks": 2, "max_steps": steps, "evaluate_every": steps}
    )
    job, lock = prepare_folder(folder, config, resume=False)
    channel = Channel.create(folder / CHANNEL_FILE, schedule(0), JobStatus())

    def on_step(status: JobStatus) -> None:
        channel.write_knobs(schedule(status.steps))

    try:
        status = run_job(job, config, channel, StopFlag(), on_step)
    finally:
        os.close(lock)
        channel.close()
    with (folder / "steps.csv").open(newline="") as text:
        losses = np.array([float(row["loss"]) for row in csv.DictReader(text)])
    assert status.eval_step == steps
    assert status.eval_loss is not None
    return losses, status.eval_loss


if __name__ == "__main__":
    main()
