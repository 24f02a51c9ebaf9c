"""What each kind of trace measures, in which unit, and which values are possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from wattgym.errors import UserError


@dataclass(frozen=True)
class Kind:
    """One kind of trace.

    Attributes:
        unit: The unit its values are kept in.
        low: Smallest possible value, in `unit`.
        high: Largest possible value, in `unit`.
        meaning: One line for people.
        hint: What to do about a value outside the range.
        accepts: Other units a file may use, with the factor to `unit`.
    """

    unit: str
    low: float
    high: float
    meaning: str
    hint: str = ""
    accepts: Mapping[str, float] = field(default_factory=dict)


_PERCENT = {"%": 0.01}
_WATTS = {"mW": 1e-3, "kW": 1e3, "MW": 1e6}

KINDS: dict[str, Kind] = {
    "regulation": Kind(
        "1", -1.0, 1.0, "regulation signal, +1 = the grid wants more power, so the load falls",
        "divide a signal in MW by the offered capacity; unit '%' for a percentage", _PERCENT,
    ),
    "frequency": Kind(
        "Hz", 40.0, 70.0, "grid frequency",
        "multiply a per-unit frequency by 50 or 60, add the nominal value to a deviation; unit 'mHz' for mHz",
        {"mHz": 1e-3},
    ),
    "power_utilisation": Kind(
        "1", 0.0, 1.0, "power of a power domain as a fraction of its capacity", "unit '%' for a percentage", _PERCENT
    ),
    "utilisation": Kind(
        "1", 0.0, 1.0, "use of a resource as a fraction of all of it", "unit '%' for a percentage", _PERCENT
    ),
    "power": Kind("W", 0.0, 1e9, "power of a device, node or site", "is the unit right?", _WATTS),
    "solar_power": Kind(
        "MW", -10.0, 1e4, "output of a solar plant, slightly negative at night for its own consumption",
        "is the unit right?", {"kW": 1e-3, "W": 1e-6},
    ),
    "price": Kind("USD/MWh", -1e4, 1e5, "electricity price", "is the unit right?", {"USD/kWh": 1e3}),
    "regulation_price": Kind("USD/MW/h", -1e4, 1e5, "price of one MW of regulation for one hour"),
    "mileage_ratio": Kind("1", 0.0, math.inf, "hourly mileage of the fast signal over that of the slow one"),
    "carbon_intensity": Kind(
        "gCO2/kWh", 0.0, 3000.0, "carbon intensity of electricity", "is the unit right?",
        {"kgCO2/kWh": 1e3, "kgCO2/MWh": 1.0},
    ),
    "load_forecast": Kind("MW", 0.0, 1e6, "forecast load of a utility", "is the unit right?", {"kW": 1e-3, "GW": 1e3}),
    "reserve_events": Kind("events", -math.inf, math.inf, "calls for reserve, a table of starts and ends"),
}  # fmt: skip

# Units that column names end in.
_SUFFIXES = {
    "_w": "W", "_kw": "kW", "_mw": "MW", "_gw": "GW", "_percent": "%", "_pct": "%", "_hz": "Hz", "_mhz": "mHz",
    "_pu": "pu",
}  # fmt: skip


def kind_of(name: str) -> Kind:
    """Looks a kind up by name.

    Raises:
        UserError: No such kind; the message lists those there are.
    """
    if name not in KINDS:
        raise UserError(f"unknown kind '{name}'; kinds: {', '.join(KINDS)}")
    return KINDS[name]


def series_kinds() -> list[str]:
    """Names of the kinds that are series (all but tables of events)."""
    return [name for name, kind in KINDS.items() if kind.unit != "events"]


def factor_to(kind_name: str, unit: str | None, column: str) -> float:
    """Factor from a file's unit to the unit that a kind is kept in.

    Args:
        kind_name: The kind.
        unit: The unit as the user named it; `None` trusts the column's name, then the kind.
        column: The column, whose name may end in a unit (`power_kw`).

    Raises:
        UserError: The kind has no such unit, or the column's name contradicts the kind and no unit was named.
    """
    kind = kind_of(kind_name)
    known = {kind.unit: 1.0, **kind.accepts}
    if unit is not None:
        if unit not in known:
            raise UserError(f"unit '{unit}' does not fit kind {kind_name}; units: {', '.join(known)}")
        return known[unit]
    lower = column.lower()
    named = next((name for suffix, name in _SUFFIXES.items() if lower.endswith(suffix)), None)
    if named is not None and named != kind.unit:
        todo = f"name the unit: '{named}'" if named in known else f"its units are: {', '.join(known)}"
        raise UserError(f"column '{column}' is named in {named}, but kind {kind_name} is kept in {kind.unit}; {todo}")
    return 1.0
