"""Every family of signals under one call: `draw_signal` for episodes, `named_signal` for one known signal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.signals.droop import DroopOptions, droop_signal
from wattgym.signals.events import (
    EmergencyOptions,
    EventOptions,
    EventRecord,
    PeakEventOptions,
    draw_event,
    nominal_event,
)
from wattgym.signals.renewable import RenewableOptions, draw_renewable, renewable_signal
from wattgym.signals.signal import Signal, signal_from_trace, tick_count
from wattgym.signals.synthetic import SyntheticRegdOptions, synthetic_regd
from wattgym.signals.windows import SPLITS, Window, cached_trace, draw_start, recorded_windows
from wattgym.traces import list_traces, load_table
from wattgym.traces.catalogue import find_trace
from wattgym.traces.trace import Trace

RESERVE_EVENTS = "reserve-events/pjm-synchronized"


class RecordedOptions(FrozenModel):
    """A recorded regulation signal is used as it is: no options."""


# (split, duration_s, period_s, rng, options) -> Signal
Draw = Callable[[str, float, float, np.random.Generator, Any], Signal]
# (start_s, duration_s or None, period_s, options) -> Signal
Named = Callable[[float, float | None, float, Any], Signal]


@dataclass(frozen=True)
class SignalFamily:
    """One kind of service a load can be asked for.

    Attributes:
        id: Key in `SIGNAL_FAMILIES`.
        summary: One line for people.
        options: Class of its options; the defaults are the family's default.
        draw: Draws an episode from a split.
        named: The family's one reference signal.
    """

    id: str
    summary: str
    options: type[FrozenModel]
    draw: Draw
    named: Named


def draw_signal(
    family: str,
    split: str,
    *,
    duration_s: float,
    period_s: float,
    rng: np.random.Generator,
    options: FrozenModel | None = None,
) -> Signal:
    """Draws one episode's signal from a split; equal generators give equal signals.

    Args:
        family: Key of `SIGNAL_FAMILIES`, or the catalogue id of a regulation, frequency or solar recording.
        split: `train`, `validation` or `test`: only this split's windows are read.
        duration_s: Length of the episode, seconds (whole periods are kept).
        period_s: Control period, seconds.
        rng: Source of all randomness.
        options: The family's options; its defaults when None.

    Raises:
        UserError: Unknown family or split, options of another family, nothing recorded in the split, or a duration
            longer than its longest window (the message states it).
    """
    if split not in SPLITS:
        raise UserError(f"unknown split '{split}'; splits: {', '.join(SPLITS)}")
    tick_count(duration_s, period_s)
    chosen = _family(family)
    return chosen.draw(split, float(duration_s), float(period_s), rng, _options(chosen, options))


def named_signal(
    id: str,
    *,
    period_s: float,
    start_s: float = 0.0,
    duration_s: float | None = None,
    options: FrozenModel | None = None,
) -> Signal:
    """One known signal: a recording by its catalogue id, or a family's reference signal.

    The reference signals are: `regd` the 40-minute wave, `rega` the afternoon of 1 August 2017, `droop` the 24-h
    frequency record, `renewable` the first day of the first solar site, `peak_event` and `emergency` one event of
    nominal length that begins at 0 s (after its end the request is 0).

    Args:
        id: Key of `SIGNAL_FAMILIES` or catalogue id.
        period_s: Control period, seconds.
        start_s: Beginning, seconds after the signal's own beginning.
        duration_s: Length; to the end when None (one day of a solar recording).
        options: The family's options; its defaults when None.

    Raises:
        UserError: Unknown id, or a part that is not inside the signal (the message states its range).
    """
    chosen = _family(id)
    return chosen.named(float(start_s), duration_s, float(period_s), _options(chosen, options))


def _options(family: SignalFamily, options: FrozenModel | None) -> FrozenModel:
    if options is None:
        return _default_options(family.options)
    if not isinstance(options, family.options):
        raise UserError(f"signal family '{family.id}' takes {family.options.__name__}, got {type(options).__name__}")
    return options


@lru_cache(maxsize=32)
def _default_options(model: type[FrozenModel]) -> FrozenModel:
    return model()


def _family(name: str) -> SignalFamily:
    found = SIGNAL_FAMILIES.get(name)
    return found if found is not None else _recording_family(name)


@lru_cache(maxsize=64)
def _recording_family(trace_id: str) -> SignalFamily:
    """A family of one catalogued recording."""
    if trace_id not in {entry.id for entry in list_traces()}:
        raise UserError(
            f"no signal '{trace_id}'; families: {', '.join(SIGNAL_FAMILIES)}; or a regulation, frequency or solar "
            "trace id of `wattgym traces list`"
        )
    kind = find_trace(trace_id).kind
    if kind == "regulation":
        return _regulation(trace_id, f"recording {trace_id}", (trace_id,))
    if kind == "frequency":
        return _droop(trace_id, f"droop on {trace_id}", (trace_id,))
    if kind == "solar_power":
        return _renewable(trace_id, f"following {trace_id}", (trace_id,))
    raise UserError(f"trace '{trace_id}' is {kind}; a signal needs a regulation, frequency or solar_power trace")


def _part(trace: Trace, start_s: float, duration_s: float | None) -> tuple[float, float]:
    """Beginning on the trace's clock, and length."""
    return trace.start_s + start_s, trace.duration_s - start_s if duration_s is None else float(duration_s)


def _regulation(id: str, summary: str, trace_ids: tuple[str, ...]) -> SignalFamily:
    def draw(split: str, duration_s: float, period_s: float, rng: np.random.Generator, options: Any) -> Signal:
        windows = recorded_windows(trace_ids, split)
        trace, start_s = draw_start(windows, duration_s, rng, what=f"{id}/{split}")
        return signal_from_trace(
            trace, period_s=period_s, start_s=start_s, duration_s=duration_s, family=id, split=split
        )

    def named(start_s: float, duration_s: float | None, period_s: float, options: Any) -> Signal:
        trace = cached_trace(trace_ids[0])
        begin_s, length_s = _part(trace, start_s, duration_s)
        return signal_from_trace(trace, period_s=period_s, start_s=begin_s, duration_s=length_s, family=id)

    return SignalFamily(id, summary, RecordedOptions, draw, named)


def _droop(id: str, summary: str, trace_ids: tuple[str, ...]) -> SignalFamily:
    def draw(split: str, duration_s: float, period_s: float, rng: np.random.Generator, options: DroopOptions) -> Signal:
        windows = recorded_windows(trace_ids, split)
        trace, start_s = draw_start(windows, duration_s, rng, what=f"{id}/{split}")
        return droop_signal(trace, start_s, duration_s, period_s, options, split)

    def named(start_s: float, duration_s: float | None, period_s: float, options: DroopOptions) -> Signal:
        trace = cached_trace(trace_ids[0])
        return droop_signal(trace, *_part(trace, start_s, duration_s), period_s, options)

    return SignalFamily(id, summary, DroopOptions, draw, named)


def _renewable(id: str, summary: str, trace_ids: tuple[str, ...]) -> SignalFamily:
    def draw(
        split: str, duration_s: float, period_s: float, rng: np.random.Generator, options: RenewableOptions
    ) -> Signal:
        return draw_renewable(recorded_windows(trace_ids, split), split, duration_s, period_s, rng, options)

    def named(start_s: float, duration_s: float | None, period_s: float, options: RenewableOptions) -> Signal:
        trace = cached_trace(trace_ids[0])
        whole = Window(trace, trace.start_s, trace.end_s)
        length_s = 86_400.0 / options.time_compression if duration_s is None else float(duration_s)
        return renewable_signal(whole, trace.start_s + start_s * options.time_compression, length_s, period_s, options)

    return SignalFamily(id, summary, RenewableOptions, draw, named)


@lru_cache(maxsize=8)
def _reserve_events(split: str) -> EventRecord:
    table = load_table(RESERVE_EVENTS, split).sort_values("t_s", kind="stable")
    return EventRecord(table["t_s"].to_numpy(dtype=np.float64), table["duration_min"].to_numpy(dtype=np.float64) * 60.0)


def _event(id: str, summary: str, model: type[EventOptions]) -> SignalFamily:
    def draw(split: str, duration_s: float, period_s: float, rng: np.random.Generator, options: EventOptions) -> Signal:
        return draw_event(id, _reserve_events(split), split, duration_s, period_s, rng, options, RESERVE_EVENTS)

    def named(start_s: float, duration_s: float | None, period_s: float, options: EventOptions) -> Signal:
        whole = options.ramp_in_s + options.hold_s + options.ramp_out_s
        return nominal_event(id, whole - start_s if duration_s is None else duration_s, period_s, options, start_s)

    return SignalFamily(id, summary, model, draw, named)


def _synthetic() -> SignalFamily:
    def named(start_s: float, duration_s: float | None, period_s: float, options: Any) -> Signal:
        raise UserError("synthetic_regd is random and for training only: draw it with draw_signal and a generator")

    return SignalFamily(
        "synthetic_regd", "generated RegD-like signal, training only", SyntheticRegdOptions, synthetic_regd, named
    )


_ALL = (
    _regulation("regd", "recorded fast regulation, PJM's 40-minute RegD test wave", ("regulation/pjm-regd-test-wave",)),
    _regulation(
        "rega",
        "recorded slow regulation, PJM RegA on two afternoons",
        ("regulation/pjm-rega-2017-08-01", "regulation/pjm-rega-2017-08-02"),
    ),
    _droop("droop", "response to a measured frequency", ("frequency/day-1s",)),
    _renewable(
        "renewable",
        "following 15-minute solar production",
        ("solar/csg-site1", "solar/csg-site2", "solar/csg-site3", "solar/csg-site5"),
    ),
    _event("peak_event", "utility peak event, -25 % for 3 h with 15-minute ramps", PeakEventOptions),
    _event("emergency", "unannounced emergency, -30 % within 30 s, held 10 min", EmergencyOptions),
    _synthetic(),
)
SIGNAL_FAMILIES: dict[str, SignalFamily] = {family.id: family for family in _ALL}
"""Families by id."""
