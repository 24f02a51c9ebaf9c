import numpy as np
import pytest

from wattgym.agents.baselines import (
    BASELINES,
    CORE,
    ORACLES,
    TUNABLE,
    TUNED_FILES,
    TunedGains,
    feedback_baseline,
    load_tuned,
    make_baseline,
    select_baselines,
    usable,
)
from wattgym.agents.baselines.static import RandomLimits, StaticCap, Uncapped
from wattgym.agents.rollout import Arena
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.feedback import FeedbackGains
from wattgym.envs.observation import common_limit
from wattgym.errors import UserError

PINNED = {
    "randomise": 0.0,
    "power_spread": 0.0,
    "control_delay_periods": (0, 0),
    "command_loss": 0.0,
    "jobs": 2,
    "sensor": "instant",
}
GAINS = FeedbackGains(proportional=0.2, integral=0.3)


def step_signal(tmp_path, values, seconds=120):
    """A recorded signal that holds each value for a while."""
    path = tmp_path / "steps.csv"
    rows = "\n".join(f"{2 * i},{v}" for i, v in enumerate(np.repeat(values, seconds // 2)))
    path.write_text(f"t_s,r\n{rows}\n")
    return str(path), float(len(values) * seconds)


def arena(tmp_path, values, seconds=120, **changes):
    trace, length = step_signal(tmp_path, values, seconds)
    site = {**PINNED, **changes.pop("site", {})}
    return Arena(
        PowerShapingConfig.model_validate({"site": site, "signal": {"trace": trace}, "episode_s": length, **changes})
    )


class Spy:
    """Keeps what the plant reports while another controller acts."""

    name = "spy"

    def __init__(self, controller, arena):
        self._controller, self._plant, self.phases = controller, arena._shaping.plant, []

    def reset(self, task):
        self.task = task
        self._controller.reset(task)

    def act(self, observation):
        self.observations = [*getattr(self, "observations", []), observation.copy()]
        return self._controller.act(observation)


def computing(observations, layout):
    """Whether all jobs computed in each period, `(T, B)`: before it and after it."""
    now = np.stack([(seen[:, layout.job("computing")] > 0).all(axis=1) for seen in observations])
    return now[:-1] & now[1:]


def settled_error(place, controller, seeds, skip):
    """Error over capacity in the second half of each hold, while all jobs compute."""
    spy = Spy(controller, place)
    rollout = place.run(spy, seeds)
    error = (rollout.power_w - rollout.target_w) / rollout.capacity_w[:, None]
    busy = computing(spy.observations, spy.task.layout).T
    late = (np.arange(error.shape[1]) % skip >= skip // 2)[:-1]
    return error[:, :-1][busy & late[None, :]]


def test_feed_forward_meets_mid_band_targets_of_the_nominal_site(tmp_path):
    place = arena(tmp_path, [0.0, 0.5, -0.5, 0.3])
    errors = settled_error(place, make_baseline("feed-forward"), [1, 2, 3], skip=60)
    assert errors.size > 100
    # What is left is the jobs' own noise, which pinning does not remove.
    assert abs(np.median(errors)) < 0.03


class Misjudging:
    """Shows a loop a nominal model that is wrong by a lasting amount."""

    name = "misjudging"

    def __init__(self, loop, shift):
        self._loop, self._shift = loop, shift

    def reset(self, task):
        self._loop.reset(task)
        self._column = task.layout.site("feed_forward")

    def act(self, observation):
        seen = observation.copy()
        seen[:, self._column] += self._shift
        return self._loop.act(seen)


def test_feedback_removes_a_bias_of_the_model(tmp_path):
    place = arena(tmp_path, [0.0, 0.3], 300)
    seeds = list(range(4))
    open_loop = settled_error(place, Misjudging(make_baseline("feed-forward"), 0.4), seeds, skip=150)
    closed = settled_error(place, Misjudging(feedback_baseline("feed-forward + PI", GAINS), 0.4), seeds, skip=150)
    assert abs(np.median(open_loop)) > 0.3
    assert abs(np.median(closed)) < 0.05


def test_pi_alone_finds_targets_away_from_the_base(tmp_path):
    place = arena(tmp_path, [0.6, -0.6], 300)
    seeds = list(range(4))
    held = settled_error(place, make_baseline("static cap"), seeds, skip=150)
    found = settled_error(place, feedback_baseline("PI", GAINS), seeds, skip=150)
    assert np.median(np.abs(held)) > 0.5
    assert abs(np.median(found)) < 0.05


@pytest.mark.parametrize("name", ["PI", "feed-forward + PI"])
def test_integral_does_not_wind_up_while_the_target_is_out_of_reach(name, tmp_path):
    place = arena(tmp_path, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    free, stuck = (StuckAbove(feedback_baseline(name, GAINS), offset) for offset in (0.0, 0.4))
    for controller in (free, stuck):
        place.run(controller, [3])
    # Eight minutes of an error that no action removes: the limit is at its lowest, the integral stays where it was
    # when it got there, and afterwards the loop is back as soon as one that was never stuck.
    assert stuck.positions[100:300].max() < 0.01
    assert np.ptp(stuck.integrals[100:300]) < 0.05
    lasting = GAINS.integral * 0.4 * stuck.per_error * 240
    assert lasting > 5.0
    assert np.abs(stuck.integrals).max() < 1.2
    settled = np.median(free.positions[-20:])
    # (A checkpoint of a job disturbs the loop later on.)
    assert stuck.positions[300:311].max() < settled + 0.05
    assert np.abs(stuck.positions[308:311] - free.positions[308:311]).max() < 0.05
    assert np.abs(stuck.positions[-20:] - free.positions[-20:]).max() < 0.05


class StuckAbove:
    """Shows a loop an error that stays positive while the signal asks for the least power."""

    name = "stuck"

    def __init__(self, loop, offset):
        self._loop, self._offset = loop, offset
        self.integrals, self.positions = np.zeros(0), np.zeros(0)

    def reset(self, task):
        self._loop.reset(task)
        self._column = task.layout.site("error_1")
        self.per_error = task.limit_per_error[0]
        self._tick = 0

    def act(self, observation):
        seen = observation.copy()
        if self._offset and 60 <= self._tick < 300:
            seen[:, self._column] = np.maximum(seen[:, self._column], self._offset)
        self._tick += 1
        action = self._loop.act(seen)
        self.integrals = np.append(self.integrals, self._loop._loop._integral[0])
        self.positions = np.append(self.positions, (action[0, 0] + 1) / 2)
        return action


def test_the_rate_limit_bounds_every_change_of_the_limit(tmp_path):
    place = arena(tmp_path, [1.0, -1.0, 0.5, -0.7], 40, rules={"dead_band_w": 0.0, "dead_band_fraction": 0.0})
    slow = place.run(feedback_baseline("feed-forward + PI", FeedbackGains(rate=0.1)), [1, 2])
    moves = np.abs(np.diff(slow.limit, axis=1))
    assert moves.max() <= 0.1 + 1e-6
    assert moves.max() > 0.09
    fast = place.run(feedback_baseline("feed-forward + PI", FeedbackGains(rate=1.0)), [1, 2])
    assert np.abs(np.diff(fast.limit, axis=1)).max() > 0.3


@pytest.mark.parametrize(
    "name", [name for name in BASELINES if name != "energy-matched cap" and usable(name, ["power_limit"])]
)
def test_limits_do_not_depend_on_what_actions_mean(name, tmp_path):
    kinds = (
        {"kind": "absolute"},
        {"kind": "delta", "scale": 1.0},
        {"kind": "residual", "scale": 1.0},
        {"kind": "residual_pi", "scale": 1.0, "gains": {}},
    )
    limits = [
        arena(tmp_path, [0.0, 0.8, -0.8, 0.2], 60, action=action).run(make_baseline(name), [1, 2]).limit
        for action in kinds
    ]
    # A program is solved to a tolerance only.
    tolerance = 0.02 if "MPC" in name else 1e-4
    for other in limits[1:]:
        np.testing.assert_allclose(other, limits[0], atol=tolerance)


class Still:
    """Leaves what actions are added to as it is."""

    name = "still"

    def reset(self, task):
        self._shape = task.spec.min_limit_w.shape

    def act(self, observation):
        return np.zeros(self._shape)


def test_a_residual_of_zero_is_feed_forward_with_pi():
    base = {"episode_s": 1200.0, "signal": {"families": {"rega": 1.0}}, "site": {"jobs": 3}}
    action = {"kind": "residual_pi", "scale": 0.2, "gains": GAINS.model_dump() | {"rate": 0.3}}
    added = Arena(PowerShapingConfig(**base, action=action)).run(Still(), [1, 2])
    alone = Arena(PowerShapingConfig(**base)).run(
        feedback_baseline("feed-forward + PI", GAINS.model_copy(update={"rate": 0.3})), [1, 2]
    )
    np.testing.assert_allclose(added.power_w, alone.power_w, rtol=1e-12)
    np.testing.assert_allclose(added.limit, alone.limit, atol=1e-12)


def test_uncapped_never_limits(tmp_path):
    rollout = arena(tmp_path, [0.0, 1.0, -1.0]).run(Uncapped(), [1, 2])
    np.testing.assert_allclose(rollout.limit, 1.0)


def test_static_cap_holds_the_position_of_the_base_power(tmp_path):
    place = arena(tmp_path, [0.0, 1.0])
    spy = Spy(StaticCap(), place)
    rollout = place.run(spy, [1, 2])
    position = common_limit(spy.task.spec, spy.task.base_w[:, None])
    np.testing.assert_allclose(rollout.limit[:, 5:], position[:, :, None] * np.ones((2, 115, 2)), atol=0.02)
    assert np.ptp(rollout.limit[:, 5:], axis=1).max() < 1e-9
    with pytest.raises(UserError, match="powers for 3 sites, the task has 2"):
        place.run(StaticCap("x", np.ones(3)), [1, 2])


def test_random_is_reproducible_and_covers_the_range(tmp_path):
    place = arena(tmp_path, [0.0, 1.0], rules={"raise_fraction_per_s": 10.0})
    one, two = (place.run(RandomLimits(), [1, 2]).limit for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, place.run(RandomLimits(seed=1), [1, 2]).limit)
    assert one.min() < 0.05
    assert one.max() > 0.95


def test_names(tmp_path):
    assert select_baselines("all") == tuple(name for name in BASELINES if usable(name, ["power_limit"]))
    assert select_baselines("core") == CORE
    assert set(CORE) < set(BASELINES)
    assert len(set(BASELINES)) == len(BASELINES)
    assert select_baselines("none") == ()
    assert select_baselines(" PI , random") == ("PI", "random")
    for name in BASELINES:
        if name != "energy-matched cap":
            assert make_baseline(name).name == name
    with pytest.raises(UserError, match="unknown baseline 'pi'; known: all, core, none, uncapped"):
        select_baselines("pi")
    with pytest.raises(UserError, match="unknown baseline 'LQR'; known: uncapped"):
        make_baseline("LQR")
    # Lists on the command line are separated by commas.
    assert not any("," in name for name in BASELINES)


def test_the_shipped_gains_name_the_command_that_found_them():
    tuned = load_tuned()
    assert tuned.command.startswith("wattgym tune-baselines --config")
    assert tuned.gains.keys() == tuned.objective_value.keys()
    assert set(TUNABLE) - set(ORACLES) <= set(tuned.gains) <= set(TUNABLE)
    assert tuned.budget >= 2
    assert make_baseline("PI")._gains == FeedbackGains(**tuned.gains["PI"])
    # Shipped in two files, found with the same budget.
    parts = [load_tuned(path) for path in TUNED_FILES]
    assert len({(part.budget, part.scenarios, part.objective) for part in parts}) == 1
    assert sum(len(part.gains) for part in parts) == len(tuned.gains)


def test_gains_of_another_file_and_mistakes_in_it(tmp_path):
    tuned = TunedGains(
        command="x", budget=1, scenarios=1, objective="o", gains={"PI": GAINS.model_dump()}, objective_value={"PI": 0.0}
    )
    assert make_baseline("PI", tuned)._gains == GAINS
    with pytest.raises(UserError, match=r"nothing for 'feed-forward \+ PI'; they hold: PI"):
        make_baseline("feed-forward + PI", tuned)
    path = tmp_path / "gains.yaml"
    path.write_text(TUNED_FILES[0].read_text().replace("integral", "integrl", 1))
    with pytest.raises(UserError, match=r"gains.yaml: gains.PI: unknown key 'integrl', did you mean 'integral'"):
        load_tuned(path)
    path.write_text(TUNED_FILES[0].read_text().replace("  PI:", "  PID:"))
    with pytest.raises(UserError, match=r"gains.PID: no such tunable baseline; known: PI, "):
        load_tuned(path)
    path.write_text(TUNED_FILES[0].read_text().replace("proportional: 0", "proportional: -0", 1))
    with pytest.raises(UserError, match="greater than or equal to 0"):
        load_tuned(path)
