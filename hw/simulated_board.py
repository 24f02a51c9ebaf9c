"""The physics of one simulated board, as functions of its state record and the time."""

from __future__ import annotations

import math

import numpy as np

from wattgym.hw.physics import FloatArray, PowerResponse
from wattgym.hw.presets import GpuPreset, Ranged
from wattgym.hw.simulated_state import SEGMENTS, State
from wattgym.hw.voltage import PowerCurve

THERMAL_TAU_S = 30.0
"""Time constant of the core temperature; an assumption, boards with large heat sinks are slower."""
AMBIENT_C = 30.0
FULL_LOAD_RISE_C = 40.0
"""Rise above ambient at the highest limit; an assumption, air-cooled boards in racks sit near 70 °C."""

REASON_IDLE = 0x1
REASON_POWER_CAP = 0x4


class Board:
    """One board: a preset's values, or values drawn from its ranges by a seed.

    Three powers are kept apart: what the board draws, what its sensor publishes (`gain * mean over a window +
    offset`, every period, with a phase of its own), and the energy counter, which integrates the sensor's view.

    Args:
        preset: The kind of board.
        seed: Draws parameters, sensor gain and offset; without one the values are the preset's, the sensor exact.
    """

    def __init__(self, preset: GpuPreset, seed: int | None = None) -> None:
        random = None if seed is None else np.random.default_rng(seed)

        def value(quantity: Ranged) -> float:
            return quantity.value if random is None else quantity.draw(float(random.uniform()))

        self.preset = preset
        self.idle_w = value(preset.context_idle_w)
        self.training_w = value(preset.training_w)
        self.drawn_share = value(preset.actuator.drawn_share)
        # The lowest cap that can be held; what is drawn then lies as far under it as under any other cap.
        self.floor_w = self.drawn_share * value(preset.reachable_floor) * preset.limits_w.default
        self.dead_time_s = value(preset.actuator.dead_time_s)
        self.call_s = value(preset.actuator.call_s)
        self.curve = PowerCurve(
            static_share=value(preset.voltage.static_share),
            knee=value(preset.voltage.knee),
            floor=value(preset.voltage.floor),
        )
        taus = [value(tau) for tau in (preset.actuator.down_tau_s, preset.actuator.up_tau_s)]
        taus.append(value(preset.actuator.recovery_tau_s))
        self.response = PowerResponse(
            tau_s=np.array(taus)[:, None], undershoot=np.array([value(preset.actuator.undershoot)])
        )
        sensor = preset.sensor
        self.gain, self.offset_w, self.phase_s = 1.0, 0.0, 0.0
        if random is not None:
            self.gain = 1.0 + sensor.gain_sd * float(np.clip(random.standard_normal(), -2.0, 2.0))
            self.offset_w = sensor.offset_sd_w * float(np.clip(random.standard_normal(), -2.0, 2.0))
            self.phase_s = sensor.period_s * float(random.uniform())

    # --- what the board is asked to draw

    def wanted_w(self, state: State) -> float:
        """Draw without a power limit at the present load and locked clocks, W."""
        full_w = self.idle_w + float(state["demand"]) * (self.training_w - self.idle_w)
        locked = int(state["locked_max_mhz"])
        return full_w * self.curve.power_share(min(locked / self.preset.clock_mhz.max, 1.0)) if locked else full_w

    def target_w(self, state: State) -> float:
        """Draw that the board settles at, W: under the limit unless the limit is below what it can hold."""
        faults = state["faults"]
        floor_w = float(faults["floor_w"]) if faults["floor_w"] >= 0 else self.floor_w
        capped_w = max(self.drawn_share * self.obeyed_mw(state) / 1000.0, floor_w)
        return min(self.wanted_w(state), capped_w)

    def obeyed_mw(self, state: State) -> int:
        """The limit that the board's power loop works to by now, mW."""
        bmc = int(state["faults"]["bmc_limit_mw"])
        return min(int(state["active_mw"]), bmc) if bmc >= 0 else int(state["active_mw"])

    def enforced_mw(self, state: State) -> int:
        """The limit in force as the driver tells it, mW."""
        bmc = int(state["faults"]["bmc_limit_mw"])
        return min(int(state["requested_mw"]), bmc) if bmc >= 0 else int(state["requested_mw"])

    # --- time

    def start(self, state: State, now_s: float) -> None:
        """Begins the record's history in the steady state."""
        state["segments"] = 1
        segment = state["segment"][0]
        segment["at_s"], segment["energy_j"], segment["target_w"] = now_s, 0.0, self.target_w(state)
        segment["amplitude_w"] = 0.0
        state["counter_start_s"], state["counter_start_j"] = now_s, 0.0
        state["temperature_at_s"], state["temperature_c"] = now_s, self._final_temperature_c(segment["target_w"])

    def advance(self, state: State, now_s: float) -> None:
        """Brings the record up to a time.

        A time before the record's last change (a machine that rebooted has a younger clock) starts its history anew.
        """
        if now_s < state["segment"][int(state["segments"]) - 1]["at_s"] - 1.0:
            state["active_mw"], state["pending_at_s"] = state["requested_mw"], math.inf
            self.start(state, now_s)
        if state["late_mw"] and state["late_at_s"] <= now_s:
            self.request(state, float(state["late_at_s"]), int(state["late_mw"]))
        if state["pending_at_s"] <= now_s:
            at_s = float(state["pending_at_s"])
            state["active_mw"], state["pending_at_s"] = state["requested_mw"], math.inf
            self.retarget(state, at_s, commanded=True)
        elapsed = now_s - float(state["temperature_at_s"])
        if elapsed > 0.0:
            mean_w = (self.energy_j(state, now_s) - self.energy_j(state, now_s - elapsed)) / elapsed
            final_c = self._final_temperature_c(mean_w)
            state["temperature_c"] = final_c + (state["temperature_c"] - final_c) * math.exp(-elapsed / THERMAL_TAU_S)
            state["temperature_at_s"] = now_s

    def request(self, state: State, at_s: float, limit_mw: int) -> None:
        """A new requested limit; the board obeys it after its dead time."""
        state["requested_mw"], state["late_mw"] = limit_mw, 0
        if math.isinf(state["pending_at_s"]):
            state["pending_at_s"] = at_s + self.dead_time_s

    def retarget(self, state: State, at_s: float, *, commanded: bool) -> None:
        """Takes the state's new limit or load into account from `at_s` on."""
        used = int(state["segments"])
        last = state["segment"][used - 1]
        new_target = self.target_w(state)
        drop_w = float(last["target_w"]) - new_target
        if drop_w == 0.0:
            return
        dt_s = max(at_s - float(last["at_s"]), 0.0)
        energy_j = self.energy_j(state, float(last["at_s"]) + dt_s)
        now_amplitudes = self.response.amplitudes_after(_column(last["amplitude_w"]), dt_s)
        amplitudes = self.response.retarget(now_amplitudes, np.array([drop_w]), commanded=commanded)
        at_s = float(last["at_s"]) + dt_s
        if used == SEGMENTS:
            state["segment"][:-1] = state["segment"][1:].copy()
            used -= 1
        segment = state["segment"][used]
        segment["at_s"], segment["energy_j"], segment["target_w"] = at_s, energy_j, new_target
        segment["amplitude_w"] = amplitudes[:, 0]
        state["segments"] = used + 1

    # --- what the board draws, what it says it draws

    def power_w(self, state: State, at_s: float) -> float:
        """True draw, W."""
        segment = self._segment(state, at_s)
        dt_s = max(at_s - float(segment["at_s"]), 0.0)
        target = np.array([segment["target_w"]])
        return float(self.response.power_w(target, _column(segment["amplitude_w"]), dt_s)[0])

    def energy_j(self, state: State, at_s: float) -> float:
        """True energy since the record began, J; negative before, where the board is taken to have been steady."""
        segment = self._segment(state, at_s)
        dt_s = at_s - float(segment["at_s"])
        target = np.array([segment["target_w"]])
        return float(segment["energy_j"] + self.response.energy_j(target, _column(segment["amplitude_w"]), dt_s)[0])

    def published_at_s(self, state: State, now_s: float) -> float:
        """When the sensor last published, on the device's clock."""
        period_s = self.preset.sensor.period_s
        until = min(now_s, float(state["stale_since_s"]))
        return self.phase_s + math.floor((until - self.phase_s) / period_s) * period_s

    def sensed_w(self, state: State, now_s: float, window_s: float) -> float:
        """The sensor's mean over a window that ended when it last published, W, to the milliwatt."""
        end_s = self.published_at_s(state, now_s)
        mean_w = (self.energy_j(state, end_s) - self.energy_j(state, end_s - window_s)) / window_s
        return round(max(self.gain * mean_w + self.offset_w, 0.0), 3)

    def counter_j(self, state: State, now_s: float) -> float:
        """The energy counter, J, to the millijoule."""
        end_s = max(self.published_at_s(state, now_s), float(state["counter_start_s"]))
        true_j = self.energy_j(state, end_s) - float(state["counter_start_j"])
        seconds = end_s - float(state["counter_start_s"])
        return round(max(self.gain * true_j + self.offset_w * seconds, 0.0), 3)

    def sm_clock_mhz(self, state: State) -> float:
        """Clock at which the board settles, MHz, on its grid."""
        clocks = self.preset.clock_mhz
        full_w = self.idle_w + float(state["demand"]) * (self.training_w - self.idle_w)
        share = self.curve.clock_share(self.target_w(state) / full_w)
        lowest, highest = clocks.min, clocks.max
        if state["locked_max_mhz"]:
            highest = min(highest, max(float(state["locked_max_mhz"]), clocks.min))
        # Half a step of slack: the inverse stops a hair short of the clock that a lock or no limit asks for.
        steps = math.floor((share * clocks.max - clocks.min) / clocks.step + 1e-6)
        return min(max(clocks.min + steps * clocks.step, lowest), highest) if share < 1.0 else highest

    def reasons(self, state: State) -> int:
        """NVML's clocks-event bit mask."""
        capped = self.target_w(state) < self.wanted_w(state) - 1e-9
        idle = state["demand"] < 0.01
        return (REASON_POWER_CAP if capped else 0) | (REASON_IDLE if idle else 0)

    def _final_temperature_c(self, power_w: float) -> float:
        return AMBIENT_C + FULL_LOAD_RISE_C * float(power_w) / self.preset.limits_w.max

    @staticmethod
    def _segment(state: State, at_s: float) -> State:
        used = int(state["segments"])
        found = int(np.searchsorted(state["segment"]["at_s"][:used], at_s, side="right")) - 1
        return state["segment"][max(found, 0)]


def _column(amplitudes: FloatArray) -> FloatArray:
    return np.asarray(amplitudes, dtype=np.float64)[:, None]
