"""Power of all sites of a run together, against the sum of what their own signals asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.federated.log import LOG_FILE, read_log
from wattgym.federated.site.ticks import COLUMNS, POWER_TICKS
from wattgym.files import atomic_path, atomic_write_json, atomic_write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLEET_TABLE, FLEET_FIGURE, FLEET_SUMMARY = "fleet.csv", "fleet.svg", "fleet.json"

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FleetPower:
    """Sites with a target of their own, on one clock.

    Attributes:
        t_s: Time since the first period that all of them saw, s, shape `(T,)`.
        unix_s: When that was, s since 1970.
        power_w: Power by site, W, each of shape `(T,)`.
        target_w: Target by site, W.
    """

    t_s: FloatArray
    unix_s: float
    power_w: Mapping[str, FloatArray]
    target_w: Mapping[str, FloatArray]

    @property
    def total_w(self) -> FloatArray:
        """Power of the fleet, W."""
        total: FloatArray = np.sum(list(self.power_w.values()), axis=0)
        return total

    @property
    def total_target_w(self) -> FloatArray:
        """Sum of the targets, W."""
        total: FloatArray = np.sum(list(self.target_w.values()), axis=0)
        return total

    def errors(self) -> dict[str, float]:
        """Mean absolute error over the mean target: of the fleet, and of its sites on average.

        Errors of sites that do not move together cancel in the sum, so the fleet's is the smaller one.
        """
        one_by_one = [
            float(np.abs(self.power_w[name] - self.target_w[name]).mean() / self.target_w[name].mean())
            for name in self.power_w
        ]
        fleet = float(np.abs(self.total_w - self.total_target_w).mean() / self.total_target_w.mean())
        return {"fleet": fleet, "sites_mean": float(np.mean(one_by_one)), "seconds": float(self.t_s[-1])}


def read_fleet(sites: Path, period_s: float = 2.0) -> FleetPower | None:
    """Power of the sites of a run.

    Args:
        sites: Folder with a folder for each site.
        period_s: Step of the common clock, s.

    Returns:
        None where fewer than one site follows a signal, or no period is common to those that do.

    Raises:
        UserError: A file is damaged.
    """
    tables = {path.parent.name: _read(path) for path in sorted(sites.glob(f"*/{POWER_TICKS}"))}
    shaped = {name: table for name, table in tables.items() if len(table) > 1}
    if not shaped:
        return None
    first = max(float(table["unix_s"].iloc[0]) for table in shaped.values())
    last = min(float(table["unix_s"].iloc[-1]) for table in shaped.values())
    t_s = np.arange(0.0, last - first, period_s)
    if t_s.size < 2:
        return None

    def column(name: str) -> dict[str, FloatArray]:
        # A line tells of the period that it ends: the value at a moment stands in the next line.
        found = {}
        for site, table in shaped.items():
            at = np.searchsorted(table["unix_s"].to_numpy(), first + t_s)
            found[site] = table[name].to_numpy(np.float64)[np.minimum(at, len(table) - 1)]
        return found

    return FleetPower(t_s, first, column("power_w"), column("target_w"))


def write_fleet(fleet: FleetPower, folder: Path) -> dict[str, float]:
    """Writes table, figure and errors beside a run's report.

    Args:
        fleet: The fleet.
        folder: Run folder; its log tells the accuracy.

    Returns:
        The errors.

    Raises:
        UserError: Something cannot be written.
    """
    table = pd.DataFrame({"t_s": fleet.t_s, "power_w": fleet.total_w, "target_w": fleet.total_target_w})
    for name in fleet.power_w:
        table[f"{name}.power_w"], table[f"{name}.target_w"] = fleet.power_w[name], fleet.target_w[name]
    atomic_write_text(folder / FLEET_TABLE, table.to_csv(index=False))
    figure = fleet_figure(fleet, folder)
    with atomic_path(folder / FLEET_FIGURE) as temporary:
        figure.savefig(temporary, format="svg")
    errors = fleet.errors()
    atomic_write_json(folder / FLEET_SUMMARY, errors)
    return errors


def fleet_figure(fleet: FleetPower, folder: Path) -> Figure:
    """Fleet power against the sum of the targets, and accuracy and loss on the same clock."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), layout="constrained")
    power, learning = figure.subplots(2, 1, sharex=True)
    power.plot(fleet.t_s, fleet.total_target_w, color="black", linewidth=1.0, label="sum of targets")
    power.plot(fleet.t_s, fleet.total_w, color="tab:blue", linewidth=1.0, label="fleet power")
    power.set(ylabel="power, W", title=f"{len(fleet.power_w)} sites, each on a signal of its own")
    power.legend()
    rounds = [(more["unix_s"], record.evaluation) for record, more in read_log(folder / LOG_FILE) if "unix_s" in more]
    at = [unix_s - fleet.unix_s for unix_s, _ in rounds]
    learning.step(at, [evaluation.accuracy for _, evaluation in rounds], where="post", label="accuracy")
    learning.set(xlabel="time, s", ylabel="accuracy")
    loss = learning.twinx()
    loss.step(at, [evaluation.loss for _, evaluation in rounds], where="post", color="tab:red", label="loss")
    loss.set_ylabel("loss, nats")
    handles = [*learning.get_lines(), *loss.get_lines()]
    learning.legend(handles, [str(handle.get_label()) for handle in handles])
    return figure


def _read(path: Path) -> pd.DataFrame:
    """Periods of one site in which it had a target; a last line that a crash cut short is left out."""
    content = path.read_text(encoding="utf-8")
    lines = content[: content.rfind("\n") + 1].splitlines()
    if not lines or lines[0] != ",".join(COLUMNS):
        raise UserError(f"{path}: is no table of a site's power; the first line must be {','.join(COLUMNS)}")
    try:
        rows = np.array([[float(value) for value in line.split(",")] for line in lines[1:]]).reshape(-1, len(COLUMNS))
    except ValueError as error:
        raise UserError(f"{path}: a line holds no {len(COLUMNS)} numbers: {error}") from None
    table = pd.DataFrame(rows, columns=COLUMNS)
    shaped: pd.DataFrame = table[np.isfinite(table["target_w"])].sort_values("unix_s", kind="stable")
    return shaped
