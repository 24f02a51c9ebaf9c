"""`wattgym export`: a trained policy as a bundle that runs without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Training run folder.")],
    out: Annotated[Path, typer.Option(help="Folder of the bundle, new or empty.")],
    checkpoint: Annotated[str, typer.Option(help="best (on validation) or last.")] = "best",
) -> None:
    """Write a run's policy as a bundle and prove that it acts as the original does."""
    from wattgym.errors import UserError

    if checkpoint not in ("best", "last"):
        raise UserError(f"--checkpoint {checkpoint}: valid are best and last")

    from wattgym.agents.export import export_bundle

    manifest = export_bundle(run, out, "best" if checkpoint == "best" else "last").manifest
    training, parity = manifest.training, manifest.parity
    typer.echo(
        f"{out}: {training.algorithm}, {training.checkpoint} checkpoint, {training.steps:,} steps; largest difference "
        f"from the original {parity.largest_difference:.2g} over {parity.observations:,} observations "
        f"(the original's own rounding: {parity.rounding:.2g})"
    )
