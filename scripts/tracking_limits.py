"""Where the tracking error of feed-forward + PI comes from, and what of it a better controller could win.

    python scripts/tracking_limits.py --scenarios 24

For scenarios of the validation split it prints the mean absolute error per capacity, the part of it that no limit could
avoid (the target lies beyond what computing jobs at their highest, or lowest, limit and the others' present draw add up
to), and how the error changes when one thing at a time is taken away: delays and lost commands; also the spread of
plants, so that the nominal model is exact; and, on the plant as it is, when the loop corrects an identified model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import typer

from wattgym.agents.baselines import load_tuned
from wattgym.agents.validation import held_out
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.plant import FloatArray, Phase
from wattgym.envs.shaping import PowerShaping

AS_IS: dict[str, Any] = {}
PROMPT = {"control_delay_periods": (0, 0), "command_loss": 0.0}
NOMINAL = {**PROMPT, "randomise": 0.0, "power_spread": 0.0, "sensor": "instant"}
IDENTIFIED = {"proportional": 0.0, "integral": 0.0, "rate": 0.3, "identify": 0.05}


def main(families: str = "rega,droop", scenarios: int = 24, jobs: int = 4, episode_s: float = 2400.0) -> None:
    """Prints one row a family and case.

    Args:
        families: Signal families, separated by commas.
        scenarios: Scenarios each.
        jobs: Jobs of the site.
        episode_s: Length of a scenario, seconds.
    """
    tuned = dict(load_tuned().gains["feed-forward + PI"])
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("feed-forward + PI", AS_IS, tuned),
        ("no delay, no lost command", PROMPT, tuned),
        ("and an exact nominal model", NOMINAL, tuned),
        ("identified feed-forward", AS_IS, IDENTIFIED),
    )
    print("| family | case | MAE / R | of it unavoidable | all computing: share of time | MAE / R then |")
    print("|---|---|---|---|---|---|")
    for family in families.split(","):
        for label, site, gains in cases:
            action = {"kind": "residual_pi", "gains": gains}
            env = PowerShapingConfig.model_validate({"site": {"jobs": jobs, **site}, "action": action})
            steps = list(_run(held_out(env, family, "validation", episode_s), range(500, 500 + scenarios)))
            error, beyond, whole = (np.stack(part) for part in zip(*steps, strict=True))
            print(
                f"| {family} | {label} | {error.mean():.3f} | {beyond.mean():.3f} | {whole.mean():.0%} "
                f"| {error[whole].mean():.3f} |"
            )


def _run(config: PowerShapingConfig, seeds: range) -> Iterator[tuple[FloatArray, FloatArray, FloatArray]]:
    """Error, its unavoidable part (both per capacity) and whether all jobs compute, each `(B,)`, period by period."""
    shaping = PowerShaping(config, Emulator(config), config.site.jobs)
    shaping.reset(list(seeds))
    task = shaping.task
    assert task is not None
    tables = task.spec.power_table_w
    computing = np.ones(tables.shape[:2], dtype=bool)
    draw = tables[:, :, -1]
    still = np.zeros(tables.shape[:2])
    for _ in range(config.ticks):
        high, low = (np.where(computing, tables[:, :, end], draw).sum(axis=1) + task.spec.host_w for end in (-1, 0))
        outcome = shaping.step(still)
        beyond = np.maximum(outcome.target_w - high, 0.0) + np.maximum(low - outcome.target_w, 0.0)
        yield (
            np.abs(outcome.power_w - outcome.target_w) / task.capacity_w,
            beyond / task.capacity_w,
            computing.all(axis=1),
        )
        computing = outcome.telemetry.phase == Phase.COMPUTE
        draw = outcome.telemetry.sensor_w


if __name__ == "__main__":
    typer.run(main)
