"""The single environment: checkers, spaces, reward, info, seeding, refusals."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_sb3

import wattgym.envs  # noqa: F401 (registers the ids)
from wattgym.envs.config import OFFERS, PowerShapingConfig
from wattgym.envs.emulator.surfaces import load_surfaces
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.envs.reward import BAND, TERMS
from wattgym.errors import UserError
from wattgym.hw.limits import Decision
from wattgym.signals import named_signal

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem != "results")  # a plan of many
V100 = {"surfaces": ("v100/bert_base_squad/b56",), "command_loss": 0.0, "control_delay_periods": (0, 0)}
VARIANTS = [
    {},
    {"site": {"jobs": 1}},
    {"site": {"jobs": 7, "sensor": "average", "control_delay_periods": (0, 4)}},
    {"site": {"surfaces": "test", "sensor": "instant", "host_w_per_gpu": 250.0}},
    {"signal": {"families": {"rega": 1, "droop": 1, "renewable": 1, "peak_event": 1, "emergency": 1}}},
    {"signal": {"trace": "regd", "start_s": 600.0}},
    {"action": {"kind": "delta", "scale": 0.1}},
    {"action": {"kind": "residual", "scale": 1.0}, "observation": {"preview_periods": 8, "error_history": 1}},
    {"period_s": 0.5, "rules": {"interval_s": 0.5}, "episode_s": 60.0},
    {"period_s": 10.0, "episode_s": 20.0},
    {"rules": {"floor_fraction": 0.0, "raise_fraction_per_s": 10.0}, "site": {"randomise": 0.0}},
]


def shipped_environment(path):
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data.get("env", data)


def make(data=None):
    return gym.make("wattgym/PowerShaping-v0", config=data or {})


def random_steps(env, n, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield env.step(rng.uniform(-1.0, 1.0, env.action_space.shape).astype(np.float32))


CONFIGURATIONS = [*map(shipped_environment, SHIPPED), *VARIANTS]
NAMES = [*(p.name for p in SHIPPED), *(str(v) for v in VARIANTS)]


@pytest.mark.parametrize("data", CONFIGURATIONS, ids=NAMES)
def test_gymnasium_and_sb3_checkers_pass(data):
    check_env(make(data).unwrapped)
    check_env_sb3(PowerShapingEnv(data))


@pytest.mark.parametrize("data", VARIANTS[:8], ids=NAMES[len(SHIPPED) :][:8])
def test_observations_stay_in_their_space_and_finite(data):
    env = make(data)
    env.reset(seed=3)
    for observation, reward, terminated, truncated, _ in random_steps(env, 200):
        assert env.observation_space.contains(observation)
        assert np.isfinite(reward)
        assert not terminated
        if truncated:
            env.reset()


def test_an_episode_ends_truncated_after_its_ticks_and_refuses_more():
    env = PowerShapingEnv({"episode_s": 60.0})
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(4))
    env.reset(seed=0)
    ends = [truncated for _, _, _, truncated, _ in random_steps(env, 30)]
    assert ends == [False] * 29 + [True]
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(4))


def test_reward_is_the_sum_of_its_terms_and_each_follows_its_formula():
    config = PowerShapingConfig()
    env = PowerShapingEnv(config)
    env.reset(seed=5)
    task, last = env.task, env._shaping._limit.copy()
    seen = set()
    for _, reward, _, _, info in random_steps(env, 300, seed=2):
        terms = info["reward_terms"]
        assert tuple(terms) == TERMS
        assert reward == pytest.approx(sum(terms.values()), abs=1e-12)
        size = abs(info["power_w"] - info["target_w"]) / task.capacity_w[0]
        huber = size**2 / 0.2 if size <= 0.1 else size - 0.05
        assert terms["tracking"] == pytest.approx(-huber)
        assert terms["throughput"] == pytest.approx(0.2 * info["throughput"])
        assert terms["violation"] == pytest.approx(-0.5 * max(size - BAND, 0.0))
        limit = env._shaping._limit
        moved = np.abs(limit - last) / (task.spec.max_limit_w - task.spec.min_limit_w)
        assert terms["actuation"] == pytest.approx(-0.05 * moved.mean())
        last = limit.copy()
        seen.add((size <= 0.1, size > BAND))
    assert len(seen) == 3  # inside the Huber knee, between, and beyond the band all happened


def test_target_and_power_follow_the_sign_convention():
    """r > 0 asks for less load: the target lies below base by r times capacity, and drawing all is an error above 0."""
    env = PowerShapingEnv({"site": V100, "signal": {"trace": "emergency"}, "episode_s": 600.0})
    observation, info = env.reset(seed=1)
    assert info["signal"] == "emergency"
    signal = named_signal("emergency", period_s=2.0, duration_s=600.0).values
    base, capacity = env.task.base_w[0], env.task.capacity_w[0]
    assert capacity == pytest.approx(0.30 * base)
    error = env.layout.site("error_1")
    for tick in range(100):
        observation, _, _, _, info = env.step(np.ones(4, dtype=np.float32))
        assert info["target_w"] == pytest.approx(base - capacity * signal[tick])
    assert signal[99] == 1.0
    assert observation[error] > 0.5
    for _ in range(5):
        observation, *_ = env.step(-np.ones(4, dtype=np.float32))
    assert observation[error] < 0.0


def test_info_says_what_the_command_rules_changed():
    env = PowerShapingEnv({"site": {**V100, "jobs": 2}})
    env.reset(seed=0)
    low, high = env.task.spec.min_limit_w, env.task.spec.max_limit_w
    env.step(np.array([-1.0, 1.0]))
    *_, info = env.step(np.array([1.0, 1.0]))
    # 20 % of 250 W a second for 2 s: 125 W may rise by 100 W of the 125 W asked for; the second job stays put.
    assert (low[0, 0], high[0, 0]) == (125.0, 250.0)
    assert list(info["decisions"]) == [Decision.RAISE_LIMITED, Decision.DEAD_BANDED]
    assert env._shaping._limit[0].tolist() == [225.0, 250.0]


@pytest.mark.parametrize(
    ("kind", "action", "positions"),
    [
        ("absolute", [-1.0, 0.0, 0.5, 0.9], [0.0, 0.5, 0.75, 0.95]),
        ("delta", [-1.0, -0.5, -0.2, 0.0], [0.7, 0.85, 0.94, 1.0]),
        ("residual", [-1.0, -0.5, 0.0, 0.5], [-0.3, -0.15, 0.0, 0.15]),
    ],
)
def test_action_kinds(kind, action, positions):
    env = PowerShapingEnv({"site": {**V100, "jobs": 4}, "action": {"kind": kind}})
    observation, _ = env.reset(seed=0)
    spec = env.task.spec
    centre = (observation[env.layout.site("feed_forward")] + 1.0) / 2.0 if kind == "residual" else 0.0
    env.step(np.array(action, dtype=np.float32))
    limit = env._shaping._limit[0]
    wanted = np.clip(np.array(positions) + centre, 0.0, 1.0)
    np.testing.assert_allclose((limit - spec.min_limit_w[0]) / 125.0, wanted, atol=1e-6)
    # What a controller asks for by position is the action that leads there.
    last = np.ones((1, 4))
    asked = env.task.action_for(wanted[None], np.array([centre]), last)
    inside = np.abs(np.array(positions) + centre - wanted) < 1e-9
    np.testing.assert_allclose(asked[0][inside], np.array(action)[inside], atol=1e-6)


def test_actions_beyond_one_are_clipped():
    data = {"site": V100}
    far, edge = PowerShapingEnv(data), PowerShapingEnv(data)
    for env in (far, edge):
        env.reset(seed=3)
    one, two = far.step(np.array([-7.0, 3.0, 1e30, -2.0])), edge.step(np.array([-1.0, 1.0, 1.0, -1.0]))
    np.testing.assert_array_equal(one[0], two[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["absolute", "delta", "residual"])
def test_non_finite_actions_are_refused_and_leave_the_plant_alone(value, kind):
    struck, twin = (PowerShapingEnv({"action": {"kind": kind}}) for _ in range(2))
    rng = np.random.default_rng(0)
    for env in (struck, twin):
        env.reset(seed=8)
    for _ in range(70):
        bad = rng.uniform(-1.0, 1.0, 4)
        bad[2] = value
        with pytest.raises(UserError, match=f"job 2 is {value}; valid: -1 to 1"):
            struck.step(bad)
        good = rng.uniform(-1.0, 1.0, 4)
        ours, theirs = struck.step(good), twin.step(good)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1] == theirs[1]


def test_huge_finite_actions_are_clipped_not_refused():
    env = PowerShapingEnv()
    env.reset(seed=0)
    observation, *_ = env.step(np.full(4, 1e308))
    assert np.isfinite(observation).all()


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5,), (4, 1), (1, 4)])
def test_actions_of_another_shape_are_refused(shape):
    env = PowerShapingEnv()
    env.reset(seed=0)
    with pytest.raises(UserError, match="one number per environment and job"):
        env.step(np.zeros(shape))


def test_equal_seeds_give_equal_episodes_and_the_sequence_goes_on():
    def episodes(env, n):
        for k in range(n):
            observation, info = env.reset(seed=21 if k == 0 else None)
            yield observation, info["episode_seed"], [r for _, r, *_ in random_steps(env, 30, seed=k)]

    first, second = (list(episodes(PowerShapingEnv({"episode_s": 60.0}), 3)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:] == b[1:]
    assert len({seed for _, seed, _ in first}) == 3


def test_an_unfinished_episode_leaves_no_trace_in_the_next():
    fresh, used = (PowerShapingEnv({"observation": {"error_history": 6, "command_history": 5}}) for _ in range(2))
    used.reset(seed=1)
    list(random_steps(used, 137))
    np.testing.assert_array_equal(fresh.reset(seed=2)[0], used.reset(seed=2)[0])
    for a, b in zip(random_steps(fresh, 50), random_steps(used, 50), strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_signal_families_are_drawn_by_their_weights():
    env = PowerShapingEnv({"signal": {"families": {"rega": 3.0, "emergency": 1.0, "droop": 0.0}}, "episode_s": 60.0})
    env.reset(seed=0)
    drawn = [env.reset()[1]["signal"] for _ in range(200)]
    assert set(drawn) == {"regulation/pjm-rega-2017-08-01", "emergency"}
    assert drawn.count("emergency") / 200 == pytest.approx(0.25, abs=0.1)


def test_a_catalogued_recording_without_a_family_has_the_offer_of_recordings():
    offer = {"base": 0.6, "capacity": 0.2}
    env = PowerShapingEnv({"signal": {"trace": "regulation/pjm-rega-2017-08-02", "offers": {"recorded": offer}}})
    env.reset(seed=0)
    spec = env.task.spec
    band = spec.full_w - spec.floor_w
    np.testing.assert_allclose(env.task.capacity_w, 0.2 * band)
    np.testing.assert_allclose(env.task.base_w, spec.floor_w + 0.6 * band)


def test_a_users_own_trace_is_followed_from_its_start(tmp_path):
    path = tmp_path / "mine.csv"
    values = np.round(np.sin(np.arange(200) / 9.0), 3)
    path.write_text("t_s,signal\n" + "".join(f"{2 * k},{v}\n" for k, v in enumerate(values)), encoding="utf-8")
    env = PowerShapingEnv({"signal": {"trace": str(path), "start_s": 20.0}, "episode_s": 100.0})
    env.reset(seed=0)
    *_, info = env.step(np.zeros(4))
    assert info["target_w"] == pytest.approx(env.task.base_w[0] - env.task.capacity_w[0] * values[10])
    too_long = PowerShapingEnv({"signal": {"trace": str(path)}, "episode_s": 600.0})
    with pytest.raises(UserError, match=r"covers 0 s to 400 s \(400 s long\); 600 s from 0 s is not inside"):
        too_long.reset(seed=0)


def test_every_family_has_an_offer_that_fits_any_drawn_site():
    for family in OFFERS:
        if family == "recorded":
            continue
        split = "test" if family == "regd" else "train"
        env = PowerShapingEnv({"signal": {"families": {family: 1.0}, "split": split}, "episode_s": 60.0})
        env.reset(seed=0)
        for _ in range(30):
            env.reset()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"site": {"jobs": 0}}, r"site.jobs: .* greater than or equal to 1 \(got 0\)"),
        ({"site": {"gpus_per_job": [0]}}, "at least 1 GPU a job"),
        ({"site": {"gpus_per_job": []}}, "site.gpus_per_job"),
        ({"site": {"host_w_per_gpu": -5}}, r"site.host_w_per_gpu: .* greater than or equal to 0 \(got -5\)"),
        ({"site": {"command_loss": 1.0}}, "site.command_loss: .* less than 1"),
        ({"site": {"control_delay_periods": [2, 1]}}, "fewest <= most"),
        ({"rules": {"floor_fraction": -0.1}}, "rules.floor_fraction"),
        ({"rules": {"floor_fraction": 0.9, "ceiling_fraction": 0.8}}, "floor_fraction 0.9 exceeds"),
        ({"period_s": -1}, "period_s"),
        ({"period_s": float("nan")}, "period_s: .*finite"),
        ({"period_s": 7}, "episode_s 1200 must be a whole number of periods of 7 s"),
        ({"period_s": 0.5}, "period_s 0.5 is shorter than rules.interval_s 1"),
        ({"signal": {"families": {"regd": -1.0}}}, "non-negative"),
        ({"signal": {"families": {"regdd": 1.0}}}, "unknown signal family 'regdd'"),
        (
            {"signal": {"offers": {"regd": {"base": 0.5, "capacity": 0.7}}}},
            "leaves the feasible band by 0.2 of it; largest possible here: 0.5",
        ),
        ("config.yaml", "expected a mapping of keys to values, got str"),
        ([], "expected a mapping of keys to values, got list"),
    ],
)
def test_bad_configurations_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        PowerShapingEnv(data)


@pytest.mark.parametrize(
    ("signal", "episode_s", "message"),
    [
        ({"trace": "regd"}, 3600.0, "covers 0 s to 2402 s .* 3600 s from 0 s is not inside"),
        ({"trace": "regd", "start_s": 2000.0}, 1200.0, "1200 s from 2000 s is not inside"),
        ({"trace": "regd", "start_s": -2.0}, 1200.0, "from -2 s is not inside"),
        ({"trace": "nowhere"}, 1200.0, "no signal 'nowhere'"),
        ({"families": {"rega": 1}}, 36_000.0, "the longest recorded window is 18000 s"),
        ({"families": {"regd": 1}}, 1200.0, "nothing in the train split"),
        (
            {"trace": "emergency", "offers": {"emergency": {"base": 0.3, "capacity": 0.5, "of": "base"}}},
            1200.0,
            r"capacity \d+ W around base \d+ W leaves the feasible band \d+ W to \d+ W by \d+ W",
        ),
    ],
)
def test_signals_that_do_not_fit_are_refused_and_no_episode_begins(signal, episode_s, message):
    env = PowerShapingEnv({"signal": signal, "episode_s": episode_s})
    with pytest.raises(UserError, match=message):
        env.reset(seed=0)
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(4))


IMMOVABLE = [s.id for s in load_surfaces() if not s.cap_sensitive and s.power_w[-1] < s.power_w[0]]


@pytest.mark.parametrize("infeasible", ["refuse", "track"])
@pytest.mark.parametrize("surface", IMMOVABLE[::8])
def test_a_site_whose_limits_move_nothing_offers_nothing(surface, infeasible):
    """Jobs far below their limits draw what they draw: noise in a table must not become a capacity, or one below 0."""
    env = PowerShapingEnv({"site": {"surfaces": [surface]}, "signal": {"infeasible": infeasible}})
    with pytest.raises(UserError, match=r"limits move the power of site 0 by -?\d+ W of \d+ W.*cap-sensitive surfaces"):
        env.reset(seed=0)
