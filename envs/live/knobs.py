"""Knobs of live jobs beside the power limit: what they may be set to, and what is known of their effect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wattgym.envs.knobs import ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE, Command, KnobName, KnobTable
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.job import RunningJob
from wattgym.envs.plant import FloatArray, IntArray
from wattgym.envs.profile import JobProfile
from wattgym.errors import UserError

MOST_LOCAL_STEPS = 64
"""A live job takes at most so many optimiser steps between averages; the environment's rules allow fewer."""


def check_knobs(config: LiveConfig, knobs: Sequence[KnobName]) -> None:
    """Refuses knobs that a plant's jobs don't have.

    Raises:
        UserError: A job's GPUs are not ranks of their own, so that none can idle alone.
    """
    if "active_gpus" not in knobs:
        return
    for j, job in enumerate(config.jobs):
        if job.training.ranks != len(job.devices):
            raise UserError(
                f"job {j} has {len(job.devices)} device(s) and {job.training.ranks} rank(s); the knob active_gpus "
                f"needs one rank a device: set training.ranks to {len(job.devices)}"
            )


def live_table(profiles: Sequence[JobProfile], limits_w: FloatArray) -> KnobTable:
    """What is known of jobs' knobs: measured where their profiles say so, else assumed.

    Args:
        profiles: The jobs' profiles.
        limits_w: Limits of each job at which tables are given, shape `(J, K)`, W per GPU.
    """
    sizes = [profile.micro_batches for profile in profiles]
    most = max(len(row) for row in sizes)
    padded = [[*row, *[row[-1]] * (most - len(row))] for row in sizes]
    power, speed = np.empty((2, len(profiles), most, limits_w.shape[1]))
    for j, (profile, row) in enumerate(zip(profiles, padded, strict=True)):
        for m, size in enumerate(row):
            per_gpu, speed[j, m] = profile.at_micro_batch(size, limits_w[j])
            power[j, m] = profile.n_gpus * per_gpu

    def each(values: Sequence[float]) -> FloatArray:
        return np.array([values], dtype=np.float64)

    def known(name: str, assumed: float) -> FloatArray:
        found = [None if profile.knobs is None else getattr(profile.knobs, name) for profile in profiles]
        return each([assumed if value is None else value for value in found])

    return KnobTable(
        micro_batch=np.array([padded]),
        micro_batches=np.array([[len(row) for row in sizes]]),
        samples_per_update=np.array(
            [[profile.samples_per_update or row[0] for profile, row in zip(profiles, sizes, strict=True)]]
        ),
        power_w=power[None],
        throughput=speed[None],
        idle_w=each([profile.n_gpus * profile.idle_w for profile in profiles]),
        comm_share=known("comm_share", ASSUMED_COMM_SHARE),
        straggler_share=known("straggler_share", ASSUMED_STRAGGLER_SHARE),
        max_local_steps=np.full((1, len(profiles)), MOST_LOCAL_STEPS),
    )


def in_force(jobs: Sequence[RunningJob], limit_w: FloatArray) -> Command:
    """The setting that jobs work under, as they tell it."""
    status = [job.handle.status() for job in jobs]

    def row(values: Sequence[int]) -> IntArray:
        return np.array([values], dtype=np.int64)

    return Command(
        limit_w=limit_w,
        micro_batch=row([found.micro_batch for found in status]),
        active_gpus=row(
            [job.profile.n_gpus * found.active_ranks // found.ranks for job, found in zip(jobs, status, strict=True)]
        ),
        duty=np.array([[job.knobs.asked_duty for job in jobs]]),
        local_steps=row([found.local_steps for found in status]),
    )


def set_knobs(job: RunningJob, command: Command, j: int) -> None:
    """Hands one job its part of a command in which every knob is told.

    Raises:
        UserError: The job cannot have it.
    """
    micro, active, duty, steps = command.micro_batch, command.active_gpus, command.duty, command.local_steps
    assert micro is not None
    assert active is not None
    assert duty is not None
    assert steps is not None
    ranks = job.handle.status().ranks
    taking_part = max(round(ranks * int(active[0, j]) / job.profile.n_gpus), 1)
    job.knobs.set(int(micro[0, j]), taking_part, float(duty[0, j]), int(steps[0, j]))
