"""Model-predictive control: the program, the forecast, what is learnt of jobs, and the loop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from wattgym.agents.baselines import make_baseline, make_tunable
from wattgym.agents.baselines.program import TrackingProgram
from wattgym.agents.rollout import Arena
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.forecast import ORDER, TargetForecast
from wattgym.envs.loop_settings import PredictiveSettings
from wattgym.envs.plant import PlantSpec
from wattgym.envs.predictive import JobEstimates, Plan
from wattgym.envs.site_model import SiteModel


def problem(batch, horizon, seed, **changes):
    rng = np.random.default_rng(seed)
    return {
        "last": rng.uniform(-0.5, 0.5, batch),
        "target": rng.uniform(-0.8, 0.8, (batch, horizon)),
        "offset": rng.normal(0.0, 0.1, (batch, horizon)),
        "share": rng.uniform(0.3, 1.0, batch),
        "low": np.full(batch, -0.9),
        "high": np.full(batch, 0.9),
        "rise": np.full(batch, 0.4),
        "throughput": rng.uniform(0.0, 0.2, batch),
        "move": rng.uniform(0.0, 0.3, batch),
        **changes,
    }


def cost(y, p, i):
    """The objective as the class's description has it."""
    before = np.concatenate([p["last"][i : i + 1], y[:-1]])
    r = p["share"][i] * y + (1 - p["share"][i]) * before + p["offset"][i]
    tracked = ((r - p["target"][i]) ** 2 - p["throughput"][i] * r).sum()
    return tracked + p["move"][i] * np.abs(y - before).sum()


def test_the_program_finds_the_optimum():
    p = problem(6, 4, seed=0)
    program = TrackingProgram(6, 4)
    program.solve(**problem(6, 4, seed=1))  # a warm start from elsewhere
    found = program.solve(**p)
    for i in range(6):
        y = found[i]
        moves = np.diff(y, prepend=p["last"][i])
        assert (moves <= p["rise"][i] + 1e-3).all()
        assert cost(y, p, i) <= least_cost(p, i) + 1e-3


def least_cost(p, i):
    """What an independent solver reaches on the smooth form of the problem, moves being variables of their own."""
    n, last, price = p["target"].shape[1], p["last"][i], p["move"][i]
    difference = np.eye(n) - np.eye(n, k=-1)

    def moves(z):
        return difference @ z[:n] - last * np.eye(n)[0]

    limits = [
        {"type": "ineq", "fun": lambda z: z[n:] - moves(z)},
        {"type": "ineq", "fun": lambda z: z[n:] + moves(z)},
        {"type": "ineq", "fun": lambda z: p["rise"][i] - moves(z)},
    ]
    start = np.concatenate([np.clip(p["target"][i], -0.9, 0.9), np.ones(n)])
    bounds = [(-0.9, 0.9)] * n + [(0, 4)] * n
    smooth = lambda z: cost(z[:n], p, i) - price * (np.abs(moves(z)).sum() - z[n:].sum())  # noqa: E731
    return minimize(smooth, start, constraints=limits, bounds=bounds, method="SLSQP").fun


def test_without_prices_and_dead_time_the_command_is_the_target():
    plain = {"offset": np.zeros((2, 3)), "share": np.ones(2), "throughput": np.zeros(2), "move": np.zeros(2)}
    p = problem(2, 3, seed=2, **plain, target=np.array([[0.1, 0.2, 0.3], [0.5, -0.5, 2.0]]), rise=np.full(2, 9.0))
    np.testing.assert_allclose(TrackingProgram(2, 3).solve(**p), np.clip(p["target"], -0.9, 0.9), atol=1e-3)
    # A price on moves is a dead band: a move by x that lasts three periods saves 3 (d² − (d − x)²), at 0.2 a unit it
    # goes no further than 0.2 / 6 from the target, and less than that is not worth a move.
    p["last"], p["move"] = np.array([0.08, 0.45]), np.full(2, 0.2)
    p["target"] = np.repeat([[0.1], [0.5]], 3, axis=1)
    held = np.repeat([[0.08], [0.5 - 0.2 / 6]], 3, axis=1)
    np.testing.assert_allclose(TrackingProgram(2, 3).solve(**p), held, atol=1e-3)


def test_the_forecast_learns_a_sine_and_starts_with_persistence():
    t = np.arange(200)
    sine = np.stack([np.sin(2 * np.pi * t / 30), 0.5 * np.cos(2 * np.pi * t / 50)])
    forecast = TargetForecast(2, memory=1e6, ridge=1e-6)
    forecast.update(sine[:, 0])
    np.testing.assert_allclose(forecast.ahead(3), np.repeat(sine[:, :1], 3, axis=1))
    for k in range(1, 150):
        forecast.update(sine[:, k])
    np.testing.assert_allclose(forecast.ahead(5), sine[:, 150:155], atol=1e-3)
    with pytest.raises(RuntimeError, match="no target"):
        TargetForecast(1, 10.0, 1.0).ahead(1)


def test_a_forecast_never_runs_off():
    forecast = TargetForecast(1, memory=50.0, ridge=1e-9)
    for k in range(40):
        forecast.update(np.array([1.2**k]))
    assert np.abs(forecast.ahead(30)).max() <= 1.5 * 1.2**39 + 1e-6
    assert ORDER == 4


ONE = PlantSpec(
    2.0, np.ones((1, 2), dtype=np.int64), np.full((1, 2), 100.0), np.full((1, 2), 300.0), np.linspace(0, 1, 3),
    np.array([[[100.0, 200.0, 300.0]] * 2]), np.array([[[0.4, 0.8, 1.0]] * 2]), np.zeros(1),
)  # fmt: skip


def test_dead_time_gain_and_dips_are_told_apart():
    rng = np.random.default_rng(0)
    settings = PredictiveSettings(credit=0.5, prior=0.01)
    position = rng.uniform(0.0, 1.0, (200, 1, 2))
    nominal = 100.0 + 200.0 * position
    # Job 0 answers at once and draws 10 % more; job 1 answers a period late.
    sensed = np.stack([1.1 * nominal[1:, :, 0], nominal[:-1, :, 1]], axis=2)
    jobs = JobEstimates(SiteModel(ONE), settings, position[0], nominal[0])
    for k in range(199):
        jobs.update(position[k + 1], sensed[k])
    np.testing.assert_allclose(jobs.share, [[1.0, 0.05]], atol=0.02)
    np.testing.assert_allclose(jobs.gain, [[1.05, 1.0]], atol=0.01)
    # The sensor is believed as far as the model is not.
    np.testing.assert_allclose(jobs.power_w[0, 0], 1.05 * nominal[-1, 0, 0], rtol=0.01)
    before = jobs.gain.copy()
    jobs.update(position[-1], np.array([[50.0, nominal[-1, 0, 1]]]))
    assert jobs.follows.tolist() == [[False, True]]
    np.testing.assert_allclose(jobs.gain, before, atol=2e-3)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=12), st.floats(0.0, 1.0))
def test_a_limit_that_moves_far_is_no_dip_whatever_the_dead_time(positions, share):
    """Taken for one, the job's dead time is never learnt, and a site of one job swings about its target for good."""
    nominal = 100.0 + 200.0 * np.array(positions)
    jobs = JobEstimates(
        SiteModel(ONE), PredictiveSettings(), np.full((1, 2), positions[0]), np.full((1, 2), nominal[0])
    )
    for k in range(1, len(positions)):
        sensed = share * nominal[k] + (1.0 - share) * nominal[k - 1]
        jobs.update(np.full((1, 2), positions[k]), np.full((1, 2), sensed))
        assert jobs.follows.all()


def pinned(**changes):
    site = {"jobs": 4, "command_loss": 0.0, **changes.pop("site", {})}
    return PowerShapingConfig.model_validate(
        {"site": site, "signal": {"families": {"rega": 1.0}}, "episode_s": 800.0, **changes}
    )


def error_of(rollout):
    return np.sqrt((((rollout.power_w - rollout.target_w) / rollout.capacity_w[:, None]) ** 2).mean())


def test_others_fill_a_dip():
    arena, seeds = Arena(pinned()), range(6)
    idle, filled = (error_of(arena.run(make_tunable("MPC", {"fill": fill}), seeds)) for fill in (0.0, 1.0))
    assert filled < 0.9 * idle
    assert filled < error_of(arena.run(make_baseline("feed-forward"), seeds))


def test_dead_time_is_made_up_for():
    late = pinned(site={"control_delay_periods": [1, 1]}, signal={"families": {"synthetic_regd": 1.0}})
    arena, seeds = Arena(late), range(6)
    told, ignored = (error_of(arena.run(make_tunable("MPC", {"prior": prior}), seeds)) for prior in (0.005, 1e6))
    assert told < ignored


def test_announced_targets_are_used(tmp_path):
    steps = np.repeat(np.random.default_rng(0).uniform(-1.0, 1.0, 40), 4)
    path = tmp_path / "steps.csv"
    path.write_text("t_s,r\n" + "\n".join(f"{2 * i},{r}" for i, r in enumerate(steps)) + "\n")
    changes = {"signal": {"trace": str(path)}, "episode_s": 320.0}
    config = pinned(site={"control_delay_periods": [1, 1]}, **changes)
    shown = config.model_copy(update={"observation": config.observation.model_copy(update={"preview_periods": 4})})
    blind, seeing = (error_of(Arena(c).run(make_tunable("MPC", {"prior": 0.005}), range(6))) for c in (config, shown))
    assert seeing < 0.8 * blind


def test_a_site_in_a_batch_is_steered_as_alone():
    arena = Arena(pinned())
    together = arena.run(make_tunable("MPC", {}), [3, 4])
    alone = arena.run(make_tunable("MPC", {}), [4])
    # The solver stops for all sites at once, within its tolerance.
    np.testing.assert_allclose(together.limit[1], alone.limit[0], atol=0.02)
    np.testing.assert_array_equal(arena.run(make_tunable("MPC", {}), [3, 4]).limit, together.limit)


def test_bounds_that_contradict_each_other_are_no_plan():
    """All sites are one program: what no command satisfies at one must not silently hold the others where they are."""
    program, p = TrackingProgram(2, 3), problem(2, 3, seed=4)
    for name, value in (("low", 1.0), ("low", np.nan), ("rise", -0.1)):
        with pytest.raises(ValueError, match=r"sites \[1\]"):
            program.solve(**{**p, name: np.array([p[name][0], value])})


def test_a_command_that_is_held_is_the_best_of_all_that_could_be():
    plan = Plan(**{k: v for k, v in problem(4, 3, seed=5).items() if k != "offset"})
    offset = np.random.default_rng(6).normal(0.0, 0.1, 4)
    found = plan.held(offset)
    for i in range(4):
        p = {**plan._asdict(), "offset": np.full((4, 3), offset[i])}
        tried = np.linspace(plan.low[i], min(plan.high[i], plan.last[i] + plan.rise[i]), 1001)
        costs = [cost(np.full(3, y), p, i) for y in (found[i], *tried)]
        assert costs[0] <= min(costs[1:]) + 1e-6


@pytest.mark.parametrize("name", ["MPC", "MPC (best split)", "PowerMorph (reconstruction)"])
def test_the_guard_has_nothing_to_change(name):
    """Raises and bounds stay within the command rules, so that what is asked for is what is done."""
    config = pinned(signal={"families": {"synthetic_regd": 1.0}}, rules={"raise_fraction_per_s": 0.05})
    assert not Arena(config).run(make_baseline(name), range(4)).changed.any()
