"""Everything an emulated site can be drawn from, laid out as arrays once per process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.envs.config import SiteConfig
from wattgym.envs.emulator.phases import PhaseFamily, load_phase_families
from wattgym.envs.emulator.surfaces import Surface, surface_library
from wattgym.envs.plant import FloatArray, IntArray
from wattgym.envs.profile import JobProfile, load_profile
from wattgym.errors import UserError
from wattgym.hw.presets import GpuPreset, Ranged, gpu_preset

FINE_POINTS = 129
"""Caps per tabulated surface; linear interpolation between them errs by less than 0.1 % of full power."""

RANGED = ("call_s", "dead_time_s", "down_tau_s", "up_tau_s", "recovery_tau_s", "undershoot", "drawn_share")
"""Actuator parameters drawn per job."""


SQRT_3 = 3.0**0.5
"""Half-width of a uniform distribution over its standard deviation."""


@dataclass(frozen=True, eq=False)
class CalibratedJobs:
    """Jobs that a profile fixes: job `j` has surface `j`.

    Attributes:
        n_gpus: GPUs of each job, shape `(J,)`.
        family: Phase family of each job, shape `(J,)`; -1 = drawn.
        profiles: What is known of them.
    """

    n_gpus: IntArray
    family: IntArray
    profiles: tuple[JobProfile, ...]


@dataclass(frozen=True, eq=False)
class SiteLibrary:
    """Surfaces `S`, their boards' parameters, and phase families, as arrays indexed by surface.

    Attributes:
        surfaces: The response surfaces that jobs are drawn from; none where a profile fixes the jobs.
        families: Phase families; the first `drawable` are those that jobs are drawn from.
        drawable: How many.
        calibrated: The jobs that a profile fixes; None where jobs are drawn.
        power_w: Measured power per GPU on a fine cap grid, shape `(S, F)`, W.
        throughput: Throughput relative to the highest cap on the same grid, shape `(S, F)`.
        throughput_sd: Uncertainty of that, shape `(S, F)`.
        power_range: Range of the full power as a share of it, shape `(S, 2)`.
        cap_w: Lowest and highest cap of the grid, shape `(S, 2)`, W.
        limit_w: Settable minimum, maximum and default power limit, shape `(S, 3)`, W.
        ranges: Value, low and high of each `RANGED` parameter, shape `(7, S, 3)`.
        sensor: Period, window (s), gain, gain sd, offset sd (W) of the chosen reading, shape `(S, 5)`.
        idle_share: Power of an idle board with a context, as a share of the surface's full power, shape `(S,)`.
    """

    surfaces: tuple[Surface, ...]
    families: tuple[PhaseFamily, ...]
    drawable: int
    calibrated: CalibratedJobs | None
    power_w: FloatArray
    throughput: FloatArray
    throughput_sd: FloatArray
    power_range: FloatArray
    cap_w: FloatArray
    limit_w: FloatArray
    ranges: FloatArray
    sensor: FloatArray
    idle_share: FloatArray

    @classmethod
    def build(cls, config: SiteConfig) -> SiteLibrary:
        """Lays out what a configuration allows.

        Raises:
            UserError: A surface or phase family is unknown, or a data file or profile cannot be used.
        """
        if config.profile is not None:
            return cls._of_profile(config, config.profile)
        surfaces = _select_surfaces(config)
        families = _select_families(config)
        presets = [gpu_preset(s.gpu) for s in surfaces]
        limits = [
            (max(p.limits_w.min, s.cap_min_w), min(p.limits_w.max, s.cap_max_w))
            for p, s in zip(presets, surfaces, strict=True)
        ]
        fine = [np.linspace(s.cap_min_w, s.cap_max_w, FINE_POINTS) for s in surfaces]
        tables = [s.tabulate(grid) for s, grid in zip(surfaces, fine, strict=True)]
        ranges = [[_triple(getattr(p.actuator, name)) for p in presets] for name in RANGED]
        return cls(
            surfaces=surfaces,
            families=families,
            drawable=len(families),
            calibrated=None,
            power_w=np.array([t[0] for t in tables]),
            throughput=np.array([t[1] for t in tables]),
            throughput_sd=np.array(
                [np.interp(g, s.caps_w, s.throughput_sd) for s, g in zip(surfaces, fine, strict=True)]
            ),
            power_range=np.array([np.array(s.power_range_w) / s.power_w[-1] for s in surfaces]),
            cap_w=np.array([(s.cap_min_w, s.cap_max_w) for s in surfaces]),
            limit_w=np.array(
                [(low, high, min(p.limits_w.default, high)) for (low, high), p in zip(limits, presets, strict=True)]
            ),
            ranges=np.array(ranges),
            sensor=np.array([_sensor_row(p, config.sensor) for p in presets]),
            idle_share=np.array(
                [min(p.context_idle_w.value / s.power_w[-1], 1.0) for p, s in zip(presets, surfaces, strict=True)]
            ),
        )

    @classmethod
    def _of_profile(cls, config: SiteConfig, path: str) -> SiteLibrary:
        jobs = load_profile(path).jobs
        if len(jobs) != config.jobs:
            raise UserError(f"site.profile: {path} describes {len(jobs)} jobs, site.jobs is {config.jobs}")
        selected = _select_families(config)
        own = [] if config.phase_families else [job.phases for job in jobs if job.phases is not None]
        place = iter(range(len(selected), len(selected) + len(own)))
        family = [-1 if job.phases is None or config.phase_families else next(place) for job in jobs]
        presets = [gpu_preset(job.gpu) for job in jobs]
        fine = [np.linspace(job.limit_w[0], job.limit_w[-1], FINE_POINTS) for job in jobs]
        return cls(
            surfaces=(),
            families=(*selected, *own),
            drawable=len(selected),
            calibrated=CalibratedJobs(
                n_gpus=np.array([job.n_gpus for job in jobs]),
                family=np.array(family),
                profiles=jobs,
            ),
            power_w=np.array([job.power_at(grid) / job.n_gpus for job, grid in zip(jobs, fine, strict=True)]),
            throughput=np.array([job.throughput_at(grid) for job, grid in zip(jobs, fine, strict=True)]),
            throughput_sd=np.array(
                [
                    np.interp(g, j.limit_w, j.throughput_sd or np.zeros_like(j.limit_w))
                    for j, g in zip(jobs, fine, strict=True)
                ]
            ),
            power_range=np.array([_around(1.0, _power_sd(job)[-1]) for job in jobs]),
            cap_w=np.array([(job.limit_w[0], job.limit_w[-1]) for job in jobs]),
            limit_w=np.array([(job.limit_w[0], job.limit_w[-1], job.rules_default_w) for job in jobs]),
            ranges=np.array([_measured_actuator(j, p) for j, p in zip(jobs, presets, strict=True)]).swapaxes(0, 1),
            sensor=np.array([(j.sensor_period_s, j.sensor_window_s, j.sensor_gain, 0.0, 0.0) for j in jobs]),
            idle_share=np.array([min(job.idle_w / job.full_power_w, 1.0) for job in jobs]),
        )

    def lookup(self, table: FloatArray, surface: IntArray, cap_w: FloatArray) -> FloatArray:
        """Linear interpolation of a fine table at caps beyond which it is held constant.

        Args:
            table: One of the `(S, F)` tables.
            surface: Surface of each job, any shape.
            cap_w: Caps per GPU, shape of `surface` plus one axis, W.
        """
        low, high = self.cap_w[surface, 0, None], self.cap_w[surface, 1, None]
        x = np.clip((cap_w - low) / (high - low), 0.0, 1.0) * (FINE_POINTS - 1)
        index = np.minimum(x.astype(np.intp), FINE_POINTS - 2)
        left = table[surface[..., None], index]
        value: FloatArray = left + (x - index) * (table[surface[..., None], index + 1] - left)
        return value


def _select_surfaces(config: SiteConfig) -> tuple[Surface, ...]:
    library = surface_library()
    if isinstance(config.surfaces, tuple):
        return tuple(library.get(surface_id) for surface_id in config.surfaces)
    return tuple(library.select(split=config.surfaces, cap_sensitive=True))


def _select_families(config: SiteConfig) -> tuple[PhaseFamily, ...]:
    families = load_phase_families()
    names = config.phase_families or tuple(families)
    for name in names:
        if name not in families:
            raise UserError(f"site.phase_families: unknown '{name}'; known: {', '.join(families)}")
    return tuple(families[name] for name in names)


def _triple(ranged: Ranged) -> tuple[float, float, float]:
    return ranged.value, ranged.low, ranged.high


def _sensor_row(preset: GpuPreset, reading: str) -> tuple[float, float, float, float, float]:
    sensor = preset.sensor
    window = {
        "default": sensor.default_window_s,
        "instant": sensor.instant_window_s,
        # Boards without an average field keep their only reading, as a driver does.
        "average": sensor.average_window_s or sensor.default_window_s,
    }[reading]
    return sensor.period_s, window, 1.0, sensor.gain_sd, sensor.offset_sd_w


def _power_sd(job: JobProfile) -> FloatArray:
    """Standard deviation of the power at each limit, as a share of it."""
    share: FloatArray = np.array(job.power_sd_w or np.zeros_like(job.power_w)) / np.array(job.power_w)
    return share


def _around(value: float, sd: float) -> tuple[float, float]:
    """Range whose uniform distribution has the given mean and (relative) standard deviation."""
    return value * (1.0 - SQRT_3 * sd), value * (1.0 + SQRT_3 * sd)


def _measured_actuator(job: JobProfile, preset: GpuPreset) -> list[tuple[float, float, float]]:
    """Rows of `RANGED` for one measured job.

    Only the time until the draw has moved half-way was measured: a falling draw of time constant `tau` has, after a
    dead time, moved half-way in `tau ln 2`. Shapes stay the preset's; a job that is slowed by waiting has none.
    """
    measured = {name: (value, value, value) for name, value in _central(job, preset).items()}
    binding = np.array(job.power_w) < 0.9 * job.full_power_w
    if binding.any():
        share = float(np.median((np.array(job.power_w) / np.array(job.limit_w))[binding]))
        low, high = _around(share, float(_power_sd(job)[binding].mean()))
        measured["drawn_share"] = (share, low, high)
    return [measured[name] for name in RANGED]


def _central(job: JobProfile, preset: GpuPreset) -> dict[str, float]:
    central = {name: getattr(preset.actuator, name).value for name in RANGED}
    if job.actuator == "duty_cycle":
        central |= {"undershoot": 0.0}
    half_way_s = float(np.log(2.0)) * central["down_tau_s"]
    return central | {"call_s": 0.0, "dead_time_s": max(job.delay_s - half_way_s, 0.0)}
