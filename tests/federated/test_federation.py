"""Rounds, whatever the engine: what counts, what is refused, what is saved. The sites here are numbers, not models."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from wattgym.errors import UserError
from wattgym.federated.adapters import digest, shapes, to_bytes
from wattgym.federated.engine import Engine
from wattgym.federated.federation import CHECKPOINTS, Federation
from wattgym.federated.log import record_json
from wattgym.federated.messages import Evaluation, Fate, SiteFailure, SiteInfo, SiteMetrics, TrainReply

A, B = "layer.lora_A.weight", "layer.lora_B.weight"
FORMS = {A: (2, 6), B: (4, 2)}


class Numbers(Engine):
    """Sites that add their number to every weight; a test may change their answers, their order and who is there."""

    name = "numbers"

    def __init__(self, names):
        self.names = list(names)
        self.hashes = dict.fromkeys(names, "same")
        self.change = {}
        self.order = sorted
        self.seconds = 1.0
        self.requests, self.evaluator, self.links_s = [], names[0], None

    def members(self):
        return {n: SiteInfo(n, 10, {"x": 10}, self.hashes[n], FORMS, "none") for n in self.names}

    def exchange(self, requests, deadline_s):
        self.requests.append(requests)
        answers = {}
        for name in self.order(requests):
            request, step = requests[name], 0.001 * (1 + ord(name[0]) - ord("a"))
            adapter = {key: array + np.float32(step) for key, array in request.adapter.items()}
            steps = request.assignment.local_steps
            metrics = SiteMetrics(samples=4 * steps, tokens=100, steps=steps, loss=1.0, train_s=self.seconds)
            reply = TrainReply(request.run_id, request.round, name, adapter, metrics)
            change = self.change.get(name, lambda reply: reply)
            answers[name] = change(reply), self.seconds
        return answers

    def evaluate(self, adapter, deadline_s, links_s=None):
        self.links_s = links_s
        return Evaluation(float(np.abs(adapter[B]).sum()), {"x": 1.0}, 0.5, self.evaluator)

    def close(self):
        self.names = []


def play(federation, names="abc"):
    return federation.run_round({name: federation.assignment() for name in names})


def fates(record):
    return {outcome.site: str(outcome.fate) for outcome in record.outcomes}


@pytest.fixture
def made(federation):
    def make(names="abc", **changes):
        config = federation(names=tuple(names), **changes)
        engine = Numbers(names)
        return Federation(config, engine, sleep=lambda s: None), engine

    return make


def test_a_round(made):
    run, engine = made()
    assert (run.round, run.records[0].round, run.records[0].evaluation.loss) == (0, 0, 0.0)
    before = run.adapter
    record = play(run)
    assert (record.round, record.attempt, run.round) == (1, 1, 1)
    assert fates(record) == dict.fromkeys("abc", "counted")
    np.testing.assert_allclose(run.adapter[B] - before[B], 0.002, rtol=1e-4)
    assert record.effective_sites == 3.0
    assert [o.delta_norm for o in record.outcomes] == pytest.approx([k * 1e-3 * math.sqrt(20) for k in (1, 2, 3)], 1e-3)
    assert record.evaluation.loss == pytest.approx(8 * 0.002, rel=1e-4)
    assert record.outcomes[0].bytes_each_way == 80
    assert not record.outcomes[0].transfer_emulated
    assert (engine.requests[0]["a"].round, engine.requests[0]["a"].link_s) == (1, (0.0, 0.0))


def test_more_samples_weigh_more(made):
    run, _ = made("ab")
    before = run.adapter
    run.run_round({"a": run.assignment(local_steps=3), "b": run.assignment(local_steps=1)})
    np.testing.assert_allclose(run.adapter[B] - before[B], 0.00125, rtol=1e-4)
    assert run.records[-1].effective_sites == pytest.approx(1.6)


def test_order_of_replies_changes_no_bit(made):
    run, _ = made()
    other, engine = made()
    engine.order = lambda names: sorted(names, reverse=True)
    for _ in range(3):
        play(run)
        play(other)
    assert digest(run.adapter) == digest(other.adapter)


def poison(key, value):
    def change(reply):
        adapter = {name: array.copy() for name, array in reply.adapter.items()}
        adapter[key].flat[0] = value
        return replace(reply, adapter=adapter)

    return change


FAULTS = {
    "NaN": (poison(A, np.nan), "rejected", "no finite number"),
    "infinite": (poison(B, np.inf), "rejected", "no finite number"),
    "wrong shape": (
        lambda r: replace(r, adapter={**r.adapter, B: np.zeros((2, 2), np.float32)}),
        "rejected",
        "shape",
    ),
    "missing layer": (lambda r: replace(r, adapter={A: r.adapter[A]}), "rejected", "has no"),
    "1,000 times": (
        lambda r: replace(r, adapter={name: 1000 * array for name, array in r.adapter.items()}),
        "rejected",
        "plausible",
    ),
    "other run": (lambda r: replace(r, run_id="older"), "rejected", "run 'older'"),
    "replayed round": (lambda r: replace(r, round=r.round - 1), "rejected", "round 1"),
    "other site": (lambda r: replace(r, site="a"), "rejected", "site 'a'"),
    "too many samples": (
        lambda r: replace(r, metrics=replace(r.metrics, samples=10**9)),
        "rejected",
        "1000000000 samples",
    ),
    "no samples": (lambda r: replace(r, metrics=replace(r.metrics, samples=0)), "rejected", "0 samples"),
    "loss is NaN": (lambda r: replace(r, metrics=replace(r.metrics, loss=math.nan)), "rejected", "loss"),
    "failed": (lambda r: SiteFailure(Fate.FAILED, "out of memory"), "failed", "out of memory"),
    "late": (lambda r: SiteFailure(Fate.LATE, "no answer"), "late", "no answer"),
    "lost": (lambda r: SiteFailure(Fate.LOST, "killed"), "lost", "killed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_site_costs_its_own_share_only(made, fault):
    change, fate, reason = FAULTS[fault]
    run, engine = made()
    without, _ = made("abc")
    play(run)
    play(without)
    engine.change["c"] = change
    record = play(run)
    play(without, "ab")
    assert fates(record) == {"a": "counted", "b": "counted", "c": fate}
    assert reason in record.outcomes[2].reason
    assert digest(run.adapter) == digest(without.adapter)
    assert record.round == 2
    del engine.change["c"]
    assert fates(play(run)) == dict.fromkeys("abc", "counted")  # it is welcome again


def test_a_reply_after_the_deadline_is_late_on_either_clock(made):
    run, engine = made()
    engine.seconds = 5.0
    record = run.run_round({"a": run.assignment()}, deadline_s=4.0)
    assert (fates(record), run.round) == ({"a": "late"}, 0)


def test_a_round_with_nobody_is_recorded_and_tried_again(federation):
    waits = []
    engine = Numbers("ab")
    run = Federation(federation(names=("a", "b"), backoff_s=2.0), engine, sleep=waits.append)
    before = digest(run.adapter)
    engine.names = []
    for attempt in (1, 2, 3):
        record = play(run, "ab")
        assert (record.round, record.attempt, record.effective_sites, run.round) == (1, attempt, 0.0, 0)
        assert fates(record) == {"a": "lost", "b": "lost"}
    assert run.run_round({}).attempt == 4
    assert digest(run.adapter) == before
    assert waits == [2.0, 4.0, 8.0]
    engine.names = ["a", "b"]
    record = play(run, "ab")
    assert (record.round, record.attempt, run.round) == (1, 5, 1)
    play(run, "ab")
    assert waits[3:] == [16.0]


def test_emulated_transfers_are_only_added_to_the_clock(federation, tmp_path):
    table = tmp_path / "links.csv"
    table.write_text(
        "src_region,dst_region,rtt_ms,gbps,egress_usd_per_gb\n"
        "aws:us-east-1,aws:eu-west-1,100,1,0\naws:eu-west-1,aws:us-east-1,100,0.5,0\n"
    )
    network = {"table": str(table), "aggregator": "aws:us-east-1", "bandwidth_share": 1.0, "local_rtt_ms": 10.0}
    changes = {"names": ("a", "b"), "network": network, "link_bytes": 125e6}
    engine = Numbers("ab")
    run = Federation(federation(clock="emulated", **changes), engine)
    record = play(run, "ab")
    here, there = record.outcomes
    # 1 Gbit down to b in 1 s, up in 2 s, and two round trips; a is in the aggregator's region (10 Gbit/s).
    assert there.transfer_s == pytest.approx(3.2)
    assert here.transfer_s == pytest.approx(0.22)
    assert there.round_trip_s == pytest.approx(4.2)
    assert (there.transfer_emulated, record.emulated_clock) == (True, True)
    # The slowest answer, and the adapter's way to the site that evaluates: 0.11 s to a, 1.1 s to b.
    assert (record.seconds, run.time_s) == (pytest.approx(4.31), pytest.approx(4.31))
    assert (engine.requests[0]["b"].link_s, engine.links_s) == ((0.0, 0.0), None)
    engine.evaluator = "b"
    record = run.run_round({n: run.assignment() for n in "ab"}, deadline_s=4.0)
    assert fates(record) == {"a": "counted", "b": "late"}
    assert (record.seconds, run.time_s) == (pytest.approx(5.1), pytest.approx(9.41))
    on_the_wall = Numbers("ab")
    play(Federation(federation(clock="wall", **changes), on_the_wall), "ab")
    assert on_the_wall.requests[0]["b"].link_s == pytest.approx((1.1, 2.1))
    assert on_the_wall.links_s == {"a": pytest.approx(0.11), "b": pytest.approx(1.1)}


def test_power_follows_the_trace(federation):
    sites = [
        {"name": "a", "region": "r", "capacity_w": 1000.0, "trace": "power-util/google-cella-pdu6"},
        {"name": "b", "region": "r", "capacity_w": 500.0},
    ]
    run = Federation(federation(sites=sites), Numbers("ab"))
    from wattgym.traces import load_trace

    trace = load_trace("power-util/google-cella-pdu6").values
    for step in (0, 1, 7):
        run.time_s = step * 300.0 + 1.0
        assert run.available_w() == {"a": pytest.approx(1000.0 * max(0.95 - trace[step], 0.0)), "b": 500.0}


def test_sites_with_different_models_are_named(federation):
    engine = Numbers("abc")
    engine.hashes["b"] = "0123456789abcdef"
    with pytest.raises(UserError, match=r"different models .* b: 0123456789ab; a, c: same"):
        Federation(federation(), engine)
    engine.hashes["b"] = "same"
    run = Federation(federation(), engine)
    engine.hashes["b"] = "other"  # replaced while the run goes on
    assert fates(play(run)) == {"a": "counted", "b": "lost", "c": "counted"}


def test_nobody_there_and_unknown_names(federation):
    engine = Numbers("abc")
    run = Federation(federation(), engine)
    with pytest.raises(UserError, match="no site is named 'd'; sites: a, b, c"):
        run.run_round({"d": run.assignment()})
    engine.names = []
    with pytest.raises(UserError, match=r"none of the sites a, b, c was there within 0 s"):
        Federation(federation(), engine, join_s=0.0)


def test_resuming_goes_on_where_it_was(federation, tmp_path):
    config, engine = federation(), Numbers("abc")
    whole = Federation(config, engine, tmp_path / "whole")
    first = Federation(config, engine, tmp_path / "parts")
    for run in (whole, first):
        for _ in range(2):
            play(run, "ab" if run.rng.random() < 0.5 else "bc")
    assert first.run_id != whole.run_id
    with pytest.raises(UserError, match="holds a run; resume it"):
        Federation(config, engine, tmp_path / "parts")
    second = Federation(config, engine, tmp_path / "parts", resume=True)
    assert (second.run_id, second.round, vars(second.evaluation)) == (first.run_id, 2, vars(first.evaluation))
    assert record_json(second.records[0]) == record_json(first.records[-1])
    assert second.time_s >= first.time_s
    for run in (whole, second):
        for _ in range(2):
            play(run, "ab" if run.rng.random() < 0.5 else "bc")
    assert [fates(r) for r in whole.records[-2:]] == [fates(r) for r in second.records[-2:]]
    assert (digest(second.adapter), second.round) == (digest(whole.adapter), 4)
    # Vain attempts survive, too.
    engine.names = []
    second.run_round({})
    third = Federation(config, Numbers("abc"), tmp_path / "parts", resume=True)
    assert play(third).attempt == 2


def test_a_damaged_checkpoint_is_passed_over(federation, tmp_path):
    config, engine = federation(), Numbers("abc")
    run = Federation(config, engine, tmp_path)
    for _ in range(3):
        play(run)
    folders = sorted((tmp_path / CHECKPOINTS).iterdir())
    assert [folder.name for folder in folders] == ["round-00000002-0000", "round-00000003-0000"]
    weights = folders[1] / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    again = Federation(config, engine, tmp_path, resume=True)
    assert again.round == 2
    play(again)
    assert digest(again.adapter) == digest(run.adapter)
    for folder in (tmp_path / CHECKPOINTS).iterdir():
        (folder / "state.json").write_text("{")
    with pytest.raises(UserError, match="no whole checkpoint to resume from"):
        Federation(config, engine, tmp_path, resume=True)
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        Federation(config, engine, tmp_path / "elsewhere", resume=True)


def test_the_saved_adapter_is_the_global_one(federation, tmp_path):
    run = Federation(federation(), Numbers("abc"))
    play(run)
    run.save_adapter(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == to_bytes(run.adapter)
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["r"], settings["target_modules"]) == ("LORA", 4, "all-linear")
    assert shapes(run.adapter) == FORMS
