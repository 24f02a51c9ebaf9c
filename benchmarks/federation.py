"""Time to a target loss of site selectors on live federations: real training, emulated power, network and clock.

    python benchmarks/federation.py [--bundle FOLDER] [--seeds 5] [--alpha 0.3] [--out runs/federation_benchmark]

Every seed draws a federation of eight sites (held-out places and weeks, capacities, boards, a Dirichlet split of eight
task families) that all selectors meet with the same model and data order. Communication takes most of a round
(configs/site_selection/communication_bound.yaml). Finished runs in --out are kept, so that an interrupted benchmark
goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console

from wattgym.agents.selection_evaluation import HEADLINE
from wattgym.agents.selection_families import read_families
from wattgym.agents.selection_rollout import SelectionEpisode
from wattgym.agents.selectors import load_tuned_selectors
from wattgym.agents.selectors.selector import Selector
from wattgym.agents.summary import print_summary
from wattgym.envs.federation.config import PowerConfig, SiteSelectionConfig
from wattgym.envs.federation.network import pool
from wattgym.envs.federation.power import GOOGLE_DOMAINS
from wattgym.federated.config import FederationConfig, check_federation
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.policy import live_selector
from wattgym.federated.report import FederatedRun, federated_result, write_federated_report
from wattgym.federated.runner import run
from wattgym.runs import RunFolder

FAMILY = "communication_bound"
SCENARIO = Path(__file__).parents[1] / "configs" / "site_selection" / f"{FAMILY}.yaml"
SITES = 8
SPLIT = "test"
TIME_LIMIT_S = 7200.0
"""Emulated time after which a run that has not reached the target is given up; it counts as this long."""
REFERENCE = "PowerTrip predicted"
SELECTORS = ("all sites", "nearest-only top k", "power-only top k", "random k", "PowerTrip measured", REFERENCE)
LEARNED = "learned policy"
METRICS = (HEADLINE, "time_to_target_s", "target_reached", "rounds", "participants_mean", "communication_share")


def main() -> None:
    """Runs what is missing and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="site-selection bundle to run beside the rules")
    parser.add_argument("--seeds", type=int, default=5, help="federations")
    parser.add_argument("--rounds", type=int, default=400, help="rounds at most")
    parser.add_argument("--target", type=float, default=2.2, help="target loss, nats")
    parser.add_argument("--alpha", type=float, default=0.3, help="concentration of the split: 100 is near IID")
    parser.add_argument("--out", type=Path, default=Path("runs/federation_benchmark"), help="folder of all runs")
    options = parser.parse_args()
    env = read_families(SCENARIO)
    scenario = next(iter(env.values()))
    policies = {name: name for name in SELECTORS}
    if options.bundle is not None:
        policies[LEARNED] = str(options.bundle)
    runs = [
        FederatedRun(name, seed, play(scenario, name, policy, seed, options))
        for seed in range(options.seeds)
        for name, policy in policies.items()
    ]
    baselines = SELECTORS if options.bundle is not None else (REFERENCE,)
    result = federated_result(runs, {"command": " ".join(sys.argv)}, REFERENCE, baselines)
    report = write_federated_report(result, options.out)
    print_summary(result.summary, Console(width=160), METRICS)
    print(
        f"{options.seeds} federations of {SITES} sites, Dirichlet {options.alpha:g}, target loss {options.target:g}; "
        f"report: {report}"
    )


def play(
    scenario: SiteSelectionConfig, name: str, policy: str, seed: int, options: argparse.Namespace
) -> SelectionEpisode:
    """One run; a finished one is replayed from its log, without training."""
    config = federation(scenario, seed, options.target, options.alpha)
    folder = options.out / f"seed{seed}" / name.replace(" ", "_")
    begun = folder.is_dir()
    if begun and RunFolder.open(folder).info.status == "finished":
        print(f"seed {seed}, {name}: finished before", flush=True)
    else:
        print(f"seed {seed}, {name}", flush=True)
    with InProcessEngine(config, folder.with_name(f"{folder.name}-sites")) as engine:
        done = run(
            engine,
            config,
            policy,
            options.rounds,
            folder,
            seed=seed,
            resume=begun,
            selector=tuned(policy),
            say=lambda line: None,
        )
    if done.stopped or done.episode is None:
        sys.exit(f"stopped; the same command goes on in {options.out}")
    seconds, reached = float(done.episode.seconds.sum()), done.episode.reached
    print(f"    {seconds:8.0f} s emulated, {len(done.episode.seconds)} rounds, target reached: {reached}", flush=True)
    return done.episode


def tuned(policy: str) -> Selector:
    """The selector, a rule with the settings that tuning on emulated training federations found."""
    return live_selector(policy, load_tuned_selectors().of(FAMILY).get(policy))


def federation(scenario: SiteSelectionConfig, seed: int, target_loss: float, alpha: float) -> FederationConfig:
    """The federation of a seed."""
    rng = np.random.default_rng([seed, 20])
    network = scenario.network.model_copy(update={"split": SPLIT})
    regions = rng.choice(pool(network), SITES, replace=False)
    capacity = scenario.sites.capacity_w * np.exp(scenario.sites.capacity_sigma * rng.standard_normal(SITES))
    sites = [
        {
            "name": f"{region.replace(':', '-')}-{k}",
            "region": str(region),
            "gpu": str(rng.choice(scenario.sites.gpus)),
            "capacity_w": float(np.round(capacity[k], -3)),
            "trace": str(rng.choice(GOOGLE_DOMAINS)),
        }
        for k, region in enumerate(regions.tolist())
    ]
    per_site = scenario.rounds.work_samples / scenario.sites.most
    selection: dict[str, Any] = {
        "workload": scenario.workload.model_dump(),
        "rounds": {**scenario.rounds.model_dump(), "work_samples": per_site * SITES},
        "learning": scenario.learning.model_dump(),
        "goal": {"target_loss": target_loss, "time_limit_s": TIME_LIMIT_S},
        "reward": scenario.reward.model_dump(),
    }
    split = {"kind": "dirichlet", "alpha": alpha}
    power: PowerConfig = scenario.power.model_copy(update={"split": SPLIT})
    config = FederationConfig.model_validate(
        {
            "seed": seed,
            "sites": sites,
            "model": {"source": "tiny"},
            "data": {
                "source": "tasks",
                "records": 1600,
                "max_tokens": 64,
                "split": split,
            },
            "lora": {"rank": 8, "alpha": 16, "targets": "all-linear"},
            "optimiser": {"learning_rate": 4e-3},
            "local_steps": 10,
            "network": network.model_dump(),
            "clock": "emulated",
            "power": power.model_dump(),
            "selection": selection,
        }
    )
    check_federation(config)
    return config


if __name__ == "__main__":
    main()
