"""A round log as the table that the learning model is fitted to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from wattgym.envs.federation.config import LearningConfig
from wattgym.envs.federation.learning import local_work
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig
from wattgym.federated.log import LOG_FILE, read_log
from wattgym.federated.messages import Fate, RoundRecord
from wattgym.federated.runner import KIND
from wattgym.runs import RunFolder


def rounds_table(folder: str | Path) -> tuple[pd.DataFrame, float | None]:
    """Rounds of a run that counted, with effective sites and local work, and the measured noise scale.

    Args:
        folder: Run folder of `wattgym federate`.

    Returns:
        Columns round, loss, sites and work; and the median of φ over rounds with two sites or more, None without any.

    Raises:
        UserError: The folder holds no such run.
    """
    run = RunFolder.open(folder, KIND)
    federation = FederationConfig.model_validate(run.config["federation"])
    records = [record for record, _ in read_log(run.path / LOG_FILE)]
    learning, reference = federation.selection.learning, federation.local_steps
    rows = [
        {
            "round": record.round,
            "loss": record.evaluation.loss,
            "sites": record.effective_sites,
            "work": _work(record, learning, reference),
        }
        for record in records
        if record.round == 0 or record.effective_sites > 0.0
    ]
    if not rows:
        raise UserError(f"{run.path / LOG_FILE}: holds no round")
    scales = [record.noise_scale for record in records if np.isfinite(record.noise_scale) and record.noise_scale > 0]
    return pd.DataFrame(rows), float(np.median(scales)) if scales else None


def _work(record: RoundRecord, learning: LearningConfig, reference_steps: int) -> float:
    """Local work of a round over the reference, weighted by samples (`wattgym.envs.federation.learning`)."""
    counted = [o.metrics for o in record.outcomes if o.fate is Fate.COUNTED and o.metrics is not None]
    if not counted:
        return 1.0
    samples = np.array([metrics.samples for metrics in counted], dtype=np.float64)
    steps = np.array([metrics.steps for metrics in counted], dtype=np.float64)
    work = local_work(steps / reference_steps, learning.work_exponent)
    return float((samples * work).sum() / samples.sum())
