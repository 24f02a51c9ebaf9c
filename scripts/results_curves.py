"""What the logs of the trained recipes come to: validation reward over environment steps."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wattgym.agents.figures import as_svg
from wattgym.files import read_json_object

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARES = (0.0, 0.25, 0.5, 1.0)
"""Shares of the budget at which the page shows curves."""

_STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """One training run.

    Attributes:
        run: Name of its folder.
        steps: Environment steps at each validation.
        reward: Validation reward then.
        composite: PJM composite then, mean over the validation families.
    """

    run: str
    steps: tuple[int, ...]
    reward: tuple[float, ...]
    composite: tuple[float, ...]

    def at(self, share: float) -> float | None:
        """Reward of the last validation within a share of the budget; None if there was none yet."""
        within = [
            reward for steps, reward in zip(self.steps, self.reward, strict=True) if steps <= share * self.steps[-1]
        ]
        return within[-1] if within else None


def curve(run: Path) -> Curve:
    """Reads the validations of a run."""
    found = read_json_object(run / "validations.json")["validations"]
    composite = [float(np.mean([f["pjm_composite"] for f in entry["families"].values()])) for entry in found]
    return Curve(run.name, tuple(e["steps"] for e in found), tuple(e["reward"] for e in found), tuple(composite))


def curves_table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Every validation as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["recipe", "run", "steps", "validation_reward", "pjm_composite"])
    for recipe, runs in curves.items():
        for found in runs:
            for steps, reward, composite in zip(found.steps, found.reward, found.composite, strict=True):
                writer.writerow([recipe, found.run, steps, f"{reward:.6g}", f"{composite:.6g}"])
    return out.getvalue()


def curve_rows(curves: Mapping[str, Sequence[Curve]]) -> list[list[str]]:
    """A row a recipe: mean reward over runs at `SHARES` of the budget, and the mean over runs of the best."""
    rows = []
    for recipe, runs in curves.items():
        values = [[found.at(share) for found in runs] for share in SHARES]
        shown = ["–" if None in row else f"{np.mean([x for x in row if x is not None]):.3f}" for row in values]
        rows.append([recipe, *shown, f"{np.mean([max(found.reward) for found in runs]):.3f}"])
    return rows


@as_svg
def figure(curves: Mapping[str, Sequence[Curve]]) -> Figure:
    """One line a recipe, the mean over its runs, and a dot at the end of each run."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8.4, 4.4), layout="constrained")
    axes = drawn.subplots()
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    for index, (recipe, runs) in enumerate(curves.items()):
        colour, style = colours[index % 10], _STYLES[index // 10 % 4]
        length = min(len(found.steps) for found in runs)
        mean = np.mean([found.reward[:length] for found in runs], axis=0)
        steps = np.maximum(runs[0].steps[:length], 1_000)
        axes.plot(steps, mean, color=colour, linestyle=style, label=recipe)
        for found in runs:
            axes.plot(max(found.steps[-1], 1_000), found.reward[-1], "o", color=colour, markersize=3.0)
    axes.set_xscale("log")
    axes.set_xlabel("environment steps (a policy that was judged before them: at 1,000)")
    axes.set_ylabel("validation reward")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], -0.6))
    drawn.legend(loc="outside right upper")
    return drawn
