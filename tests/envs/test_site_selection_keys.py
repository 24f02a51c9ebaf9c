"""Every key of a site-selection configuration changes what happens."""

from pathlib import Path

import numpy as np
import pytest
from key_tree import leaves, merged

from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.site_selection import SiteSelectionEnv

BASE = {"sites": {"count": (5, 5)}, "goal": {"round_limit": 12}}
NAMED = {"sites": {"named": ({"name": "a", "region": "aws:us-east-1", "capacity_w": 2e5},)}}
DROPS = {"rounds": {"dropouts_per_hour": 60.0, "time_model": "B"}}
# Key: another valid value, and what else to set for both (the key needs it, or shows only with it).
ALTERNATIVES = {
    "sites.count": ((6, 6), {}),
    "sites.slots": (7, {}),
    "sites.named": (({"name": "a", "region": "aws:us-east-1", "capacity_w": 2e5},), {}),
    "sites.capacity_w": (2e5, {}),
    "sites.capacity_sigma": (0.1, {}),
    "sites.gpus": (("a40",), {}),
    "sites.samples": (50_000.0, {"rounds": {"time_model": "B"}}),
    "sites.samples_sigma": (0.1, {}),
    "sites.alpha": (100.0, {}),
    "power.reading": ("utilisation", {}),
    "power.u_max": (0.9, {}),
    "power.production_share": (0.5, {"power": {"reading": "non_production"}}),
    "power.traces": (("machine-util/google-cpu",), {}),
    "power.split": ("test", {}),
    "power.alignment": ("none", {}),
    "power.min_gpus": (60.0, {}),
    "power.pue": (1.6, {}),
    "network.split": ("test", {}),
    "network.regions": (("aws:us-east-1", "aws:us-west-1"), {}),
    "network.distinct_regions": ((2, 2), {}),
    "network.aggregator": ("aws:us-east-1", {}),
    "network.throughput": ("2022-01", {"network": {"regions": ("aws:us-east-1", "aws:us-west-1")}}),
    "network.bandwidth_share": (0.01, {}),
    "network.tcp_window_bytes": (1e5, {}),
    "network.local_rtt_ms": (500.0, {"network": {"regions": ("aws:us-east-1",)}}),
    "network.local_gbps": (0.1, {"network": {"regions": ("aws:us-east-1",)}}),
    "network.table": ("LINKS", {"network": {"regions": ("aws:us-east-1", "aws:us-west-1")}}),
    "market.split": ("test", {}),
    "market.carbon": ("direct", {}),
    "workload.model": ("llama-3-70b", {}),
    "workload.adapter": ("lora_qv", {}),
    "workload.rank": (8, {}),
    "workload.bytes_per_value": (4.0, {}),
    "workload.sequence_tokens": (2048, {}),
    "workload.mfu": (0.2, {}),
    "workload.host_share": (0.0, {}),
    "rounds.time_model": ("B", {}),
    "rounds.work_samples": (1e6, {}),
    "rounds.epochs": (3.0, {"rounds": {"time_model": "B"}}),
    "rounds.overhead_s": (20.0, {}),
    "rounds.deadline_s": (20.0, {}),
    "rounds.dropouts_per_hour": (60.0, {"rounds": {"time_model": "B"}}),
    "rounds.detect_s": (400.0, DROPS),
    "rounds.outage_s": (10.0, DROPS),
    "rounds.straggler_sigma": (0.5, {}),
    "learning.profile": ("PROFILE", {}),
    "learning.domains": (4, {}),
    "learning.loss_start": (3.0, {}),
    "learning.loss_floor": (0.3, {}),
    "learning.s0": (30.0, {}),
    "learning.beta": (0.8, {}),
    "learning.phi": (2.0, {}),
    "learning.phi_growth": (1.0, {}),
    "learning.transfer": (0.1, {}),
    "learning.forgetting": (0.3, {}),
    "learning.reference_samples": (50_000.0, {}),
    "learning.work_exponent": (0.2, {}),
    "learning.evaluation": ("population", {}),
    "learning.noise": ((0.0, 0.0), {}),
    "learning.accuracy_max": (0.8, {"goal": {"target_accuracy": 0.5}}),
    "learning.accuracy_slope": (2.0, {"goal": {"target_accuracy": 0.5}}),
    "learning.accuracy_half_loss": (1.0, {"goal": {"target_accuracy": 0.5}}),
    "learning.randomise": (0.0, {}),
    "goal.target_accuracy": (0.5, {}),
    "goal.target_loss": (1.0, {}),
    "goal.time_limit_s": (7200.0, {}),
    "goal.round_limit": (4, {}),
    "action.kind": ("binary", {}),
    "observation.domain_mix": (False, {}),
    "observation.domain_loss": (False, {}),
    "observation.market": (False, {}),
    "reward.form": ("net", {}),
    "reward.time_scale_s": (60.0, {}),
    "reward.energy_per_kwh": (0.1, {}),
    "reward.carbon_per_kg": (0.1, {}),
    "reward.cost_per_usd": (0.1, {}),
    "reward.target": (1.0, {"goal": {"target_loss": 3.9}}),
    "sites.named.*.name": ("b", NAMED),
    "sites.named.*.region": ("aws:us-west-1", NAMED),
    "sites.named.*.capacity_w": (3e5, NAMED),
    "sites.named.*.gpu": ("a40", NAMED),
    "sites.named.*.samples": (40_000.0, NAMED),
    "sites.named.*.mix": ((1.0, 0, 0, 0, 0, 0, 0, 0), NAMED),
    "sites.named.*.trace": ("machine-util/google-cpu", NAMED),
}


def changed(base, key, value):
    if ".*." in key:
        outer, inner = key.split(".*.")
        section, name = outer.split(".")
        return merged(base, {section: {name: ({**base[section][name][0], inner: value},)}})
    section, name = key.split(".")
    return merged(base, {section: {name: value}})


def trajectory(data):
    env = SiteSelectionEnv(data)
    observation, info = env.reset(seed=7)
    rng, met, over = np.random.default_rng(1), [observation, np.array(["|".join(info["sites"])])], False
    slots = env.layout.slots
    while not over:
        bits = rng.random(100)[:slots] < 0.6
        action = bits.astype(np.int8) if env.config.action.kind == "binary" else np.where(bits, 1.0, -1.0)
        observation, reward, terminated, truncated, _ = env.step(action.astype(env.action_space.dtype))
        over = terminated or truncated
        met += [observation, np.array([reward, terminated])]
    return [env.action_space] + [part.tolist() for part in met]


@pytest.mark.parametrize("key", sorted(set(leaves(SiteSelectionConfig)) | set(ALTERNATIVES)))
def test_every_key_has_an_effect(key, tmp_path):
    assert key in ALTERNATIVES, f"{key} is new: say here which other value shows its effect"
    assert key in set(leaves(SiteSelectionConfig)), f"{key} is no key any more"
    value, context = ALTERNATIVES[key]
    if value == "LINKS":
        value = str(tmp_path / "links.csv")
        rows = [
            f"{a},{b},80,0.5,0.1" for a, b in (("aws:us-east-1", "aws:us-west-1"), ("aws:us-west-1", "aws:us-east-1"))
        ]
        Path(value).write_text("\n".join(["src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb", *rows]) + "\n")
    elif value == "PROFILE":
        value = str(tmp_path / "profile.yaml")
        Path(value).write_text("loss_start: 4.0\nloss_floor: 0.01\ns0: 9.0\nbeta: 1.1\nphi: 2.6\n")
    base = merged(BASE, context)
    assert trajectory(base) != trajectory(changed(base, key, value)), f"{key} changes nothing"


def test_the_same_configuration_gives_the_same_trajectory():
    assert trajectory(BASE) == trajectory(BASE)
