"""Site selection measured: speed, a plausibility check of the greedy, and the headline comparison.

python benchmarks/site_selection.py speed        rounds per CPU-second, milliseconds per decision at 57 sites
python benchmarks/site_selection.py plausible    round time over the oracle's, 300 random draws, round-time model A
python benchmarks/site_selection.py headline     time to the target over PowerTrip's, by compute/communication ratio
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from wattgym.agents.selection_bundle import SelectionBundleController, load_selection_bundle
from wattgym.agents.selection_families import read_families
from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selection_scoring import episode_metrics
from wattgym.agents.selectors import SELECTORS, make_selector
from wattgym.agents.selectors.powertrip import GreedySettings, greedy_stop
from wattgym.agents.selectors.ranking import pick, prefixes
from wattgym.agents.selectors.selector import Observing, Selector, Turn
from wattgym.agents.validation import held_out_federation
from wattgym.envs.federation.arrays import BoolArray, FloatArray
from wattgym.envs.federation.config import SitesConfig, SiteSelectionConfig
from wattgym.envs.selection import SiteSelection
from wattgym.envs.site_selection import SiteSelectionEnv

CONFIGS = Path(__file__).parents[1] / "configs" / "site_selection"
RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Compute over communication at full participation."""

EXPECTED = {
    "greedy, patience 0": (1.05, 1.06, 1.06, 1.08, 1.09, 1.04),
    "greedy, patience 2": (1.04, 1.04, 1.03, 1.04, 1.03, 1.01),
    "all sites": (3.05, 2.05, 1.54, 1.22, 1.07, 1.02),
    "best single": (2.22, 3.07, 3.89, 4.98, 6.44, 8.12),
    "power-only N/2": (2.93, 2.05, 1.62, 1.39, 1.33, 1.37),
    "nearest-only N/2": (1.39, 1.13, 1.06, 1.10, 1.25, 1.47),
    "random N/2": (2.99, 2.14, 1.75, 1.56, 1.55, 1.66),
}
"""The same quantity from an independent calculation under the same assumptions; draws differ."""


def speed(bundle: Path | None = None) -> None:
    """Rounds per CPU-second, and milliseconds per decision, of an exported policy too if there is one."""
    config = SiteSelectionConfig(sites=SitesConfig(count=(20, 20)))
    env = SiteSelectionEnv(config)
    env.reset(seed=0)
    action, rounds = np.ones(20, dtype=np.float32), 3000
    begun = time.process_time()
    for _ in range(rounds):
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    print(f"single, 20 sites:          {rounds / (time.process_time() - begun):>10,.0f} rounds per CPU-second")
    batch = 256
    selection = SiteSelection(config)
    selection.reset(range(batch))
    actions, steps, done = np.ones((batch, 20), dtype=np.float32), 200, 0
    begun = time.process_time()
    for step in range(steps):
        outcome = selection.step(actions)
        done += batch
        ended = np.flatnonzero(outcome.terminated | outcome.truncated)
        if ended.size:
            selection.reset([batch * (step + 1) + row for row in ended.tolist()], ended)
    print(f"batched, {batch} x 20 sites:    {done / (time.process_time() - begun):>10,.0f} rounds per CPU-second")
    print("\nmilliseconds per decision at 57 sites, one federation")
    selection = SiteSelection(SiteSelectionConfig(sites=SitesConfig(count=(57, 57))))
    selectors: list[Selector] = [make_selector(name) for name in SELECTORS if name != "horizon planner"]
    if bundle is not None:
        selectors.append(Observing(SelectionBundleController(load_selection_bundle(bundle))))
    for selector in selectors:
        observation = selection.reset([0])
        selector.reset(selection.task)
        spent, decisions = 0.0, 0
        while spent < 0.5 and decisions < 200:
            turn = Turn(selection.view, observation, selection.emulator)
            begun = time.process_time()
            chosen = selector.act(turn)
            spent += time.process_time() - begun
            decisions += 1
            outcome = selection.step(chosen)
            observation = outcome.observation
            if (outcome.terminated | outcome.truncated).any():
                observation = selection.reset([decisions])
                selector.reset(selection.task)
        print(f"  {selector.name:24s} {1e3 * spent / decisions:8.3f}")


def plausible(draws: int = 300, sites: int = 20) -> None:
    """Mean round time over the oracle's, where progress a round is the same for every set.

    Under that assumption efficiency is the inverse of the round time `W / Σ P + max c`, and the oracle is exact: for
    any communication ceiling it takes every site under it. Utilisation is normal around 0.72, clipped, and costs lie
    between 0.2 and 3 s, as in the independent calculation; its spread of utilisation, the shape of its costs and what
    it divides compute by are not recorded. Here the spread is 0.12, costs are uniform or log-uniform, and compute is
    divided by the sites' mean cost (which fits its row of the best single site).
    """
    for shape in ("uniform", "log-uniform"):
        rng = np.random.default_rng(0)
        power = 1.0 - np.clip(rng.normal(0.72, 0.12, (draws, sites)), 0.05, 0.98)
        cost = rng.uniform(0.2, 3.0, (draws, sites))
        if shape == "log-uniform":
            cost = np.exp(rng.uniform(np.log(0.2), np.log(3.0), (draws, sites)))
        luck = rng.random((draws, sites))
        columns = [_over_oracle(power, cost, luck, ratio * cost.mean(axis=1) * power.sum(axis=1)) for ratio in RATIOS]
        print(f"round time over the oracle's, mean of {draws} draws of {sites} sites; {shape} costs")
        print("(in brackets the independent calculation)")
        print("compute/communication   " + "".join(f"{ratio:>15g}" for ratio in RATIOS))
        for name, expected in EXPECTED.items():
            cells = [f"{column[name]:.2f} ({theirs:.2f})" for column, theirs in zip(columns, expected, strict=True)]
            print(f"{name:24s}" + "".join(f"{cell:>15s}" for cell in cells))
        print()


def _over_oracle(power: FloatArray, cost: FloatArray, luck: FloatArray, work: FloatArray) -> dict[str, float]:
    """Mean round time of each rule over the oracle's.

    Args:
        power: Shape `(draws, N)`.
        cost: Communication time, shape `(draws, N)`, s.
        luck: Random numbers, shape `(draws, N)`.
        work: A round's work, shape `(draws,)`.
    """
    draws, sites = power.shape
    everyone = np.ones((draws, sites), dtype=bool)

    def seconds(sets: BoolArray) -> FloatArray:
        took: FloatArray = work[:, None] / (sets * power[:, None]).sum(axis=-1) + (sets * cost[:, None]).max(axis=-1)
        return took

    best = seconds(prefixes(-cost, everyone)).min(axis=1)
    by_score = prefixes(power / cost, everyone)
    efficiency, full = 1.0 / seconds(by_score), np.full(draws, sites)
    alone = work[:, None] / power + cost
    one, half = np.zeros(draws, dtype=np.int64), np.full(draws, sites // 2 - 1)
    sets = {
        "greedy, patience 0": pick(by_score, greedy_stop(efficiency, full, GreedySettings(patience=0))),
        "greedy, patience 2": pick(by_score, greedy_stop(efficiency, full, GreedySettings(patience=2))),
        "all sites": everyone,
        "best single": pick(prefixes(-alone, everyone), one),
        "power-only N/2": pick(prefixes(power, everyone), half),
        "nearest-only N/2": pick(prefixes(-cost, everyone), half),
        "random N/2": pick(prefixes(luck, everyone), half),
    }
    return {name: float(np.mean(seconds(chosen[:, None])[:, 0] / best)) for name, chosen in sets.items()}


RIVALS: dict[str, tuple[str, dict[str, float]]] = {
    "PowerTrip predicted": ("PowerTrip predicted", {}),
    "PowerTrip measured": ("PowerTrip measured", {}),
    "all sites": ("all sites", {}),
    "power-only N/2": ("power-only top k", {"share": 0.5}),
    "power-only N/4": ("power-only top k", {"share": 0.25}),
    "nearest-only N/2": ("nearest-only top k", {"share": 0.5}),
    "nearest-only N/4": ("nearest-only top k", {"share": 0.25}),
}
"""Selectors of the headline with their settings, by the name of their column; the first is the reference."""


def headline(seeds: int = 40) -> None:
    """Time to the target in the committed communication-bound family, with its round's work scaled up."""
    found = read_families(CONFIGS / "communication_bound.yaml")
    assert found is not None
    (env,) = found.values()
    print(f"median time to the target over that of PowerTrip predicted; {seeds} held-out federations\n")
    print(
        f"{'work of a round':>16s} {'compute/comm':>13s} {'reached':>8s}" + "".join(f"{name:>21s}" for name in RIVALS)
    )
    for factor in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0):
        work, reference = (factor * value for value in (env.rounds.work_samples, env.learning.reference_samples))
        scaled = env.model_copy(
            update={
                # Long enough for the most work, so that nothing is cut off.
                "rounds": env.rounds.model_copy(update={"work_samples": work, "deadline_s": 3600.0}),
                "goal": env.goal.model_copy(update={"time_limit_s": 2 * 86_400.0}),
                "learning": env.learning.model_copy(update={"reference_samples": reference}),
            }
        )
        arena = SelectionArena(held_out_federation(scaled, "test"))
        times, ratio, reached = [], 0.0, 1.0
        for name, settings in RIVALS.values():
            episodes = arena.run(make_selector(name, settings), range(seeds))
            metrics = [episode_metrics(episode) for episode in episodes]
            times.append(np.array([m["time_to_target_s"] for m in metrics]))
            reached = min(reached, float(np.mean([m["target_reached"] for m in metrics])))
            if name == "all sites":
                ratio = float(np.median([1.0 / m["communication_share"] - 1.0 for m in metrics]))
        print(
            f"{work:>16,.0f} {ratio:>13.2f} {reached:>8.0%}"
            + "".join(f"{float(np.median(t / times[0])):>21.2f}" for t in times),
            flush=True,
        )


def main() -> None:
    """Runs the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"speed": speed, "plausible": plausible, "headline": headline}
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)}; default: all")
    parser.add_argument("--bundle", type=Path, help="exported selection policy whose decisions are timed as well")
    options = parser.parse_args()
    parts["speed"] = lambda: speed(options.bundle)
    chosen = options.parts or list(parts)
    for part in chosen:
        if part not in parts:
            parser.error(f"unknown part '{part}'; known: {', '.join(parts)}")
    for part in chosen:
        print(f"== {part}")
        parts[part]()
        print()


if __name__ == "__main__":
    main()
