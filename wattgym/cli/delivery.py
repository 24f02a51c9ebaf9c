"""What commands that evaluate have in common: the report, and where its policies come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from wattgym.agents.policy import TrainedPolicy
    from wattgym.agents.results import EvaluationResult


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
