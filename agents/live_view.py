"""What a live run looks like while it runs: a table in a terminal, one line a period elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from wattgym.agents.deployment import Tick

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table


@contextmanager
def live_view(title: str, ticks: int, output: TextIO = sys.stdout) -> Iterator[Callable[[Tick], object]]:
    """Shows ticks as they come.

    Args:
        title: Controller and plant.
        ticks: Ticks of the whole run.
        output: Where to; whether it is a terminal decides the form.

    Yields:
        To be called with each tick.
    """
    if not output.isatty():
        yield lambda tick: print(tick_line(tick, ticks), file=output, flush=True)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=output), auto_refresh=False) as live:
        yield lambda tick: live.update(tick_table(title, tick, ticks), refresh=True)


def tick_line(tick: Tick, ticks: int) -> str:
    """One period in one line."""
    parts = [
        f"{tick.tick}/{ticks}",
        f"target {tick.target_w:.0f} W",
        f"power {tick.power_w:.0f} W",
        _score(tick),
        f"{tick.tokens_per_s:.0f} tokens/s",
        f"throughput {tick.throughput:.2f}",
        f"loss {_loss(tick)}",
        f"guard {tick.guard_state or 'none'}, {tick.guard_events} events",
        f"fallbacks {tick.fallbacks}{f' ({tick.fallback})' if tick.fallback else ''}",
        f"late {tick.lateness_ms:.1f} ms, {tick.missed} missed",
    ]
    return " | ".join(parts)


def tick_table(title: str, tick: Tick, ticks: int) -> Table:
    """One period as a table."""
    from rich.table import Table

    table = Table(title=title, show_header=False)
    rows = [
        ("tick", f"{tick.tick} of {ticks}, {tick.t_s:.0f} s"),
        ("target", f"{tick.target_w:.0f} W (signal {tick.signal:+.2f})"),
        ("power", f"{tick.power_w:.0f} W ({tick.power_w - tick.target_w:+.0f} W)"),
        ("score so far", _score(tick)),
        ("training", f"{tick.tokens_per_s:.0f} tokens/s, {tick.throughput:.2f} of full speed"),
        ("guards", f"{tick.guard_state or 'none'}, {tick.guard_events} events, {tick.failed_commands} failed commands"),
        ("fallbacks", f"{tick.fallbacks}{f', now: {tick.fallback}' if tick.fallback else ''}"),
        ("loop", f"decided in {tick.decision_ms:.1f} ms, {tick.lateness_ms:.1f} ms late, {tick.missed} missed"),
    ]
    for j, job in enumerate(tick.jobs):
        loss = "none yet" if job.loss_mean is None else f"{job.loss_mean:.3f}"
        text = f"{job.phase}, limit {job.limit_w:.0f} W, {job.sensor_w:.0f} W, step {job.steps}, loss {loss}"
        rows.append((f"job {j}", f"{text}, {job.warning}" if job.warning else text))
    for row in rows:
        table.add_row(*row)
    return table


def _score(tick: Tick) -> str:
    composite = "" if tick.pjm_composite is None else f"PJM {tick.pjm_composite:.3f}, "
    return f"{composite}nRMSE {tick.nrmse:.3f}"


def _loss(tick: Tick) -> str:
    losses = [job.loss_mean for job in tick.jobs if job.loss_mean is not None]
    return f"{sum(losses) / len(losses):.3f}" if losses else "none yet"
