"""Power that is free for training at each site, replayed from recorded utilisation."""

from __future__ import annotations

import numpy as np

from wattgym.envs.federation.power import available_power_w
from wattgym.errors import UserError
from wattgym.federated.config import FederatedSite, FederationConfig
from wattgym.traces import Trace, load_trace


class AvailablePower:
    """What each site may draw, by the time since the run began.

    A trace that has come to its end begins again.
    """

    def __init__(self, config: FederationConfig) -> None:
        """Reads the sites' traces.

        Raises:
            UserError: A trace is unknown or is no utilisation.
        """
        self._config = config
        self._traces = {site.name: _trace(site) for site in config.sites if site.trace is not None}

    def at(self, name: str, time_s: float) -> float:
        """Power that is free at a site, W."""
        site = self._config.site(name)
        trace = self._traces.get(name)
        if trace is None:
            return site.capacity_w
        sample = int((site.trace_start_s + time_s) // trace.interval_s) % trace.values.size
        return float(available_power_w(self._config.power, np.array(site.capacity_w), trace.values[sample]))


def _trace(site: FederatedSite) -> Trace:
    assert site.trace is not None
    trace = load_trace(site.trace)
    if trace.kind not in ("power_utilisation", "utilisation"):
        raise UserError(f"site '{site.name}': trace '{site.trace}' is of kind {trace.kind}; power needs a utilisation")
    if site.trace_start_s >= trace.duration_s:
        raise UserError(
            f"site '{site.name}': trace_start_s {site.trace_start_s:g} lies beyond the trace's {trace.duration_s:g} s"
        )
    return trace
