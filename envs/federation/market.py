"""Price and carbon intensity of sites' power, hour by hour.

Prices: market operators' public sites by way of HewlettPackard/sustain-cluster; carbon intensity: Electricity Maps
(ODbL), both of 2023. `regions.yaml` beside this module maps places to zones; a zone that stands in for one that is
not shipped is read at the same local hour.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wattgym.envs.federation.arrays import FloatArray, IntArray
from wattgym.envs.federation.config import MarketConfig
from wattgym.envs.federation.network import gazetteer, places_by_region
from wattgym.errors import UserError
from wattgym.signals.windows import cached_trace, recorded_windows

_DAY_H = 24
"""Room kept at both ends of a split's weeks, so that a zone read at another hour stays inside."""


@dataclass(frozen=True, eq=False)
class Market:
    """Hourly price and carbon intensity of `R` regions, each already shifted to the region's own time.

    Attributes:
        price_usd_per_mwh: Shape `(R, 8760)`, USD/MWh.
        carbon_g_per_kwh: Shape `(R, 8760)`, gCO2e/kWh.
        days: Days of the year (midnight UTC) at which an episode may begin, hours from the year's start.
    """

    price_usd_per_mwh: FloatArray
    carbon_g_per_kwh: FloatArray
    days: IntArray

    @classmethod
    def build(cls, config: MarketConfig, regions: tuple[str, ...], hours: int) -> Market:
        """Reads the zones of regions.

        Args:
            config: Split and kind of emissions.
            regions: Regions, in the order of the network's matrices.
            hours: Hours that an episode may touch.

        Raises:
            UserError: No day of the split leaves room for the episode.
        """
        zones = {"price": "price/{}-2023", "carbon": f"carbon-{config.carbon}/{{}}-2023"}
        series = {
            kind: np.stack([_local(kind, template, region) for region in regions]) for kind, template in zones.items()
        }
        any_zone = gazetteer().places["sydney"].price
        windows = recorded_windows((zones["price"].format(any_zone.lower()),), config.split)
        days = [
            np.arange(np.ceil(w.start_s / 86_400.0) * _DAY_H + _DAY_H, w.end_s / 3600.0 - hours - 2 * _DAY_H, _DAY_H)
            for w in windows
        ]
        starts = np.concatenate(days).astype(np.int64)
        if starts.size == 0:
            raise UserError(f"the {config.split} weeks of prices are shorter than the {hours} h of an episode")
        return cls(series["price"], series["carbon"], starts)


def _local(kind: str, template: str, region: str) -> FloatArray:
    place = places_by_region()[region]
    zone = place.price if kind == "price" else place.carbon
    values = cached_trace(template.format(zone.lower())).values
    if kind not in place.stand_in:
        return values
    shift = round(place.utc_offset_h - gazetteer().zones[zone])
    # Hour h at the place is hour h of the zone's own day: UTC positions differ by the difference of the offsets.
    return np.roll(values, -shift)
