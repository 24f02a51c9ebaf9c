"""How an emulated batch of jobs takes up knobs beside the power limit: command network, step boundaries, lost time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.config import KnobPhysics, PowerShapingConfig
from wattgym.envs.emulator.draw import GRID, DrawnSite
from wattgym.envs.emulator.library import SiteLibrary
from wattgym.envs.emulator.micro_batch import MicroBatches
from wattgym.envs.knobs import Command, KnobTable, active_speed, working_share
from wattgym.envs.plant import FloatArray

_DUTY = 2
"""Row of a setting; the others are micro-batch (its number from the largest), active GPUs and local steps."""


_BESIDE_DUTY = (np.arange(4) != _DUTY)[:, None]


class KnobDynamics:
    """Settings of `N = B * J` jobs, flat.

    A command travels as long as the limit's does, then waits for the end of the optimiser step under way. What a
    change costs is training time: for so long the job draws its power and gets nowhere.

    Attributes:
        table: Nominal effect of the knobs.
        limit_tables: True power that each limit allows, and throughput, shape `(2, N * M * GRID)`.
        table_base: Where each job's row of them begins, shape `(N,)`.
        demand_w: True power of each job when no limit binds, all GPUs at duty 1, shape `(N,)`, W.
        idle_w: Power of each job while nothing works, shape `(N,)`, W.
        share: Share of its GPU time that computes, shape `(N,)`.
        factor: Throughput by duty, active GPUs and local steps relative to neutral, shape `(N,)`.
    """

    def __init__(
        self,
        config: PowerShapingConfig,
        site: DrawnSite,
        library: SiteLibrary,
        micro: MicroBatches | None,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        """Draws what the knobs do at each site, and starts at the neutral setting.

        Args:
            config: Enabled knobs, and what they do.
            site: The sites drawn.
            library: What they were drawn from.
            micro: Micro-batches of the library's surfaces; None where that knob is not enabled.
            rngs: One generator per environment. Only generators spawned from them are read, so that an episode's
                jobs and phases do not depend on which knobs are enabled.
        """
        physics = config.site.knobs
        self._shape = site.n_gpus.shape
        n = self._n = site.n_gpus.size
        uniforms = np.stack([rng.spawn(1)[0].random((2, self._shape[1])) for rng in rngs], axis=1)
        self._comm, self._straggler = (
            (low + (0.5 + config.site.randomise * (u - 0.5)) * (high - low)).reshape(n)
            for u, (low, high) in zip(uniforms, (physics.comm_share, physics.straggler_share), strict=True)
        )
        idle = library.idle_share[site.surface] * library.power_w[site.surface, -1] * site.n_gpus
        self._set_micro_batches(site, library, micro)
        self.table = KnobTable(
            micro_batch=self._sizes,
            micro_batches=self._count,
            samples_per_update=self._samples,
            power_w=self._nominal_w,
            throughput=self._nominal_speed,
            idle_w=idle,
            comm_share=np.full(self._shape, sum(physics.comm_share) / 2.0),
            straggler_share=np.full(self._shape, sum(physics.straggler_share) / 2.0),
            max_local_steps=np.full(self._shape, config.knob_rules.max_local_steps),
        )
        self.idle_w = idle.reshape(n)
        self._n_gpus = site.n_gpus.reshape(n)
        self._columns = np.arange(n)
        self._steps = self._sizes.shape[2]
        self._asked = np.stack([np.zeros(n), self._n_gpus, np.ones(n), np.ones(n)])
        self._in_force = self._asked.copy()
        delay = site.delay.reshape(n)
        depth = int(delay.max()) + 1
        self._sent = np.repeat(self._asked[None], depth, axis=0)
        self._arriving = [(slot - delay) % depth for slot in range(depth)]
        self._step_s, self._period_s = physics.step_s, config.period_s
        self._left_s = np.full(n, physics.step_s)
        self._lost_s = np.zeros(n)
        self._costs_s = self._switching(physics, library, site)
        self._work_out()

    def command(self, command: Command, lost: NDArray[np.bool_] | None) -> None:
        """Takes a command in.

        Args:
            command: The whole setting.
            lost: Where it does not arrive, shape `(B, J)`; the one before stays in force.

        Raises:
            UserError: A job cannot have the setting; nothing was changed.
        """
        whole = self.table.filled(command, self._n_gpus.reshape(self._shape))
        assert whole.micro_batch is not None
        values = self.table.micro_index(whole.micro_batch), whole.active_gpus, whole.duty, whole.local_steps
        asked = np.array(values, dtype=np.float64).reshape(4, self._n)
        self._asked = asked if lost is None else np.where(lost.reshape(self._n), self._asked, asked)

    def take_up(self, tick: int, speed: FloatArray, computing: NDArray[np.bool_]) -> None:
        """Brings into force what has arrived and meets the end of a step in the coming period.

        Args:
            tick: Control periods since reset.
            speed: Speed of each job until now, shape `(N,)`.
            computing: Which jobs are in the middle of optimiser steps, shape `(N,)`; the others wait for none.
        """
        depth = len(self._arriving)
        slot = tick % depth
        self._sent[slot] = self._asked
        arrived = self._sent[self._arriving[slot], :, self._columns].T
        # A paused job takes nothing else up until it goes on, as a live one that waits between two steps.
        arrived = np.where((arrived[_DUTY] == 0.0) & _BESIDE_DUTY, self._in_force, arrived)
        changed = arrived != self._in_force
        # A paused job stands between two steps.
        ends = (self._left_s <= self._period_s * speed) | ~computing | (self._in_force[_DUTY] == 0.0)
        now = changed.any(axis=0) & ends
        if now.any():
            self._lost_s += np.where(now, (self._costs_s * changed).sum(axis=0), 0.0)
            self._in_force = np.where(now, arrived, self._in_force)
            self._work_out()

    def progress(self, progress: FloatArray) -> FloatArray:
        """Training progress of the period after what changes cost; moves the step clock on.

        Args:
            progress: Mean speed over the period as settings and limits allow it, shape `(N,)`.
        """
        if self._lost_s.any():
            lost = np.minimum(self._lost_s, self._period_s)
            self._lost_s -= lost
            progress = progress * (1.0 - lost / self._period_s)
        self._left_s -= self._period_s * progress
        self._left_s -= np.floor(self._left_s / self._step_s) * self._step_s
        return progress

    @property
    def true_table(self) -> KnobTable:
        """The table with true power, throughput and shares in place of the nominal."""
        shape = (*self._shape, self._steps)
        ceiling, speed = self.limit_tables.reshape(2, *shape, GRID)
        return replace(
            self.table,
            power_w=np.minimum(ceiling, self._demand_w.reshape(shape)[..., None]),
            throughput=speed,
            comm_share=self._comm.reshape(self._shape),
            straggler_share=self._straggler.reshape(self._shape),
        )

    @property
    def setting(self) -> Command:
        """The setting in force; its limits are not known here and left empty."""
        micro, active, duty, steps = self._in_force.reshape(4, *self._shape)
        sizes = np.take_along_axis(self._sizes, micro.astype(np.int64)[..., None], axis=2)[..., 0]
        return Command(np.empty(0), sizes, active.astype(np.int64), duty, steps.astype(np.int64))

    def _work_out(self) -> None:
        micro, active, duty, steps = self._in_force
        row = self._columns * self._steps + micro.astype(np.intp)
        self.table_base = row * GRID
        self.demand_w = self._demand_w[row]
        self.share = working_share(self._n_gpus, active, duty)
        self.factor = duty * active_speed(self._n_gpus, active, steps, self._comm, self._straggler)

    def _switching(self, physics: KnobPhysics, library: SiteLibrary, site: DrawnSite) -> FloatArray:
        """Training time that a change of each knob costs each job, shape `(4, N)`, s; what was measured comes first."""
        configured = [physics.micro_batch_switch_s, physics.active_gpus_switch_s, 0.0, physics.local_steps_switch_s]
        costs = np.repeat(np.array(configured)[:, None], self._n, axis=1)
        if library.calibrated is not None:
            told = [None if job.knobs is None else job.knobs.switch_s for job in library.calibrated.profiles]
            own = np.array([np.nan if value is None else value for value in told])[site.surface.reshape(self._n)]
            costs = np.where(np.isfinite(own) & _BESIDE_DUTY, own, costs)
        return costs

    def _set_micro_batches(self, site: DrawnSite, library: SiteLibrary, micro: MicroBatches | None) -> None:
        """Tables of every micro-batch; a single one where that knob is not enabled."""
        surface = site.surface
        if micro is None:
            self._sizes = np.ones((*self._shape, 1), dtype=np.int64)
            self._count = self._samples = np.ones(self._shape, dtype=np.int64)
            power, tables = library.power_w[:, None], [site.tables]
        else:
            self._sizes, self._count = micro.sizes[surface], micro.count[surface]
            self._samples = micro.samples_per_update[surface]
            power, speed = micro.power_w, micro.throughput
            tables = [site.truth.tables(library, power[:, m], speed[:, m]) for m in range(power.shape[1])]
        self._nominal_w = np.stack([table.nominal_w for table in tables], axis=2)
        self._nominal_speed = np.stack([table.nominal_speed for table in tables], axis=2)
        ceiling = np.stack([table.ceiling_w for table in tables], axis=2)
        true_speed = np.stack([table.speed for table in tables], axis=2)
        demand = power[surface, :, -1] * site.truth.excess[..., None] * site.n_gpus[..., None]
        self._demand_w = demand.reshape(-1)
        self.limit_tables = np.stack([ceiling.reshape(-1), true_speed.reshape(-1)])
