"""How a board's power answers a change of what it should draw, in closed form.

One linear model with three decaying modes serves the batched emulator and the simulated device. With the target
draw `P` held constant, the power at time `t` after the last change is

    p(t) = P + a_down exp(-t / tau_down) + a_up exp(-t / tau_up) + a_recovery exp(-t / tau_recovery)

A change of target by `d = P_old - P_new` goes into the modes so that the power stays continuous: a rise (d < 0)
adds `d` to the up mode; a cut (d > 0) adds `(1 + k) d` to the down mode and `-k d` to the recovery mode, so that a
lowered power limit undershoots and recovers, as V100 boards do (2 to 4 % of the limit for 150 to 350 ms; a rise takes
157 to 224 ms to 97 %: GridPilot's raw data, arXiv 2605.26384). Sums of exponentials integrate exactly, so energies and
window averages over any interval need no sub-stepping.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

DOWN, UP, RECOVERY = 0, 1, 2


@dataclass(frozen=True, eq=False)
class PowerResponse:
    """Time constants of `n` boards (or jobs of equal boards).

    Attributes:
        tau_s: Time constants of the down, up and recovery modes, shape `(3, n)`, seconds.
        undershoot: Share `k` of a cut that overshoots downwards, shape `(n,)`.
    """

    tau_s: FloatArray
    undershoot: FloatArray

    def retarget(self, amplitudes_w: FloatArray, drop_w: FloatArray, *, commanded: bool) -> FloatArray:
        """Mode amplitudes just after the target fell by `drop_w` (rose, where negative).

        Args:
            amplitudes_w: Amplitudes just before, shape `(3, n)`, W.
            drop_w: Old target minus new target, shape `(n,)`, W.
            commanded: A power limit caused the change (cuts undershoot); else the load changed by itself.

        Returns:
            New amplitudes, shape `(3, n)`, W.
        """
        fall = np.maximum(drop_w, 0.0)
        extra = self.undershoot * fall if commanded else np.zeros_like(fall)
        amplitudes: FloatArray = amplitudes_w + np.stack([fall + extra, np.minimum(drop_w, 0.0), -extra])
        return amplitudes

    def amplitudes_after(self, amplitudes_w: FloatArray, dt_s: float | FloatArray) -> FloatArray:
        """Amplitudes `dt_s` later without a change of target, shape `(3, n)`, W."""
        amplitudes: FloatArray = amplitudes_w * np.exp(-np.asarray(dt_s) / self.tau_s)
        return amplitudes

    def power_w(self, target_w: FloatArray, amplitudes_w: FloatArray, dt_s: float | FloatArray) -> FloatArray:
        """Power `dt_s` after the state was taken, shape `(n,)`, W."""
        power: FloatArray = target_w + self.amplitudes_after(amplitudes_w, dt_s).sum(axis=0)
        return power

    def energy_j(self, target_w: FloatArray, amplitudes_w: FloatArray, dt_s: float | FloatArray) -> FloatArray:
        """Energy drawn in the `dt_s` after the state was taken, shape `(n,)`, J."""
        energy: FloatArray = target_w * dt_s + (amplitudes_w * self.mode_integral_s(dt_s)).sum(axis=0)
        return energy

    def mode_integral_s(self, dt_s: float | FloatArray) -> FloatArray:
        """Integral of each mode's unit decay over `dt_s`, shape `(3, n)`, s; 0 for negative `dt_s`."""
        integral: FloatArray = self.tau_s * -np.expm1(-np.maximum(np.asarray(dt_s), 0.0) / self.tau_s)
        return integral


class TickKernel:
    """A response folded over one control period into constant coefficients.

    Within a period of `T` seconds the load's target `P1` changes at the start, and the command's target `P2` takes over
    `latency_s` later. Energy up to any fixed offset in the period is then linear in seven numbers a board: `P1`, `P2`,
    the three amplitudes after the first change, and the fall and rise of the second change. The coefficients depend on
    the board only, so a step of the whole batch is one product and one sum.
    """

    ROWS = 7
    P1, P2, A_DOWN, A_UP, A_RECOVERY, FALL2, RISE2 = range(ROWS)

    def __init__(self, response: PowerResponse, period_s: float, latency_s: FloatArray, offsets_s: FloatArray) -> None:
        """Precomputes coefficients.

        Args:
            response: Boards, `n` of them.
            period_s: Control period T, seconds.
            latency_s: Time from the period's start until a command acts, within `[0, T]`, shape `(n,)`.
            offsets_s: Offsets within `[0, T]` up to which energies are wanted, shape `(k, n)`.
        """
        n = response.undershoot.shape[0]
        latency = np.clip(latency_s, 0.0, period_s)
        coefficients = np.zeros((offsets_s.shape[0], self.ROWS, n))
        for k, offset in enumerate(offsets_s):
            late = np.maximum(offset - latency, 0.0)
            modes, modes2 = response.mode_integral_s(offset), response.mode_integral_s(late)
            coefficients[k, self.P1] = offset - late
            coefficients[k, self.P2] = late
            coefficients[k, self.A_DOWN : self.A_RECOVERY + 1] = modes
            coefficients[k, self.FALL2] = (
                modes2[DOWN] * (1.0 + response.undershoot) - modes2[RECOVERY] * response.undershoot
            )
            coefficients[k, self.RISE2] = modes2[UP]
        self.energy_coefficients = coefficients
        """Shape `(k, 7, n)`."""
        self._decay = np.exp(-period_s / response.tau_s)
        rest = np.exp(-(period_s - latency) / response.tau_s)
        self._fall_to_down = rest[DOWN] * (1.0 + response.undershoot)
        self._fall_to_recovery = -rest[RECOVERY] * response.undershoot
        self._rise_to_up = rest[UP]

    def decay_amplitudes(self, rows: FloatArray) -> None:
        """Carries the amplitudes to the period's end, in place.

        Args:
            rows: The seven numbers of each board, shape `(7, n)`; rows `A_DOWN` to `A_RECOVERY` change.
        """
        amplitudes = rows[self.A_DOWN : self.A_RECOVERY + 1]
        amplitudes *= self._decay
        amplitudes[DOWN] += self._fall_to_down * rows[self.FALL2]
        amplitudes[UP] += self._rise_to_up * rows[self.RISE2]
        amplitudes[RECOVERY] += self._fall_to_recovery * rows[self.FALL2]
