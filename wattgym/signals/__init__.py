"""Signals a grid asks a load to follow, and the sign convention they share."""

from wattgym.signals.convention import response, target_w
from wattgym.signals.families import SIGNAL_FAMILIES, SignalFamily, draw_signal, named_signal
from wattgym.signals.signal import Signal, signal_from_trace

__all__ = [
    "SIGNAL_FAMILIES",
    "Signal",
    "SignalFamily",
    "draw_signal",
    "named_signal",
    "response",
    "signal_from_trace",
    "target_w",
]
