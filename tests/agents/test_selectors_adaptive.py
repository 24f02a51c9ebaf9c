"""Selectors that learn while they choose: PowerTrip's measured greedy, Oort and UCB, on scripted feedback."""

import dataclasses

import numpy as np
import pytest

from wattgym.agents.selection_rollout import SelectionArena
from wattgym.agents.selectors import make_selector
from wattgym.agents.selectors.oort import Oort, OortSettings, percentile
from wattgym.agents.selectors.powertrip_measured import MeasuredSettings, PowerTripMeasured, slope
from wattgym.agents.selectors.selector import Turn
from wattgym.agents.selectors.ucb import Ucb, UcbSettings
from wattgym.envs.federation.config import SiteSelectionConfig


class Script:
    """A federation of which the test says how each round goes; site 0 has the highest power over cost, and so on."""

    def __init__(self, sites=5):
        config = SiteSelectionConfig.model_validate({"sites": {"count": [sites, sites]}})
        self.selection = SelectionArena(config).selection
        self.selection.reset([0])
        self.task = dataclasses.replace(self.selection.task, comm_s=np.arange(1.0, sites + 1)[None])
        known = self.selection.emulator.telemetry
        self.known = dataclasses.replace(
            known, power_w=np.full((1, sites), 1e5), eligible=np.ones((1, sites), bool), loss=np.array([4.0])
        )
        self.last = None

    def play(self, selector):
        view = dataclasses.replace(self.selection.view, task=self.task, known=self.known, last=self.last)
        self.chosen = np.asarray(selector.act(Turn(view, np.zeros((1, 1), np.float32)))) > 0
        return np.flatnonzero(self.chosen[0]).tolist()

    def pass_round(self, rate, seconds=10.0):
        """The log loss falls by `rate` a second; all that were chosen count."""
        known = self.known
        self.known = dataclasses.replace(
            known,
            time_s=known.time_s + seconds,
            rounds=known.rounds + 1,
            loss=known.loss * np.exp(-rate * seconds),
            times=known.times + self.chosen,
            last_round=np.where(self.chosen, known.rounds[:, None] + 1, known.last_round),
            last_seconds=np.where(self.chosen, seconds, known.last_seconds),
        )
        result = self.selection.emulator.step(self.chosen & self.selection.eligible)
        result.played.counted = self.chosen
        self.last = result


@pytest.fixture(scope="module")
def five():
    return Script()


@pytest.fixture
def script(five):
    fresh = object.__new__(Script)
    fresh.__dict__.update(five.__dict__)
    fresh.selection.reset([0])
    return fresh


def run(script, selector, rates, seconds=10.0):
    """Sizes of the sets that are chosen before each round with the given rate of progress, and after the last."""
    sizes = []
    for rate in rates:
        sizes.append(len(script.play(selector)))
        script.pass_round(rate, seconds)
    return [*sizes, len(script.play(selector))]


def measured(**settings):
    defaults = {"window": 1, "patience": 0, "start": 0.2, "hold": 100, "drop": 0.0, "on_power": False, "memory": 1.0}
    return PowerTripMeasured(MeasuredSettings(**{**defaults, **settings}))


def begin(script, selector):
    selector.reset(script.task)
    return selector


def test_a_site_that_helps_stays_and_one_that_does_not_is_rolled_back(script):
    selector = begin(script, measured())
    assert run(script, selector, [0.01, 0.02, 0.015]) == [1, 2, 3, 2]
    assert selector.trials[0].holding
    assert script.play(selector) == [0, 1]


def test_patience_looks_beyond_a_failure(script):
    assert run(script, begin(script, measured(patience=1)), [0.01, 0.005, 0.03, 0.02, 0.02]) == [1, 2, 3, 4, 5, 3]


def test_threshold_asks_for_a_clear_gain(script):
    assert run(script, begin(script, measured(threshold=0.5)), [0.010, 0.014]) == [1, 2, 1]


def test_a_window_is_judged_as_a_whole(script):
    # The first window brings 0.02 per second, the second 0.03, so the one bad round does not end the search.
    sizes = run(script, begin(script, measured(window=2)), [0.02, 0.02, 0.0, 0.06, 0.01, 0.01])
    assert sizes == [1, 1, 2, 2, 3, 3, 2]


def test_slope_is_that_of_the_least_squares_line():
    assert slope([0.0, 10.0, 20.0], [1.0, 0.7, 0.6]) == pytest.approx(-0.02)
    assert slope([5.0], [1.0]) == 0.0


def test_a_held_set_is_reconsidered_one_site_below(script):
    selector = begin(script, measured(hold=3))
    assert run(script, selector, [0.01, 0.02, 0.01, 0.02, 0.02, 0.02]) == [1, 2, 3, 2, 2, 2, 1]


def test_a_new_power_sample_reorders(script):
    selector = begin(script, measured(on_power=True))
    assert run(script, selector, [0.01, 0.02, 0.01]) == [1, 2, 3, 2]
    script.known = dataclasses.replace(script.known, power_w=np.array([[1e3, 1e5, 1e5, 1e5, 1e5]]))
    assert script.play(selector) == [0, 1]
    script.pass_round(0.02, seconds=300.0)
    assert script.play(selector) == [1]


def test_an_efficiency_that_falls_starts_a_new_search(script):
    selector = begin(script, measured(drop=0.5))
    assert run(script, selector, [0.01, 0.02, 0.01, 0.015, 0.009]) == [1, 2, 3, 2, 2, 1]


def test_a_member_without_power_is_replaced(script):
    selector = begin(script, measured())
    assert run(script, selector, [0.01, 0.02, 0.01]) == [1, 2, 3, 2]
    script.known = dataclasses.replace(script.known, eligible=np.array([[True, False, True, True, True]]))
    assert script.play(selector) == [0, 2]


def test_episodes_are_searched_apart(script):
    selector = begin(script, measured())
    run(script, selector, [0.01, 0.02])
    selector.reset(script.task, np.array([0]))
    assert selector.trials[0].size == 0


def test_oort_explores_first_and_then_exploits(script):
    selector = begin(script, Oort(OortSettings(share=0.6, explore=0.5, explore_decay=1.0, explore_least=0.0)))
    first = set(script.play(selector))
    assert len(first) == 3
    script.pass_round(0.01)
    second = set(script.play(selector))
    # Two of the three places go to the two sites never tried, the third to one that was.
    assert set(range(5)) - first <= second
    assert len(second & first) == 1


def test_oort_prefers_high_utility_and_short_rounds():
    selector = Oort(OortSettings(clip=1.0))
    selector._states = [selector._begin(0)]
    state = selector._states[0]
    state.round = 10
    utility, last = np.array([1.0, 2.0, 3.0]), np.array([5, 5, 5])
    bonus = np.sqrt(0.1 * np.log(10) / 5)
    alike = selector._scores(state, utility, last, np.array([10.0, 10.0, 10.0]), 10.0)
    np.testing.assert_allclose(alike, [bonus, 0.5 + bonus, 1.0 + bonus])
    slow = selector._scores(state, utility, last, np.array([10.0, 10.0, 40.0]), 10.0)
    np.testing.assert_allclose(slow[2], (1.0 + bonus) / 16)


@pytest.mark.parametrize("tried", [1, 2, 3, 4])
def test_oort_may_exploit_every_site_there_is(tried):
    selector = Oort()
    state = selector._begin(0)
    drawn = selector._draw_best(state, np.linspace(1.0, 0.9, tried), tried)
    assert sorted(drawn.tolist()) == list(range(tried))
    assert percentile(np.arange(float(tried)), 1.0) == tried - 1


@pytest.mark.parametrize("sites", [2, 3, 4])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_oort_with_few_sites_plays_to_the_end(sites, share):
    count = {"count": [sites, sites], "capacity_w": 1e6, "capacity_sigma": 0.0}
    config = SiteSelectionConfig.model_validate({"sites": count, "goal": {"round_limit": 60}})
    settings = {"share": share, "explore": 0.0, "explore_least": 0.0, "clip": 1.0}
    for episode in SelectionArena(config).run(make_selector("Oort", settings), range(4)):
        assert (episode.chosen.sum(axis=1) == max(round(share * sites), 1)).all()


def test_oorts_pacer_moves_with_the_exploited_utility():
    selector = Oort(OortSettings(pacer_window=2))
    state = selector._begin(0)
    for utility in (10.0, 10.0, 10.0, 10.0):
        selector._pace(state, utility)
    assert state.percentile == 35.0
    for utility in (60.0, 60.0):
        selector._pace(state, utility)
    assert state.percentile == 30.0


def test_ucb_tries_everyone_and_then_follows_the_rewards(script):
    selector = begin(script, Ucb(UcbSettings(share=0.2, width=0.0, memory=1.0)))
    seen = []
    for rate in (0.01, 0.05, 0.02, 0.03, 0.04):
        (site,) = script.play(selector)
        seen.append(site)
        script.pass_round(rate)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert script.play(selector) == [seen[1]]
    np.testing.assert_allclose(sorted(selector._mean[0]), [0.01, 0.02, 0.03, 0.04, 0.05])


def test_ucb_looks_again_at_what_it_knows_little_of(script):
    selector = begin(script, Ucb(UcbSettings(share=0.2, width=5.0)))
    sites = set()
    for _ in range(15):
        sites |= set(script.play(selector))
        script.pass_round(0.01)
    assert sites == {0, 1, 2, 3, 4}
    assert selector._times[0].min() >= 2
