"""Recorded traces: the catalogue, its splits, and evenly sampled series."""

from wattgym.traces.catalogue import data_path, list_tables, list_traces
from wattgym.traces.model import CatalogueEntry
from wattgym.traces.series import load_table, load_trace, split_windows
from wattgym.traces.trace import Trace

__all__ = [
    "CatalogueEntry",
    "Trace",
    "data_path",
    "list_tables",
    "list_traces",
    "load_table",
    "load_trace",
    "split_windows",
]
