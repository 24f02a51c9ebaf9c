"""Selectors on federations that are small enough to work out by hand, and in emulated ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattgym.agents.selection_families import read_families
from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selectors import ORACLES, SELECTORS, STANDARD, load_tuned_selectors, make_selector, select_selectors
from wattgym.agents.selectors.fedcs import DeadlineSettings, FedCS
from wattgym.agents.selectors.oracle import MyopicOracle, best_sets, subsets
from wattgym.agents.selectors.powertrip import GreedySettings, greedy_stop, power_to_cost, predicted_efficiency
from wattgym.agents.selectors.powertrip_static import PowerTripStatic
from wattgym.agents.selectors.ranking import Share, best_k, prefixes
from wattgym.agents.selectors.selector import Turn
from wattgym.envs.federation.config import LearningConfig, SiteSelectionConfig
from wattgym.envs.federation.emulator import Telemetry
from wattgym.envs.federation.view import SelectionTask, SelectionView
from wattgym.envs.selection import SiteSelection
from wattgym.errors import UserError

ROOT = Path(__file__).parents[2]


def make_view(power, comm, *, samples=None, model="A", eligible=None, **telemetry):
    """One federation: 1000 samples a round, one sample per joule, and a learning model in which every round brings
    the same progress, so that efficiency is the inverse of the round's time.
    """
    power, comm = np.atleast_2d(np.array(power, float)), np.atleast_2d(np.array(comm, float))
    batch, n = power.shape
    samples = np.atleast_2d(np.array(samples, float)) if samples else np.full((batch, n), 1000.0)
    config = SiteSelectionConfig.model_validate({"rounds": {"time_model": model, "work_samples": 1000.0}})
    learning = LearningConfig(phi=1e12, work_exponent=1.0, reference_samples=1000.0)
    ones = np.ones((batch, n))
    task = SelectionTask(
        config, learning, None, 0.6, np.full(batch, n), ones > 0, np.zeros((batch, n), int), ("here",), power * 2,
        ones, ones, samples, np.full((batch, n, 8), 0.125), ones * 0.1, comm, ones,
    )  # fmt: skip
    none = np.zeros((batch, n))
    fields = dict(
        time_s=np.zeros(batch), rounds=np.zeros(batch, int), waits=np.zeros(batch, int), power_w=power,
        power_change_w=none, eligible=ones > 0 if eligible is None else np.atleast_2d(np.array(eligible, bool)),
        loss=np.full(batch, 4.0), domain_loss=np.full((batch, 8), 4.0), mix_loss=ones * 4, site_loss=ones * 4,
        last_seconds=none, last_round=none.astype(int), times=none.astype(int), failed=none > 0,
        price_usd_per_mwh=ones, carbon_g_per_kwh=ones,
    )  # fmt: skip
    return SelectionView(task, Telemetry(**{**fields, **telemetry}), None)


def choose(selector, view):
    selector.reset(view.task)
    return np.flatnonzero(selector.act(Turn(view, np.zeros((1, 1), np.float32)))[0]).tolist()


# Rates 100, 50 and 30 samples/s. Alone: 20, 22 and 34.3 s. Power over cost: 10, 25 and 30 W/s.
THREE = ([100.0, 50.0, 30.0], [10.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("all sites", None, [0, 1, 2]),
        ("single best", None, [0]),
        ("power-only top k", {"share": 0.67}, [0, 1]),
        ("power-only top k", {"share": 0.01}, [0]),
        ("nearest-only top k", {"share": 0.67}, [1, 2]),
        ("fastest k", {"share": 0.67}, [0, 1]),
        ("PowerTrip predicted", None, [1, 2]),
        ("PowerTrip static", None, [1, 2]),
    ],
)
def test_choice_by_hand(name, settings, expected):
    assert choose(make_selector(name, settings), make_view(*THREE)) == expected


def test_predicted_efficiency_by_hand():
    view = make_view(*THREE)
    np.testing.assert_allclose(power_to_cost(view)[0], [10, 25, 30])
    sets = prefixes(power_to_cost(view), view.known.eligible)
    assert sets[0].tolist() == [[False, False, True], [False, True, True], [True, True, True]]
    # 1000 / 30 + 1, 1000 / 80 + 2, 1000 / 180 + 10; each round brings one effective site-round.
    np.testing.assert_allclose(1.0 / predicted_efficiency(view, sets)[0], [34.3333, 14.5, 15.5556], rtol=1e-4)


@pytest.mark.parametrize(
    ("efficiency", "settings", "stop"),
    [
        ([1.0, 0.9, 2.0, 3.0], {"patience": 0}, 0),
        ([1.0, 0.9, 2.0, 3.0], {"patience": 1}, 3),
        ([1.0, 0.9, 0.8, 3.0], {"patience": 1}, 0),
        ([1.0, 0.9, 0.8, 3.0], {"patience": 2}, 3),
        ([1.0, 1.04, 1.3, 1.31], {"patience": 0, "threshold": 0.05}, 0),
        ([1.0, 1.04, 1.3, 1.31], {"patience": 1, "threshold": 0.05}, 2),
    ],
)
def test_greedy_stops_when_its_patience_is_at_an_end(efficiency, settings, stop):
    assert greedy_stop(np.array([efficiency]), np.array([4]), GreedySettings(**settings)).tolist() == [stop]


def test_greedy_never_goes_beyond_the_eligible_sites():
    efficiency = np.array([[1.0, 2.0, 3.0, 4.0]] * 3)
    assert greedy_stop(efficiency, np.array([4, 2, 0]), GreedySettings()).tolist() == [3, 1, 0]


@pytest.mark.parametrize(
    ("model", "samples", "slack", "expected"),
    [
        # Sets in order of own time: 34.3 s, 14.5 s, 15.6 s.
        ("A", None, 1.0, [1, 2]),
        ("A", None, 1.07, [1, 2]),
        ("A", None, 1.08, [0, 1, 2]),
        # Own data: 1000/100 + 10 = 20 s, 500/50 + 2 = 12 s, 2000/30 + 1 = 67.7 s.
        ("B", [1000, 500, 2000], 1.0, [1]),
        ("B", [1000, 500, 2000], 1.7, [0, 1]),
        ("B", [1000, 500, 2000], 6.0, [0, 1, 2]),
    ],
)
def test_deadline_selection_takes_all_that_fits(model, samples, slack, expected):
    view = make_view(*THREE, model=model, samples=samples)
    assert choose(FedCS(DeadlineSettings(slack=slack)), view) == expected


def test_top_k_counts_eligible_sites_only():
    eligible = np.array([[True, False, True, True, True]])
    assert best_k(np.array([[1.0, 9.0, 3.0, 2.0, 3.0]]), eligible, np.array([2]))[0].tolist() == [
        False, False, True, False, True,
    ]  # fmt: skip
    assert Share(share=0.5).count(eligible).tolist() == [2]
    assert Share(share=0.01).count(eligible).tolist() == [1]


def test_static_choice_is_kept_and_its_absent_members_sit_out():
    selector, view = PowerTripStatic(), make_view(*THREE)
    assert choose(selector, view) == [1, 2]
    changed = make_view([500.0, 1.0, 30.0], [1.0, 2.0, 1.0], eligible=[True, False, True])
    assert np.flatnonzero(selector.act(Turn(changed, None))[0]).tolist() == [2]


@pytest.mark.parametrize("name", [name for name in SELECTORS if name not in ORACLES])
def test_no_eligible_site_and_a_single_site(name):
    nobody = make_view([5.0, 4.0], [1.0, 1.0], eligible=[False, False])
    assert choose(make_selector(name), nobody) == []
    assert choose(make_selector(name), make_view([5.0], [1.0])) == [0]
    assert choose(make_selector(name), make_view([5.0, 4.0], [1.0, 1.0], eligible=[False, True])) == [1]


def test_subsets_are_all_sets_of_the_sites():
    sets = subsets(np.array([[True, False, True], [False, True, False]]))
    assert {tuple(s) for s in sets[0].astype(int).tolist()} == {(1, 0, 0), (0, 0, 1), (1, 0, 1)}
    assert {tuple(s) for s in sets[1].astype(int).tolist()} <= {(0, 1, 0), (0, 0, 0)}


def test_names_and_settings_are_checked():
    with pytest.raises(UserError, match="unknown selector 'best'"):
        make_selector("best")
    with pytest.raises(UserError, match="'all sites' has no settings"):
        make_selector("all sites", {"share": 0.5})
    with pytest.raises(UserError, match="unknown key 'shear', did you mean 'share'"):
        make_selector("random k", {"shear": 0.5})
    with pytest.raises(UserError, match="unknown selector 'x'"):
        select_selectors("all sites,x")
    assert select_selectors("all") == STANDARD
    assert select_selectors("none") == ()


def test_shipped_settings_fit_every_committed_family():
    tuned = load_tuned_selectors()
    for family, found in tuned.families.items():
        assert {make_selector(name, settings).name for name, settings in found.settings.items()} == set(found.settings)
        assert tuned.of(family) == found.settings
    assert set(tuned.families) >= set(read_families(ROOT / "configs" / "site_selection"))
    assert tuned.of("no such family") == {}


def config(**changes):
    data = {
        "sites": {"count": [4, 8], "slots": 8},
        "network": {"bandwidth_share": 0.02},
        "learning": {"s0": 8.0},
        "goal": {"time_limit_s": 20_000},
    }
    return SiteSelectionConfig.model_validate({**data, **changes})


@pytest.fixture(scope="module")
def small():
    return SelectionArena(config())


@pytest.fixture(scope="module")
def rough():
    rounds = {"time_model": "B", "dropouts_per_hour": 6.0, "straggler_sigma": 0.3, "deadline_s": 900}
    return SelectionArena(config(sites={"count": [1, 4], "slots": 4}, rounds=rounds, power={"u_max": 0.75}))


def test_the_oracle_has_the_most_progress_per_second(small):
    selection = small.selection
    observation = selection.reset(range(12))
    others = [make_selector(name) for name in STANDARD if name not in ORACLES]
    for selector in others:
        selector.reset(selection.task)
    for _ in range(4):
        turn = Turn(selection.view, observation, selection.emulator)
        best = MyopicOracle().act(turn)
        candidates = np.stack([best, *(np.asarray(selector.act(turn)) > 0 for selector in others)], axis=1)
        worth = selection.emulator.imagine(candidates).per_second
        assert (worth[:, :1] >= worth - 1e-15).all()
        observation = selection.step(candidates[:, -1]).observation


def test_local_search_nearly_finds_the_best_set(small):
    selection = small.selection
    selection.reset(range(30))
    exact = best_sets(selection.emulator, selection.view)
    searched = best_sets(selection.emulator, selection.view, exhaustive=0)
    worth = selection.emulator.imagine(np.stack([exact, searched], axis=1)).per_second
    ratio = worth[:, 1] / worth[:, 0]
    assert ratio.max() <= 1.0 + 1e-12
    assert ratio.mean() > 0.995
    assert ratio.min() > 0.9


def test_what_the_clairvoyant_imagines_comes_true(rough):
    selection = rough.selection
    selection.reset(range(20))
    chosen = best_sets(selection.emulator, selection.view, foresee=True)
    imagined = selection.emulator.imagine(chosen[:, None], foresee=True).log_progress[:, 0]
    np.testing.assert_allclose(selection.step(chosen).result.log_progress, imagined, rtol=1e-12)


def test_the_plan_arrives_no_later_than_the_myopic_oracle():
    arena = SelectionArena(config(sites={"count": [3, 4]}, goal={"target_loss": 1.2, "time_limit_s": 20_000}))
    times = {
        name: np.array([e.seconds.sum() for e in arena.run(make_selector(name), range(6))])
        for name in ("myopic oracle", "horizon planner", "all sites")
    }
    assert (times["horizon planner"] <= times["myopic oracle"] + 1e-6).all()
    assert times["horizon planner"].sum() < times["all sites"].sum()


def test_the_present_power_oracle_knows_no_power_to_come():
    """It reckons with rounds as long as the aggregator predicts them, which differs from what comes."""
    sites = {"count": [6, 6], "capacity_w": 4e5, "samples": 5e4}
    volatile = config(sites=sites, power={"u_max": 0.78}, rounds={"time_model": "B", "deadline_s": 1800})
    selection = SiteSelection(volatile)
    selection.reset(range(60))
    # Somewhere between two power samples.
    selection.step(selection.view.known.eligible)
    truth, view = selection.emulator, selection.view
    sets = np.stack([view.known.eligible, np.eye(6, dtype=bool)[view.best_site()] & view.known.eligible], axis=1)
    predicted = np.minimum(view.round_seconds(sets), 1800)
    steady, moving = (truth.imagine(sets, steady=steady).seconds for steady in (True, False))
    np.testing.assert_allclose(steady, np.where(sets.any(axis=2), predicted, 0.0), rtol=1e-9)
    assert (np.abs(moving - steady) > 1).any()
    turn = Turn(view, np.zeros((60, 1), np.float32), truth)
    present = make_selector("present-power oracle").act(turn)
    best = truth.imagine(subsets(view.known.eligible), steady=True).per_second.max(axis=1)
    np.testing.assert_allclose(truth.imagine(present[:, None], steady=True).per_second[:, 0], best, rtol=1e-9)
    assert (present != make_selector("myopic oracle").act(turn)).any()


def test_oracles_need_the_emulator_and_the_planner_few_sites(small):
    view = make_view(*THREE)
    for name in ORACLES:
        with pytest.raises(UserError, match=f"'{name}' needs an emulated federation"):
            choose(make_selector(name), view)
    with pytest.raises(UserError, match="plans for at most 8 sites, this federation has 12"):
        SelectionArena(config(sites={"count": [12, 12]})).run(make_selector("horizon planner"), [0])


@pytest.mark.parametrize("name", [name for name in STANDARD if name not in ORACLES])
def test_selectors_see_nothing_hidden(small, name):
    """Neither the true federation nor the true outcome of the last round changes what a selector does."""
    selection = small.selection
    observation = selection.reset([5, 6])
    open_, blind = make_selector(name), make_selector(name)
    open_.reset(selection.task)
    blind.reset(selection.task)
    for _ in range(6):
        view, last = selection.view, selection.view.last
        if last is not None:
            nothing = np.full_like
            played = replace(
                last.played,
                progress=nothing(last.played.progress, np.nan),
                loss=nothing(last.played.loss, np.nan),
                domain_loss=nothing(last.played.domain_loss, np.nan),
            )
            last = replace(last, played=played, log_progress=nothing(last.log_progress, np.nan))
        chosen = open_.act(Turn(view, observation, selection.emulator))
        hidden = blind.act(Turn(SelectionView(view.task, view.known, last), observation, None))
        np.testing.assert_array_equal(chosen, hidden)
        observation = selection.step(chosen).observation


@pytest.mark.parametrize("name", [name for name in STANDARD if name not in ORACLES])
def test_selectors_survive_one_to_four_sites_that_come_and_go(rough, name):
    episodes = rough.run(make_selector(name), range(12))
    assert {len(e.sites) for e in episodes} == {1, 2, 3, 4}
    assert any(e.waited.any() for e in episodes)
    for episode in episodes:
        assert episode.chosen[~episode.waited].any(axis=1).all()
        assert not episode.chosen[episode.waited].any()
