"""The `wattgym` command. Heavy libraries load inside the sub-commands that need them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from wattgym.cli import deploy, evaluate, export, federate, federated, gap, hw, profile, score, traces, train, tune
from wattgym.errors import UserError

app = typer.Typer(
    name="wattgym",
    help="Train, evaluate and deploy controllers for the electric power of LLM training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(train.train)
app.command()(tune.tune)
app.command()(evaluate.evaluate)
app.command("tune-baselines")(evaluate.tune_baselines)
app.command()(score.score)
app.command()(export.export)
app.command()(deploy.deploy)
app.command()(gap.gap)
app.command()(profile.profile)
app.command()(federate.federate)
app.add_typer(federated.app)
app.add_typer(traces.app)
app.add_typer(hw.app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a user's error is one line on stderr and exit code 2.

    Args:
        arguments: Arguments after the program's name; those of the process if None.
    """
    try:
        app(args=list(arguments) if arguments is not None else None)
    except UserError as error:
        print(f"wattgym: error: {error}", file=sys.stderr)
        sys.exit(2)
