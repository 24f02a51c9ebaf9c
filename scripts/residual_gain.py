"""What a policy adds to the loop that it is added to or advises, on boards it was trained on and on boards it was not.

    python scripts/residual_gain.py runs/residual_identified-seed0

Both meet identical scenarios of the training and of the validation split. It prints the paired difference of the mean
reward with its 95 % bootstrap interval, for the run's last policy (the best on validation was chosen there).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import typer
from numpy.typing import NDArray

from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena
from wattgym.agents.validation import held_out
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError
from wattgym.metrics.statistics import paired_difference


class Still:
    """Adds nothing."""

    name = "still"

    def reset(self, task: ControlTask) -> None:
        """Remembers how many numbers an action has."""
        self._shape = (task.base_w.size, task.layout.actions)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Nothing is added."""
        return np.zeros(self._shape)


def main(run: Path, families: str = "rega,droop", scenarios: int = 64, episode_s: float = 1200.0) -> None:
    """Prints one row a family and split.

    Args:
        run: Training run whose actions are residuals or advice.
        families: Signal families, separated by commas.
        scenarios: Scenarios each.
        episode_s: Length of a scenario, seconds.
    """
    policy = load_policy(run, "last")
    env = policy.config.env if hasattr(policy.config, "env") else None
    if not isinstance(env, PowerShapingConfig) or not env.action.kind.startswith(("residual", "advice")):
        raise UserError(f"{run}: its actions are not added to anything")
    seeds = list(range(900, 900 + scenarios))
    print("| family | boards | without learning | difference |")
    print("|---|---|---|---|")
    for family in families.split(","):
        for split in ("train", "validation"):
            arena = Arena(held_out(env, family, split, episode_s))
            without = arena.run(Still(), seeds).reward.mean(axis=1)
            found = paired_difference(arena.run(policy.controller, seeds).reward.mean(axis=1), without)
            print(
                f"| {family} | {split} | {without.mean():.4f} "
                f"| {found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}] |"
            )


if __name__ == "__main__":
    typer.run(main)
