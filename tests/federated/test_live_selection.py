"""The selection environment over a live federation, its loop, its log: with rounds that are scripted."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from wattgym.agents.selectors import make_selector
from wattgym.agents.selectors.selector import Turn
from wattgym.config import parse_config
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.envs.selection import SiteSelection
from wattgym.errors import UserError
from wattgym.federated.log import RoundLog, read_log
from wattgym.federated.loop import SelectionPlan, run_rounds
from wattgym.federated.messages import Evaluation, Fate, RoundRecord, SiteMetrics, SiteOutcome
from wattgym.federated.selection import LiveFederation

SITES = {"a": "aws:us-east-1", "b": "aws:eu-west-1", "c": "aws:ap-northeast-1", "d": "aws:us-west-2"}
DOMAINS = ("add", "reverse", "larger")
START = Evaluation(4.0, {"add": 3.0, "reverse": 4.0, "larger": 5.0}, 0.0)


def environment(**changes):
    values = {
        "sites": {"named": [{"name": n, "region": r, "capacity_w": 9e4, "samples": 8000} for n, r in SITES.items()]},
        "rounds": {"work_samples": 8000.0},
        "learning": {"domains": 4, "noise": (0.0, 0.0), "loss_start": 4.0, "reference_samples": 2000.0},
        "goal": {"target_loss": 1.0},
    }
    return parse_config(SiteSelectionConfig, {**values, **changes}, "test")


class Script:
    """Rounds that lower the loss by a tenth; `fates` says who does not count."""

    def __init__(self, fates=None, seconds=7.0):
        self.round, self.loss, self.fates, self.seconds, self.asked = 0, 4.0, fates or {}, seconds, []

    def evaluate(self):
        return START

    def run_round(self, assignments):
        self.asked.append(dict(assignments))
        outcomes = []
        for name, assignment in assignments.items():
            fate = self.fates.get(name, Fate.COUNTED)
            outcome = SiteOutcome(name, fate, "" if fate is Fate.COUNTED else "scripted", assignment)
            if fate is Fate.COUNTED:
                metrics = SiteMetrics(8 * assignment.local_steps, 99, assignment.local_steps, 2.5, 3.0, energy_j=900.0)
                outcome = replace(outcome, metrics=metrics, round_trip_s=4.0, transfer_s=1.0)
            outcomes.append(outcome)
        counted = sum(o.fate is Fate.COUNTED for o in outcomes)
        if counted:
            self.round += 1
            self.loss *= 0.9
        by_domain = {name: loss * self.loss / 4.0 for name, loss in START.domain_loss.items()}
        return RoundRecord(
            round=self.round if counted else self.round + 1,
            seconds=self.seconds,
            time_s=self.seconds * self.round,
            outcomes=tuple(outcomes),
            evaluation=Evaluation(self.loss, by_domain, 1.0 - self.loss / 4.0),
            effective_sites=float(counted),
            noise_scale=math.nan if counted < 2 else 3.0,
        )


def live(script, *, wall_clock=False, **changes):
    env = environment(**changes)
    federation = LiveFederation(env, DOMAINS, START, script.run_round, reference_steps=10, wall_clock=wall_clock)
    selection = SiteSelection(env, federation)
    selection.reset([0])
    return federation, selection


def everybody(selection):
    return np.ones((1, selection.layout.slots), dtype=np.float32)


def test_the_loss_before_training_is_the_measured_one_and_unknown_domains_show_the_mean():
    federation, selection = live(Script())
    assert selection.view.known.loss[0] == 4.0
    assert selection.view.known.domain_loss[0].tolist() == [3.0, 4.0, 5.0, 4.0]
    np.testing.assert_allclose(selection.view.known.mix_loss[0], federation.federation.mix[0] @ [3.0, 4.0, 5.0, 4.0])


def test_local_steps_follow_the_split_of_the_work():
    """8,000 emulated samples at 200 a step are 40 steps, split by power over the sites that take part."""
    script = Script()
    federation, selection = live(script)
    rate = selection.view.rate[0].copy()
    outcome = selection.step(everybody(selection))
    steps = [script.asked[0][name].local_steps for name in SITES]
    assert steps == [max(1, round(40 * share)) for share in rate / rate.sum()]
    assert [script.asked[0][name].power_w for name in SITES] == federation.telemetry.power_w[0].tolist()
    assert outcome.true_loss[0] == pytest.approx(3.6)
    assert outcome.loss[0] == pytest.approx(3.6)
    assert outcome.result.log_progress[0] == pytest.approx(-math.log(0.9))
    assert outcome.result.played.counted.all()
    assert selection.view.known.site_loss[0].tolist() == [2.5] * 4  # as reported


def test_time_is_the_emulated_federations_unless_the_clock_is_the_wall():
    emulated, wall = Script(seconds=7.0), Script(seconds=7.0)
    _, selection = live(emulated)
    expected = float(selection.view.round_seconds(selection.eligible)[0])
    assert selection.step(everybody(selection)).time_s[0] == pytest.approx(expected)
    _, selection = live(wall, wall_clock=True)
    outcome = selection.step(everybody(selection))
    assert outcome.time_s[0] == pytest.approx(7.0)
    assert outcome.result.energy_kwh[0] == pytest.approx(4 * 900.0 / 3.6e6)
    view = selection.view
    assert view.task.comm_s[0].tolist() == [1.0] * 4
    # Ten steps stand for 2,000 samples: what a site did in 3 s is its rate from now on.
    done = np.array([wall.asked[0][name].local_steps * 200.0 for name in SITES])
    np.testing.assert_allclose(view.rate[0], done / 3.0)


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.FAILED, Fate.REJECTED, Fate.LATE])
def test_a_site_that_did_not_count_shows_as_failed_and_the_others_count(fate):
    _, selection = live(Script({"b": fate}))
    outcome = selection.step(everybody(selection))
    assert outcome.result.played.counted[0].tolist() == [True, False, True, True]
    assert selection.view.known.failed[0].tolist() == [False, True, False, False]
    assert bool(outcome.result.played.late[0, 1]) is (fate is Fate.LATE)
    assert outcome.true_loss[0] == pytest.approx(3.6)


def test_a_round_with_nobody_changes_nothing_but_the_time():
    _, selection = live(Script(dict.fromkeys(SITES, Fate.LOST)))
    outcome = selection.step(everybody(selection))
    assert outcome.true_loss[0] == outcome.loss[0] == 4.0
    assert outcome.result.log_progress[0] == 0.0
    assert outcome.time_s[0] > 0.0
    assert not outcome.result.played.counted.any()


def test_more_domains_than_the_policy_knows_are_refused():
    with pytest.raises(UserError, match=r"3 domains \(add, reverse, larger\).*set learning.domains to 3 or more"):
        live(Script(), learning={"domains": 2, "loss_start": 4.0, "noise": (0.0, 0.0)})


def plan(rounds=6):
    return SelectionPlan(environment(), DOMAINS, rounds, seed=3, reference_steps=10)


def timeless(path):
    """A log without the wall clock's times of its rounds."""
    return re.sub(r'"unix_s": [0-9.]+, ', "", path.read_text())


@pytest.mark.parametrize("name", ["Oort", "PowerTrip measured", "random k", "UCB per site"])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(tmp_path, name):
    """Selectors with memory stand where they stood, because the rounds are replayed to them."""
    whole, parts = Script({"c": Fate.LOST}), Script({"c": Fate.LOST})
    expected = run_rounds(whole, make_selector(name), plan(), RoundLog(tmp_path / "whole.jsonl"))
    run_rounds(parts, make_selector(name), plan(4), RoundLog(tmp_path / "parts.jsonl"))
    shown = []
    again = run_rounds(parts, make_selector(name), plan(), RoundLog(tmp_path / "parts.jsonl"), shown.append)
    assert [progress.record.round for progress in shown] == [5, 6]
    assert parts.asked == whole.asked
    assert timeless(tmp_path / "parts.jsonl") == timeless(tmp_path / "whole.jsonl")
    for field in ("seconds", "chosen", "counted", "true_loss", "accuracy", "energy_kwh"):
        np.testing.assert_array_equal(getattr(again, field), getattr(expected, field))


def test_a_run_is_resumed_by_who_began_it(tmp_path):
    log = tmp_path / "rounds.jsonl"
    run_rounds(Script(), make_selector("all sites"), plan(2), RoundLog(log))
    with pytest.raises(UserError, match="begun by 'all sites', not by 'single best'"):
        run_rounds(Script(), make_selector("single best"), plan(4), RoundLog(log))
    other = SelectionPlan(environment(rounds={"work_samples": 8000.0}), DOMAINS, 4, 3, 10)
    text = log.read_text().replace('"site": "b"', '"site": "nowhere"')
    log.write_text(text)
    with pytest.raises(UserError, match="round 1 was played with a, c, d, nowhere, this run selects a, b, c, d"):
        run_rounds(Script(), make_selector("all sites"), other, RoundLog(log))


def test_a_run_ends_at_the_target_and_when_it_is_told_to(tmp_path):
    reached = run_rounds(Script(), make_selector("all sites"), plan(50), RoundLog(tmp_path / "a.jsonl"))
    assert reached.reached
    assert len(reached.seconds) == 14  # 4 * 0.9 ** 14 is the first below 1
    assert reached.accuracy[-1] == pytest.approx(1.0 - 0.9**14)  # measured, not the learning model's
    stopped = run_rounds(
        Script(),
        make_selector("all sites"),
        plan(50),
        RoundLog(tmp_path / "b.jsonl"),
        stop=iter([False] * 3 + [True]).__next__,
    )
    assert len(stopped.seconds) == 3
    assert (
        run_rounds(Script(), make_selector("all sites"), plan(), RoundLog(tmp_path / "c.jsonl"), stop=lambda: True)
        is None
    )


def test_the_log_holds_everything_and_survives_a_cut(tmp_path):
    path = tmp_path / "rounds.jsonl"
    log = RoundLog(path)
    script = Script({"b": Fate.REJECTED, "c": Fate.LOST, "d": Fate.LOST})
    run_rounds(script, make_selector("all sites"), plan(2), log)
    again = read_log(path)
    assert len(again) == 3
    assert "NaN" not in path.read_text()  # every line is JSON as others read it, too
    for (ours, more), (theirs, told) in zip(log.lines, again, strict=True):
        assert repr(ours) == repr(theirs)
        assert repr(more) == repr(told)
    whole = path.read_text()
    path.write_text(whole + '{"round": 3, "seco')
    assert len(RoundLog(path).records) == 3
    assert path.read_text() == whole
    path.write_text(whole + "not json\n" + whole.splitlines()[-1] + "\n")
    with pytest.raises(UserError, match="line 4: no record of a round"):
        read_log(path)


def test_an_oracle_cannot_select_live_sites_and_names_are_checked():
    from wattgym.federated.policy import live_selector

    with pytest.raises(UserError, match="'myopic oracle' sees the true federation"):
        live_selector("myopic oracle")
    with pytest.raises(UserError, match=r"neither a selector nor the folder of a bundle.*all sites"):
        live_selector("nearest")


def test_selectors_are_asked_without_the_truth(tmp_path):
    seen = []

    class Spy:
        name = "spy"

        def reset(self, task, rows=None):
            pass

        def act(self, turn: Turn):
            seen.append(turn.truth)
            return np.ones((1, 4))

    run_rounds(Script(), Spy(), plan(2), RoundLog(tmp_path / "log.jsonl"))
    assert seen == [None, None]
