"""From a federation file and the sites that joined to the selection environment that policies know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wattgym.config import parse_config
from wattgym.envs.federation.config import NetworkConfig, SiteSelectionConfig
from wattgym.federated.config import FederationConfig
from wattgym.federated.loop import SelectionPlan
from wattgym.federated.messages import SiteInfo


def selection_plan(
    config: FederationConfig,
    members: Mapping[str, SiteInfo],
    domains: Sequence[str],
    start_loss: float,
    *,
    rounds: int,
    seed: int,
) -> SelectionPlan:
    """The plan of a run.

    Args:
        config: The federation.
        members: What the sites told when they joined; one that has not joined counts as without data until it does.
        domains: Names of the domains of the data.
        start_loss: Loss before training, nats.
        rounds: Rounds at most.
        seed: Seed of what the emulated federation draws.

    Raises:
        UserError: The target is out of reach from here, or the environment cannot be built.
    """
    settings = config.selection
    learning = settings.learning.model_dump()
    # An emulated sample is so many of the real ones; a site's data and its steps are told in emulated samples.
    per_sample = settings.learning.reference_samples / (config.local_steps * config.samples_per_update)
    network = config.network or NetworkConfig(split="all")
    data: dict[str, Any] = {
        **settings.model_dump(exclude={"learning"}),
        "sites": {
            "named": [
                {
                    "name": site.name,
                    "region": site.region,
                    "gpu": site.gpu,
                    "capacity_w": site.capacity_w,
                    "trace": site.trace,
                    **_data(members.get(site.name), domains, settings.learning.domains, per_sample),
                }
                for site in config.sites
            ]
        },
        "power": config.power.model_dump(),
        "network": network.model_dump(),
        # The loss is measured: it has its own noise, and its own start.
        "learning": {**learning, "noise": (0.0, 0.0), "randomise": 0.0, "loss_start": start_loss},
    }
    return SelectionPlan(
        env=parse_config(SiteSelectionConfig, data, "federation"),
        domains=tuple(domains),
        rounds=rounds,
        seed=seed,
        reference_steps=config.local_steps,
        wall_clock=config.clock == "wall",
    )


def _data(info: SiteInfo | None, domains: Sequence[str], known: int, per_sample: float) -> dict[str, Any]:
    """Samples and domain mix that a site discloses."""
    if info is None or not info.samples:
        return {"samples": per_sample}
    counts = [float(info.domain_samples.get(name, 0)) for name in domains] + [0.0] * max(known - len(domains), 0)
    total = sum(counts)
    return {
        "samples": info.samples * per_sample,
        "mix": [count / total for count in counts] if total else [],
    }
