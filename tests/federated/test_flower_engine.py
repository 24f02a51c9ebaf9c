"""FlowerEngine and relay over a grid inside this process; the sites are sockets that speak the site protocol."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="the Flower engine is an optional extra")

from flwr.app import Context, Error, Message, RecordDict

from wattgym.errors import UserError
from wattgym.federated.adapters import from_bytes, to_bytes
from wattgym.federated.flower import engine as engine_module
from wattgym.federated.flower.client_app import site_socket
from wattgym.federated.flower.engine import FlowerEngine
from wattgym.federated.flower.records import unpack
from wattgym.federated.messages import (
    Assignment,
    Evaluation,
    Fate,
    SiteFailure,
    SiteInfo,
    SiteMetrics,
    TrainReply,
    TrainRequest,
)
from wattgym.federated.site import wire

pytestmark = pytest.mark.xdist_group("flower")

ADAPTER = {"layer.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


class Site(threading.Thread):
    """A trainer's socket: adds one to every weight, after a delay, or misbehaves as told."""

    def __init__(self, folder: Path, name: str, pid: int = 1000):
        super().__init__(daemon=True)
        self.path, self.name_, self.pid = folder / f"{name}.sock", name, pid
        self.hold, self.fault, self.seen = threading.Event(), "", []
        self.hold.set()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.path))
        self.socket.listen()
        self.start()

    def run(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection:
            header, body = wire.receive(connection)
            self.seen.append(header)
            if header["kind"] == "train":
                self.hold.wait(60.0)
            with contextlib.suppress(OSError):  # The relay has given up.
                wire.send(connection, *self.answer(header, body))

    def answer(self, header, body):
        if header["kind"] == "info":
            shapes = {name: array.shape for name, array in ADAPTER.items()}
            return wire.info_header(SiteInfo(self.name_, 10, {"a": 10}, "hash", shapes, "cpu", self.pid)), b""
        if self.fault:
            return wire.failure_header(SiteFailure(Fate.FAILED, self.fault)), b""
        if header["kind"] == "evaluate":
            return wire.evaluation_header(
                Evaluation(float(from_bytes(body)[next(iter(ADAPTER))].sum()), {"a": 2.0})
            ), b""
        request = wire.request_from(header, from_bytes(body))
        trained = {name: array + 1 for name, array in request.adapter.items()}
        metrics = SiteMetrics(8 * request.assignment.local_steps, 80, request.assignment.local_steps, 1.5, 0.1)
        return wire.reply_header(TrainReply(request.run_id, request.round, self.name_, trained, metrics)), to_bytes(
            trained
        )

    def stop(self):
        with contextlib.suppress(OSError):  # Twice is fine.
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def wait_until(true, seconds=60.0):
    until_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.fixture
def grid(flower_grid):
    return flower_grid()


@pytest.fixture
def sites(tmp_path, grid):
    made = {name: Site(tmp_path, name) for name in ("a", "b")}
    for site in made.values():
        site.key = grid.join(site.path)
    yield made
    for site in made.values():
        site.stop()


def requests(*names, steps=2):
    return {name: TrainRequest("run", 4, ADAPTER, Assignment(steps + at), (0.25, 0.5)) for at, name in enumerate(names)}


def test_a_round_reaches_each_site_with_its_own_assignment_and_bits_survive(grid, sites, tmp_path):
    engine = FlowerEngine(grid, poll_s=0.01, timing=tmp_path / "flower.jsonl")
    assert set(engine.members()) == {"a", "b"}
    answers = engine.exchange(requests("a", "b"), 60.0)
    for name, steps in (("a", 2), ("b", 3)):
        reply, seconds = answers[name]
        assert (reply.site, reply.round, reply.run_id, reply.metrics.steps) == (name, 4, "run", steps)
        assert np.array_equal(reply.adapter["layer.lora_A.weight"], ADAPTER["layer.lora_A.weight"] + 1)
        assert 0 < seconds < 60
    assert sites["a"].seen[-1]["link_s"] == [0.25, 0.5]
    lines = [json.loads(line) for line in (tmp_path / "flower.jsonl").read_text().splitlines()]
    assert {(line["site"], line["round"]) for line in lines} == {("a", 4), ("b", 4)}
    assert all(0 < line["relay_s"] <= line["total_s"] for line in lines)


def test_a_late_site_holds_nobody_up_and_its_answer_is_never_fetched(grid, sites):
    sites["b"].hold.clear()
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    first = engine.exchange(requests("a", "b"), 2.0)
    assert isinstance(first["a"][0], TrainReply)
    assert first["b"][0].fate is Fate.LATE
    late = next(key for key, m in grid.sent.items() if m.metadata.dst_node_id == sites["b"].key and m.metadata.group_id)
    sites["b"].hold.set()
    wait_until(lambda: late in grid.ready)
    fetched = list(grid.pulled)
    assert isinstance(engine.exchange(requests("a", "b"), 30.0)["b"][0], TrainReply)
    assert (late in grid.pulled) == (late in fetched)


def test_failed_lost_and_unknown_sites_are_answers_not_exceptions(grid, sites):
    sites["a"].fault = "out of memory"
    sites["b"].stop()
    engine = FlowerEngine(grid, poll_s=0.01)
    assert set(engine.members()) == {"a"}
    answers = engine.exchange(requests("a", "b", "c"), 60.0)
    assert answers["a"][0] == SiteFailure(Fate.FAILED, "out of memory")
    assert answers["b"][0].fate is Fate.LOST
    assert answers["c"] == (SiteFailure(Fate.LOST, "the site is not connected"), 0.0)


def test_a_node_that_vanishes_in_a_round_is_lost_and_counts_again_when_back(grid, sites):
    sites["b"].hold.clear()
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})

    def leave_once_asked():
        key = sites["b"].key
        wait_until(lambda: any(m.metadata.dst_node_id == key and m.metadata.group_id for m in [*grid.sent.values()]))
        grid.leave(key)

    leaver = threading.Thread(target=leave_once_asked)
    leaver.start()
    answers = engine.exchange(requests("a", "b"), 60.0)
    leaver.join()
    assert isinstance(answers["a"][0], TrainReply)
    assert answers["b"][0] == SiteFailure(Fate.LOST, "Node Unavailable")
    assert set(engine.members()) == {"a"}
    sites["b"].hold.set()
    grid.join(sites["b"].path)
    assert set(engine.members()) == {"a", "b"}
    assert isinstance(engine.exchange(requests("b"), 60.0)["b"][0], TrainReply)


def test_a_restarted_trainer_says_again_who_it_is(grid, sites, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "ASK_AGAIN_S", 0.0)
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    sites["b"].stop()
    assert engine.exchange(requests("b"), 60.0)["b"][0].fate is Fate.LOST
    assert set(engine.members()) == {"a"}
    sites["b"].path.unlink()
    again = Site(tmp_path, "b", pid=2000)  # It may be asked at once.
    wait_until(lambda: "b" in engine.members())
    assert engine.members()["b"].pid == 2000
    again.stop()


def test_a_node_that_lost_a_question_is_asked_again(grid, sites, monkeypatch):
    monkeypatch.setattr(engine_module, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(engine_module, "JOIN_S", 0.1)
    took, lost = grid.deliver, []
    monkeypatch.setattr(grid, "deliver", lambda *message: lost.append(message) if len(lost) < 4 else took(*message))
    engine = FlowerEngine(grid, poll_s=0.01)
    assert engine.members() == {}
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    lives = [message.metadata.ttl for _, message in lost]
    assert lives == [0.1, 0.1, 0.2, 0.2]


def test_a_message_whose_relay_died_is_sent_again_and_asks_for_the_same(grid, sites, monkeypatch):
    took, asked = grid.deliver, []

    def deliver(identifier, message):
        asked.append(unpack(message.content)[0])
        took(identifier, message)
        if len(asked) < 3:
            grid.ready[identifier] = Message(Error(8, "ClientApp stopped responding."), reply_to=message)

    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    monkeypatch.setattr(grid, "deliver", deliver)
    reply, seconds = engine.exchange(requests("b"), 60.0)["b"]
    assert isinstance(reply, TrainReply)
    left_s = [header.pop("timeout_s") for header in asked]
    assert 60.0 >= left_s[0] > left_s[1] > left_s[2] > 60.0 - seconds
    assert asked[0] == asked[1] == asked[2]


def test_a_message_that_nobody_takes_is_late_at_the_deadline(grid, sites, monkeypatch):
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    pull = grid.pull_messages
    monkeypatch.setattr(grid, "deliver", lambda *message: None)
    monkeypatch.setattr(grid, "pull_messages", lambda ids: time.sleep(0.2) or pull(ids))  # The last look comes late.
    assert engine.exchange(requests("b"), 0.5)["b"][0] == SiteFailure(Fate.LATE, "no answer within 0.5 s")


def test_two_nodes_with_one_name(grid, sites, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_module, "ASK_AGAIN_S", 0.0)
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    (tmp_path / "other").mkdir()
    impostor = Site(tmp_path / "other", "a")
    impostor.pid = 3000
    grid.join(impostor.path)
    assert engine.members()["a"].pid == 1000  # Another trainer with a taken name stays outside …
    engine.exchange(requests("a"), 60.0)
    assert not [header for header in impostor.seen if header["kind"] == "train"]
    grid.leave(sites["a"].key)
    wait_until(lambda: "a" in engine.members())
    assert engine.members()["a"].pid == 3000  # … until the first is gone.
    grid.join(impostor.path)
    assert engine.members()["a"].pid == 3000  # The same trainer behind a new node is no impostor.
    assert isinstance(engine.exchange(requests("a"), 60.0)["a"][0], TrainReply)
    impostor.stop()


def test_evaluation_goes_to_another_site_when_one_cannot(grid, sites):
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    sites["a"].fault = "no memory"
    assert engine.evaluate(ADAPTER, 60.0).loss == 15.0
    sites["b"].fault = "neither"
    assert engine.evaluate(ADAPTER, 60.0) == SiteFailure(Fate.FAILED, "neither")


def test_a_reply_of_something_else_is_rejected(grid, sites, monkeypatch):
    engine = FlowerEngine(grid, poll_s=0.01)
    wait_until(lambda: set(engine.members()) == {"a", "b"})
    monkeypatch.setattr(
        sites["a"], "answer", lambda header, body: ({"kind": "reply", "run_id": "run"}, to_bytes(ADAPTER))
    )
    assert engine.exchange(requests("a"), 60.0)["a"][0].fate is Fate.REJECTED


def test_a_node_without_a_site_says_how_to_start_it():
    with pytest.raises(UserError, match="--node-config"):
        site_socket(Context(7, 5, {}, RecordDict(), {}, 0))


def test_simulated_nodes_take_the_sites_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name / "job").mkdir(parents=True)
    (tmp_path / "b" / "site.sock").touch()  # the trainer of `a` is away, and its node stays its node
    (tmp_path / "aflower").mkdir()
    context = Context(7, 5, {"partition-id": 1, "num-partitions": 2}, RecordDict(), {"site-folders": str(tmp_path)}, 0)
    assert site_socket(context) == tmp_path / "b" / "site.sock"
    context.node_config["partition-id"] = 2
    with pytest.raises(UserError, match="2 sites, none for node 2"):
        site_socket(context)
