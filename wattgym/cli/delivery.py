"""What commands that end in a folder of results have in common: the folder's check, the report, its provenance."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wattgym.errors import UserError

if TYPE_CHECKING:
    from wattgym.agents.policy import TrainedPolicy
    from wattgym.agents.results import EvaluationResult


def check_folder(out: Path) -> None:
    """Refuses an unusable output folder before minutes of work are spent; creates nothing."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UserError(f"{out}: cannot write results there: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{out}: cannot write results there: no permission to write in {existing}")


def deliver(result: EvaluationResult, out: Path) -> None:
    """Writes an evaluation's tables and report, and prints its summary."""
    from rich.console import Console

    from wattgym.agents.report import write_report
    from wattgym.agents.summary import print_summary

    result.save(out)
    write_report(result, out / "report.html")
    print_summary(result.summary, Console())
    typer.echo(f"tables and report: {out / 'report.html'}")


def policies_provenance(trained: dict[str, list[TrainedPolicy]]) -> dict[str, Any]:
    """Where policies come from, for a report."""
    return {
        name: [
            {
                "folder": str(policy.run.path),
                "status": policy.run.info.status,
                "seed": policy.run.info.seed,
                "algorithm": policy.config.train.algorithm,
                "trained steps": policy.steps,
                "commit": policy.run.info.git.commit if policy.run.info.git else "unknown",
                "config": policy.run.config,
            }
            for policy in group
        ]
        for name, group in trained.items()
    }
