"""The emulated plant: a batch of sites of training jobs under power limits, one array step a control period."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.draw import GRID, DrawnSite, draw_sites
from wattgym.envs.emulator.jitter import BLOCK, Jitter
from wattgym.envs.emulator.knob_dynamics import KnobDynamics
from wattgym.envs.emulator.library import RANGED, SiteLibrary
from wattgym.envs.emulator.micro_batch import MicroBatches
from wattgym.envs.emulator.segments import SEGMENTS, Segments, draw_segments
from wattgym.envs.plant import Command, FloatArray, IntArray, Phase, PlantSpec, Telemetry
from wattgym.envs.profile import JobProfile
from wattgym.errors import UserError
from wattgym.hw.physics import PowerResponse, TickKernel

_OFFSET_FULL, _OFFSET_PUBLISHED, _OFFSET_WINDOW = range(3)


class Emulator:
    """`B` sites of `J` jobs; all state is flat arrays of `N = B * J` jobs.

    Within a period a job's draw heads for the lower of what it asks for and what its limit allows: first under the old
    limit, then, once the new command has arrived, under the new one (`wattgym.hw.physics`).
    """

    _limit: FloatArray
    _elapsed: FloatArray
    _track_elapsed: bool
    _decisions: NDArray[np.uint8]
    _age: FloatArray
    _rows: FloatArray
    _heading: FloatArray
    _ceiling: FloatArray
    _speed: FloatArray
    _energy_total: FloatArray
    _sent: FloatArray
    _window_energy: FloatArray

    def __init__(self, config: PowerShapingConfig) -> None:
        """Prepares to draw sites.

        Raises:
            UserError: The configuration names unknown surfaces or families, or asks for a period that the command
                rules forbid.
        """
        if config.period_s < config.rules.interval_s:
            raise UserError(
                f"period_s {config.period_s:g} is shorter than rules.interval_s {config.rules.interval_s:g}: "
                "every other command would be refused"
            )
        self._config = config
        self._library = SiteLibrary.build(config.site)
        enabled = config.action.beside_limit
        self._micro = MicroBatches.build(self._library) if "micro_batch" in enabled else None
        self._knobs: KnobDynamics | None = None
        self._spec: PlantSpec | None = None

    @property
    def spec(self) -> PlantSpec:
        """Nominal description of the sites drawn last."""
        if self._spec is None:
            raise RuntimeError("the emulator has no site before its first reset")
        return self._spec

    @property
    def profiles(self) -> tuple[JobProfile, ...]:
        """What is known of each job of the first site drawn last."""
        spec, site = self.spec, self._site
        jobs = self._library.calibrated
        if jobs is not None:
            return jobs.profiles
        limits = spec.min_limit_w[0, :, None] + spec.limit_grid * (spec.max_limit_w - spec.min_limit_w)[0, :, None]
        found = []
        for j, index in enumerate(site.surface[0]):
            surface, gpus = self._library.surfaces[index], int(spec.n_gpus[0, j])
            found.append(
                JobProfile(
                    gpu=surface.gpu,
                    n_gpus=gpus,
                    model=surface.id,
                    samples_per_update=None if self._knobs is None else int(self._knobs.table.samples_per_update[0, j]),
                    default_limit_w=float(self._library.limit_w[index, 2]),
                    limit_w=tuple(limits[j].tolist()),
                    power_w=tuple((spec.power_table_w[0, j] / gpus).tolist()),
                    throughput=tuple(spec.throughput_table[0, j].tolist()),
                )
            )
        return tuple(found)

    def reset(self, rngs: Sequence[np.random.Generator]) -> Telemetry:
        """Draws one site per generator and starts it with no limit binding.

        Args:
            rngs: One generator per environment; the emulator goes on using them until the next reset.

        Returns:
            Telemetry of tick 0: jobs in steady state at their default limit.
        """
        config = self._config
        site = draw_sites(config.site, config.rules, self._library, rngs)
        idle = self._library.idle_share[site.surface]
        segments = draw_segments(self._library.families, site.family, idle, site.start, rngs)
        self._jitter = Jitter(self._library.families, site.family, config.period_s, config.site.command_loss, rngs)
        self._shape = site.family.shape
        self._n = site.family.size
        self._columns = np.arange(self._n)
        self._site = site
        self._tick = 0
        if config.action.beside_limit:
            self._knobs = KnobDynamics(config, site, self._library, self._micro, rngs)
        self._spec = self._describe(site)
        self._set_tables(site)
        self._set_phases(segments)
        self._set_dynamics(site)
        return self._first_telemetry(site)

    def apply(self, command: Command) -> None:
        """Commands limits and knobs for the coming period.

        Raises:
            UserError: A job cannot have the setting of a knob; nothing was changed.
        """
        k = self._tick % BLOCK
        lost = self._jitter.lost[k] if self._jitter.any_lost[k] else None
        if self._knobs is not None:
            self._knobs.command(command, lost)
        last = self._limit
        limit, self._decisions = self._site.shaped.shape(command.limit_w, last, self._elapsed)
        if lost is not None:
            limit = np.where(lost, last, limit)
        if self._track_elapsed:
            self._elapsed = np.where(limit != last, 0.0, self._elapsed) + self._config.period_s
        self._limit = limit

    def advance(self) -> Telemetry:
        """Lets one control period pass; returns what meters, sensors and jobs report at its end."""
        n, shape, period = self._n, self._shape, self._config.period_s
        ceiling, speed = self._in_force()
        jitter = self._jitter.relative[self._tick % BLOCK].reshape(n)
        load = self._level + self._jittering * (jitter - self._ripple())

        # Linear response: where the load itself heads at the start, then where the command sends it.
        rows = self._rows
        first, second = rows[TickKernel.P1], rows[TickKernel.P2]
        if self._knobs is None:
            demand = self._demand * load
            np.minimum(demand, self._ceiling, out=first)
            np.minimum(demand, ceiling, out=second)
        else:
            self._set_out(load, ceiling, first, second)
        drop = self._heading - first
        amplitudes = rows[TickKernel.A_DOWN : TickKernel.A_RECOVERY + 1]
        amplitudes[0] += np.maximum(drop, 0.0)
        amplitudes[1] += np.minimum(drop, 0.0)
        np.subtract(first, second, out=drop)
        np.maximum(drop, 0.0, out=rows[TickKernel.FALL2])
        np.minimum(drop, 0.0, out=rows[TickKernel.RISE2])
        energy = (self._kernel.energy_coefficients * rows).sum(axis=1)
        sensor = self._read_sensor(energy)
        self._kernel.decay_amplitudes(rows)
        self._heading = second.copy()

        # Training progress: the share of the period under the old limit and under the new one.
        progress = self._speed + self._share_new * (speed - self._speed)
        if self._knobs is not None:
            progress = self._knobs.progress(progress)
        throughput = progress * self._computing
        self._ceiling, self._speed = ceiling, speed
        self._pass_phases(progress)
        self._tick += 1
        if self._tick % BLOCK == 0:
            self._jitter.refill()
        return Telemetry(
            tick=self._tick,
            sensor_w=sensor.reshape(shape),
            meter_w=(energy[_OFFSET_FULL] / period).reshape(shape),
            host_w=self.spec.host_w,
            throughput=throughput.reshape(shape),
            phase=self._phase.reshape(shape),
            limit_w=self._limit,
            age_s=self._age,
            decisions=self._decisions,
            in_force=self.setting,
        )

    def close(self) -> None:
        """Nothing to release."""

    def fork(self) -> Emulator:
        """A twin in the same state with the same future, noise and lost commands included; for oracles alone.

        What becomes of the one does not touch the other.
        """
        constant = [self._config, self._library, self._micro, self._site, self._segments, self._spec, self._kernel]
        constant += [self._table] if self._knobs is None else [self._knobs.table, self._knobs.limit_tables]
        return copy.deepcopy(self, {id(shared): shared for shared in constant})

    @property
    def true_spec(self) -> PlantSpec:
        """The description with true power and throughput in place of the nominal; for oracles alone."""
        tables, demand = self._site.tables, self._site.demand_w[..., None]
        return replace(
            self.spec,
            power_table_w=np.minimum(tables.ceiling_w, demand),
            throughput_table=tables.speed,
            knobs=None if self._knobs is None else self._knobs.true_table,
        )

    @property
    def setting(self) -> Command | None:
        """The setting in force, every knob filled in; None where the power limit is the only knob."""
        return None if self._knobs is None else replace(self._knobs.setting, limit_w=self._limit)

    @property
    def delay_periods(self) -> IntArray:
        """Whole periods by which each job's commands act late, shape `(B, J)`; for oracles alone."""
        return self._site.delay

    def _describe(self, site: DrawnSite) -> PlantSpec:
        host = self._config.site.host_w_per_gpu * site.n_gpus.sum(axis=1)
        return PlantSpec(
            period_s=self._config.period_s,
            n_gpus=site.n_gpus,
            min_limit_w=site.shaped.low_w,
            max_limit_w=site.shaped.high_w,
            limit_grid=site.grid,
            power_table_w=site.tables.nominal_w,
            throughput_table=site.tables.nominal_speed,
            host_w=host.astype(np.float64),
            knobs=None if self._knobs is None else self._knobs.table,
        )

    def _set_tables(self, site: DrawnSite) -> None:
        n = self._n
        if self._knobs is None:
            self._table = np.stack([site.tables.ceiling_w.reshape(n * GRID), site.tables.speed.reshape(n * GRID)])
            self._table_base = np.arange(n) * GRID
        else:
            self._table, self._table_base = self._knobs.limit_tables, self._knobs.table_base
        self._low = site.shaped.low_w.reshape(n)
        self._per_watt = (GRID - 1) / np.maximum(site.shaped.high_w - site.shaped.low_w, 1e-9).reshape(n)
        self._demand = site.demand_w.reshape(n)

    def _set_dynamics(self, site: DrawnSite) -> None:
        n, period = self._n, self._config.period_s
        actuator = {name: site.actuator[i].reshape(n) for i, name in enumerate(RANGED)}
        response = PowerResponse(
            tau_s=np.stack([actuator["down_tau_s"], actuator["up_tau_s"], actuator["recovery_tau_s"]]),
            undershoot=actuator["undershoot"],
        )
        latency = np.minimum(actuator["call_s"] + actuator["dead_time_s"], period)
        self._share_new = (period - latency) / period

        # The reading at the period's end is the mean over a window that ended at the last publication and may have
        # begun in an earlier period; `back` says how many periods earlier.
        window = site.sensor_window_s.reshape(n)
        published = period - np.minimum(site.sensor_lag_s.reshape(n), period)
        begin = published - window
        back = np.maximum(np.ceil(-begin / period - 1e-12), 0.0)
        begin = begin + back * period
        self._kernel = TickKernel(response, period, latency, np.stack([np.full(n, period), published, begin]))
        self._gain_per_s = site.sensor_gain.reshape(n) / window
        self._offset_w = site.sensor_offset_w.reshape(n)
        self._back = back.astype(np.intp)

        self._limit = site.default_limit_w
        # Time since the last write matters only where a raise allowance can outlast the period.
        self._track_elapsed = self._config.rules.raise_window_s > period + 1e-9
        self._elapsed = np.full(self._shape, self._config.rules.raise_window_s if self._track_elapsed else period)
        # A ring of the commands sent, and for each of its slots where the commands that arrive now lie in it.
        delay = site.delay.reshape(n)
        depth = int(delay.max()) + 1
        self._sent = np.repeat(self._limit.reshape(1, n), depth, axis=0)
        self._arriving = [(slot - delay) % depth * n + self._columns for slot in range(depth)]
        self._decisions = np.zeros(self._shape, dtype=np.uint8)
        self._age = np.zeros(self._shape[0])

        self._ceiling, self._speed = self._lookup(self._limit.reshape(n))
        self._heading = np.minimum(self._demand * self._level, self._ceiling)
        self._rows = np.zeros((TickKernel.ROWS, n))
        history = int(self._back.max()) + 1
        # Before the start every job drew its steady power: energies at the window's begin, on a clock at 0 now. The
        # ring's row for tick k is k % history; rows now hold the ticks -history .. -1.
        ticks_ago = history - np.arange(history)[:, None]
        self._window_energy = self._heading * (begin - ticks_ago * period)
        self._energy_total = np.zeros(n)

    def _set_phases(self, segments: Segments) -> None:
        n = self._n
        self._segments = segments
        self._segment = np.zeros(n, dtype=np.intp)
        self._left = segments.first_left_s.copy()
        self._phase = np.empty(n, dtype=np.int64)
        self._level, self._computing = np.empty(n), np.empty(n)
        self._by_speed, self._jittering = np.empty(n), np.empty(n)
        self._enter(self._columns)
        ripples = [f.ripple for f in self._library.families]
        family = self._site.family.reshape(n)
        self._has_ripple = any(r is not None for r in ripples)
        # Two equal rows each: arithmetic on equal shapes is several times faster than broadcasting.
        self._ripple_period = np.tile(np.array([r.period_s if r else 1.0 for r in ripples])[family], (2, 1))
        self._ripple_dip = np.tile(np.array([r.dip_s if r else 0.0 for r in ripples])[family], (2, 1))
        gain = np.array([f.gpu_gain for f in self._library.families])[family]
        depth = np.array([r.depth if r else 0.0 for r in ripples])[family] * gain
        self._ripple_depth = depth / self._config.period_s
        self._steps_per_s = 1.0 / self._ripple_period
        self._ripple_left = np.empty((2, n))

    def _enter(self, jobs: IntArray) -> None:
        """Brings the phase-dependent arrays of some jobs up to date with their segment."""
        segment = self._segment[jobs]
        phase = self._segments.phase[segment % self._segments.phase.size]
        computing = phase == Phase.COMPUTE
        self._phase[jobs] = phase
        self._level[jobs] = self._segments.level[jobs, segment]
        self._computing[jobs] = computing
        self._jittering[jobs] = computing
        # Evaluation computes too, so a limit slows it; loading and writing do not care.
        self._by_speed[jobs] = computing | (phase == Phase.EVALUATE)

    def _pass_phases(self, progress: FloatArray) -> None:
        period = self._config.period_s
        self._left -= period * (1.0 + self._by_speed * (progress - 1.0))
        if self._left.min() > 0.0:
            return
        changed = np.flatnonzero(self._left <= 0.0)
        ended = changed
        while ended.size:
            self._segment[ended] = (self._segment[ended] + 1) % SEGMENTS
            self._left[ended] += self._segments.length_s[ended, self._segment[ended]]
            ended = ended[self._left[ended] <= 0.0]
        self._enter(changed)

    def _ripple(self) -> FloatArray | float:
        """Mean depth over the coming period of the dip at the end of each optimiser step."""
        if not self._has_ripple:
            return 0.0
        # Dips within what is left of the segment, now and a period later.
        left = self._ripple_left
        left[0] = self._left
        np.subtract(self._left, self._config.period_s, out=left[1])
        np.maximum(left[1], 0.0, out=left[1])
        steps = np.floor(left * self._steps_per_s)
        dip_s = steps * self._ripple_dip
        dip_s += np.minimum(left - steps * self._ripple_period, self._ripple_dip)
        dip: FloatArray = (dip_s[0] - dip_s[1]) * self._ripple_depth
        return dip

    def _in_force(self) -> tuple[FloatArray, FloatArray]:
        """Ceiling and speed under the command that arrives in this period."""
        slot = self._tick % len(self._arriving)
        self._sent[slot] = self._limit.reshape(self._n)
        knobs = self._knobs
        if knobs is None:
            return self._lookup(self._sent.take(self._arriving[slot]))
        self._before = knobs.demand_w, knobs.share
        knobs.take_up(self._tick, self._speed, self._by_speed > 0.0)
        self._table_base = knobs.table_base
        ceiling, speed = self._lookup(self._sent.take(self._arriving[slot]))
        return ceiling, speed * knobs.factor

    def _set_out(self, load: FloatArray, ceiling: FloatArray, first: FloatArray, second: FloatArray) -> None:
        """Where the draw heads under the old setting and under the new one, written to `first` and `second`."""
        knobs = self._knobs
        assert knobs is not None
        for demand_w, share, limit, out in (
            (*self._before, self._ceiling, first),
            (knobs.demand_w, knobs.share, ceiling, second),
        ):
            np.minimum(demand_w * load, limit, out=out)
            # Loading and writing go on whatever the knobs.
            out -= self._by_speed * (1.0 - share) * (out - knobs.idle_w)

    def _lookup(self, limit_w: FloatArray) -> tuple[FloatArray, FloatArray]:
        x = (limit_w - self._low) * self._per_watt
        index = np.minimum(x.astype(np.intp), GRID - 2)
        x -= index
        index += self._table_base
        value = self._table.take(index, axis=1)
        index += 1
        value += x * (self._table.take(index, axis=1) - value)
        return value[0], value[1]

    def _read_sensor(self, energy: FloatArray) -> FloatArray:
        history = self._window_energy.shape[0]
        total = self._energy_total
        self._window_energy[self._tick % history] = total + energy[_OFFSET_WINDOW]
        if history == 1:
            begin = self._window_energy[0]
        else:
            begin = self._window_energy[(self._tick - self._back) % history, self._columns]
        reading: FloatArray = (total + energy[_OFFSET_PUBLISHED] - begin) * self._gain_per_s + self._offset_w
        self._energy_total = total + energy[_OFFSET_FULL]
        return reading

    def _first_telemetry(self, site: DrawnSite) -> Telemetry:
        shape = self._shape
        power = self._heading.reshape(shape)
        return Telemetry(
            tick=0,
            sensor_w=power * site.sensor_gain + site.sensor_offset_w,
            meter_w=power,
            host_w=self.spec.host_w,
            throughput=(self._speed * self._computing).reshape(shape),
            phase=self._phase.reshape(shape),
            limit_w=self._limit,
            age_s=self._age,
            decisions=self._decisions,
            in_force=self.setting,
        )
