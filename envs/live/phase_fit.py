"""Phases and noise of a job from a calibration's samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from wattgym.envs.emulator.phases import Checkpoint, ComputeNoise, PhaseFamily, Spread
from wattgym.envs.live.activity import BoolArray, is_clean, long_phases, occurrences
from wattgym.envs.profile import JobProfile
from wattgym.phase import Phase

NEVER_S = 1e6
"""Work between evaluations, or checkpoints, of a job that showed none, seconds."""

NOISE_S = 1.0
"""Interval at which noise is fitted."""


def fit_phases(profile: JobProfile, rows: pd.DataFrame, computing_w: Mapping[int, float]) -> PhaseFamily:
    """The phases that the run showed, at full speed.

    Args:
        profile: The job's power and speed.
        rows: Samples of the whole sweep.
        computing_w: Power while computing by number of the dwell, W.
    """
    assert profile.full_samples_per_s is not None
    speed = profile.throughput_at(rows["limit_w"].to_numpy())
    samples = rows["samples"].to_numpy()
    work_s = float(samples[-1] - samples[0]) / profile.full_samples_per_s
    long = long_phases(rows)
    n_evaluations = n_checkpoints = 0
    evaluate_s = checkpoint_s = 0.0
    if Phase.EVALUATE in long:
        n_evaluations = occurrences(rows, Phase.EVALUATE)[0]
        # Evaluation computes too, so a limit stretches it.
        evaluate_s = float((np.diff(rows["evaluate_s"]) * speed[1:]).sum()) / n_evaluations
    if Phase.CHECKPOINT in long:
        n_checkpoints, checkpoint_s = occurrences(rows, Phase.CHECKPOINT)
        checkpoint_s /= n_checkpoints
    cycles = n_evaluations or n_checkpoints
    cycle_s = work_s / cycles if cycles else NEVER_S
    # A cycle has room for one checkpoint; more of them become one as long as all.
    merged = max(n_checkpoints / cycles, 1.0) if cycles else 1.0
    between_s = max(work_s / n_checkpoints, cycle_s) if n_checkpoints else 1000.0 * NEVER_S
    levels = _levels(profile, rows, computing_w)
    ar1, innovation = _noise(profile, rows)
    nothing = Spread(mean=0.0, sd=0.0)
    return PhaseFamily(
        gpus=profile.n_gpus,
        compute_w_per_gpu=profile.full_power_w,
        host_w_per_gpu=0.0,
        run_level_sd=0.0,
        load_level=0.0,
        evaluate_level=max(levels[Phase.EVALUATE], 1e-3),
        idle_level=0.0,
        load_s=nothing,
        start_stall_s=nothing,
        first_evaluate_stall_s=nothing,
        evaluate_stall_s=nothing,
        evaluate_s=Spread(mean=evaluate_s, sd=0.0),
        first_compute_work_s=Spread(mean=cycle_s, sd=0.0),
        compute_work_s=Spread(mean=cycle_s, sd=0.0),
        fall_s=0.0,
        rise_s=0.0,
        ripple=None,
        noise=ComputeNoise(
            sample_s=NOISE_S, ar1=ar1, innovation_sd=innovation, dip_probability=0.0, dip_depth=0.0
        ),
        checkpoint=Checkpoint(
            level=(levels[Phase.CHECKPOINT],) * 2,
            duration_s=(max(checkpoint_s * merged, 1e-3),) * 2,
            compute_work_s=(between_s, between_s),
        ),
    )  # fmt: skip


def _levels(profile: JobProfile, rows: pd.DataFrame, computing_w: Mapping[int, float]) -> dict[Phase, float]:
    """Power in evaluation and checkpoint relative to full power, by energy balance; 1 where limits held it down.

    A stretch away from computing, with a second of computing on both sides for what lags, has drawn what computing
    would have drawn for part of the time; the rest is the phases'. Stretches in which a limit may have held the power
    down tell nothing, unless they drew clearly less than computing did.
    """
    at_s = rows["t_s"].to_numpy()
    phases = [phase for phase in (Phase.EVALUATE, Phase.CHECKPOINT) if phase in long_phases(rows)]
    spent = rows[[f"{phase.name.lower()}_s" for phase in phases]].to_numpy()
    away = np.append(False, (np.diff(spent, axis=0) > 1e-3).any(axis=1))
    full_w = profile.full_power_w * profile.n_gpus
    seconds, joules = [], []
    for first, last in _stretches(away):
        inside = np.flatnonzero((at_s >= at_s[first] - 1.0) & (at_s <= at_s[last] + 1.0))
        block = rows.iloc[inside]
        number = int(block["dwell"].iloc[0])
        if number not in computing_w or not (block["measuring"].all() and (block["dwell"] == number).all()):
            continue
        in_phases = spent[inside[-1]] - spent[inside[0]]
        metered = block[["energy_j", "metered_s"]].iloc[-1] - block[["energy_j", "metered_s"]].iloc[0]
        rest = float(metered["energy_j"]) - computing_w[number] * (float(metered["metered_s"]) - in_phases.sum())
        if computing_w[number] > 0.95 * full_w or rest < 0.9 * computing_w[number] * in_phases.sum():
            seconds.append(in_phases)
            joules.append(rest)
    if not seconds:
        return dict.fromkeys((Phase.EVALUATE, Phase.CHECKPOINT), 1.0)
    found = np.linalg.lstsq(np.array(seconds), np.array(joules), rcond=None)[0] / full_w
    levels = dict.fromkeys((Phase.EVALUATE, Phase.CHECKPOINT), 1.0)
    return levels | {phase: min(max(float(level), 0.0), 1.0) for phase, level in zip(phases, found, strict=True)}


def _stretches(mask: BoolArray) -> list[tuple[int, int]]:
    """First and last index of each run of true values."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    return list(zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True))


def _noise(profile: JobProfile, rows: pd.DataFrame) -> tuple[float, float]:
    """First-order autoregression of the relative power while computing: coefficient, innovation's deviation.

    From the sensor, whose readings are as old as they are, not the meter, whose differences show its own steps. Where
    limits bind, boards hold the power still, so dwells near full power count if there are any.
    """
    rows = rows[is_clean(rows) & rows["measuring"].to_numpy()]
    free = rows[profile.power_at(rows["limit_w"].to_numpy()) > 0.95 * profile.full_power_w * profile.n_gpus]
    rows = free if len(free) >= 0.1 * len(rows) else rows
    before, after = [], []
    for _, part in rows.groupby("dwell"):
        seconds = np.floor((part["t_s"] - part["t_s"].iloc[0]) / NOISE_S)
        means = part.groupby(seconds)["sensor_w"].mean().dropna().to_numpy()
        if means.size >= 2:
            relative = means / means.mean() - 1.0
            before += relative[:-1].tolist()
            after += relative[1:].tolist()
    if len(before) < 10 or (variance := float(np.mean(np.square(before)))) < 1e-10:
        return 0.0, 0.0
    ar1 = float(np.clip(np.mean(np.multiply(before, after)) / variance, -0.95, 0.95))
    return ar1, (variance * (1.0 - ar1**2)) ** 0.5
