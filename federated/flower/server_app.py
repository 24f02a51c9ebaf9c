"""Flower's server app: its loop is the site-selection loop, one round an environment step.

Run configuration (`flwr run --run-config`): `federation`, `policy`, `rounds`, `seed`, `out` and `resume` are those of
`wattgym federate`; `join-s` is how long sites may take to join. Relative paths are relative to the folder that the
SuperLink was started in; give absolute ones.
"""

from __future__ import annotations

import logging
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from wattgym.federated.flower.engine import TIMING_FILE, FlowerEngine

app = ServerApp()
"""What `flwr run` loads at the SuperLink."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs the federation to its end."""
    run_on_grid(grid, context)


def run_on_grid(grid: Grid, context: Context) -> None:
    """Plays the rounds that a run configuration asks for over a grid.

    Args:
        grid: The grid.
        context: Flower's context; its run configuration says what to do.

    Raises:
        UserError: The configuration is wrong, or too few sites joined in time.
    """
    from wattgym.federated.runner import run

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = context.run_config
    out = Path(str(config["out"]))
    run(
        FlowerEngine(grid, timing=out / TIMING_FILE),
        str(config["federation"]),
        str(config["policy"]),
        int(config["rounds"]),
        out,
        seed=int(config["seed"]),
        resume=bool(config["resume"]),
        join_s=float(config["join-s"]),
    )
