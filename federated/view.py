"""What a live federated run looks like while it runs: one line a round, and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattgym.federated.loop import Progress, SelectionPlan
from wattgym.federated.messages import Fate

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def progress_line(progress: Progress, plan: SelectionPlan) -> str:
    """A round in one line: who trained, seconds, joules, loss, accuracy."""
    record, outcome = progress.record, progress.outcome
    clock = "" if plan.wall_clock else " emulated"
    if record is None:
        return f"waited {float(outcome.result.seconds[0]):.0f} s{clock}: no site had power enough"
    counted = [o.site for o in record.outcomes if o.fate is Fate.COUNTED]
    missed = [f"{o.site} {o.fate} ({o.reason})" for o in record.outcomes if o.fate is not Fate.COUNTED]
    accuracy = record.evaluation.accuracy
    parts = [
        f"round {record.round}/{plan.rounds}",
        f"trained: {', '.join(sorted(counted)) or 'nobody'}",
        *([f"missed: {'; '.join(missed)}"] if missed else []),
        f"{float(outcome.result.seconds[0]):.1f} s{clock} (wall {record.seconds:.1f} s)",
        f"{float(outcome.result.energy_kwh[0]) * 3.6e6:.0f} J",
        f"loss {record.evaluation.loss:.4f}",
        *([f"accuracy {accuracy:.3f}"] if np.isfinite(accuracy) else []),
    ]
    return " | ".join(parts)


@contextmanager
def tensorboard(folder: Path) -> Iterator[Callable[[Progress], None]]:
    """Writes rounds to TensorBoard.

    Args:
        folder: Folder of the event file.

    Yields:
        To be called with each round.
    """
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder))
    try:
        yield lambda progress: _write_scalars(writer, progress)
    finally:
        writer.close()


def _write_scalars(writer: SummaryWriter, progress: Progress) -> None:
    record, outcome = progress.record, progress.outcome
    if record is None:
        return
    values = {
        "federation/loss": record.evaluation.loss,
        "federation/accuracy": record.evaluation.accuracy,
        "federation/clock_s": float(outcome.time_s[0]),
        "federation/round_s": float(outcome.result.seconds[0]),
        "federation/participants": float(outcome.result.played.chosen.sum()),
        "federation/counted": float(outcome.result.played.counted.sum()),
        "federation/energy_kwh": float(outcome.result.energy_kwh[0]),
        "federation/noise_scale": record.noise_scale,
    }
    values |= {f"loss/{name}": loss for name, loss in record.evaluation.domain_loss.items()}
    for outcome_of_site in record.outcomes:
        metrics = outcome_of_site.metrics
        if metrics is not None:
            values[f"site_loss/{outcome_of_site.site}"] = metrics.loss
            values[f"site_power_w/{outcome_of_site.site}"] = metrics.power_w
    for name, value in values.items():
        if np.isfinite(value):
            writer.add_scalar(name, value, record.round)
