"""How records are dealt to sites, and what a federation file may not say."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from wattgym.config import parse_config, parse_yaml
from wattgym.errors import UserError
from wattgym.federated.config import FederationConfig, SplitConfig, check_federation, load_federation
from wattgym.federated.links import Links
from wattgym.federated.partition import Partition, deal, domain_counts
from wattgym.federated.tasks import FAMILIES, generate

DOMAINS = ["x"] * 40 + ["y"] * 40 + ["z"] * 40


def shares(kind, sites=4, seed=0, **settings_):
    owner = deal(DOMAINS, sites, SplitConfig(kind=kind, **settings_), np.random.default_rng(seed))
    return np.array([[sum(o == k and d == name for o, d in zip(owner, DOMAINS, strict=True)) for name in "xyz"]
                     for k in range(sites)])  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["iid", "dirichlet", "quantity", "category"]), st.integers(1, 9), st.integers(0, 99))
def test_every_record_is_dealt_once(kind, sites, seed):
    table = shares(kind, sites, seed)
    assert table.sum(axis=0).tolist() == [40, 40, 40]


def test_kinds_of_splits():
    even = shares("iid")
    assert even.sum(axis=1).tolist() == [30, 30, 30, 30]
    assert np.abs(shares("dirichlet", alpha=1000.0) - 10).max() <= 3
    largest = np.mean([shares("dirichlet", alpha=0.01, seed=seed).max(axis=0) / 40 for seed in range(20)])
    assert largest > 0.93  # nearly all of a domain is at one site
    assert np.ptp(shares("quantity", sigma=1.5).sum(axis=1)) > 20
    assert shares("category", 3).tolist() == [[40, 0, 0], [0, 40, 0], [0, 0, 40]]
    assert shares("category", 2).tolist() == [[40, 0, 40], [0, 40, 0]]
    assert shares("category", 6).astype(bool).sum() == 6


def test_tasks_are_right_and_the_same_each_time():
    records = generate(tuple(FAMILIES), 400, seed=5)
    assert records == generate(tuple(FAMILIES), 400, seed=5)
    assert records != generate(tuple(FAMILIES), 400, seed=6)
    assert domain_counts(records) == dict.fromkeys(sorted(FAMILIES), 50)
    for (prompt, answer), family in records:
        words = prompt.split()
        if family == "add":
            assert int(answer) == int(words[0]) + int(words[2])
        elif family == "reverse":
            assert answer[::-1] == words[1]
        elif family == "larger":
            assert int(answer) == max(int(words[2]), int(words[4]))
        elif family == "repeat":
            assert answer.split() == [words[1]] * int(words[2])


def test_evaluation_is_even_and_nobody_trains_on_it(federation):
    config = federation()
    partition = Partition(config)
    assert set(domain_counts(partition.evaluation).values()) == {2}
    dealt = sum(len(partition.slice(name)) for name in config.names)
    assert dealt == config.data.records - config.data.evaluation
    again = Partition(config)
    assert [again.slice(n) for n in config.names] == [partition.slice(n) for n in config.names]


@pytest.mark.parametrize(
    ("source", "domains"),
    [
        ("gsm8k", {"2 steps", "3 steps", "4 steps", "5 steps", "6+ steps"}),
        ("self_instruct", {"classification", "generation", "user-oriented"}),
    ],
)
def test_domains_of_the_shipped_sources(federation, source, domains):
    partition = Partition(federation(data={"source": source, "evaluation": 30}))
    assert set(partition.domains) == domains
    assert set(domain_counts(partition.evaluation)) == domains


def test_a_users_file_and_a_sites_own(federation, tmp_path):
    shared, own = tmp_path / "shared.jsonl", tmp_path / "own.jsonl"
    rows = [{"prompt": f"{i}?", "completion": "yes", "topic": "even" if i % 2 == 0 else "odd"} for i in range(20)]
    shared.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own.write_text("".join(json.dumps({**row, "topic": "mine"}) + "\n" for row in rows[:5]))
    data = {"source": "file", "path": str(shared), "domain_field": "topic", "evaluation": 4, "split": {"kind": "iid"}}
    sites = [{"name": "a", "region": "r"}, {"name": "b", "region": "r", "data": str(own)}]
    partition = Partition(federation(data=data, sites=sites))
    assert partition.domains == ("even", "odd")
    assert len(partition.slice("a")) == 16
    assert domain_counts(partition.slice("b")) == {"mine": 5}
    shared.write_text(json.dumps({"prompt": "?", "completion": "!"}) + "\n")
    with pytest.raises(UserError, match=r"shared.jsonl, line 1: the record does not say what kind it is"):
        Partition(federation(data=data, sites=sites))


def _file(tmp_path, config, **changes):
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump({**config.model_dump(mode="json"), **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": [{"name": "a", "region": "r"}, {"name": "a", "region": "r"}]}, "two sites are named 'a'"),
        ({"sites": []}, "sites: Tuple should have at least 1 item"),
        ({"local_stepz": 3}, "unknown key 'local_stepz', did you mean 'local_steps'"),
        ({"clock": "emulated"}, "need network"),
        ({"samples_per_update": 6, "micro_batch": 4}, "micro-batch 4 does not divide"),
        ({"network": {"aggregator": "aws:nowhere"}}, "unknown region 'aws:nowhere'"),
        ({"data": {"source": "tasks", "families": ["adding"]}}, "unknown family 'adding'"),
        (
            {"data": {"source": "tasks", "families": ["add"], "records": 12, "split": {"alpha": 0.01}}},
            "its data slice has no samples",
        ),
        ({"data": {"source": "tasks", "records": 8, "evaluation": 64}}, "at least one must be left"),
        ({"sites": [{"name": "a", "region": "aws:us-east-1", "trace": "power-util/nowhere"}]}, "power-util/nowhere"),
        (
            {"sites": [{"name": "a", "region": "r", "shaping": {
                "devices": ["h100-sxm:0"], "controller": "PID", "signal": "regd"}}]},
            "site 'a': unknown policy 'PID'; .*feed-forward \\+ PI",
        ),
        (
            {"sites": [{"name": "a", "region": "r", "shaping": {
                "devices": ["h100-sxm:0"], "controller": "PI", "signal": "regx"}}]},
            "regx",
        ),
        (
            {"sites": [{"name": "a", "region": "r", "shaping": {"devices": ["cuda:0"], "backend": "nvml"}}]},
            "site 'a': .*trains on the CPU",
        ),
        (
            {"sites": [{"name": "a", "region": "r", "shaping": {"devices": ["h100-sxm:0"], "controller": "PI"}}]},
            "controller and signal go together",
        ),
        ({"model": {"source": "folder", "path": "/nowhere/model"}}, "/nowhere/model: no such model folder"),
    ],
)  # fmt: skip
def test_a_bad_federation_file_is_one_line(federation, tmp_path, changes, message):
    pytest.importorskip("peft", reason="checks for the model's libraries")
    with pytest.raises(UserError, match=message) as found:
        load_federation(_file(tmp_path, federation(), **changes))
    assert "\n" not in str(found.value)


def test_a_missing_pair_of_regions_is_named(federation, tmp_path):
    pytest.importorskip("peft", reason="checks for the model's libraries")
    table = tmp_path / "links.csv"
    rows = ["src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb"]
    pairs = [("aws:us-east-1", "aws:eu-west-1"), ("aws:eu-west-1", "aws:us-east-1")]
    rows += [f"{a},{b},80,1,0.1" for a, b in pairs]
    table.write_text("\n".join(rows) + "\n")
    network = {"table": str(table), "aggregator": "aws:us-east-1", "bandwidth_share": 1.0}
    config = federation(names=("a", "b"), network=network, clock="emulated")
    check_federation(config)
    # 1 Gbit/s are 125 MB/s.
    assert Links(config).by_site["b"].seconds(12.5e6) == pytest.approx((0.18, 0.18))
    with pytest.raises(UserError, match=r"no rtt_ms from 'aws:ap-northeast-1' to 'aws:us-east-1'"):
        check_federation(federation(network=network, clock="emulated"))


def test_the_documented_federation_file_is_valid():
    text = (Path(__file__).parents[2] / "docs" / "federated.md").read_text(encoding="utf-8")
    block = text.partition("```yaml\n")[2].partition("```")[0]
    config = parse_config(FederationConfig, parse_yaml(block, "docs"), "docs/federated.md")
    assert config.names == ("virginia", "ireland", "tokyo")
    assert set(Links(config).by_site) == set(config.names)
