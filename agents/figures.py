"""The report's figures, each returned as one SVG text.

Colours are from Okabe and Ito's palette, which colour-blind readers can tell apart, and never carry meaning alone:
shape, fill or a label says the same. Figures are built without pyplot, so nothing global is touched.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np

from wattgym.agents.episodes import METRICS, PowerTrace
from wattgym.agents.summary import Summary, format_estimate, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wattgym.agents.results import EvaluationResult

P = ParamSpec("P")

BLUE, VERMILION, ORANGE, GREY, INK = "#0072B2", "#D55E00", "#E69F00", "#6B7280", "#1F2933"
_MARKERS = "oDPXv^<>hp*8"
_VERDICT_COLOURS = {"better": BLUE, "worse": VERMILION, "no clear difference": GREY}
_STYLE: Any = {
    "font.size": 9.0,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "text.parse_math": False,  # a controller may be named "$x$"
    "axes.edgecolor": "#9AA5B1",
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E7EB",
    "grid.linewidth": 0.8,
    "xtick.color": "#52606D",
    "ytick.color": "#52606D",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "path",
    "svg.hashsalt": "wattgym",  # the same evaluation gives the same file
}


def as_svg(draw: Callable[P, Figure]) -> Callable[P, str]:
    """Draws in the report's style and returns the SVG text; matplotlib's settings are as before afterwards."""

    @wraps(draw)
    def render(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib as mpl

        with mpl.rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
            text = io.StringIO()
            blank = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            draw(*args, **kwargs).savefig(text, format="svg", metadata=blank, dpi=200)
        return text.getvalue()

    return render


@as_svg
def components_figure(summary: Summary, metrics: Sequence[str]) -> Figure:
    """One panel per metric: each controller's interquartile mean with its interval, best controller on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 0.75 + 0.27 * len(summary.ranking)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    rows = np.arange(len(summary.ranking))[::-1]
    for axes, metric in zip(panels, metrics, strict=True):
        for row, name in zip(rows, summary.ranking, strict=True):
            baseline = name in summary.baselines
            _point(axes, summary, name, metric, float(row), GREY if baseline else BLUE, filled=not baseline)
        axes.set_title(heading(metric))
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
        axes.xaxis.get_major_locator().set_params(nbins=4)
    panels[0].set_yticks(rows, [label(name) for name in summary.ranking])
    panels[0].set_ylim(-0.6, len(rows) - 0.4)
    for tick, name in zip(panels[0].get_yticklabels(), summary.ranking, strict=True):
        tick.set_fontweight("normal" if name in summary.baselines else "bold")
    return figure


def _point(axes: Axes, summary: Summary, name: str, metric: str, row: float, colour: str, *, filled: bool) -> None:
    estimate = summary.estimates[name, metric]
    if not math.isnan(estimate.low):
        axes.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=2.0, solid_capstyle="butt")
    face = colour if filled else "white"
    axes.plot(estimate.value, row, "o" if filled else "s", color=colour, markerfacecolor=face, markersize=6)


@as_svg
def differences_figure(summary: Summary, controller: str, metric: str) -> Figure:
    """One controller's paired difference to each baseline; the better side is always on the right."""
    from matplotlib.figure import Figure

    order = {name: i for i, name in enumerate(summary.ranking)}
    compared = sorted(summary.differences_for(controller, metric), key=lambda d: order[d.baseline])
    figure = Figure(figsize=(10.4, 0.95 + 0.3 * len(compared)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0.0, color=INK, linewidth=1.0)
    for row, d in enumerate(reversed(compared)):
        colour = _VERDICT_COLOURS[d.verdict]
        if not math.isnan(d.estimate.low):
            axes.plot([d.estimate.low, d.estimate.high], [row, row], "|-", color=colour, linewidth=1.6, markersize=7)
        face = "white" if d.verdict == "no clear difference" else colour
        marker = {"better": "o", "worse": "D"}.get(d.verdict, "s")
        axes.plot(d.estimate.value, row, marker, color=colour, markerfacecolor=face, markersize=5)
        text = f"{format_estimate(d.estimate, signed=True)}   {d.verdict}"
        axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", color=colour)
    axes.set_yticks(range(len(compared)), [f"against {label(d.baseline)}" for d in reversed(compared)])
    axes.set_ylim(-0.6, len(compared) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    if METRICS[metric].better == "lower":
        axes.invert_xaxis()
    figure.suptitle(label(controller), x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes.annotate("◄ worse ", (0.0, 1.0), ha="right", **_above(axes, VERMILION))
    axes.annotate(" better ►", (0.0, 1.0), ha="left", **_above(axes, BLUE))
    axes.set_xlabel(heading(metric) + ", difference to the baseline")
    return figure


def _above(axes: Axes, colour: str) -> dict[str, Any]:
    """Places text just above the axes at a data x coordinate."""
    offset: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points"}
    return {"xycoords": axes.get_xaxis_transform(), "va": "bottom", "color": colour, **offset}


@as_svg
def tradeoff_figure(result: EvaluationResult, x_metric: str, y_metric: str) -> Figure:
    """Two metrics against each other: interquartile means with both intervals over the single scenarios."""
    from matplotlib.figure import Figure

    summary = result.summary
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(summary.ranking):
        baseline = name in summary.baselines
        colour, marker = (GREY if baseline else BLUE), _MARKERS[i % len(_MARKERS)]
        x, y = (result.scores(name, metric).mean(axis=0) for metric in (x_metric, y_metric))
        axes.plot(x, y, marker, color=colour, markersize=3.5, alpha=0.28, markeredgewidth=0)
        ex, ey = summary.estimates[name, x_metric], summary.estimates[name, y_metric]
        bars = [[[e.value - e.low], [e.high - e.value]] if not math.isnan(e.low) else None for e in (ex, ey)]
        axes.errorbar(
            ex.value,
            ey.value,
            xerr=bars[0],
            yerr=bars[1],
            fmt=marker,
            color=colour,
            markersize=9,
            markerfacecolor="white" if baseline else colour,
            markeredgewidth=1.6,
            elinewidth=1.4,
            zorder=4,
            label=label(name),
        )
    axes.set_xlabel(heading(x_metric))
    axes.set_ylabel(heading(y_metric))
    axes.set_title("Large: interquartile mean with intervals. Small: single scenarios.")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


@as_svg
def hour_figure(result: EvaluationResult, scenario: str) -> Figure:
    """Target against power and, below it, throughput over time, one pair of panels per controller."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    order = {name: i for i, name in enumerate(result.summary.ranking)}
    found = [t for t in result.traces if isinstance(t, PowerTrace) and t.scenario == scenario]
    traces = sorted(found, key=lambda t: order[t.controller])
    columns = 2 if len(traces) > 1 else 1
    blocks = math.ceil(len(traces) / columns)
    figure = Figure(figsize=(10.4, 2.0 * blocks + 0.5), layout=ConstrainedLayoutEngine(h_pad=0.03, hspace=0.0))
    outer = figure.add_gridspec(blocks, columns)
    power, throughput = _shared_limits(traces)
    for i, trace in enumerate(traces):
        pair = outer[i // columns, i % columns].subgridspec(2, 1, height_ratios=(3, 1), hspace=0.06)
        axes: Any = pair.subplots(sharex=True)
        upper, lower = axes
        minutes = trace.t_s / 60.0
        (target,) = upper.plot(minutes, trace.target_w / 1e3, color=ORANGE, linewidth=2.4, rasterized=True)
        baseline = trace.controller in result.baselines
        (drawn,) = upper.plot(
            minutes, trace.power_w / 1e3, color=INK if baseline else BLUE, linewidth=0.9, rasterized=True
        )
        score = result.scores(trace.controller, result.headline)[:, result.scenarios.index(scenario)].mean()
        upper.set_title(f"{label(trace.controller)}   {METRICS[result.headline].title} {score:.3f}")
        upper.set_ylim(power)
        lower.fill_between(minutes, trace.throughput, color="#56B4E9", alpha=0.45, linewidth=0, rasterized=True)
        lower.plot(minutes, trace.throughput, color=GREY, linewidth=0.7, rasterized=True)
        lower.set_ylim(0, throughput)
        lower.set_yticks([0, 1])
        lower.set_xlim(minutes[0], minutes[-1] if minutes[-1] > minutes[0] else minutes[0] + 1)
        if i % columns == 0:
            upper.set_ylabel("kW")
            lower.set_ylabel("through-\nput", fontsize=7.5)
        if i >= len(traces) - columns:
            lower.set_xlabel("minutes")
        else:
            lower.tick_params(labelbottom=False)
        if i == 0:
            place: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.97), "borderpad": 0.0}
            upper.legend([target, drawn], ["target", "power"], ncols=2, frameon=False, fontsize=8, **place)
    return figure


def _shared_limits(traces: Sequence[PowerTrace]) -> tuple[tuple[float, float], float]:
    """One power range (kW) and one throughput limit, so that panels compare at a glance."""
    power = np.concatenate([np.concatenate([t.target_w, t.power_w]) for t in traces]) / 1e3
    low, high = float(np.nanmin(power)), float(np.nanmax(power))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    throughput = float(np.nanmax(np.concatenate([t.throughput for t in traces])))
    return (low - margin, high + margin), 1.08 * max(1.0, throughput)


def label(name: str, limit: int = 30) -> str:
    """A name fit for a figure: one line, printable, not too long."""
    text = " ".join("".join(c if c.isprintable() else " " for c in name).split()) or "?"
    return text if len(text) <= limit else text[: limit - 1] + "…"
