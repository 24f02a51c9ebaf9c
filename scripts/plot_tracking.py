"""Draws the README's picture from an evaluation: target and metered power of some controllers in one scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure

from wattgym.agents.results import EvaluationResult
from wattgym.errors import UserError
from wattgym.files import atomic_path


def main(
    evaluation: Annotated[Path, typer.Argument(help="Folder that `wattgym evaluate` wrote.")],
    out: Annotated[Path, typer.Option(help="Picture, PNG or SVG.")],
    controllers: Annotated[str, typer.Option(help="Controllers, separated by commas.")] = "learned,static cap",
    family: Annotated[str, typer.Option(help="Signal family.")] = "regd",
) -> None:
    """Draws target and power over time, one panel a controller."""
    result = EvaluationResult.load(evaluation)
    names = [name.strip() for name in controllers.split(",")]
    traces = {t.controller: t for t in result.traces if t.scenario.startswith(f"{family}/")}
    missing = [name for name in names if name not in traces]
    if missing:
        raise UserError(f"{evaluation}: no trace of '{missing[0]}' in '{family}'; there are: {', '.join(traces)}")
    figure = Figure(figsize=(9, 1.9 * len(names) + 0.5), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        trace = traces[name]
        minutes = trace.t_s / 60.0
        panel.plot(minutes, trace.power_w / 1000.0, color="#0072b2", linewidth=0.7, label="metered power")
        panel.plot(minutes, trace.target_w / 1000.0, color="#d55e00", linewidth=1.4, label="target")
        panel.set_ylabel("site power, kW")
        panel.set_title(name, loc="left", fontsize=10)
        panel.margins(x=0)
        panel.grid(alpha=0.3)
    panels[0].legend(loc="upper right", fontsize=8, ncols=2)
    panels[-1].set_xlabel("minutes")
    with atomic_path(out) as draft:
        figure.savefig(draft, dpi=130)


if __name__ == "__main__":
    typer.run(main)
