"""Phases of a training job: how its power moves between load, compute, evaluation and checkpoint, and how it jitters.

The numbers live in `phases.yaml`, written by `scripts/fit_phases.py` from measured MLPerf Training v4.0 runs on H100
nodes (node AC power at 2 s with phases from the training logs; Apache-2.0). Levels are relative to a run's mean compute
power *of the node*; `PhaseFamily.gpu_level` takes the host's share out for models of the GPU alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from wattgym.config import FrozenModel, load_config
from wattgym.errors import UserError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Spread(FrozenModel):
    """A quantity that varies: mean and standard deviation."""

    mean: NonNegative
    sd: NonNegative


class StepRipple(FrozenModel):
    """The dip at the end of every optimiser step, where it is long enough to show at 2 s.

    Attributes:
        period_s: Optimiser step, seconds.
        dip_s: Length of the dip, seconds, as the meters show it (they widen it by up to their own averaging time).
        depth: Fall of relative node power inside the dip.
    """

    period_s: Positive
    dip_s: NonNegative
    depth: Fraction


class ComputeNoise(FrozenModel):
    """Relative node power within compute, at `sample_s`: a first-order autoregression plus rare one-sample dips.

    Attributes:
        sample_s: Sampling interval of the fit, seconds.
        ar1: Autoregressive coefficient from one sample to the next.
        innovation_sd: Standard deviation of the autoregression's innovation.
        dip_probability: Chance that a sample falls into a dip.
        dip_depth: Mean depth of such a dip; depths are uniform from 0 to twice the mean.
    """

    sample_s: Positive
    ar1: Annotated[float, Field(gt=-1, lt=1)]
    innovation_sd: NonNegative
    dip_probability: Fraction
    dip_depth: Fraction

    def at_period(self, period_s: float) -> tuple[float, float]:
        """Coefficient and innovation of the same process sampled every `period_s`, with its variance unchanged.

        A negative coefficient has no continuous counterpart and counts as uncorrelated at other periods.
        """
        stationary_sd = self.innovation_sd / (1 - self.ar1**2) ** 0.5
        same = period_s == self.sample_s
        coefficient = self.ar1 if same else max(self.ar1, 0.0) ** (period_s / self.sample_s)
        return coefficient, float(stationary_sd * (1 - coefficient**2) ** 0.5)


class Checkpoint(FrozenModel):
    """Checkpoint pauses: assumed, the measured runs wrote none.

    Attributes:
        level: Range of the relative node power: idle with a context, up to some activity while shards are written.
        duration_s: Range of the length, seconds.
        compute_work_s: Range of the compute between two checkpoints, seconds at full speed.
    """

    level: tuple[Fraction, Fraction]
    duration_s: tuple[Positive, Positive]
    compute_work_s: tuple[Positive, Positive]


class PhaseFamily(FrozenModel):
    """One family of measured training runs.

    Durations and work are at full speed (no cap). A stall is a stop of the GPUs (input pipeline, compilation) that the
    log counts as training or evaluation; it is a `Phase.LOAD` (see `wattgym.envs.plant`).

    Attributes:
        gpus: GPUs of one job.
        compute_w_per_gpu: Node AC power per GPU, mean over compute, watts.
        host_w_per_gpu: Part of it that is not the GPU (CPUs, memory, network cards, supply losses), watts. Assumed.
        run_level_sd: Standard deviation of the mean compute power between runs, relative.
        load_level: Relative node power while loading or stalled.
        evaluate_level: Relative node power while evaluating.
        idle_level: Relative node power after the job's processes have ended.
        load_s: From the first log line to the start of the run, less any warm-up steps that the meter shows, seconds.
        start_stall_s: Stall just after the start of the run, seconds.
        first_evaluate_stall_s: Stall on the way into the first evaluation, seconds.
        evaluate_stall_s: Stall on the way into each later evaluation, seconds (equivalent length at `load_level`).
        evaluate_s: Length of an evaluation after its stall, seconds.
        first_compute_work_s: Compute before the first evaluation, seconds at full speed.
        compute_work_s: Compute between later evaluations, seconds at full speed.
        fall_s: 90-to-10 % time from compute into a stall as the meter shows it; an upper bound on the real one.
        rise_s: 10-to-90 % time out of a stall, likewise.
        ripple: Step dips; None where the step is too short to show.
        noise: Jitter within compute.
        checkpoint: Assumed checkpoint pauses.
    """

    gpus: Annotated[int, Field(gt=0)]
    compute_w_per_gpu: Positive
    host_w_per_gpu: NonNegative
    run_level_sd: NonNegative
    load_level: Fraction
    evaluate_level: Positive
    idle_level: Fraction
    load_s: Spread
    start_stall_s: Spread
    first_evaluate_stall_s: Spread
    evaluate_stall_s: Spread
    evaluate_s: Spread
    first_compute_work_s: Spread
    compute_work_s: Spread
    fall_s: NonNegative
    rise_s: NonNegative
    ripple: StepRipple | None
    noise: ComputeNoise
    checkpoint: Checkpoint

    @property
    def plateau(self) -> float:
        """Relative node power between dips, so that the mean over compute is 1."""
        lost = self.noise.dip_probability * self.noise.dip_depth
        if self.ripple is not None:
            lost += self.ripple.depth * self.ripple.dip_s / self.ripple.period_s
        return 1.0 + lost

    @property
    def gpu_gain(self) -> float:
        """Change of the GPU's relative power per change of the node's, the host's power being constant."""
        return self.compute_w_per_gpu / (self.compute_w_per_gpu - self.host_w_per_gpu)

    def gpu_level(self, level: float) -> float:
        """Relative power of the GPU alone at a relative node power, at least 0.

        The host's power is taken as constant, which puts idle GPUs too low by a few per cent of their full power; a
        board's own idle power should floor the result.
        """
        return max(0.0, 1.0 - (1.0 - level) * self.gpu_gain)


class PhaseTable(FrozenModel):
    """All fitted families by name."""

    families: dict[str, PhaseFamily]


def load_phase_families(path: str | Path | None = None) -> dict[str, PhaseFamily]:
    """The fitted families by name, from the shipped `phases.yaml` or another file of the same form.

    Raises:
        UserError: The file is missing, is not YAML, or does not fit.
    """
    source = Path(__file__).with_name("phases.yaml") if path is None else Path(path)
    families = load_config(PhaseTable, source).families
    if not families:
        raise UserError(f"{source}: 'families' is empty; it needs at least one family")
    return families
