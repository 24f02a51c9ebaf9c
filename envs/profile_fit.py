"""From the table of a sweep to a profile of the plant's jobs, knobs included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wattgym.envs.knobs import ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE, active_speed
from wattgym.envs.plant import FloatArray
from wattgym.envs.profile import JobProfile, MeasuredKnobs
from wattgym.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


def fitted_jobs(
    known: Sequence[JobProfile], found: pd.DataFrame, switch_s: Sequence[float | None] | None = None
) -> tuple[JobProfile, ...]:
    """Profiles of the jobs as they were measured.

    Args:
        known: What is known of each job beside (board, sensor, delay).
        found: Table of `wattgym.envs.profiling.table`.
        switch_s: What a change of setting cost each job, seconds, where it was told.

    Raises:
        UserError: A job made no progress at its neutral setting.
    """
    costs = switch_s or [None] * len(known)
    return tuple(_fitted(j, job, found[found["job"] == j], costs[j]) for j, job in enumerate(known))


def _fitted(j: int, known: JobProfile, own: pd.DataFrame, switch_s: float | None) -> JobProfile:
    sizes = sorted(own["micro_batch"].unique().tolist(), reverse=True)
    limits = sorted(own["limit_w"].unique().tolist())
    full = (own["active_gpus"] == known.n_gpus) & (own["duty_cycle"] == 1.0) & (own["local_steps"] == 1)
    neutral = full & (own["micro_batch"] == sizes[0])
    top = own[neutral & (own["limit_w"] == limits[-1])].iloc[0]
    if not top["throughput"] > 0.0:
        raise UserError(f"job {j} made no progress at its highest limit; let it train before it is profiled")
    per_gpu, per_speed = 1.0 / known.n_gpus, 1.0 / float(top["throughput"])

    def rows(column: str, scale: float) -> tuple[tuple[float, ...], ...]:
        pivot = own[full].pivot(index="micro_batch", columns="limit_w", values=column)
        return tuple(tuple((scale * pivot.loc[size]).loc[limits].tolist()) for size in sizes)

    comm, straggler = _shares(known.n_gpus, float(top["throughput"]), own[own["limit_w"] == limits[-1]], sizes[0])
    power, speed = rows("power_w", per_gpu), rows("throughput", per_speed)
    measured: dict[str, Any] = {
        "limit_w": tuple(limits),
        "power_w": power[0],
        "throughput": speed[0],
        "power_sd_w": rows("power_sd_w", per_gpu)[0],
        "throughput_sd": rows("throughput_sd", per_speed)[0],
        "micro_batch": sizes[0],
        "knobs": MeasuredKnobs(
            micro_batch=tuple(sizes),
            power_w=power,
            throughput=speed,
            idle_w=_idle_w(own, top, sizes[0], known.n_gpus),
            comm_share=comm,
            straggler_share=straggler,
            switch_s=switch_s,
        ),
    }
    if known.full_samples_per_s is not None:
        measured["full_samples_per_s"] = known.full_samples_per_s / per_speed
    # Built anew, so that what was measured is checked as what is read from a file.
    return JobProfile.model_validate({**known.model_dump(), **measured})


def _idle_w(own: pd.DataFrame, top: pd.Series, size: int, n_gpus: int) -> float | None:
    """Power per GPU while nothing works, from duties below 1: `P(d) = idle + d (P(1) - idle)`; None without any."""
    slowed = own[
        (own["duty_cycle"] < 1.0)
        & (own["limit_w"] == top["limit_w"])
        & (own["micro_batch"] == size)
        & (own["active_gpus"] == n_gpus)
        & (own["local_steps"] == 1)
    ]
    if slowed.empty:
        return None
    duty, power = slowed["duty_cycle"].to_numpy(), slowed["power_w"].to_numpy()
    # Least squares in the one unknown.
    left = 1.0 - duty
    idle = float((left * (power - duty * float(top["power_w"]))).sum() / (left**2).sum())
    return max(idle, 0.0) / n_gpus


def _shares(n_gpus: int, full_speed: float, own: pd.DataFrame, size: int) -> tuple[float | None, float | None]:
    """Communication and straggler share that fit the speeds with idle GPUs and local steps; None without any.

    The assumed shares pull weakly (as one more measurement of 0.1), because one kind of setting alone cannot tell the
    two apart.
    """
    told = own[(own["duty_cycle"] == 1.0) & (own["micro_batch"] == size)]
    told = told[(told["active_gpus"] < n_gpus) | (told["local_steps"] > 1)]
    if told.empty or n_gpus == 1:
        return None, None
    from scipy.optimize import least_squares

    active, steps = told["active_gpus"].to_numpy(), told["local_steps"].to_numpy()
    speed = told["throughput"].to_numpy() / full_speed
    assumed = np.array([ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE])

    def residuals(shares: FloatArray) -> FloatArray:
        miss = active_speed(n_gpus, active, steps, *shares) / speed - 1.0
        return np.concatenate([miss, 0.1 * (shares - assumed)])

    comm, straggler = least_squares(residuals, assumed, bounds=(0.0, 0.45)).x.tolist()
    return comm, straggler
