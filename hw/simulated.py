"""A simulated power-managed GPU behind the interface of a real one, with the faults that real ones show."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from wattgym.errors import UserError
from wattgym.hw.clock import Clock, MonotonicClock
from wattgym.hw.device import (
    Device,
    DeviceInfo,
    DeviceReading,
    PowerKind,
    checked_clocks_mhz,
    checked_limit_mw,
)
from wattgym.hw.presets import gpu_preset
from wattgym.hw.remedies import NvmlCode, device_error
from wattgym.hw.simulated_board import Board
from wattgym.hw.simulated_state import MAGIC, STATE, FileStore, MemoryStore, State, StateStore, stored_identity

_CAPABILITIES = (
    *("power", "energy", "sm_clock", "memory_clock", "temperature", "utilisation", "throttle_reasons"),
    *("requested_limit", "enforced_limit", "set_power_limit", "lock_clocks"),
)


@dataclass(frozen=True)
class Faults:
    """What is wrong with a simulated device; everything off by default.

    Attributes:
        permission_denied: Setters answer as to a user who is not root.
        set_ignored: The limit setter reports success and changes nothing.
        set_delay_s: The limit setter blocks this long before it acts.
        show_delay_s: A new limit shows, and acts, this much after the setter has returned.
        lost: The GPU fell off the bus.
        unknown_error: Every call fails as in a container that lost its devices.
        stale_sensor: Power and energy stay as last published; their age grows.
        implausible_power_w: What the power reading shows instead.
        mig: Split into instances; utilisation cannot be read.
        persistence_off: Persistence mode is off.
        no_energy_counter: There is no energy counter.
        bmc_limit_mw: An out-of-band limit, enforced where it is below the requested one.
        floor_w: The board cannot draw less than this under load, whatever its limit.
        min_limit_mw: Lowest settable limit, where the board's range is narrower than its preset's.
        max_limit_mw: Highest settable limit, likewise.
        nvml_index: Index that the driver gives, where it differs from the order of the devices.
    """

    permission_denied: bool = False
    set_ignored: bool = False
    set_delay_s: float = 0.0
    show_delay_s: float = 0.0
    lost: bool = False
    unknown_error: bool = False
    stale_sensor: bool = False
    implausible_power_w: float | None = None
    mig: bool = False
    persistence_off: bool = False
    no_energy_counter: bool = False
    bmc_limit_mw: int | None = None
    floor_w: float | None = None
    min_limit_mw: int | None = None
    max_limit_mw: int | None = None
    nvml_index: int | None = None

    def store(self, record: State) -> None:
        """Writes every field to a record; `None` as NaN, or as -1 where the field is an integer."""
        for field in fields(self):
            value = getattr(self, field.name)
            record[field.name] = (math.nan if field.name == "implausible_power_w" else -1) if value is None else value

    @classmethod
    def load(cls, record: State) -> Faults:
        """Reads a record back."""
        values = {field.name: record[field.name].item() for field in fields(cls)}
        for name in ("bmc_limit_mw", "floor_w", "min_limit_mw", "max_limit_mw", "nvml_index"):
            values[name] = values[name] if values[name] >= 0 else None
        if math.isnan(values["implausible_power_w"]):
            values["implausible_power_w"] = None
        return cls(**values)


class SimulatedDevice(Device):
    """One simulated GPU.

    With a state path, every process that opens the same path sees one and the same GPU (its clock must then be the
    machine's, the default).

    Args:
        preset: Name of a GPU preset.
        index: Its place in the machine; part of the UUID `SIM-<preset>-<index>`.
        seed: Draws the board's parameters from the preset's ranges, and its sensor's gain and offset.
        clock: Real by default; a virtual one makes the setter's latency pass at once.
        state_path: File that shares the state between processes.
        power_kind: Which reading `power_w` is: the instantaneous one, or the mean that `average` asks for.

    Raises:
        UserError: Unknown preset, a preset without that reading, or an unusable state file.
    """

    def __init__(
        self,
        preset: str = "h100-sxm",
        *,
        index: int = 0,
        seed: int | None = None,
        clock: Clock | None = None,
        state_path: Path | None = None,
        power_kind: PowerKind = PowerKind.INSTANT,
    ) -> None:
        if seed is not None and not 0 <= seed < 2**63:
            raise UserError(f"seed {seed} of a simulated device must be in 0 … 2**63 - 1")
        board = gpu_preset(preset)
        window_s = board.sensor.instant_window_s
        if power_kind != PowerKind.INSTANT:
            if board.sensor.average_window_s is None or power_kind != PowerKind.AVERAGE:
                raise UserError(f"GPU '{preset}' has no {power_kind} power reading; use 'instant'")
            window_s = board.sensor.average_window_s
        self.preset_name = preset
        self.state_path = state_path
        self._name = f"Simulated {preset}"
        self._window_s = window_s
        self._power_kind = power_kind
        self._clock: Clock = clock if clock is not None else MonotonicClock()
        self._board = Board(board, seed)
        initial = self._initial_state(preset, index, seed)
        self._store: StateStore = MemoryStore(initial) if state_path is None else FileStore(state_path, initial)
        self._uuid = f"SIM-{preset}-{index}"
        with self._transaction() as (state, _):
            self._info = self._describe(state, index)

    @classmethod
    def attach(cls, state_path: Path, wanted_seed: int | None = None) -> SimulatedDevice:
        """Opens the device whose state a file holds.

        Args:
            state_path: The file.
            wanted_seed: Seed that its board must have been drawn from; any if None.

        Raises:
            UserError: No such file, not a device's state, or of a board of another seed.
        """
        uuid, preset, index, seed = stored_identity(state_path)
        if wanted_seed not in (None, seed):
            raise UserError(f"{state_path}: {uuid} was drawn from seed {seed}, not {wanted_seed}; take another number")
        return cls(preset, index=index, seed=seed, state_path=state_path)

    # --- Device

    def info(self) -> DeviceInfo:
        """See `Device.info`."""
        return self._info

    def read(self) -> DeviceReading:
        """See `Device.read`."""
        with self._transaction() as (state, now_s):
            return self._reading(state, now_s)

    def set_power_limit_mw(self, limit_mw: int) -> None:
        """See `Device.set_power_limit_mw`; blocks for the board's call latency, on its clock."""
        wanted_mw = checked_limit_mw(limit_mw, self._uuid)
        with self._transaction() as (state, _):
            delay_s = self._board.call_s + float(state["faults"]["set_delay_s"])
        self._clock.sleep(delay_s)
        with self._transaction() as (state, now_s):
            self._require_permission(state, "set power limit")
            lowest, highest = self._constraints_mw(state)
            if not lowest <= wanted_mw <= highest:
                problem = f"{self._uuid}: power limit {wanted_mw} mW is outside {lowest} … {highest}"
                raise device_error(NvmlCode.INVALID_ARGUMENT, problem)
            state["writes"] += 1
            if state["faults"]["set_ignored"]:
                return
            if state["faults"]["show_delay_s"] > 0.0:
                state["late_mw"], state["late_at_s"] = wanted_mw, now_s + float(state["faults"]["show_delay_s"])
            else:
                self._board.request(state, now_s, wanted_mw)

    def requested_limit_mw(self) -> int:
        """See `Device.requested_limit_mw`."""
        with self._transaction() as (state, _):
            return int(state["requested_mw"])

    def enforced_limit_mw(self) -> int:
        """See `Device.enforced_limit_mw`."""
        with self._transaction() as (state, _):
            return self._board.enforced_mw(state)

    def lock_clocks_mhz(self, *, min_mhz: int, max_mhz: int) -> None:
        """See `Device.lock_clocks_mhz`; the minimum is not guaranteed, a power limit wins over it."""
        lowest, highest = checked_clocks_mhz(min_mhz, max_mhz, self._uuid)
        with self._transaction() as (state, now_s):
            self._require_permission(state, "lock clocks")
            state["locked_min_mhz"], state["locked_max_mhz"] = lowest, highest
            self._board.retarget(state, now_s, commanded=True)

    def reset_clocks(self) -> None:
        """See `Device.reset_clocks`."""
        with self._transaction() as (state, now_s):
            self._require_permission(state, "reset clocks")
            state["locked_min_mhz"] = state["locked_max_mhz"] = 0
            self._board.retarget(state, now_s, commanded=True)

    def close(self) -> None:
        """Nothing to release: the state stays, in its file if it has one."""

    # --- the load on it, and the truth about it

    def set_demand(self, demand: float) -> None:
        """Sets the load: 0 is a loaded but idle model, 1 is full training.

        Raises:
            UserError: Outside [0, 1], or NaN.
        """
        if not 0.0 <= demand <= 1.0:
            raise UserError(f"{self._uuid}: demand {demand} is outside 0 … 1")
        with self._transaction(healthy=False) as (state, now_s):
            state["demand"] = demand
            self._board.retarget(state, now_s, commanded=False)

    def true_power_w(self) -> float:
        """What the board really draws now, W; no real device tells."""
        with self._transaction(healthy=False) as (state, now_s):
            return self._board.power_w(state, now_s)

    def true_energy_j(self) -> float:
        """What it has really drawn since its state began, J."""
        with self._transaction(healthy=False) as (state, now_s):
            return self._board.energy_j(state, now_s)

    def writes(self) -> int:
        """How many limit writes the device has accepted since its state began, by anyone."""
        with self._transaction(healthy=False) as (state, _):
            return int(state["writes"])

    # --- faults

    def inject(self, faults: Faults) -> None:
        """Replaces the device's faults, for all processes that see it; `Faults()` mends it."""
        with self._transaction(healthy=False) as (state, now_s):
            if faults.stale_sensor != bool(state["faults"]["stale_sensor"]):
                state["stale_since_s"] = now_s if faults.stale_sensor else math.inf
            faults.store(state["faults"])
            self._board.retarget(state, now_s, commanded=True)

    def faults(self) -> Faults:
        """The faults in force."""
        with self._transaction(healthy=False) as (state, _):
            return Faults.load(state["faults"])

    def write_as_other(self, limit_mw: int) -> None:
        """Another program changes the limit."""
        with self._transaction(healthy=False) as (state, now_s):
            self._board.request(state, now_s, checked_limit_mw(limit_mw, self._uuid))

    def reload_driver(self) -> None:
        """The driver is unloaded and loaded: limit at its default, clocks unlocked, energy counter at 0."""
        with self._transaction(healthy=False) as (state, now_s):
            state["locked_min_mhz"] = state["locked_max_mhz"] = 0
            state["counter_start_s"], state["counter_start_j"] = now_s, self._board.energy_j(state, now_s)
            self._board.request(state, now_s, _milliwatts(self._board.preset.limits_w.default))

    # --- inside

    @contextmanager
    def _transaction(self, *, healthy: bool = True) -> Iterator[tuple[State, float]]:
        """The record, brought up to now, and the time; refused where the device does not answer."""
        with self._store.transaction() as state:
            now_s = self._clock.now_s()
            self._board.advance(state, now_s)
            if healthy and state["faults"]["lost"]:
                raise device_error(NvmlCode.GPU_IS_LOST, self._uuid)
            if healthy and state["faults"]["unknown_error"]:
                raise device_error(NvmlCode.UNKNOWN, self._uuid)
            yield state, now_s

    def _initial_state(self, preset: str, index: int, seed: int | None) -> State:
        state = np.zeros(1, dtype=STATE)[0]
        default_mw = _milliwatts(self._board.preset.limits_w.default)
        state["magic"], state["uuid"], state["preset"] = MAGIC, f"SIM-{preset}-{index}".encode(), preset.encode()
        state["seed"], state["index"] = -1 if seed is None else seed, index
        state["requested_mw"] = state["active_mw"] = default_mw
        state["pending_at_s"] = state["stale_since_s"] = math.inf
        Faults().store(state["faults"])
        self._board.start(state, self._clock.now_s())
        return state

    def _constraints_mw(self, state: State) -> tuple[int, int]:
        faults, limits = Faults.load(state["faults"]), self._board.preset.limits_w
        lowest = _milliwatts(limits.min) if faults.min_limit_mw is None else faults.min_limit_mw
        highest = _milliwatts(limits.max) if faults.max_limit_mw is None else faults.max_limit_mw
        return lowest, highest

    def _require_permission(self, state: State, action: str) -> None:
        if state["faults"]["permission_denied"]:
            raise device_error(NvmlCode.NO_PERMISSION, f"{self._uuid}: {action}")

    def _describe(self, state: State, index: int) -> DeviceInfo:
        faults = Faults.load(state["faults"])
        lowest, highest = self._constraints_mw(state)
        missing = device_error(NvmlCode.NOT_SUPPORTED, "").args[0].removeprefix(": ")
        capabilities = dict.fromkeys(_CAPABILITIES, "ok")
        if faults.no_energy_counter or not self._board.preset.sensor.energy_counter:
            capabilities["energy"] = missing
        if faults.mig:
            capabilities["utilisation"] = missing
        return DeviceInfo(
            uuid=self._uuid,
            name=self._name,
            index=index if faults.nvml_index is None else faults.nvml_index,
            backend="simulated",
            min_limit_mw=lowest,
            max_limit_mw=highest,
            default_limit_mw=_milliwatts(self._board.preset.limits_w.default),
            requested_limit_mw=int(state["requested_mw"]),
            enforced_limit_mw=self._board.enforced_mw(state),
            power_kind=self._power_kind,
            power_window_s=self._window_s,
            capabilities=capabilities,
            is_mig=faults.mig,
            persistence=not faults.persistence_off,
        )

    def _reading(self, state: State, now_s: float) -> DeviceReading:
        board, faults = self._board, state["faults"]
        power_w = board.sensed_w(state, now_s, self._window_s)
        if not math.isnan(faults["implausible_power_w"]):
            power_w = float(faults["implausible_power_w"])
        has_counter = board.preset.sensor.energy_counter and not faults["no_energy_counter"]
        return DeviceReading(
            t_s=now_s,
            age_s=now_s - board.published_at_s(state, now_s),
            power_w=power_w,
            power_kind=self._power_kind,
            energy_j=board.counter_j(state, now_s) if has_counter else None,
            sm_clock_mhz=board.sm_clock_mhz(state),
            memory_clock_mhz=board.preset.clock_mhz.memory,
            temperature_c=float(round(float(state["temperature_c"]))),
            utilisation=None if faults["mig"] else float(state["demand"]),
            throttle_reasons=board.reasons(state),
            requested_limit_mw=int(state["requested_mw"]),
            enforced_limit_mw=board.enforced_mw(state),
        )


def _milliwatts(watts: float) -> int:
    return round(1000 * watts)
