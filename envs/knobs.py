"""Knobs: what a controller may set of a training job, and what each setting does to power and throughput.

Beside its power limit, a job has four knobs. None of them changes how many samples an optimiser step takes in:

- `micro_batch`: samples of one forward and backward pass; accumulation makes up the rest of the step.
- `active_gpus`: data-parallel ranks that work; the others idle and count for nothing in the average.
- `duty_cycle`: share of the time in which the job works, in whole optimiser steps; 0 pauses it.
- `local_steps`: optimiser steps between two averages of the ranks, each of which takes as many samples as its speed
  allows, weighted by samples (local SGD); 1 is ordinary synchronous training.

The *neutral* setting is what a job has that nobody shapes: the highest limit, the largest micro-batch, all GPUs, duty
1 and one local step. All arrays have a batch axis `B` and a job axis `J`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wattgym.errors import UserError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KnobName = Literal["power_limit", "micro_batch", "active_gpus", "duty_cycle", "local_steps"]
ASSUMED_COMM_SHARE, ASSUMED_STRAGGLER_SHARE = 0.10, 0.03
"""Shares of a synchronous step spent in communication and in waiting for the slowest rank, where nobody measured them:
middles of what well-tuned data-parallel training loses. Assumption."""

KNOBS: tuple[KnobName, ...] = get_args(KnobName)
"""Every knob, in the order in which actions and observations hold them."""

DISCRETE: tuple[KnobName, ...] = ("micro_batch", "active_gpus", "local_steps")
"""Knobs with a few settings only."""

MIN_DUTY = 0.1
"""A job works for at least this share of the time or not at all: a slower one's status would be stale between steps."""


@dataclass(frozen=True, eq=False, slots=True)
class Command:
    """What a job shall have; the whole setting, not a change. `None` leaves a knob at its neutral setting.

    Attributes:
        limit_w: Power limit per GPU, shape `(B, J)`, W, finite.
        micro_batch: Samples of one pass of one rank, shape `(B, J)`; one of `KnobTable.micro_batch`.
        active_gpus: Ranks that work, shape `(B, J)`, 1 to the job's GPUs.
        duty: Share of the time in which the job works, shape `(B, J)`: 0 (paused), or `MIN_DUTY` to 1.
        local_steps: Optimiser steps between averages, shape `(B, J)`, 1 to `KnobTable.max_local_steps`.
    """

    limit_w: FloatArray
    micro_batch: IntArray | None = None
    active_gpus: IntArray | None = None
    duty: FloatArray | None = None
    local_steps: IntArray | None = None

    def of(self, name: KnobName) -> FloatArray | IntArray | None:
        """The setting of one knob."""
        values = {"power_limit": self.limit_w, "duty_cycle": self.duty}
        return values[name] if name in values else getattr(self, name)


@dataclass(frozen=True, eq=False)
class KnobTable:
    """What a controller may know of the knobs before it runs: nominal power and throughput of every configuration.

    Settings of a job with fewer than `M` micro-batches are filled up with its smallest.

    Attributes:
        micro_batch: Micro-batches a job may have, from the largest (neutral) down, shape `(B, J, M)`.
        micro_batches: How many of them are its own, shape `(B, J)`.
        samples_per_update: Samples of an optimiser step, which micro-batches divide, shape `(B, J)`.
        power_w: Power of each job, computing with all GPUs at duty 1, shape `(B, J, M, K)`, W, over the limits of
            `PlantSpec.limit_grid`; row 0 is `PlantSpec.power_table_w`.
        throughput: Throughput likewise, in samples relative to the neutral setting.
        idle_w: Power of each job while no rank works, shape `(B, J)`, W.
        comm_share: Share of a synchronous step spent in communication, shape `(B, J)`.
        straggler_share: Share of a synchronous step that ranks wait for the slowest, shape `(B, J)`.
        max_local_steps: Most optimiser steps between averages, shape `(B, J)`.
    """

    micro_batch: IntArray
    micro_batches: IntArray
    samples_per_update: IntArray
    power_w: FloatArray
    throughput: FloatArray
    idle_w: FloatArray
    comm_share: FloatArray
    straggler_share: FloatArray
    max_local_steps: IntArray

    def filled(self, command: Command, n_gpus: IntArray) -> Command:
        """A command with every knob told, checked.

        Args:
            command: What a job shall have.
            n_gpus: GPUs of each job, shape `(B, J)`.

        Raises:
            UserError: A job cannot have the setting; the message says what would be valid.
        """
        shape = n_gpus.shape
        ones = np.ones(shape, dtype=np.int64)
        micro = self.micro_batch[..., 0] if command.micro_batch is None else command.micro_batch
        self.micro_index(micro)
        active = n_gpus if command.active_gpus is None else command.active_gpus
        duty = np.ones(shape) if command.duty is None else command.duty
        steps = ones if command.local_steps is None else command.local_steps
        for name, value, low, high in (
            ("active GPUs", active, ones, n_gpus),
            ("local steps", steps, ones, self.max_local_steps),
            ("a duty", np.where(duty == 0.0, 1.0, duty), np.full(shape, MIN_DUTY), ones),
        ):
            wrong = ~((value >= low) & (value <= high))
            if wrong.any():
                b, j = np.argwhere(wrong)[0]
                pause = " or 0 (paused)" if name == "a duty" else ""
                raise UserError(
                    f"job {j} cannot have {name} of {value[b, j]:g}; valid: {low[b, j]:g} to {high[b, j]:g}{pause}"
                )
        return Command(command.limit_w, micro, active, duty, steps)

    def micro_index(self, micro_batch: IntArray) -> IntArray:
        """Place of each job's micro-batch in its row of the table, shape `(B, J)`.

        Raises:
            UserError: A job cannot have that micro-batch; the message names the nearest it can have.
        """
        same = self.micro_batch == micro_batch[..., None]
        known = same.any(axis=-1)
        if not known.all():
            b, j = np.argwhere(~known)[0]
            wanted = int(micro_batch[b, j])
            valid = self.micro_batch[b, j, : self.micro_batches[b, j]].tolist()
            raise UserError(
                f"job {j} cannot have a micro-batch of {wanted}: its {self.samples_per_update[b, j]} samples per update"
                f" and its memory allow {_listed(sorted(valid))}; nearest: {_listed(nearest(wanted, valid))}"
            )
        place: IntArray = same.argmax(axis=-1)
        return place


def nearest(wanted: int, valid: Sequence[int]) -> list[int]:
    """The valid values next to a wanted one, below and above it, ascending."""
    below = [value for value in valid if value <= wanted]
    above = [value for value in valid if value >= wanted]
    return sorted({*([max(below)] if below else []), *([min(above)] if above else [])})


def _listed(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def active_speed(
    n_gpus: ArrayLike, active: ArrayLike, local_steps: ArrayLike, comm_share: ArrayLike, straggler_share: ArrayLike
) -> FloatArray:
    """Throughput with some GPUs idle and some local steps, relative to all GPUs and synchronous steps.

    A step of `n` ranks takes one unit: `1 - κ - σ` of computing, `κ` of communication and `σ` of waiting for the
    slowest. With `a` ranks each computes `n / a` as long; a ring all-reduce takes `(a - 1) / a` of twice the model's
    size over the bandwidth (Patarasuk and Yuan 2009), and nobody waits for a rank alone, so both shrink by
    `r = (a - 1) n / (a (n - 1))`. With `H` local steps there is one exchange and one wait in `H` steps:

        T = (1 - κ - σ) n / a + (σ n / a + κ) r / H,        throughput = 1 / T.

    Args:
        n_gpus: GPUs of the job, `n`.
        active: GPUs that work, `a`, 1 to `n`.
        local_steps: Optimiser steps between averages, `H`.
        comm_share: `κ`.
        straggler_share: `σ`; both count for nothing on a single GPU.
    """
    n, a, steps = (np.asarray(v, dtype=np.float64) for v in (n_gpus, active, local_steps))
    several = n > 1.0
    kappa, sigma = np.where(several, comm_share, 0.0), np.where(several, straggler_share, 0.0)
    # Rearranged so that the neutral setting gives exactly 1.
    more = n / a
    together = (a - 1.0) * n / np.maximum(a * (n - 1.0), 1.0) / steps
    time = more - kappa * (more - together) - sigma * more * (1.0 - together)
    speed: FloatArray = 1.0 / time
    return speed


def working_share(n_gpus: ArrayLike, active: ArrayLike, duty: ArrayLike) -> FloatArray:
    """Share of a job's GPU time that computes; its GPUs draw idle power for the rest."""
    share: FloatArray = np.asarray(duty, dtype=np.float64) * np.asarray(active) / np.asarray(n_gpus)
    return share
