"""Available power of sites, from recorded utilisation of power domains.

The shipped traces are five power domains of Google's powerdata-2019 (cell a, May 2019; Sakalkar et al., ASPLOS 2020),
as fractions of a capacity that is withheld. A site therefore gets assigned watts, and reads a trace from a day of its
own: by power domain, by whole days within the split's weeks, and at its own local hour. Windows never leave the
split's weeks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import FloatArray, IntArray
from wattgym.envs.federation.config import PowerConfig
from wattgym.errors import UserError
from wattgym.signals.windows import recorded_windows
from wattgym.traces import list_traces

STEP_S = 300.0
"""Seconds between power samples."""

_ROUNDING = 1e-9

STEPS_A_DAY = round(86_400.0 / STEP_S)

GOOGLE_DOMAINS = tuple(f"power-util/google-cella-pdu{k}" for k in range(6, 11))
"""The shipped power domains."""

_LOCAL_AHEAD_H = {"power-util/google-cella": 3.0}
"""Hours by which local time is ahead of a trace's clock: cell a lies in New York's zone, its clock in Los Angeles'."""


def power_step(time_s: FloatArray) -> IntArray:
    """The power sample in force at times of the episode; a rounding error before a sample counts as its start."""
    step: IntArray = (time_s / STEP_S + _ROUNDING).astype(np.int64)
    return step


@dataclass(frozen=True, eq=False)
class PowerSource:
    """Utilisation traces and the places where an episode may begin in them.

    Attributes:
        ids: Traces.
        values: All traces' samples one after another, within [0, 1].
        starts: Start positions in `values`, shape `(traces, phases, most)`; phase is the local step of the day at which
            the episode begins, or 0 alone where traces are not aligned.
        counts: How many of them there are, shape `(traces, phases)`.
    """

    ids: tuple[str, ...]
    values: FloatArray
    starts: IntArray
    counts: IntArray

    @classmethod
    def build(cls, config: PowerConfig, extra: Sequence[str], steps: int) -> PowerSource:
        """Finds every place where an episode of a length fits into the split.

        Args:
            config: Traces, split and alignment.
            extra: Further traces that pinned sites name.
            steps: Power samples of an episode.

        Raises:
            UserError: A trace is unknown, has another interval, is out of [0, 1], or is shorter than the job.
        """
        ids = tuple(dict.fromkeys((*(config.traces or GOOGLE_DOMAINS), *extra)))
        parts, found, offset = [], [], 0
        for trace_id in ids:
            windows = recorded_windows((trace_id,), config.split)
            trace = windows[0].trace
            _check(trace_id, trace.kind, trace.interval_s)
            ahead = next((h for prefix, h in _LOCAL_AHEAD_H.items() if trace_id.startswith(prefix)), 0.0)
            places = []
            for window in windows:
                first = round((window.start_s - trace.start_s) / STEP_S)
                count = round((window.end_s - window.start_s) / STEP_S) - steps + 1
                places.append(np.arange(first, first + max(count, 0)))
            valid = np.concatenate(places)
            midnight = round((trace.start_s + ahead * 3600.0) / STEP_S)
            phases = STEPS_A_DAY if config.alignment == "hour_of_day" else 1
            by_phase = [valid[(valid + midnight) % phases == phase] + offset for phase in range(phases)]
            shortest = min(by_phase, key=len)
            if shortest.size == 0:
                longest = max(window.end_s - window.start_s for window in windows)
                day = 86_400.0 if phases > 1 else 0.0
                raise UserError(
                    f"trace '{trace_id}' is shorter than the job: its {config.split} weeks hold {longest - day:.0f} s "
                    f"at any hour of the day, an episode needs {steps * STEP_S:.0f} s; lower goal.time_limit_s"
                )
            found.append(by_phase)
            parts.append(trace.values)
            offset += trace.values.size
        counts = np.array([[len(places) for places in by_phase] for by_phase in found])
        starts = np.zeros((*counts.shape, counts.max()), dtype=np.int64)
        for i, by_phase in enumerate(found):
            for phase, places in enumerate(by_phase):
                starts[i, phase, : len(places)] = places
        return cls(ids, np.concatenate(parts), starts, counts)

    def draw(self, trace: IntArray, local_step: IntArray, u: FloatArray) -> IntArray:
        """Start positions in `values`.

        Args:
            trace: Index of each site's trace, any shape.
            local_step: Local step of the day at which the episode begins at the site.
            u: Uniform numbers that choose the day.
        """
        phase = local_step % self.counts.shape[1]
        count = self.counts[trace, phase]
        starts: IntArray = self.starts[trace, phase, np.minimum((u * count).astype(np.int64), count - 1)]
        return starts


def available_power_w(config: PowerConfig, capacity_w: FloatArray, utilisation: FloatArray) -> FloatArray:
    """Power that a site has for training, W.

    Args:
        config: Which of the three readings of the traces holds.
        capacity_w: Capacity of the power domain, W.
        utilisation: Measured utilisation, broadcasts with `capacity_w`.
    """
    if config.reading == "utilisation":
        share = utilisation
    else:
        taken = utilisation * (config.production_share if config.reading == "non_production" else 1.0)
        share = np.maximum(config.u_max - taken, 0.0)
    power: FloatArray = capacity_w * share
    return power


def _check(trace_id: str, kind: str, interval_s: float) -> None:
    if kind not in ("power_utilisation", "utilisation"):
        known = ", ".join(entry.id for entry in list_traces(kind="power_utilisation"))
        raise UserError(f"trace '{trace_id}' is of kind {kind}; power needs a utilisation, for example: {known}")
    if interval_s != STEP_S:
        raise UserError(f"trace '{trace_id}' has an interval of {interval_s:g} s; power traces need {STEP_S:g} s")
