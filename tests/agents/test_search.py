import math
from pathlib import Path

import pytest

from wattgym.agents import search as searching
from wattgym.agents.search import check_ranges, search
from wattgym.agents.search_space import SearchRange, with_values
from wattgym.agents.seeds import SeedResult, SeedsOutcome
from wattgym.config import parse_config
from wattgym.errors import UserError

pytest.importorskip("optuna")

RATE, HIDDEN = "train.hyperparameters.learning_rate", "network.hidden"
SPACE = {
    RATE: {"low": 1e-5, "high": 1e-1, "log": True},
    "train.hyperparameters.n_epochs": {"low": 1, "high": 9},
    HIDDEN: {"choices": [[8], [16, 16]]},
    "env.reward.throughput": {"low": 0.1, "high": 1.0},
}


@pytest.fixture
def config(tiny):
    return tiny(search=SPACE)


@pytest.fixture
def trained(monkeypatch):
    """Replaces trainings by their outcome: best at a learning rate of 1e-3, worse for each seed."""
    calls = []

    def fake(config, folder, count, *, jobs, resume, progress):
        assert resume
        assert not config.search
        rate = config.train.hyperparameters["learning_rate"]
        reward = -abs(math.log10(rate) + 3.0) - 0.1 * len(config.network.hidden)
        calls.append((config, Path(folder), count))
        if config.train.hyperparameters["n_epochs"] == 9:
            results = [SeedResult(0, Path(folder), "failed", 0, None, "it broke")]
        else:
            results = [SeedResult(i, Path(folder), "finished", 8, reward - 0.01 * i) for i in range(count)]
        return SeedsOutcome(Path(folder), tuple(results), fake.interrupt)

    fake.interrupt = False
    fake.calls = calls
    monkeypatch.setattr(searching, "train_seeds", fake)
    return fake


def test_the_search_finds_the_best_mean_over_seeds_and_goes_on(config, trained, tmp_path):
    told = []
    first = search(config, tmp_path / "s.journal", 8, tmp_path / "runs", told=told.append)
    assert (first.trials, first.interrupted, len(told)) == (8, False, 8)
    again = search(config, tmp_path / "s.journal", 30, tmp_path / "runs", told=told.append)
    assert (again.trials, len(told)) == (30, 30)
    assert again.best_value >= first.best_value
    # The value is the mean over three seeds; the configuration is the one that reached it.
    rate = again.best.train.hyperparameters["learning_rate"]
    reward = -abs(math.log10(rate) + 3.0) - 0.1 * len(again.best.network.hidden)
    assert again.best_value == pytest.approx(reward - 0.01)
    assert again.best_value > -0.6
    assert again.best_values[HIDDEN] == list(again.best.network.hidden)
    assert not again.best.search
    # Whatever weights are searched, policies are compared by those of the configuration.
    assert {c.validation.reward for c, *_ in trained.calls} == {config.env.reward}
    assert len({c.env.reward.throughput for c, *_ in trained.calls}) == 30
    # Poor trials are given up after a seed, good ones have all three; each has a folder of its own.
    folders = {}
    for _, folder, count in trained.calls:
        folders[folder] = max(count, folders.get(folder, 0))
    assert len(folders) == 30
    assert set(folders.values()) >= {1, 3}
    # Nothing is left to do for a study that is complete.
    before = len(trained.calls)
    assert search(config, tmp_path / "s.journal", 30, tmp_path / "runs") == again
    assert len(trained.calls) == before


def test_a_trial_that_was_stopped_is_tried_again_in_its_folder(config, trained, tmp_path):
    trained.interrupt = True
    stopped = search(config, tmp_path / "s.journal", 3, tmp_path / "runs")
    assert (stopped.interrupted, stopped.trials, stopped.best) == (True, 0, None)
    trained.interrupt = False
    search(config, tmp_path / "s.journal", 1, tmp_path / "runs")
    assert len({folder for _, folder, _ in trained.calls}) == 1


def test_trials_that_fail_are_counted_and_said(tiny, trained, tmp_path):
    told = []
    config = tiny(search={**SPACE, "train.hyperparameters.n_epochs": {"choices": [9]}})
    outcome = search(config, tmp_path / "s.journal", 2, tmp_path / "runs", told=told.append)
    assert (outcome.trials, outcome.best_value) == (2, None)
    assert all("seed 0: it broke" in text for text in told)


def test_a_study_of_another_configuration_or_version_is_refused(config, tiny, trained, tmp_path):
    path = tmp_path / "s.journal"
    search(config, path, 1, tmp_path / "runs")
    written = path.read_bytes()
    for other, seeds in ((tiny(search=SPACE, network__hidden=[4]), 3), (config, 4)):
        with pytest.raises(UserError, match="study is of another configuration"):
            search(other, path, 2, tmp_path / "runs", seeds=seeds)
    path.write_text(
        path.read_text()
        .replace('"schema_version": 1', '"schema_version": 7')
        .replace('"schema_version":1', '"schema_version":7')
    )
    with pytest.raises(UserError, match="schema version 7, this WattGym goes on with 1"):
        search(config, path, 2, tmp_path / "runs")
    path.write_bytes(written)
    assert search(config, path, 2, tmp_path / "runs").trials == 2


@pytest.mark.parametrize("content", [b"not a journal\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b'{"op_code": 0, "wor'])
def test_a_file_that_is_no_study_is_one_line_and_stays_as_it_is(content, config, trained, tmp_path):
    path = tmp_path / "s.journal"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        search(config, path, 1, tmp_path / "runs")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
    assert not trained.calls


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "no 'search' section"),
        ({"train.total_stepz": {"low": 1, "high": 2}}, "search.train.total_stepz: unknown key"),
        ({"env.reward.huber": {"low": -1.0, "high": 1.0}}, "search.env.reward.huber: env.reward.huber"),
        ({"env.site.jobs": {"low": 1, "high": 2}}, "search.env.site.jobs: cannot be searched"),
        ({"validation.scenarios": {"low": 1, "high": 2}}, "cannot be searched"),
        ({"seed": {"low": 1, "high": 2}}, "cannot be searched"),
    ],
)
def test_ranges_that_do_not_fit_are_refused_by_key(space, message, tiny):
    with pytest.raises(UserError, match=message):
        check_ranges(tiny(search=space))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"low": 1}, "needs low and high, or choices"),
        ({"low": 2, "high": 1}, "low 2 must lie below high 1"),
        ({"low": 0.0, "high": 1.0, "log": True}, "log needs a positive low"),
        ({"low": 1, "high": 4, "step": 0.5}, "step 0.5 must be a whole number"),
        ({"choices": [1], "low": 1}, "choices exclude low"),
        ({"lo": 1, "high": 2}, "did you mean 'low'"),
    ],
)
def test_ranges_that_contradict_themselves_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        parse_config(SearchRange, data, "test")


def test_numbers_out_of_range_are_refused(config, trained, tmp_path):
    for options, message in (({"seeds": 2}, "at least 3, got 2"), ({"jobs": 0}, "jobs must be"), ({}, "trials must")):
        with pytest.raises(UserError, match=message):
            search(config, tmp_path / "s.journal", 0 if not options else 1, tmp_path / "runs", **options)
    assert not (tmp_path / "s.journal").exists()


def test_without_optuna_the_extra_is_named(config, tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'wattgym\[tune\]'"):
        search(config, tmp_path / "s.journal", 1, tmp_path / "runs")


def test_with_values_replaces_only_what_it_names():
    data = {"a": {"b": 1, "c": [1]}, "d": None}
    assert with_values(data, {"a.b": 2, "d.e": 3}) == {"a": {"b": 2, "c": [1]}, "d": {"e": 3}}
    assert data == {"a": {"b": 1, "c": [1]}, "d": None}
