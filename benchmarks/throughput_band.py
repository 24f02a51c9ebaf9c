"""What shaping the training gains over capping it: throughput at every target between floor and full power.

    python benchmarks/throughput_band.py [--seeds 8] [--levels 9] [--run RUN] [--plot FILE] [--json FILE] [--quick]

Emulated sites of plants that no baseline was tuned on hold one target after another, from the lowest power that caps
reach to full power. Cap-following (feed-forward) moves power limits alone; the multi-knob controller (the PowerMorph
reconstruction) may set other knobs too: once without local steps, whose averaging changes the order of updates, and
once with all; so may a learned policy (`--run`, a training run or a folder of several). Throughput is training progress
relative to uncapped. Then all follow renewable curves for two hours.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from wattgym.agents.baselines import make_baseline
from wattgym.agents.controller import Controller
from wattgym.agents.policy import load_policy
from wattgym.agents.rollout import Arena, Rollout
from wattgym.agents.scoring import quarter_hour_mape
from wattgym.agents.seeds import group_runs
from wattgym.envs.config import PowerShapingConfig
from wattgym.errors import UserError

CAPS = ("power_limit",)
SAME_ORDER = ("power_limit", "micro_batch", "active_gpus", "duty_cycle")
ALL = (*SAME_ORDER, "local_steps")


@dataclass(frozen=True)
class Entrant:
    """Who is measured.

    Attributes:
        name: Name in tables.
        env: What the environment has that is not the benchmark's.
        make: Makes the controllers; several are training runs of one.
    """

    name: str
    env: Mapping[str, Any]
    make: Callable[[], list[Controller]]


def _baseline(name: str, baseline: str, knobs: Sequence[str]) -> Entrant:
    return Entrant(name, {"action": {"knobs": list(knobs)}}, lambda: [make_baseline(baseline)])


CONTROLLERS = (
    _baseline("cap-following", "feed-forward", CAPS),
    _baseline("multi-knob, synchronous", "PowerMorph (reconstruction)", SAME_ORDER),
    _baseline("multi-knob, local steps", "PowerMorph (reconstruction)", ALL),
)
UNCAPPED = _baseline("uncapped", "uncapped", CAPS)
PERIOD_S = 2.0
"""Control period, seconds."""
HOLD_S = 900.0
"""Length of a hold, seconds."""
AIM_MAPE = 0.02
"""PowerMorph's published tracking error is about 2 %."""


@dataclass(frozen=True)
class Point:
    """One controller at one target level, means over sites.

    Attributes:
        controller: Name of an entrant.
        level: Target as a share of the band from floor to full power.
        power: Metered power over target.
        throughput: Training progress relative to uncapped.
        gain: Mean difference of throughput to cap-following on the same sites.
        least_gain: Least of those differences.
    """

    controller: str
    level: float
    power: float
    throughput: float
    gain: float
    least_gain: float


@dataclass(frozen=True)
class Following:
    """One controller on renewable curves, means over scenarios.

    Attributes:
        controller: Name of an entrant.
        mape: Mean of |power − target| / target.
        mape_quarter_hour: The same of quarter-hour means.
        nrmse: Root mean square of the error over the capacity.
        throughput: Training progress relative to uncapped.
    """

    controller: str
    mape: float
    mape_quarter_hour: float
    nrmse: float
    throughput: float


def learned(path: Path) -> Entrant:
    """The policies of a training run, or of a folder of several.

    Raises:
        UserError: They shape no power, or act in other periods than the benchmark's.
    """
    runs = group_runs(path) or (path,)
    policies = [load_policy(run) for run in runs]
    env = policies[0].config.env
    if not isinstance(env, PowerShapingConfig) or env.period_s != PERIOD_S:
        raise UserError(f"{path}: not a policy for power shaping in periods of {PERIOD_S:g} s")
    return Entrant(f"learned, {path.name}", dict(env), lambda: [policy.controller for policy in policies])


def run_all(entrant: Entrant, seeds: range, changes: Mapping[str, Any]) -> list[Rollout]:
    """The controllers of an entrant on sites of held-out plants."""
    common = {"site": {"surfaces": "test"}, "period_s": PERIOD_S, **changes}
    arena = Arena(PowerShapingConfig.model_validate({**entrant.env, **common}))
    return [arena.run(controller, seeds) for controller in entrant.make()]


def hold(level: float, length_s: float, folder: Path) -> dict[str, Any]:
    """Signal of a constant target at a level of the band."""
    path = folder / f"level_{level:.4f}.csv"
    r = 1.0 - 2.0 * level
    path.write_text("t_s,r\n" + "".join(f"{2 * k},{r}\n" for k in range(round(length_s / 2))), encoding="utf-8")
    offer = {"base": 0.5, "capacity": 0.5}
    return {"signal": {"trace": str(path), "offers": {"recorded": offer}}, "episode_s": length_s}


def band(entrants: Sequence[Entrant], levels: Sequence[float], seeds: range, length_s: float) -> list[Point]:
    """Every controller at every level, on the same sites."""
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for level in levels:
            signal = hold(level, length_s, Path(folder))
            (free,) = run_all(UNCAPPED, seeds, signal)
            # The first tenth is the way to the target.
            settled = slice(free.power_w.shape[1] // 10, None)
            uncapped = free.throughput[:, settled].mean(axis=1)
            reference = None
            for entrant in entrants:
                runs = run_all(entrant, seeds, signal)
                throughput = np.mean([run.throughput[:, settled].mean(axis=1) for run in runs], axis=0) / uncapped
                reference = throughput if reference is None else reference
                gain = throughput - reference
                power = np.mean([run.power_w[:, settled].mean(axis=1) / run.target_w[:, 0] for run in runs])
                found = (float(x) for x in (power, throughput.mean(), gain.mean(), gain.min()))
                points.append(Point(entrant.name, level, *found))
                print(f"level {level:.3f}: {entrant.name}", file=sys.stderr)
    return points


def renewable(entrants: Sequence[Entrant], seeds: range, length_s: float) -> list[Following]:
    """Every controller on the same renewable curves, whose samples are quarter-hours."""
    families = {"families": {"renewable": 1.0}, "split": "test"}
    changes = {"signal": families, "episode_s": length_s}
    uncapped = run_all(UNCAPPED, seeds, changes)[0].throughput.mean(axis=1)
    found = []
    for entrant in entrants:
        rows = []
        for run in run_all(entrant, seeds, changes):
            error_w = run.power_w - run.target_w
            nrmse = np.sqrt(((error_w / run.capacity_w[:, None]) ** 2).mean(axis=1)).mean()
            throughput = (run.throughput.mean(axis=1) / uncapped).mean()
            rows.append([np.abs(error_w / run.target_w).mean(), quarter_hour_mape(run).mean(), nrmse, throughput])
        found.append(Following(entrant.name, *np.mean(rows, axis=0).tolist()))
        print(f"renewable: {entrant.name}", file=sys.stderr)
    return found


def show(points: Sequence[Point], following: Sequence[Following]) -> None:
    """Prints both tables and how they compare with the aims."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    names = list(dict.fromkeys(p.controller for p in points))
    table = Table(title="Throughput relative to uncapped, by target (share of the band); power over target in brackets")
    table.add_column("target")
    for name in names:
        table.add_column(name, justify="right")
    for level in dict.fromkeys(p.level for p in points):
        row = [p for p in points if p.level == level]
        table.add_row(f"{level:.2f}", *(f"{p.throughput:.3f} ({p.power:.3f})" for p in row))
    console.print(table)
    for name in names[1:]:
        own = [p for p in points if p.controller == name]
        middle = [p.gain for p in own if 0.25 <= p.level <= 0.75]
        console.print(
            f"{name}: gain at least {min(p.gain for p in own):+.4f} at every level (aim >= 0), "
            f"at least {min(middle):+.4f} in the middle (aim > 0); "
            f"least of any site {min(p.least_gain for p in own):+.4f}"
        )
    table = Table(title=f"Renewable curves, 15-minute samples, periods of {PERIOD_S:g} s")
    for column in ("controller", "MAPE", "of 15-min means", "nRMSE", "throughput"):
        table.add_column(column, justify="left" if column == "controller" else "right")
    for f in following:
        table.add_row(
            f.controller, f"{f.mape:.2%}", f"{f.mape_quarter_hour:.2%}", f"{f.nrmse:.3f}", f"{f.throughput:.3f}"
        )
    console.print(table)
    console.print(f"aim: MAPE <= {AIM_MAPE:.0%} for multi-knob controllers")


def plot(points: Sequence[Point], path: Path) -> None:
    """Draws throughput against the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    names = dict.fromkeys(p.controller for p in points)
    for name, colour, marker in zip(names, ("#6B7280", "#0072B2", "#D55E00", "#009E73"), "ods^", strict=False):
        own = [p for p in points if p.controller == name]
        axes.plot([p.level for p in own], [p.throughput for p in own], color=colour, marker=marker, label=name)
    axes.set_xlabel("target, share of the band from lowest capped to full power")
    axes.set_ylabel("throughput relative to uncapped")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=8, help="sites per level, and renewable scenarios")
    parser.add_argument("--levels", type=int, default=9, help="targets between floor and full power")
    parser.add_argument("--run", type=Path, metavar="RUN", help="judge a learned policy too, or those of several runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curve there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the code; the figures mean nothing")
    arguments = parser.parse_args()
    seeds = range(1000, 1000 + (2 if arguments.quick else arguments.seeds))
    levels = np.linspace(0.0, 1.0, 3 if arguments.quick else arguments.levels).tolist()
    try:
        entrants = (*CONTROLLERS, *([learned(arguments.run)] if arguments.run else []))
    except UserError as error:
        print(f"throughput_band: error: {error}", file=sys.stderr)
        sys.exit(2)
    points = band(entrants, levels, seeds, 120.0 if arguments.quick else HOLD_S)
    following = renewable(entrants, seeds, 1800.0 if arguments.quick else 7200.0)
    show(points, following)
    if arguments.plot:
        plot(points, arguments.plot)
    if arguments.json:
        found = {"band": [asdict(p) for p in points], "renewable": [asdict(f) for f in following]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
