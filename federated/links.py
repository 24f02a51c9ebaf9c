"""Emulated links between the sites and the aggregator, by the network table."""

from __future__ import annotations

from dataclasses import dataclass

from wattgym.envs.federation.network import Network
from wattgym.federated.config import FederationConfig


@dataclass(frozen=True)
class Link:
    """A site's link.

    Attributes:
        rtt_s: Round-trip time, s.
        up_bytes_per_s: Throughput from the site, bytes/s.
        down_bytes_per_s: Throughput to the site, bytes/s.
    """

    rtt_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float

    def seconds(self, size_bytes: float) -> tuple[float, float]:
        """Time to send so many bytes to the site, and back, each with a round trip for the request, s."""
        return self.rtt_s + size_bytes / self.down_bytes_per_s, self.rtt_s + size_bytes / self.up_bytes_per_s


class Links:
    """All links of a federation with a network table.

    Attributes:
        aggregator: Region of the aggregator: the table's, or that of the first site.
        by_site: Links by site.
    """

    def __init__(self, config: FederationConfig) -> None:
        """Reads the table.

        Raises:
            UserError: A region is unknown, or a pair is missing from the table; both are named.
        """
        assert config.network is not None
        self.aggregator = config.network.aggregator or config.sites[0].region
        # One pair at a time: the table need not know what two sites never say to each other.
        self.by_site = {site.name: self._link(config, site.region) for site in config.sites}

    def _link(self, config: FederationConfig, region: str) -> Link:
        assert config.network is not None
        network = Network.build(config.network, (region, self.aggregator))
        there, here = network.indices((region, self.aggregator))
        return Link(
            rtt_s=float(network.rtt_s[there, here]),
            up_bytes_per_s=float(network.bytes_per_s[there, here]),
            down_bytes_per_s=float(network.bytes_per_s[here, there]),
        )
