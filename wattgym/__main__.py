"""`python -m wattgym` is the `wattgym` command."""

from wattgym.cli import main

main()
