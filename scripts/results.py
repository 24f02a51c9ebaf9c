"""Trains the recipes, judges them and every baseline on held-out scenarios, and writes docs/results.md from it.

    python scripts/results.py                                     # all of configs/results.yaml; hours
    python scripts/results.py --minutes 45 --scenarios 8          # what fits; the page says what was not run

Interruptible at any time: what is finished lies in `results/` and is not done again as long as what it depends on
(configuration, scenarios, policy, tuned settings) stays the same. The page and the table beside it are generated whole.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray
from pydantic import Field
from results_curves import curve, curves_table, figure
from results_page import ALL, WITH_KNOBS, Results, Rows, render, table

from wattgym import envs
from wattgym.agents.baselines import BASELINES, ENERGY_MATCHED, LIMIT_ONLY, load_tuned, make_baseline, needs, usable
from wattgym.agents.checkpoint import read_manifest
from wattgym.agents.config import parse_training
from wattgym.agents.controller import Controller
from wattgym.agents.evaluation import EvaluationPlan, Stage
from wattgym.agents.policy import checkpoint_folder, load_policy
from wattgym.agents.scoring import scenario_metrics
from wattgym.agents.seeds import SUMMARY, group_runs, train_seeds
from wattgym.config import FrozenModel, load_config, read_yaml
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.surfaces import surface_library
from wattgym.envs.plant import FloatArray
from wattgym.envs.task import ControlTask
from wattgym.errors import UserError
from wattgym.files import atomic_write_json, atomic_write_text, read_json_object
from wattgym.runs import RunFolder

ROOT = Path(__file__).resolve().parents[1]


class Learned(FrozenModel):
    """A recipe and its budget."""

    recipe: str
    steps: int = Field(ge=1)
    seeds: int = Field(ge=1)


class Shaped(FrozenModel):
    """Baselines that enter once more, with more knobs than the limit.

    Attributes:
        recipe: Recipe whose environment says which knobs, and under which rules.
        baselines: Who enters.
    """

    recipe: str
    baselines: tuple[str, ...]

    def env(self) -> dict[str, Any]:
        """What that changes in the environment.

        Raises:
            UserError: The recipe enables no knob beside the limit.
        """
        source = _recipe(self.recipe)
        env = parse_training(read_yaml(source), str(source)).env
        if not env.action.beside_limit:
            raise UserError(f"shaped.recipe: {source} enables no knob beside the power limit")
        return {"action": {"knobs": env.action.knobs}, "knob_rules": env.knob_rules}


class ResultsPlan(FrozenModel):
    """Content of `configs/results.yaml`."""

    site: dict[str, Any] = Field(default_factory=dict)
    reward: dict[str, Any] = Field(default_factory=dict)
    families: tuple[str, ...]
    episode_s: dict[str, float]
    scenarios: int = Field(ge=1)
    period_s: float = 2.0
    learned: tuple[Learned, ...] = ()
    shaped: Shaped | None = None
    references: tuple[str, ...] = ()
    gpus: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None


class Budget:
    """Time that is left."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes

    @property
    def spent(self) -> bool:
        """Whether nothing new may be begun."""
        return self._end is not None and time.monotonic() > self._end


def main(
    plan: Path = ROOT / "configs" / "results.yaml",
    cache: Path = ROOT / "results",
    page: Path = ROOT / "docs" / "results.md",
    scenarios: int | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    minutes: float | None = None,
    train: bool = True,
    families: str | None = None,
) -> None:
    """Trains, evaluates and writes the page.

    Args:
        plan: What to compare.
        cache: Folder of finished pieces.
        page: The page; beside it lie the tables of all numbers and of the learning curves as CSV, and their figure.
        scenarios: Fewer scenarios a family and GPU type than planned.
        steps: Fewer training steps than planned.
        seeds: Fewer training seeds than planned.
        jobs: Training processes at a time.
        minutes: Nothing is begun after that many minutes.
        train: Whether recipes that are not trained yet are.
        families: Only these of the planned signal families, separated by commas; processes that take one each may run
            side by side on one cache, and a last one then makes the page.
    """
    settings = load_config(ResultsPlan, plan)
    budget = Budget(minutes)
    if scenarios is not None:
        settings = settings.model_copy(update={"scenarios": scenarios})
    learned = tuple(
        entry.model_copy(
            update={"steps": min(entry.steps, steps or entry.steps), "seeds": min(entry.seeds, seeds or entry.seeds)}
        )
        for entry in settings.learned
    )
    wanted = tuple(families.split(",")) if families else settings.families
    settings = settings.model_copy(update={"learned": learned, "families": wanted})
    results = Results()
    groups = dict(_trained(settings, cache, jobs, budget if train else Budget(0.0), results))
    _evaluate(settings, cache, groups, budget, results)
    # The page says whether the tree is as committed, so it is made before anything is written.
    text = render(settings.families, settings.references, settings.scenarios, results)
    atomic_write_text(page.with_suffix(".csv"), table(results))
    atomic_write_text(page.with_name("learning_curves.csv"), curves_table(results.curves))
    if results.curves:
        atomic_write_text(page.parent / "images" / "learning_curves.svg", figure(results.curves))
    atomic_write_text(page, text)
    print(f"{page}: {len(results.cells)} pieces, {len(results.not_run)} not run")


def _trained(
    plan: ResultsPlan, cache: Path, jobs: int, budget: Budget, results: Results
) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Trains what is not trained yet; yields the finished runs of each recipe."""
    for entry in plan.learned:
        source = _recipe(entry.recipe)
        data = read_yaml(source)
        config = parse_training({**data, "train": {**data["train"], "total_steps": entry.steps}}, str(source))
        folder = cache / "runs" / f"{entry.recipe}-{entry.steps}"
        if not budget.spent:
            print(f"training {folder.name}", file=sys.stderr)
            outcome = train_seeds(config, folder, entry.seeds, jobs=jobs, resume=True, progress=sys.stderr.isatty())
            if outcome.interrupted:
                raise typer.Exit(130)
        try:
            runs = group_runs(folder) or ()
        except UserError:
            runs = ()
        if len(runs) < entry.seeds:
            results.not_run.append(f"{entry.recipe}: {len(runs)} of {entry.seeds} seeds are trained")
        if runs:
            found = read_json_object(folder / SUMMARY)["validation_reward"]
            interval = "" if found["ci_low"] is None else f" [{found['ci_low']:.4f}, {found['ci_high']:.4f}]"
            results.budgets[entry.recipe] = (
                f"{config.train.algorithm}, {entry.steps:,} steps, {len(runs)} seeds; validation reward "
                f"{found['iqm']:.4f}{interval}"
            )
            results.curves[entry.recipe] = [curve(run) for run in runs]
            yield entry.recipe, runs


def _recipe(name: str) -> Path:
    return ROOT / "configs" / "recipes" / f"{name}.yaml"


def _evaluate(
    plan: ResultsPlan, cache: Path, groups: dict[str, tuple[Path, ...]], budget: Budget, results: Results
) -> None:
    tuned = load_tuned()
    names = plan.baselines or tuple(name for name in BASELINES if name != ENERGY_MATCHED)
    shaped = plan.shaped.baselines if plan.shaped else ()
    lacking = tuple(name for name in names if not usable(name, LIMIT_ONLY))
    results.not_run += [
        f"{name}: needs {' and '.join(needs(name))}, the sites here have limits alone"
        for name in lacking
        if name not in shaped
    ]
    names = tuple(name for name in names if name not in lacking)
    baselines = [_baseline(name, tuned.gains.get(name)) for name in names]
    if plan.shaped:
        env = plan.shaped.env()
        baselines += [_baseline(name, tuned.gains.get(name), env, WITH_KNOBS) for name in shaped]
    surfaces = surface_library().select(split="test", cap_sensitive=True)
    gpus = plan.gpus if plan.gpus is not None else (ALL, *sorted({surface.gpu for surface in surfaces}))
    skipped: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    entrants = [entrant for name, runs in groups.items() for entrant in _learned(name, runs)]
    results.with_knobs |= {e.name for e in entrants if e.env["action"].beside_limit}
    # The site with every GPU type first: if time runs out, single types are what is missing.
    for gpu in gpus:
        ids = "test" if gpu == ALL else tuple(surface.id for surface in surfaces if surface.gpu == gpu)
        for family in plan.families:
            cell = _Cell(plan, cache, family, gpu, {**plan.site, "surfaces": ids})
            for entrant in [*entrants, *baselines]:
                name = entrant.name
                found = cell.cached(entrant)
                if found is None and not budget.spent:
                    try:
                        found = cell.run(entrant)
                    except UserError as error:
                        refused.setdefault(f"{name}: {error}", []).append(f"{family}, {gpu}")
                        continue
                if found is None:
                    skipped.setdefault(f"{family}, {gpu}", []).append(name)
                else:
                    results.cells[family, gpu, name] = found
    results.not_run += [f"{text} ({'; '.join(cells)})" for text, cells in refused.items()]
    everybody = [entrant.name for entrant in [*entrants, *baselines]]
    for cell_name, missing in skipped.items():
        who = "every controller" if missing == everybody else ", ".join(missing)
        results.not_run.append(f"{cell_name}: {who} (no time)")


@dataclass(frozen=True)
class Entrant:
    """A controller to be judged.

    Attributes:
        name: Name in tables.
        identity: What its results depend on beside the scenarios; a change makes them out of date.
        make: Makes the controller, or one for each training run.
        env: What its environment has that is not the plan's: for a policy, all that it acts in.
        commands: Whether its actions are settings whatever actions mean in that environment, as those of baselines are.
    """

    name: str
    identity: list[str]
    make: Callable[[], list[Controller]]
    env: Mapping[str, Any]
    commands: bool = False


class Still:
    """Leaves what a residual is added to as it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self, task: ControlTask) -> None:
        """Remembers how many numbers an action has."""
        self._shape = (task.base_w.size, task.layout.actions)

    def act(self, observation: NDArray[np.float32]) -> FloatArray:
        """Nothing is added."""
        return np.zeros(self._shape)


def _baseline(name: str, settings: Any, env: Mapping[str, Any] | None = None, suffix: str = "") -> Entrant:
    identity = [repr(settings), *([] if env is None else [repr(env)])]
    return Entrant(name + suffix, identity, lambda: [make_baseline(name)], env or {}, commands=True)


def _learned(name: str, runs: tuple[Path, ...]) -> list[Entrant]:
    """A recipe's policies, and where they are residuals, what they are added to."""
    env = load_policy(runs[0]).config.env
    assert isinstance(env, PowerShapingConfig)
    found = [
        Entrant(
            name,
            [_digest_of(path) for path in runs],
            lambda: [load_policy(path).controller for path in runs],
            dict(env),
        )
    ]
    if env.action.gains is not None or env.action.loop is not None:
        still = f"{name} without learning"
        found.append(Entrant(still, [env.action.model_dump_json()], lambda: [Still(still)], dict(env)))
    return found


class _Cell:
    """One signal family on one kind of site: the same scenarios for whoever enters."""

    def __init__(self, plan: ResultsPlan, cache: Path, family: str, gpu: str, site: dict[str, Any]) -> None:
        self._family, self._gpu, self._site = family, gpu, site
        self._plan, self._cache = plan, cache / "pieces"
        self._scenarios = EvaluationPlan(
            families=(family,), seeds=plan.scenarios, episode_s=plan.episode_s[family], traced=0
        )
        self._uncapped: Any = None

    def cached(self, entrant: Entrant) -> Rows | None:
        """What is finished, if it is of the same scenarios and controllers."""
        path = self._path(entrant.name)
        if not path.is_file():
            return None
        held = read_json_object(path)
        if held["key"] != self._key(entrant):
            return None
        return {
            run: {m: np.array(v, dtype=np.float64) for m, v in found.items()} for run, found in held["rows"].items()
        }

    def run(self, entrant: Entrant) -> Rows:
        """Runs a controller, or all training runs of one, and keeps the metrics."""
        print(f"{self._family}, {self._gpu}: {entrant.name}", file=sys.stderr)
        if self._uncapped is None:
            self._uncapped = self._stage({}).baseline(make_baseline("uncapped"))
        stage = self._stage(entrant.env)
        if entrant.commands:
            rollouts = {"": stage.baseline(*entrant.make())}
        else:
            rollouts = {controller.name: stage.policy(controller) for controller in entrant.make()}
        rows = {run: dict(scenario_metrics(rollout, self._uncapped)) for run, rollout in rollouts.items()}
        plain = {run: {m: [_plain(x) for x in v.tolist()] for m, v in found.items()} for run, found in rows.items()}
        atomic_write_json(self._path(entrant.name), {"key": self._key(entrant), "rows": plain})
        return rows

    def _stage(self, env: Mapping[str, Any]) -> Stage:
        common = {"site": self._site, "reward": self._plan.reward, "signal": {"infeasible": "track"}}
        config = PowerShapingConfig.model_validate({"period_s": self._plan.period_s, **env, **common})
        if config.period_s != self._plan.period_s:
            raise UserError(f"a policy was trained for periods of {config.period_s:g} s, not {self._plan.period_s:g} s")
        return Stage(config, self._family, self._scenarios)

    def _path(self, name: str) -> Path:
        slug = "".join(c if c.isalnum() else "-" for c in name)
        return self._cache / f"{self._family}-{self._gpu}" / f"{slug}.json"

    def _key(self, entrant: Entrant) -> str:
        plain = [self._scenarios.model_dump(mode="json"), self._site, self._plan.reward, entrant.identity, _plant()]
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@cache
def _plant() -> str:
    """Digest of the environment's code and tables: what was run on another plant is not compared."""
    folder = Path(envs.__file__).parent
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".yaml"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _digest_of(run: Path) -> str:
    manifest = read_manifest(checkpoint_folder(RunFolder.open(run)))
    return hashlib.sha256(json.dumps(manifest.sha256, sort_keys=True).encode()).hexdigest()


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else value


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(f"results: error: {error}", file=sys.stderr)
        sys.exit(2)
