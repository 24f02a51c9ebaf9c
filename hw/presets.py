"""GPU presets: limits, draws, sensor and actuator parameters with their measured or assumed ranges."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from wattgym.config import FrozenModel, parse_config
from wattgym.errors import UserError


class Ranged(FrozenModel):
    """A value and the range that randomisation may draw it from."""

    value: float
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Ranged:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"needs low <= value <= high, got {self.low}, {self.value}, {self.high}")
        return self

    def draw(self, u: float, spread: float = 1.0) -> float:
        """Maps a uniform number to the range, triangularly around the value.

        Args:
            u: Uniform in [0, 1]; 0.5 gives the value itself.
            spread: 0 pins the value, 1 uses the whole range.
        """
        offset = 2.0 * u - 1.0
        side = self.high - self.value if offset > 0 else self.value - self.low
        return self.value + spread * offset * side


def _as_range(data: Any) -> Any:
    if isinstance(data, int | float):
        return {"value": data, "low": data, "high": data}
    if isinstance(data, list):
        if len(data) != 3:
            raise ValueError(f"a range is [value, low, high], got {data}")
        return dict(zip(("value", "low", "high"), data, strict=True))
    return data


RangedField = Annotated[Ranged, BeforeValidator(_as_range)]


class Limits(FrozenModel):
    """Settable power limits of one board, W."""

    min: float
    default: float
    max: float

    @model_validator(mode="after")
    def _ordered(self) -> Limits:
        if not 0 < self.min < self.default <= self.max:
            raise ValueError(f"needs 0 < min < default <= max, got {self.min}, {self.default}, {self.max}")
        return self


class Clocks(FrozenModel):
    """SM clock range and grid, and the memory clock, MHz."""

    min: float
    max: float
    step: float
    memory: float


class Voltage(FrozenModel):
    """Dynamic-power shape `P = V(f)^2 (static + dynamic f / f_max)`, V flat at `floor` below `knee`."""

    static_share: RangedField
    knee: RangedField
    floor: RangedField


class Sensor(FrozenModel):
    """How the board reports its power: `gain * mean(power over window) + offset`, published every `period_s`."""

    period_s: float
    default_window_s: float
    instant_window_s: float
    average_window_s: float | None
    gain_sd: float
    offset_sd_w: float
    energy_counter: bool


class Actuator(FrozenModel):
    """How the board's draw answers a new limit; see `wattgym.hw.physics`."""

    call_s: RangedField
    dead_time_s: RangedField
    down_tau_s: RangedField
    up_tau_s: RangedField
    recovery_tau_s: RangedField
    undershoot: RangedField
    drawn_share: RangedField
    loop_s: float


class GpuPreset(FrozenModel):
    """One board."""

    evidence: dict[str, str]
    limits_w: Limits
    idle_w: RangedField
    context_idle_w: RangedField
    training_w: RangedField
    clock_mhz: Clocks
    voltage: Voltage
    reachable_floor: RangedField
    sensor: Sensor
    actuator: Actuator


class _PresetFile(FrozenModel):
    presets: dict[str, GpuPreset]


@functools.cache
def load_presets() -> dict[str, GpuPreset]:
    """All shipped presets by board name."""
    import yaml

    text = resources.files("wattgym.hw").joinpath("presets.yaml").read_text(encoding="utf-8")
    return parse_config(_PresetFile, {"presets": yaml.safe_load(text)}, "presets.yaml").presets


def gpu_preset(name: str) -> GpuPreset:
    """The preset of one board.

    Raises:
        UserError: No preset has this name; the message lists those that exist.
    """
    presets = load_presets()
    if name not in presets:
        raise UserError(f"unknown GPU '{name}'; known: {', '.join(presets)}")
    return presets[name]
