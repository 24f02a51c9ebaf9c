"""What each kind of trace measures, in which unit, and which values are possible."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wattgym.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of trace.

    Attributes:
        unit: The unit its values are kept in.
        low: Smallest possible value, in `unit`.
        high: Largest possible value, in `unit`.
        meaning: One line for people.
        hint: What a value outside the range usually means.
    """

    unit: str
    low: float
    high: float
    meaning: str
    hint: str = ""


KINDS: dict[str, Kind] = {
    "regulation": Kind("1", -1.0, 1.0, "regulation signal, +1 = the grid wants more power, so the load falls",
                       "divide a signal in MW by the offered capacity, or a percentage by 100"),
    "frequency": Kind("Hz", 40.0, 70.0, "grid frequency",
                      "a per-unit frequency must be multiplied by 50 or 60, one in mHz divided by 1000"),
    "power_utilisation": Kind("1", 0.0, 1.0, "power of a power domain as a fraction of its capacity",
                              "divide a percentage by 100"),
    "utilisation": Kind("1", 0.0, 1.0, "use of a resource as a fraction of all of it",
                        "divide a percentage by 100"),
    "power": Kind("W", 0.0, 1e9, "power of a device, node or site", "multiply kW by 1000, divide mW by 1000"),
    "solar_power": Kind("MW", -10.0, 1e4, "output of a solar plant (slightly negative at night: own consumption)"),
    "price": Kind("USD/MWh", -1e4, 1e5, "electricity price"),
    "regulation_price": Kind("USD/MW/h", -1e4, 1e5, "price of one MW of regulation for one hour"),
    "mileage_ratio": Kind("1", 0.0, math.inf, "hourly mileage of the fast signal over that of the slow one"),
    "carbon_intensity": Kind("gCO2/kWh", 0.0, 3000.0, "carbon intensity of electricity",
                             "multiply kg/kWh by 1000"),
    "load_forecast": Kind("MW", 0.0, 1e6, "forecast load of a utility"),
    "reserve_events": Kind("events", -math.inf, math.inf, "calls for reserve, a table of starts and ends"),
}  # fmt: skip


def kind_of(name: str) -> Kind:
    """Looks a kind up by name.

    Raises:
        UserError: No such kind; the message lists those there are.
    """
    if name not in KINDS:
        raise UserError(f"unknown kind '{name}'; kinds: {', '.join(KINDS)}")
    return KINDS[name]
