"""Round-trip times, throughput and egress prices between cloud regions.

Measured by the Skyplane project (NSDI 2023; Apache-2.0): ping of April 2022, iperf3 over 64 connections of January and
November 2022, and the providers' egress prices. Throughput is that received on the premium tier; where a pair was
measured more than once, the median counts. 62 of the 69 regions with round-trip times also have throughput to and from
each other and egress prices; `regions.yaml` beside this module says where they lie and how they are held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wattgym.config import FrozenModel, load_config
from wattgym.envs.federation.arrays import FloatArray, IntArray
from wattgym.envs.federation.config import NetworkConfig, Split
from wattgym.errors import UserError
from wattgym.traces import load_table

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("rtt_ms", "gbps", "egress_usd_per_gb")
"""Quantities of a link, as a user's table names them."""


class Place(FrozenModel):
    """Where regions lie.

    Attributes:
        utc_offset_h: Standard time, hours from UTC.
        price: Zone of the price series.
        carbon: Zone of the carbon series.
        stand_in: Which of the two zones stand in for one that is not shipped.
        split: Split that holds the place.
        regions: Cloud regions there.
    """

    utc_offset_h: float
    price: str
    carbon: str
    stand_in: tuple[str, ...] = ()
    split: Split
    regions: tuple[str, ...]


class Gazetteer(FrozenModel):
    """Contents of `regions.yaml`."""

    zones: dict[str, float]
    places: dict[str, Place]


@cache
def gazetteer() -> Gazetteer:
    """The shipped table of places, read once."""
    return load_config(Gazetteer, Path(__file__).with_name("regions.yaml"))


@cache
def places_by_region() -> dict[str, Place]:
    """The place of every region."""
    return {region: place for place in gazetteer().places.values() for region in place.regions}


@dataclass(frozen=True, eq=False)
class Network:
    """Links between `R` regions; matrices are indexed by source, destination.

    Attributes:
        regions: Names.
        rtt_s: Round-trip times, s.
        bytes_per_s: Throughput that a round gets, bytes/s.
        egress_usd_per_gb: Price of sending, USD/GB.
    """

    regions: tuple[str, ...]
    rtt_s: FloatArray
    bytes_per_s: FloatArray
    egress_usd_per_gb: FloatArray

    @classmethod
    def build(cls, config: NetworkConfig, regions: Sequence[str]) -> Network:
        """Links between regions.

        Args:
            config: Tables and shares.
            regions: Regions needed.

        Raises:
            UserError: A region is unknown, or a pair is missing from a table; both are named.
        """
        names = tuple(dict.fromkeys(regions))
        for region in names:
            if region not in places_by_region():
                raise UserError(f"network: unknown region '{region}'; known: {', '.join(places_by_region())}")
        rtt_ms, gbps, egress = (_matrix(config, column, names) for column in COLUMNS)
        np.fill_diagonal(rtt_ms, config.local_rtt_ms)
        np.fill_diagonal(gbps, config.local_gbps)
        np.fill_diagonal(egress, 0.0)
        rtt = rtt_ms / 1000.0
        bytes_per_s = gbps * 1e9 / 8.0 * config.bandwidth_share
        if config.tcp_window_bytes is not None:
            bytes_per_s = np.minimum(bytes_per_s, config.tcp_window_bytes / rtt)
        return cls(names, rtt, bytes_per_s, egress)

    def indices(self, regions: Sequence[str]) -> IntArray:
        """Positions of regions in the matrices."""
        return np.array([self.regions.index(region) for region in regions])


def pool(config: NetworkConfig) -> tuple[str, ...]:
    """Regions that sites and aggregator are drawn from."""
    if config.regions:
        return config.regions
    return tuple(r for r, place in places_by_region().items() if config.split in ("all", place.split))


def _matrix(config: NetworkConfig, column: str, names: tuple[str, ...]) -> FloatArray:
    if config.table is not None:
        links, source = _user_links(config.table)[column], config.table
    else:
        links, source = _measured_links(config.throughput, column)
    # NaN on the diagonal until the local values replace it.
    matrix = np.full((len(names), len(names)), np.nan)
    for i, src in enumerate(names):
        for j, dst in enumerate(names):
            if i == j:
                continue
            value = links.get((src, dst))
            if value is None:
                raise UserError(f"{source}: no {column} from '{src}' to '{dst}'; leave one of the two regions out")
            matrix[i, j] = value
    return matrix


@lru_cache(maxsize=16)
def _measured_links(throughput: str, column: str) -> tuple[dict[tuple[str, str], float], str]:
    """Values of one column by pair of regions, and the name of the table; read once per process."""
    if column == "rtt_ms":
        name, value = "network/skyplane_cloud_region_rtt_2022", "avg_rtt_ms"
    elif column == "gbps":
        name, value = f"network/skyplane_cloud_region_throughput_{throughput}", "throughput_received_gbps"
    else:
        name, value = "network/skyplane_cloud_egress_cost", "egress_usd_per_gb"
    frame = load_table(name)
    if "src_tier" in frame:
        frame = frame[(frame["src_tier"] == "PREMIUM") & (frame["dst_tier"] == "PREMIUM")]
    return _by_pair(frame, value), name


def _user_links(table: str) -> dict[str, dict[tuple[str, str], float]]:
    import pandas as pd

    try:
        frame = pd.read_csv(table)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{table}: cannot read the network table: {' '.join(str(error).split())}") from None
    for needed in ("src_region", "dst_region", *COLUMNS):
        if needed not in frame:
            raise UserError(f"{table}: no column '{needed}'; needed: src_region, dst_region, {', '.join(COLUMNS)}")
    links = {}
    for column in COLUMNS:
        values = pd.to_numeric(frame[column], errors="coerce").to_numpy(np.float64)
        free = column == "egress_usd_per_gb"
        bad = np.flatnonzero(~(np.isfinite(values) & ((values >= 0.0) if free else (values > 0.0))))
        if bad.size:
            row, least = int(bad[0]), "at least 0" if free else "above 0"
            raise UserError(f"{table}: line {row + 2}: {column} is '{frame[column].iloc[row]}'; valid: {least}")
        links[column] = _by_pair(frame.assign(**{column: values}), column)
    return links


def _by_pair(frame: pd.DataFrame, value: str) -> dict[tuple[str, str], float]:
    grouped: Any = frame.groupby(["src_region", "dst_region"])[value].median()
    return {(str(src), str(dst)): float(number) for (src, dst), number in grouped.items()}
