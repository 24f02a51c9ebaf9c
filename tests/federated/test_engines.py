"""One suite for every engine: the same answers, the same adapters bit by bit, and no fault of a site raises."""

import contextlib
import time

import numpy as np
import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.federated.adapters import check_form, digest, initial
from wattgym.federated.federation import Federation
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.messages import Assignment, Evaluation, Fate, SiteFailure, TrainReply, TrainRequest
from wattgym.federated.processes import ProcessEngine

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def local(config, folder):
    with InProcessEngine(config) as engine:
        yield engine


@contextlib.contextmanager
def process(config, folder):
    with ProcessEngine(config, folder) as engine:
        wait_for_all(engine, config)
        yield engine


def wait_for_all(engine, config, timeout_s=300.0):
    until_s = time.monotonic() + timeout_s
    while set(engine.members()) != set(config.names):
        assert time.monotonic() < until_s
        time.sleep(0.1)


ENGINES = {"local": local, "process": process}
"""By name, how to have one with all its sites for as long as a block runs; Flower's is the fixture `flower`."""


@pytest.fixture(scope="module")
def config(federation):
    return federation()


@pytest.fixture(scope="module", params=[*ENGINES, "flower"])
def engine(request, config, tmp_path_factory):
    make = ENGINES.get(request.param) or request.getfixturevalue(request.param)
    with make(config, tmp_path_factory.mktemp(request.param)) as made:
        assert made.name == request.param
        yield made


@pytest.fixture(scope="module")
def expected(config):
    """Answers to `ask` of sites that nothing lies in between of."""
    with InProcessEngine(config) as reference:
        return ask(reference, config, "expected", 1)


def requests_for(engine, config, run_id, number, names=None, steps=2):
    adapter = initial(next(iter(engine.members().values())).shapes, config.seed)
    names = names or config.names
    return {name: TrainRequest(run_id, number, adapter, Assignment(local_steps=steps)) for name in names}


def ask(engine, config, run_id, number, **more):
    return engine.exchange(requests_for(engine, config, run_id, number, **more), 120.0)


def test_members_have_one_model_and_their_own_data(engine, config):
    members = engine.members()
    assert set(members) == set(config.names)
    assert len({info.model_hash for info in members.values()}) == 1
    assert len({tuple(sorted(info.shapes.items())) for info in members.values()}) == 1
    assert sum(info.samples for info in members.values()) == config.data.records - config.data.evaluation
    assert all(sum(info.domain_samples.values()) == info.samples for info in members.values())


def test_answers_are_those_of_any_engine(engine, config, expected):
    answers = ask(engine, config, "conformance", 1)
    assert set(answers) == set(config.names)
    for name, (reply, seconds) in answers.items():
        assert isinstance(reply, TrainReply), reply
        assert (reply.run_id, reply.round, reply.site) == ("conformance", 1, name)
        check_form(reply.adapter, engine.members()[name].shapes)
        assert (reply.metrics.steps, reply.metrics.samples) == (2, 8)
        assert 0.0 < reply.metrics.train_s <= seconds
        assert digest(reply.adapter) == digest(expected[name][0].adapter)
    assert len({digest(reply.adapter) for reply, _ in answers.values()}) == len(answers)


def test_the_next_round_goes_on_in_the_data_and_a_repeated_one_does_not_train_again(engine, config):
    first = ask(engine, config, "repeat", 1, names=["a"])["a"][0]
    again = ask(engine, config, "repeat", 1, names=["a"])["a"][0]
    assert digest(again.adapter) == digest(first.adapter)
    assert again.metrics.train_s == first.metrics.train_s  # it was not trained a second time
    following = ask(engine, config, "repeat", 2, names=["a"])["a"][0]
    assert digest(following.adapter) != digest(first.adapter)  # other samples
    stale = ask(engine, config, "repeat", 1, names=["a"], steps=1)["a"][0]
    assert isinstance(stale, SiteFailure)
    assert (stale.fate, stale.reason) == (Fate.FAILED, "round 1 is past; this site is at round 2")


def test_what_a_site_cannot_do_is_its_answer(engine, config):
    requests = requests_for(engine, config, "faulty", 1)
    name = next(iter(requests["b"].adapter))
    wrong = {**requests["b"].adapter, name: np.zeros((1, 1), np.float32)}
    requests["b"] = TrainRequest("faulty", 1, wrong, Assignment(local_steps=2))
    requests["c"] = TrainRequest("faulty", 1, requests["c"].adapter, Assignment(local_steps=2, learning_rate=1e30))
    answers = engine.exchange(requests, 120.0)
    assert isinstance(answers["a"][0], TrainReply)
    assert (answers["b"][0].fate, "has shape (1, 1)" in answers["b"][0].reason) == (Fate.FAILED, True)
    assert (answers["c"][0].fate, "the loss is" in answers["c"][0].reason) == (Fate.FAILED, True)
    assert isinstance(ask(engine, config, "healed", 1, names=["c"])["c"][0], TrainReply)


def test_a_deadline_holds_and_what_comes_later_is_dropped(engine, config):
    late = engine.exchange(requests_for(engine, config, "late", 1, steps=200), 0.3)
    assert {answer.fate for answer, _ in late.values()} == {Fate.LATE}
    answers = ask(engine, config, "late", 2)
    assert {answer.round for answer, _ in answers.values()} == {2}


def test_an_emulated_link_takes_its_time(engine, config):
    request = requests_for(engine, config, "link", 1, names=["a"])["a"]
    requests = {"a": TrainRequest("link", 1, request.adapter, request.assignment, link_s=(0.2, 0.3))}
    reply, seconds = engine.exchange(requests, 120.0)["a"]
    assert seconds >= reply.metrics.train_s + 0.5
    begin_s = time.monotonic()
    found = engine.evaluate(request.adapter, 120.0, dict.fromkeys(config.names, 0.7))
    assert time.monotonic() - begin_s >= 0.7
    assert found.site in config.names


def test_evaluation_is_the_same_everywhere(engine, config):
    adapter = requests_for(engine, config, "", 1)["a"].adapter
    found = engine.evaluate(adapter, 120.0)
    assert isinstance(found, Evaluation)
    assert found.loss == pytest.approx(np.mean(list(found.domain_loss.values())))
    assert 0.0 <= found.accuracy <= 1.0
    with InProcessEngine(config) as reference:
        assert vars(reference.evaluate(adapter, 120.0)) == {**vars(found), "site": "a"}  # whoever it was here
    wrong = engine.evaluate({}, 120.0)
    assert isinstance(wrong, SiteFailure)
    assert wrong.fate is Fate.FAILED


def test_a_federation_is_the_same_on_every_engine(engine, config, tmp_path):
    def run(over, **more):
        federation = Federation(config, over, **more)
        for names in ("abc", "ab", "c"):
            federation.run_round({name: federation.assignment() for name in names})
        return federation

    found = run(engine, folder=tmp_path)
    with InProcessEngine(config) as other:
        reference = run(other)
    assert digest(found.adapter) == digest(reference.adapter)
    losses = [record.evaluation.loss for record in found.records]
    assert losses == [record.evaluation.loss for record in reference.records]
    assert losses[-1] < losses[0]
    assert all(outcome.fate is Fate.COUNTED for record in found.records for outcome in record.outcomes)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_the_saved_adapter_loads_in_stock_peft(config, tmp_path):
    import torch
    from peft import PeftModel

    from wattgym.live.models import load_model

    with InProcessEngine(config) as engine:
        run = Federation(config, engine)
        run.run_round({name: run.assignment() for name in config.names})
        run.save_adapter(tmp_path)
        ids = torch.arange(40)[None]
        base = load_model(config.job("a"), "cpu")[0].unload()
        plain = base(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path)(input_ids=ids).logits
        engine.evaluate(run.adapter, 60.0)  # puts the adapter into the engine's model
        own = engine._sites["a"]._loaded.model.eval()(input_ids=ids).logits
    assert torch.equal(loaded, own)
    assert not torch.equal(loaded, plain)


def test_both_ways_to_aggregate_learn(federation):
    """The exact mean of products trains as well; after one site alone it is the same model, after several another."""
    runs = {}
    for method in ("factors", "svd"):
        config = federation(aggregation={"method": method}, local_steps=5)
        with InProcessEngine(config) as engine:
            run = runs[method] = Federation(config, engine)
            for names in ("a", "abc", "abc", "abc"):
                run.run_round({name: run.assignment() for name in names})
    factors, svd = ([record.evaluation.loss for record in runs[method].records] for method in runs)
    assert svd[1] == pytest.approx(factors[1], abs=1e-4)
    assert svd[2] != pytest.approx(factors[2], abs=1e-4)
    assert min(factors[0] - factors[-1], svd[0] - svd[-1]) > 0.3
