"""The option `--knobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wattgym.envs.knobs import KnobName


def parse_knobs(text: str) -> tuple[KnobName, ...]:
    """Knobs beside the power limit from a list with commas, in the order of actions.

    Raises:
        UserError: A name is unknown, or there is none beside the limit.
    """
    from wattgym.envs.knobs import KNOBS
    from wattgym.errors import UserError

    asked = [part.strip() for part in text.split(",") if part.strip()]
    for name in asked:
        if name not in KNOBS:
            raise UserError(f"--knobs: unknown knob '{name}'; known: {', '.join(KNOBS[1:])}")
    beside = tuple(name for name in KNOBS[1:] if name in asked)
    if not beside:
        raise UserError(f"--knobs: names no knob beside the power limit; known: {', '.join(KNOBS[1:])}")
    return beside
