"""What remains of a live run: the evaluator's tables and report, and the training loss beside an uncontrolled run's."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.deployment import LiveRun, composite
from wattgym.agents.episodes import EpisodeResult, PowerTrace
from wattgym.agents.rollout import Rollout
from wattgym.agents.scoring import REGULATION, scenario_metrics
from wattgym.errors import UserError
from wattgym.files import atomic_path, atomic_write_text

REPORT = "report.html"
LOSSES, LOSSES_FIGURE = "losses.csv", "losses.svg"
RECENT_STEPS = 20
"""Losses are compared as means over this many last steps, and step by step."""


@dataclass(frozen=True, eq=False)
class LossComparison:
    """One job's training loss beside an uncontrolled run's, at equal samples.

    Attributes:
        job: Number of the job.
        samples: Samples after each step that both runs have made, shape `(n,)`.
        loss: Loss of those steps, shape `(n,)`.
        reference: The uncontrolled run's, shape `(n,)`.
    """

    job: int
    samples: NDArray[np.int64]
    loss: NDArray[np.float64]
    reference: NDArray[np.float64]

    def summary(self) -> dict[str, Any]:
        """Plain numbers: means over the last steps, and the largest difference in any step."""
        if not self.samples.size:
            return {"job": self.job, "samples": 0, "loss": None, "uncontrolled": None, "largest_difference": None}
        return {
            "job": self.job,
            "samples": int(self.samples[-1]),
            "loss": float(self.loss[-RECENT_STEPS:].mean()),
            "uncontrolled": float(self.reference[-RECENT_STEPS:].mean()),
            "largest_difference": float(np.abs(self.loss - self.reference).max()),
        }


def compare_losses(folder: Path, reference: Path, jobs: int) -> list[LossComparison]:
    """Losses of all jobs of two live runs, at equal samples.

    Args:
        folder: Folder with the jobs' folders.
        reference: The uncontrolled run's.
        jobs: Number of jobs.

    Raises:
        UserError: A log is missing or damaged.
    """
    found = []
    for j in range(jobs):
        own, other = _losses(folder / f"job{j}"), _losses(reference / f"job{j}")
        common = sorted(own.keys() & other.keys())
        found.append(
            LossComparison(
                j,
                np.array(common, dtype=np.int64),
                np.array([own[samples] for samples in common]),
                np.array([other[samples] for samples in common]),
            )
        )
    return found


def write_losses(comparisons: Sequence[LossComparison], folder: Path) -> None:
    """Writes `losses.csv` and `losses.svg`.

    Raises:
        UserError: The folder cannot be written.
    """
    rows = ["job,samples,loss,uncontrolled_loss"]
    for found in comparisons:
        columns = zip(found.samples.tolist(), found.loss.tolist(), found.reference.tolist(), strict=True)
        rows += [f"{found.job},{samples},{loss!r},{other!r}" for samples, loss, other in columns]
    atomic_write_text(folder / LOSSES, "\n".join(rows) + "\n")

    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.2 * len(comparisons)), layout="constrained")
    for axes, found in zip(np.atleast_1d(figure.subplots(len(comparisons), 1)), comparisons, strict=True):
        axes.plot(found.samples, found.reference, label="uncontrolled", linewidth=2.5, color="0.7")
        axes.plot(found.samples, found.loss, label="controlled", linewidth=1.0)
        axes.set(title=f"job {found.job}", xlabel="samples", ylabel="training loss, nats")
        axes.legend()
    with atomic_path(folder / LOSSES_FIGURE) as temporary:
        figure.savefig(temporary)


def write_reports(
    name: str, run: LiveRun, uncapped: LiveRun | None, folder: Path, provenance: Mapping[str, Any]
) -> bool:
    """Writes tables and `report.html` in the evaluator's format; nothing where not one tick has passed.

    Args:
        name: Name of the controller.
        run: The run.
        uncapped: The same jobs and signal without a limit; what is relative to it is left out without it.
        folder: Where to.
        provenance: How it was made, plain values.

    Returns:
        Whether there was anything to report.

    Raises:
        UserError: The folder cannot be written.
    """
    from wattgym.agents.report import write_report
    from wattgym.agents.results import EvaluationResult

    rollout = run.rollout()
    if rollout is None:
        return False
    other = uncapped.rollout() if uncapped is not None else None
    if other is not None:
        # An interrupted run is compared over what both have.
        length = min(rollout.power_w.shape[1], other.power_w.shape[1])
        rollout, other = _first(rollout, length), _first(other, length)
    scored = rollout.families[0] in REGULATION and composite(rollout, run.variant) is not None
    variant = run.variant if scored else None
    scenario, plant = f"{rollout.families[0]}/live", "live plant"
    rows, traces = [], []
    for label, record in ((name, rollout), ("uncapped", other)):
        if record is None:
            continue
        metrics = scenario_metrics(record, other, variant)
        values = {metric: float(found[0]) for metric, found in metrics.items()}
        rows.append(EpisodeResult(label, scenario, record.families[0], plant, 0, values))
        t_s = np.arange(record.power_w.shape[1], dtype=np.float64) * record.period_s
        traces.append(PowerTrace(label, scenario, t_s, record.target_w[0], record.power_w[0], record.throughput[0]))
    result = EvaluationResult(
        rows=rows,
        baselines=("uncapped",) if other is not None else (),
        traces=traces,
        provenance=provenance,
        headline="pjm_composite" if scored else "nrmse",
    )
    result.save(folder)
    write_report(result, folder / REPORT)
    return True


def _first(rollout: Rollout, length: int) -> Rollout:
    from dataclasses import replace

    names = ("signal", "target_w", "power_w", "throughput", "reward", "limit", "knobs", "changed")
    return replace(rollout, **{name: getattr(rollout, name)[:, :length] for name in names})


def _losses(folder: Path) -> dict[int, float]:
    """Loss of each step of a job, by the samples trained on until then."""
    path = folder / "steps.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {int(row["samples"]): float(row["loss"]) for row in csv.DictReader(file)}
    except OSError as error:
        raise UserError(f"{path}: cannot read the losses: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: not a job's log of steps (columns samples and loss)") from None
