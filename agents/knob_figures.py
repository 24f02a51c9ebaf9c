"""The figure of a knob profile: every configuration's power and throughput, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wattgym.agents.figures import BLUE, GREY, ORANGE, as_svg

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@as_svg
def profile_figure(found: pd.DataFrame, titles: Sequence[str]) -> Figure:
    """One panel per job.

    Args:
        found: Table of `wattgym.envs.profiling.table`.
        titles: A title for each job.
    """
    from matplotlib.figure import Figure

    columns = min(len(titles), 3)
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.1 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for j, (axes, title) in enumerate(zip(panels, titles, strict=False)):
        own = found[found["job"] == j]
        kilowatt = own.assign(power=own["power_w"] / 1000.0, spread=own["power_sd_w"] / 1000.0)
        axes.errorbar(
            kilowatt["power"], kilowatt["throughput"], xerr=kilowatt["spread"], yerr=kilowatt["throughput_sd"],
            fmt="o", color=GREY, markersize=3.5, elinewidth=0.8, label="configuration",
        )  # fmt: skip
        neutral = own["micro_batch"] == own["micro_batch"].max()
        neutral &= (own["active_gpus"] == own["active_gpus"].max()) & (own["duty_cycle"] == 1.0)
        limits = kilowatt[neutral & (own["local_steps"] == 1)]
        axes.plot(limits["power"], limits["throughput"], "--", color=ORANGE, linewidth=1.2, label="power limit alone")
        front = kilowatt[own["pareto"]]
        axes.plot(
            front["power"], front["throughput"], "D-",
            color=BLUE, markersize=4.0, linewidth=1.2, drawstyle="steps-post", label="Pareto front",
        )  # fmt: skip
        axes.set_title(title)
        axes.set_xlabel("power, kW")
        axes.set_ylabel("throughput, share of full speed")
        axes.set_xlim(left=0.0)
        axes.set_ylim(bottom=0.0)
        if j == 0:
            axes.legend(loc="lower right", frameon=False)
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    return figure
