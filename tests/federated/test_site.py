"""A site without a process: its desk, its memory over restarts, its optimiser, and the wire."""

import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.errors import UserError
from wattgym.federated.adapters import digest, from_bytes, initial, to_bytes
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
from wattgym.federated.partition import Partition
from wattgym.federated.site import wire
from wattgym.federated.site.client import SiteClient
from wattgym.federated.site.desk import Desk
from wattgym.federated.site.holder import PowerReading, as_line, from_values
from wattgym.federated.site.store import ReplyStore
from wattgym.federated.site.trainer import AbandonedError, SiteStop, SiteTrainer
from wattgym.live.learner import LoadedModel

ADAPTER = {"x.lora_A.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}


def request(number, run="run", steps=2, value=0.0, **more):
    adapter = {name: array + np.float32(value) for name, array in ADAPTER.items()}
    return TrainRequest(run, number, adapter, Assignment(local_steps=steps), **more)


def reply_to(asked, site="a"):
    metrics = SiteMetrics(samples=8, tokens=50, steps=asked.assignment.local_steps, loss=1.5, train_s=0.1)
    return TrainReply(asked.run_id, asked.round, site, asked.adapter, metrics)


class TestStore:
    def test_position_and_replies_survive_a_restart(self, tmp_path):
        store = ReplyStore(tmp_path, "a", "data")
        moments = {"x/exp_avg": np.ones(3, np.float32)}
        for number in (1, 2, 3):
            store.keep(request(number), reply_to(request(number)), moments)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "round-00000002.safetensors",
            "round-00000003.safetensors",
        ]
        again = ReplyStore(tmp_path, "a", "data")
        for each in (store, again):
            assert each.position("run") == 6
            assert each.optimiser("run")["x/exp_avg"].tolist() == [1.0, 1.0, 1.0]
            found = each.find(request(2))
            assert (found.round, found.metrics.loss, digest(found.adapter)) == (2, 1.5, digest(ADAPTER))
            assert each.find(request(4)) is None
            assert each.find(request(3, value=1.0)) is None  # the same round, but of another global adapter
            assert each.find(request(3, steps=5)) is None
            assert each.find(replace(request(3), link_s=(1.0, 1.0))) is not None  # the link is no part of it
            with pytest.raises(UserError, match="round 1 is past; this site is at round 3"):
                each.find(request(1))

    def test_another_run_begins_at_the_first_sample(self, tmp_path):
        store = ReplyStore(tmp_path, "a", "data")
        store.keep(request(5), reply_to(request(5)))
        assert (store.position("other"), store.optimiser("other")) == (0, {})
        asked = request(1, run="other")
        store.keep(asked, reply_to(asked))
        assert [path.name for path in tmp_path.iterdir()] == ["round-00000001.safetensors"]

    def test_what_belongs_to_others_is_refused(self, tmp_path):
        ReplyStore(tmp_path, "a", "data").keep(request(1), reply_to(request(1)))
        with pytest.raises(UserError, match="belongs to site 'a', not to 'b'"):
            ReplyStore(tmp_path, "b", "data")
        with pytest.raises(UserError, match="the records of site 'a' have changed"):
            ReplyStore(tmp_path, "a", "other data")
        path = next(tmp_path.iterdir())
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(UserError, match="cannot be read as a site's reply"):
            ReplyStore(tmp_path, "a", "data")


class TestDesk:
    def test_a_request_under_way_is_joined_and_a_newer_one_supersedes(self):
        stop = SiteStop()
        desk = Desk(stop)
        first = desk.hand_in(request(1))
        assert desk.hand_in(request(1)) is first
        assert desk.take(0.0) is first
        second, third = desk.hand_in(request(2)), desk.hand_in(request(3))
        assert stop.reason == "superseded by round 3 of run run"
        assert second.done.is_set()  # it had not begun
        assert second.answer.fate is Fate.FAILED
        desk.finish(first, SiteFailure(Fate.FAILED, "abandoned"))
        assert first.done.is_set()
        assert desk.take(0.0) is None  # the second
        assert desk.take(0.0) is third
        assert stop.reason == ""
        desk.finish(third, reply_to(request(3)))
        assert third.answer.round == 3
        assert desk.take(0.0) is None

    def test_a_signal_outlives_a_superseded_round(self):
        stop = SiteStop()
        desk = Desk(stop)
        desk.hand_in(request(1))
        desk.take(0.0)
        desk.hand_in(request(2))
        stop.reason = "SIGTERM"
        desk.take(0.0)
        assert stop.reason == "SIGTERM"

    def test_an_older_round_waits_its_turn_and_closing_answers_all(self):
        desk = Desk(SiteStop())
        desk.hand_in(request(2))
        desk.take(0.0)
        old, evaluation = desk.hand_in(request(1)), desk.hand_in(ADAPTER)
        assert not old.done.is_set()
        desk.close()
        assert old.answer == evaluation.answer == SiteFailure(Fate.FAILED, "the site has ended")
        assert old.done.is_set()
        assert evaluation.done.is_set()


@pytest.fixture(scope="module")
def loaded(federation):
    return LoadedModel(federation().job("a"))


class TestTrainer:
    def make(self, config, loaded, folder=None):
        return SiteTrainer(config, "a", Partition(config), loaded, folder=folder)

    def play(self, trainer, adapter, *numbers):
        replies = []
        for number in numbers:
            asked = TrainRequest("run", number, adapter, Assignment(local_steps=2))
            reply = trainer.train(asked)
            trainer.keep(asked, reply)
            replies.append(digest(reply.adapter))
        return replies

    @pytest.mark.parametrize("keep_optimiser", [False, True])
    def test_a_restarted_site_trains_as_if_it_had_never_ended(self, federation, loaded, tmp_path, keep_optimiser):
        config = federation(keep_optimiser=keep_optimiser, lora={"targets": "all-linear", "rank": 4, "dropout": 0.0})
        whole = self.make(config, loaded)
        adapter = initial(whole.info().shapes, 1)
        expected = self.play(whole, adapter, 1, 2, 3)
        found = self.play(self.make(config, loaded, tmp_path), adapter, 1, 2)
        found += self.play(self.make(config, loaded, tmp_path), adapter, 3)
        assert found == expected

    def test_keeping_the_optimiser_makes_a_difference(self, federation, loaded):
        results = []
        for keep in (False, True):
            trainer = self.make(federation(keep_optimiser=keep), loaded)
            results.append(self.play(trainer, initial(trainer.info().shapes, 1), 1, 2))
        assert results[0][0] == results[1][0]
        assert results[0][1] != results[1][1]

    def test_an_abandoned_round_leaves_no_trace(self, federation, loaded):
        trainer, other = self.make(federation(), loaded), self.make(federation(), loaded)
        adapter = initial(trainer.info().shapes, 1)
        trainer.stop.round = "superseded"
        with pytest.raises(AbandonedError, match="round 1 was abandoned: superseded"):
            trainer.train(TrainRequest("run", 1, adapter, Assignment(local_steps=2)))
        trainer.stop.round = ""
        assert self.play(trainer, adapter, 2) == self.play(other, adapter, 2)

    def test_rehearsing_uses_up_nothing(self, federation, loaded):
        trainer, other = self.make(federation(), loaded), self.make(federation(), loaded)
        adapter = initial(trainer.info().shapes, 1)
        expected = self.play(other, adapter, 1)
        for count, _ in enumerate(trainer.rehearse()):
            if count == 3:
                break
        assert self.play(trainer, adapter, 1) == expected

    def test_an_untrained_adapter_is_the_plain_model(self, federation, loaded):
        trainer = self.make(federation(), loaded)
        found = [trainer.evaluate(initial(trainer.info().shapes, seed)) for seed in (1, 2)]
        assert found[0].loss == found[1].loss  # B is zero
        assert set(found[0].domain_loss) == set(Partition(federation()).domains)


class TestWire:
    @settings(max_examples=20, deadline=None)
    @given(st.binary(max_size=3000), st.floats(), st.text(max_size=20))
    def test_frames_arrive_whole(self, body, number, text):
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(target=wire.send, args=(here, {"kind": "x", "n": number, "t": text}, body))
            thread.start()
            header, found = wire.receive(there)
            thread.join()
        assert (header["t"], found) == (text, body)
        assert header["n"] == (number if np.isfinite(number) else None)

    def test_an_answer_may_come_before_the_question_has_returned(self):
        here, there = socket.socketpair()

        class Preempted:
            """Loses the processor after each call, so that the other side has answered and gone before the next."""

            def sendall(self, data):
                here.sendall(data)
                with there:
                    wire.receive(there)
                    wire.send(there, {"kind": "answer"})

        with here:
            wire.send(Preempted(), {"kind": "question"})
            assert wire.receive(here) == ({"kind": "answer"}, b"")

    def test_messages_survive_the_wire(self):
        asked = replace(request(4), link_s=(0.25, 0.5), assignment=Assignment(3, 0.1, 200.0))
        again = wire.request_from(wire.request_header(asked), asked.adapter)
        assert vars(again) == vars(asked)
        reply = reply_to(asked)
        found = wire.reply_from(wire.reply_header(reply), from_bytes(to_bytes(reply.adapter)))
        assert (found.site, found.metrics.loss) == ("a", 1.5)
        info = SiteInfo("a", 3, {"x": 3}, "hash", {"x": (2, 3)}, "cpu", 5)
        assert wire.info_from(wire.info_header(info)) == info
        evaluation = wire.evaluation_from(wire.evaluation_header(Evaluation(1.0, {"x": 1.0}, 0.5, "a")))
        assert vars(evaluation) == {"loss": 1.0, "domain_loss": {"x": 1.0}, "accuracy": 0.5, "site": "a"}
        for parse in (wire.reply_from, wire.request_from):
            with pytest.raises(wire.WireError):
                parse({"kind": "reply", "metrics": 3}, {})

    @pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"WGS1" + b"\0" * 12 + b"x", b"WGS1\0"])
    def test_who_speaks_something_else_is_named(self, sent):
        here, there = socket.socketpair()
        with there:
            here.sendall(sent)
            here.close()
            with pytest.raises(wire.WireError):
                wire.receive(there)

    def test_nobody_there(self, tmp_path):
        client = SiteClient(tmp_path / "site.sock")
        answer = client.train(request(1), 1.0)
        assert (answer.fate, answer.reason) == (Fate.LOST, "no trainer answers at the site's socket")
        with pytest.raises(UserError, match="no trainer answers"):
            client.info()

    def test_a_socket_with_a_long_path(self, tmp_path):
        folder = tmp_path / ("long" * 30)
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            with wire.address(folder / "site.sock") as where:
                listener.bind(where)
            listener.listen()
            # Nobody answers: the client reaches it, and gives up at its deadline.
            answer = SiteClient(folder / "site.sock").train(request(1), 0.2)
        assert answer.fate is Fate.LATE


def test_power_between_two_readings():
    before = PowerReading(10.0, 1000.0, 400.0, 450.0, 500.0, float("nan"), 30.0, 4.0, 0)
    after = PowerReading(14.0, 2600.0, 410.0, 450.0, 480.0, 400.0, 70.0, 8.0, 0)
    assert after.since(before) == {"energy_j": 1600.0, "power_w": 400.0, "available_w": 480.0, "target_error_w": 10.0}
    assert before.since(after) == {"available_w": 500.0}  # of a controller that was started anew
    import json

    again = from_values(json.loads(as_line(before)))
    assert np.isnan(again.target_w)
    assert again.power_w == 400.0
