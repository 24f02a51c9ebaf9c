"""Draws one episode's site: jobs, boards and their true parameters, from one generator per environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from wattgym.envs.config import SiteConfig
from wattgym.envs.emulator.library import RANGED, SiteLibrary
from wattgym.envs.plant import FloatArray, IntArray
from wattgym.hw.limits import CommandRules, ShapedLimits

GRID = 33
"""Points of a job's limit range at which its tables are kept; linear interpolation between them."""

_UNIFORMS = (
    *RANGED, "surface", "gpus", "family", "full_power", "throughput", "delay",
    "sensor_phase", "gain", "offset", "start",
)  # fmt: skip
_ROW = {name: row for row, name in enumerate(_UNIFORMS)}

GAIN_CLIP = 0.06
"""Sensor gains are normal within ±6 %, the range seen over boards (arXiv 2312.02741)."""


@dataclass(frozen=True, eq=False)
class LimitTables:
    """Power and throughput of jobs at each limit of their range, shape `(B, J, GRID)`.

    Attributes:
        ceiling_w: True power that each limit allows, W.
        speed: True throughput at each limit, relative to the nominal full speed.
        nominal_w: Nominal power at each limit, W.
        nominal_speed: Nominal throughput at each limit.
    """

    ceiling_w: FloatArray
    speed: FloatArray
    nominal_w: FloatArray
    nominal_speed: FloatArray


@dataclass(frozen=True, eq=False)
class Truth:
    """How jobs differ from their nominal description, shape `(B, J)`.

    Attributes:
        surface: Index of the job's surface in the library.
        n_gpus: GPUs of the job.
        limits_w: Limits at which tables are kept, shape `(B, J, GRID)`, W per GPU.
        drawn_share: Share of a binding limit that is drawn.
        drawn_ratio: That over its central value.
        excess: True power when no limit binds over the nominal one.
        throughput_error: Error of the nominal throughput, in the surface's standard deviations.
    """

    surface: IntArray
    n_gpus: IntArray
    limits_w: FloatArray
    drawn_share: FloatArray
    drawn_ratio: FloatArray
    excess: FloatArray
    throughput_error: FloatArray

    def tables(self, library: SiteLibrary, power_w: FloatArray, throughput: FloatArray) -> LimitTables:
        """What limits do to the jobs.

        A job's true demand differs from the calibrated one; a limit allows what it allows, whoever asks for it. A job
        that asks for more is throttled sooner: at a limit c it runs as a nominal job would at c divided by its excess.

        Args:
            library: What the jobs were drawn from.
            power_w: Power per GPU of every surface on the library's cap grid, shape `(S, F)`, W.
            throughput: Throughput likewise.
        """
        surface, limits, n_gpus = self.surface, self.limits_w, self.n_gpus[..., None]
        nominal_w = library.lookup(power_w, surface, limits)
        nominal_speed = library.lookup(throughput, surface, limits)
        ceiling = _ceiling(nominal_w, power_w[surface, -1], self.drawn_share, self.drawn_ratio, limits)
        speed = library.lookup(throughput, surface, limits / self.excess[..., None])
        error = self.throughput_error[..., None] * library.lookup(library.throughput_sd, surface, limits)
        return LimitTables(ceiling * n_gpus, np.maximum(speed + error, 0.01), nominal_w * n_gpus, nominal_speed)


@dataclass(frozen=True, eq=False)
class DrawnSite:
    """True and nominal parameters of `B` sites of `J` jobs; arrays are `(B, J)` unless they say otherwise.

    Attributes:
        surface: Index of the job's surface in the library.
        family: Index of its phase family.
        n_gpus: GPUs of the job.
        shaped: Command rules worked out for the jobs' boards.
        default_limit_w: Power limit in force at the start, per GPU, W.
        demand_w: True power of the job when no limit binds, W.
        grid: Fractions of the limit range, shape `(GRID,)`.
        truth: How the jobs differ from their nominal description.
        tables: What limits do to the jobs.
        actuator: Rows of `RANGED`, shape `(7, B, J)`.
        delay: Whole periods by which commands act late.
        sensor_window_s: Averaging window of the reading, s.
        sensor_lag_s: Time from the last publication to the end of a period, s.
        sensor_gain: Gain of the reading.
        sensor_offset_w: Offset of the reading, whole job, W.
        start: Uniform position of the episode's start within the job's first cycle.
    """

    surface: IntArray
    family: IntArray
    n_gpus: IntArray
    shaped: ShapedLimits
    default_limit_w: FloatArray
    demand_w: FloatArray
    grid: FloatArray
    truth: Truth
    tables: LimitTables
    actuator: FloatArray
    delay: IntArray
    sensor_window_s: FloatArray
    sensor_lag_s: FloatArray
    sensor_gain: FloatArray
    sensor_offset_w: FloatArray
    start: FloatArray


def draw_sites(
    config: SiteConfig, rules: CommandRules, library: SiteLibrary, rngs: Sequence[np.random.Generator]
) -> DrawnSite:
    """Draws one site per generator.

    Args:
        config: What may be drawn.
        rules: Command rules in force.
        library: What jobs are drawn from.
        rngs: One generator per environment; each is read the same number of times whatever the others draw.

    Returns:
        The sites, batched in the order of the generators.
    """
    u = np.stack([rng.random((len(_UNIFORMS), config.jobs)) for rng in rngs], axis=1)
    row = {name: u[index] for name, index in _ROW.items()}
    spread = config.randomise

    surface, n_gpus, family = _choose_jobs(row, config, library)
    ranges = library.ranges[:, surface]
    actuator = _in_range(ranges, u[: len(RANGED)], spread)

    low, high, default = (library.limit_w[surface, i] for i in range(3))
    shaped = ShapedLimits(low, high, default, rules)
    grid = np.linspace(0.0, 1.0, GRID)
    limits = shaped.low_w[..., None] + grid * (shaped.high_w - shaped.low_w)[..., None]
    low_share, high_share = (library.power_range[surface, i] for i in range(2))
    own = low_share + row["full_power"] * (high_share - low_share)
    if library.calibrated is None:
        own = own * (1.0 + config.power_spread * (2.0 * row["full_power"] - 1.0))
    drawn = RANGED.index("drawn_share")
    truth = Truth(
        surface=surface,
        n_gpus=n_gpus,
        limits_w=limits,
        drawn_share=actuator[drawn],
        drawn_ratio=actuator[drawn] / ranges[drawn, ..., 0],
        excess=1.0 + spread * (own - 1.0),
        throughput_error=spread * _normal(row["throughput"]),
    )

    period, window, gain, gain_sd, offset_sd = (library.sensor[surface, i] for i in range(5))
    gain = gain + np.clip(spread * gain_sd * _normal(row["gain"]), -GAIN_CLIP, GAIN_CLIP)
    low_delay, high_delay = config.control_delay_periods
    return DrawnSite(
        surface=surface,
        family=family,
        n_gpus=n_gpus,
        shaped=shaped,
        default_limit_w=np.minimum(default, shaped.high_w),
        demand_w=library.power_w[surface, -1] * truth.excess * n_gpus,
        grid=grid,
        truth=truth,
        tables=truth.tables(library, library.power_w, library.throughput),
        actuator=actuator,
        delay=low_delay + _choose(row["delay"], high_delay - low_delay + 1),
        sensor_window_s=window,
        sensor_lag_s=row["sensor_phase"] * period,
        sensor_gain=gain,
        sensor_offset_w=spread * offset_sd * _normal(row["offset"]) * n_gpus,
        start=row["start"],
    )


def _choose_jobs(
    row: dict[str, FloatArray], config: SiteConfig, library: SiteLibrary
) -> tuple[IntArray, IntArray, IntArray]:
    """Surface, GPUs and phase family of each job, each `(B, J)`."""
    family = _choose(row["family"], library.drawable)
    jobs = library.calibrated
    if jobs is None:
        n_gpus = np.array(config.gpus_per_job)[_choose(row["gpus"], len(config.gpus_per_job))]
        return _choose(row["surface"], len(library.surfaces)), n_gpus, family
    shape = family.shape
    surface = np.broadcast_to(np.arange(shape[1]), shape)
    return surface, np.broadcast_to(jobs.n_gpus, shape), np.where(jobs.family >= 0, jobs.family, family)


def _ceiling(
    nominal_w: FloatArray, full_w: FloatArray, drawn_share: FloatArray, drawn_ratio: FloatArray, limits: FloatArray
) -> FloatArray:
    """Power per GPU that a limit allows, whatever is asked for.

    Where the limit binds, that is what was measured (a fixed share of the limit, or the board's floor). Near full
    power the measurement shows the job's own demand instead, so there the ceiling goes over to the share of the limit.
    """
    binding = np.clip((nominal_w / full_w[..., None] - 0.90) / 0.10, 0.0, 1.0)
    above = np.maximum(drawn_share[..., None] * limits - nominal_w, 0.0)
    ceiling: FloatArray = nominal_w * drawn_ratio[..., None] + binding * above
    return ceiling


def _choose(u: FloatArray, n: int) -> IntArray:
    return np.minimum((u * n).astype(np.int64), n - 1)


def _in_range(ranges: FloatArray, u: FloatArray, spread: float) -> FloatArray:
    """Value at u = 0.5, low at 0, high at 1, linear between; `spread` shrinks towards the value."""
    value, low, high = ranges[..., 0], ranges[..., 1], ranges[..., 2]
    offset = 2.0 * u - 1.0
    drawn: FloatArray = value + spread * offset * np.where(offset > 0, high - value, value - low)
    return drawn


def _normal(u: FloatArray) -> FloatArray:
    """Standard normal quantiles of uniforms, from a table of 2,048 (exact enough for parameters)."""
    return _QUANTILES[(u * _QUANTILES.size).astype(np.intp)]


_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 2048) for i in range(2048)])
