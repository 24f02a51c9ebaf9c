"""Everything an emulated site can be drawn from, laid out as arrays once per process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.envs.config import SiteConfig
from wattgym.envs.emulator.phases import PhaseFamily, load_phase_families
from wattgym.envs.emulator.surfaces import Surface, surface_library
from wattgym.envs.plant import FloatArray, IntArray
from wattgym.errors import UserError
from wattgym.hw.presets import GpuPreset, Ranged, gpu_preset

FINE_POINTS = 129
"""Caps per tabulated surface; linear interpolation between them errs by less than 0.1 % of full power."""

RANGED = ("call_s", "dead_time_s", "down_tau_s", "up_tau_s", "recovery_tau_s", "undershoot", "drawn_share")
"""Actuator parameters drawn per job."""


@dataclass(frozen=True, eq=False)
class SiteLibrary:
    """Surfaces `S`, their boards' parameters, and phase families, as arrays indexed by surface.

    Attributes:
        surfaces: The surfaces that jobs are drawn from.
        families: Phase families that jobs are drawn from.
        power_w: Measured power per GPU on a fine cap grid, shape `(S, F)`, W.
        throughput: Throughput relative to the highest cap on the same grid, shape `(S, F)`.
        throughput_sd: Uncertainty of that, shape `(S, F)`.
        power_range: Range of the full power as a share of it, shape `(S, 2)`.
        cap_w: Lowest and highest cap of the grid, shape `(S, 2)`, W.
        limit_w: Settable minimum, maximum and default power limit, shape `(S, 3)`, W.
        ranges: Value, low and high of each `RANGED` parameter, shape `(7, S, 3)`.
        sensor: Period, window (s), gain sd, offset sd (W) of the chosen reading, shape `(S, 4)`.
        idle_share: Power of an idle board with a context, as a share of the surface's full power, shape `(S,)`.
    """

    surfaces: tuple[Surface, ...]
    families: tuple[PhaseFamily, ...]
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
            UserError: A surface or phase family is unknown, or a data file is missing.
        """
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


def _sensor_row(preset: GpuPreset, reading: str) -> tuple[float, float, float, float]:
    sensor = preset.sensor
    window = {
        "default": sensor.default_window_s,
        "instant": sensor.instant_window_s,
        # Boards without an average field keep their only reading, as a driver does.
        "average": sensor.average_window_s or sensor.default_window_s,
    }[reading]
    return sensor.period_s, window, sensor.gain_sd, sensor.offset_sd_w
