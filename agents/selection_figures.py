"""The report's figures of site selection: accuracy over time, participants over time, and who trained when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wattgym.agents.episodes import SelectionTrace
from wattgym.agents.figures import BLUE, GREY, INK, as_svg, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wattgym.agents.results import EvaluationResult

_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6B7280", "#1F2933")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


@as_svg
def accuracy_figure(result: EvaluationResult, scenario: str) -> Figure:
    """Accuracy against time and, beside it, loss, one line per selector; lines end where the episode does."""
    from matplotlib.figure import Figure

    traces = _traces(result, scenario)
    figure = Figure(figsize=(10.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    for trace, style in zip(traces, _styles(result, traces), strict=True):
        hours = trace.t_s / 3600.0
        left.plot(hours, trace.accuracy, label=label(trace.controller), **style)
        right.plot(hours, trace.loss, **style)
        left.plot(hours[-1], trace.accuracy[-1], "o", color=style["color"], markersize=4)
        right.plot(hours[-1], trace.loss[-1], "o", color=style["color"], markersize=4)
    right.set_yscale("log")
    # Plain numbers: powers of ten would be set as mathematics, which names in the report must not be.
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("{x:g}")
    left.set_ylabel("accuracy")
    right.set_ylabel("loss (nats)")
    for axes in (left, right):
        axes.set_xlabel("hours")
        axes.set_xlim(left=0.0)
        _until_most_have_ended(axes, traces)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


@as_svg
def participants_figure(result: EvaluationResult, scenario: str) -> Figure:
    """Sites that took part over time, one line per selector."""
    from matplotlib.figure import Figure

    traces = _traces(result, scenario)
    figure = Figure(figsize=(10.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for trace, style in zip(traces, _styles(result, traces), strict=True):
        edges = np.concatenate([[0.0], trace.t_s]) / 3600.0
        axes.stairs(trace.chosen.sum(axis=1), edges, baseline=None, label=label(trace.controller), **style)
    axes.set_ylabel("sites in the round")
    axes.set_ylim(0, len(traces[0].sites) + 0.5)
    axes.set_xlabel("hours")
    axes.set_xlim(left=0.0)
    _until_most_have_ended(axes, traces)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return figure


@as_svg
def membership_figure(result: EvaluationResult, scenario: str) -> Figure:
    """Who trained when: a matrix of sites against rounds for each selector."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    traces = _traces(result, scenario)
    columns = 2 if len(traces) > 1 else 1
    rows = math.ceil(len(traces) / columns)
    sites = traces[0].sites
    height = min(max(0.09 * len(sites), 1.0), 3.0) + 0.5
    figure = Figure(figsize=(10.4, height * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(traces) :]:
        panel.set_axis_off()
    for panel, trace in zip(panels.flat, traces, strict=False):
        baseline = trace.controller in result.baselines
        colours = ListedColormap(["#F5F7FA", INK if baseline else BLUE])
        panel.pcolormesh(
            np.arange(trace.t_s.size + 1),
            np.arange(len(sites) + 1),
            _matrix(trace),
            cmap=colours,
            vmin=0,
            vmax=1,
            rasterized=True,
        )
        panel.set_title(f"{label(trace.controller)}   {trace.t_s[-1] / 3600.0:.2f} h")
        panel.grid(visible=False)
        if not panel.yaxis_inverted():
            panel.invert_yaxis()
    names = [label(name, 18) for name in sites]
    every = max(1, math.ceil(len(sites) / 12))
    for panel in panels[:, 0]:
        panel.set_yticks(np.arange(0, len(sites), every) + 0.5, names[::every], fontsize=6.5)
    for panel in panels[-1]:
        panel.set_xlabel("round")
    return figure


def _matrix(trace: SelectionTrace) -> NDArray[np.int64]:
    return trace.chosen.T.astype(np.int64)


def _traces(result: EvaluationResult, scenario: str) -> list[SelectionTrace]:
    order = {name: i for i, name in enumerate(result.summary.ranking)}
    found = [t for t in result.traces if isinstance(t, SelectionTrace) and t.scenario == scenario]
    return sorted(found, key=lambda t: order[t.controller])


def _styles(result: EvaluationResult, traces: list[SelectionTrace]) -> list[dict[str, Any]]:
    """Policies under test are blue and thick; baselines differ by colour and dashes together."""
    styles: list[dict[str, Any]] = []
    tested = others = 0
    for trace in traces:
        if trace.controller in result.baselines:
            colour, dash = _COLOURS[others % len(_COLOURS)], _DASHES[others // len(_COLOURS) % len(_DASHES)]
            styles.append({"color": colour, "linestyle": dash, "linewidth": 1.1})
            others += 1
        else:
            styles.append({"color": BLUE, "linestyle": _DASHES[tested % len(_DASHES)], "linewidth": 2.4, "zorder": 5})
            tested += 1
    return styles


def _until_most_have_ended(axes: Axes, traces: list[SelectionTrace]) -> None:
    """Ends the time axis at twice the median length, so that one slow selector does not squeeze the others."""
    ends = np.array([trace.t_s[-1] for trace in traces]) / 3600.0
    limit = min(float(ends.max()), 2.0 * float(np.median(ends)))
    axes.set_xlim(right=limit * 1.02)
    if ends.max() > limit:
        text = "the slowest go on beyond"
        axes.annotate(text, (1.0, 0.01), xycoords="axes fraction", ha="right", va="bottom", fontsize=7, color=GREY)
