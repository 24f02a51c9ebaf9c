"""What controls power: baselines and learned policies behind one interface, for batches of sites."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wattgym.envs.observation import ObservationLayout
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask


class Controller(Protocol):
    """A power-shaping controller of a batch of sites (one site is a batch of one)."""

    @property
    def name(self) -> str:
        """Name in tables and logs."""
        ...

    def reset(self, task: ControlTask) -> None:
        """Prepares for an episode of the given task."""
        ...

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Chooses the coming period's action.

        Args:
            observation: Shape `(B, D)`, as the task's layout describes it.

        Returns:
            Actions in [-1, 1], shape `(B, J)`.
        """
        ...


class Observed:
    """Reads single features out of observation vectors, in natural units."""

    def __init__(self, layout: ObservationLayout) -> None:
        self._error = layout.site("error_1")
        self._feed_forward = layout.site("feed_forward")
        self._limit = layout.job("limit_1")

    def error(self, observation: NDArray[np.float32]) -> FloatArray:
        """Sensed power minus target of the last period, capacities, shape `(B,)`."""
        return observation[:, self._error].astype(np.float64)

    def feed_forward(self, observation: NDArray[np.float32]) -> FloatArray:
        """Nominal model's common limit for the coming target, position in [0, 1], shape `(B,)`."""
        return (observation[:, self._feed_forward].astype(np.float64) + 1.0) / 2.0

    def limits(self, observation: NDArray[np.float32]) -> FloatArray:
        """Limits in force, positions in [0, 1], shape `(B, J)`."""
        return (observation[:, self._limit].astype(np.float64) + 1.0) / 2.0


class ObservedPower(Observed):
    """Also in watts, for controllers that reckon with power itself."""

    def __init__(self, task: ControlTask) -> None:
        super().__init__(task.layout)
        layout, spec = task.layout, task.spec
        self._half_band = (spec.full_w - spec.floor_w) / 2.0
        self._middle = spec.floor_w + self._half_band
        self._half_full = spec.power_table_w[:, :, -1] / 2.0
        self._base, self._capacity = task.base_w, task.capacity_w
        self._target, self._power = layout.site("target"), layout.site("power")
        self._preview = [layout.site(f"preview_{k}") for k in range(1, layout.config.preview_periods + 1)]
        self._job_power, self._computing = layout.job("power"), layout.job("computing")

    def target_w(self, observation: NDArray[np.float32]) -> FloatArray:
        """Target of the coming period, shape `(B,)`, W."""
        return self._middle + self._half_band * observation[:, self._target].astype(np.float64)

    def power_w(self, observation: NDArray[np.float32]) -> FloatArray:
        """Sensed site power of the last period, shape `(B,)`, W."""
        return self._middle + self._half_band * observation[:, self._power].astype(np.float64)

    def preview_w(self, observation: NDArray[np.float32]) -> FloatArray:
        """Announced targets after the coming one, shape `(B, preview_periods)`, W."""
        signal = observation[:, self._preview].astype(np.float64)
        return self._base[:, None] - self._capacity[:, None] * signal

    def job_power_w(self, observation: NDArray[np.float32]) -> FloatArray:
        """Sensed power of each job in the last period, shape `(B, J)`, W."""
        return self._half_full * (observation[:, self._job_power].astype(np.float64) + 1.0)

    def computing(self, observation: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Whether each job computed at the end of the last period, shape `(B, J)`."""
        busy: NDArray[np.bool_] = observation[:, self._computing] > 0.0
        return busy
