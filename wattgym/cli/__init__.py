"""The `wattgym` command. Heavy libraries load inside the sub-commands that need them."""

from __future__ import annotations

import sys

import typer

from wattgym.cli import hw
from wattgym.errors import UserError

app = typer.Typer(
    name="wattgym",
    help="Train, evaluate and deploy controllers for the electric power of LLM training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(hw.app)


def main() -> None:
    """Runs the command line; a user's error is one line on stderr and exit code 2."""
    try:
        app()
    except UserError as error:
        print(f"wattgym: error: {error}", file=sys.stderr)
        sys.exit(2)
