"""The observation vector: worked values, histories, preview, and where everything lies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.envs.config import ObservationConfig
from wattgym.envs.observation import BOUND, ObservationBuilder, ObservationLayout, common_limit
from wattgym.envs.plant import Phase, PlantSpec, Telemetry
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.signals import named_signal

GRID = np.array([0.0, 0.5, 1.0])
# Two jobs: 400 to 800 W under 100 to 200 W a GPU, and 600 to 1,200 W under 150 to 300 W a GPU; hosts 100 W.
SPEC = PlantSpec(
    period_s=2.0,
    n_gpus=np.array([[4, 4]]),
    min_limit_w=np.array([[100.0, 150.0]]),
    max_limit_w=np.array([[200.0, 300.0]]),
    limit_grid=GRID,
    power_table_w=np.array([[[400.0, 600.0, 800.0], [600.0, 900.0, 1200.0]]]),
    throughput_table=np.array([[[0.6, 0.9, 1.0], [0.5, 0.8, 1.0]]]),
    host_w=np.array([100.0]),
)
BASE, CAPACITY = np.array([1600.0]), np.array([400.0])
SIGNAL = np.array([[0.0, 0.5, -0.25, 1.0]])
TARGETS = BASE[:, None] - CAPACITY[:, None] * SIGNAL


def telemetry(tick, sensor, limit, phase=(Phase.COMPUTE, Phase.COMPUTE), throughput=(1.0, 0.5), age=0.0):
    return Telemetry(
        tick=tick,
        sensor_w=np.array([sensor], dtype=float),
        meter_w=np.array([sensor], dtype=float) * 0.9,
        host_w=SPEC.host_w,
        throughput=np.array([throughput]),
        phase=np.array([phase]),
        limit_w=np.array([limit], dtype=float),
        age_s=np.array([age]),
        decisions=np.zeros((1, 2), dtype=np.uint8),
    )


def begun(**options):
    layout = ObservationLayout(ObservationConfig(**options), jobs=2)
    builder = ObservationBuilder(layout)
    builder.reset(SPEC, TARGETS, BASE, CAPACITY)
    names = {f.name: i for i, f in enumerate(layout.features)}
    return builder, names


def test_worked_values():
    """Band 1,100 to 2,100 W: middle 1,600 W, half of it 500 W."""
    assert SPEC.floor_w == [1100.0]
    assert SPEC.full_w == [2100.0]
    builder, at = begun(error_history=2, command_history=2, preview_periods=2, integral_leak=0.8)

    x = builder.build(telemetry(0, (800.0, 1000.0), (200.0, 300.0)))[0]
    assert x[at["target"]] == 0.0
    assert x[at["target_change"]] == 0.0
    assert x[at["feed_forward"]] == pytest.approx(0.0)  # 1,600 W is the tables' middle
    assert x[at["signal_level"]] == 0.0
    assert (x[at["preview_1"]], x[at["preview_2"]]) == (0.5, -0.25)
    assert (x[at["error_1"]], x[at["error_2"]], x[at["error_integral"]]) == (0.0, 0.0, 0.0)
    assert x[at["power"]] == pytest.approx((800 + 1000 + 100 - 1600) / 500)
    assert x[at["capacity"]] == pytest.approx(0.8)
    assert x[at["age"]] == 0.0
    assert [x[at[f"job{j}.limit_{k}"]] for k in (1, 2) for j in (0, 1)] == [1.0] * 4
    assert x[at["job0.power"]] == pytest.approx(800 / 400 - 1)
    assert x[at["job1.power"]] == pytest.approx(1000 / 600 - 1)
    assert (x[at["job0.throughput"]], x[at["job1.throughput"]]) == (1.0, 0.0)
    assert (x[at["job0.computing"]], x[at["job0.phase_age"]]) == (1.0, 0.0)
    assert x[[at["job0.share"], at["job1.share"]]] == pytest.approx([0.4, 0.6])
    assert x[[at["job0.knee"], at["job1.knee"]]] == pytest.approx([0.9, 0.8])

    # Period 0 asked for 1,600 W; 1,700 W sensed. Period 1 asks for 1,400 W.
    x = builder.build(telemetry(1, (700.0, 900.0), (125.0, 300.0), age=1.0))[0]
    assert x[at["target"]] == pytest.approx(-0.4)
    assert x[at["target_change"]] == pytest.approx(-0.5)
    assert x[at["feed_forward"]] == pytest.approx(2 * 0.3 - 1)
    assert x[at["signal_level"]] == pytest.approx(0.2 * 0.5)
    assert (x[at["preview_1"]], x[at["preview_2"]]) == (-0.25, 1.0)
    assert x[[at["error_1"], at["error_2"]]] == pytest.approx([0.25, 0.0])
    assert x[at["error_integral"]] == pytest.approx(0.2 * 0.25)
    assert x[at["age"]] == pytest.approx(0.5)
    assert x[[at["job0.limit_1"], at["job1.limit_1"]]] == pytest.approx([-0.5, 1.0])
    assert x[[at["job0.limit_2"], at["job1.limit_2"]]] == pytest.approx([1.0, 1.0])
    assert x[at["job0.phase_age"]] == pytest.approx(2 / 120)

    # Period 1 asked for 1,400 W; 1,300 W sensed: too little is an error below zero. Job 1 goes to evaluate.
    x = builder.build(telemetry(2, (500.0, 700.0), (150.0, 225.0), phase=(Phase.COMPUTE, Phase.EVALUATE)))[0]
    assert x[[at["error_1"], at["error_2"]]] == pytest.approx([-0.25, 0.25])
    assert x[at["error_integral"]] == pytest.approx(0.8 * 0.05 - 0.2 * 0.25)
    assert (x[at["preview_1"]], x[at["preview_2"]]) == (1.0, 1.0)  # beyond the end the last value stays
    assert x[[at["job0.computing"], at["job1.computing"]]].tolist() == [1.0, -1.0]
    assert x[[at["job0.phase_age"], at["job1.phase_age"]]] == pytest.approx([4 / 120, 0.0])
    assert x[[at["job0.limit_2"], at["job1.limit_2"]]] == pytest.approx([-0.5, 1.0])

    # The observation after the last period still shows the last target.
    builder.build(telemetry(3, (500.0, 700.0), (150.0, 225.0)))
    x = builder.build(telemetry(4, (500.0, 700.0), (150.0, 225.0)))[0]
    assert x[at["target"]] == pytest.approx((1200 - 1600) / 500)


def test_features_beyond_the_bound_are_clipped():
    builder, at = begun()
    x = builder.build(telemetry(0, (1e6, 0.0), (200.0, 300.0)))[0]
    assert x[at["power"]] == BOUND
    assert x.dtype == np.float32
    assert np.abs(x).max() <= BOUND


def test_an_observation_is_not_overwritten_by_the_next():
    builder, _ = begun()
    first = builder.build(telemetry(0, (800.0, 1000.0), (200.0, 300.0)))
    kept = first.copy()
    builder.build(telemetry(1, (500.0, 700.0), (150.0, 225.0)))
    np.testing.assert_array_equal(first, kept)


@given(
    st.builds(
        ObservationConfig,
        preview_periods=st.integers(0, 5),
        error_history=st.integers(1, 5),
        command_history=st.integers(1, 4),
    ),
    st.integers(1, 9),
)
def test_layout_names_every_column_once(config, jobs):
    layout = ObservationLayout(config, jobs)
    names = [f.name for f in layout.features]
    assert len(set(names)) == len(names) == layout.size
    assert all(f.unit and f.description for f in layout.features)
    for feature in layout.site_features:
        assert names[layout.site(feature.name)] == feature.name
    for feature in layout.job_features:
        assert names[layout.job(feature.name)] == [f"job{j}.{feature.name}" for j in range(jobs)]


@given(st.floats(0.0, 1.0))
def test_feed_forward_inverts_the_nominal_model(position):
    power = sum(np.interp(position, GRID, table) for table in SPEC.power_table_w[0]) + SPEC.host_w
    assert common_limit(SPEC, np.array([power]))[0, 0] == pytest.approx(position, abs=1e-9)


def test_feed_forward_of_targets_out_of_reach():
    assert common_limit(SPEC, np.array([[0.0, 5000.0]])).tolist() == [[0.0, 1.0]]


def test_the_preview_shows_what_the_signal_will_be():
    data = {"signal": {"trace": "rega"}, "observation": {"preview_periods": 3}, "episode_s": 60.0}
    env = PowerShapingEnv(data)
    observation, _ = env.reset(seed=0)
    signal = named_signal("rega", period_s=2.0, duration_s=60.0).values
    columns = [env.layout.site(f"preview_{k}") for k in (1, 2, 3)]
    for tick in range(30):
        wanted = signal[np.minimum(tick + np.arange(1, 4), 29)]
        np.testing.assert_allclose(observation[columns], wanted, atol=1e-6)
        observation, *_ = env.step(np.zeros(4, dtype=np.float32))


def test_by_default_nothing_of_the_future_but_the_coming_target_is_shown():
    """Two signals that part at some time give equal observations up to the period that follows them."""
    site = {"command_loss": 0.0}
    same, other = (PowerShapingEnv({"site": site, "signal": {"trace": "regd", "start_s": 300.0}}) for _ in range(2))
    first, second = same.reset(seed=4)[0], other.reset(seed=4)[0]
    # The signal is bent before the builder works its features out for the episode.
    other._shaping.targets_w[:, 10:] += 500.0
    task = other.task
    other._shaping._builder.reset(task.spec, other._shaping.targets_w, task.base_w, task.capacity_w)
    other._shaping._builder.build(
        Telemetry(0, *([np.ones((1, 4))] * 2), np.zeros(1), *([np.ones((1, 4))] * 3), np.zeros(1), np.ones((1, 4)))
    )
    np.testing.assert_array_equal(first, second)
    for tick in range(1, 12):
        action = np.zeros(4, dtype=np.float32)
        first, second = same.step(action)[0], other.step(action)[0]
        known = [same.layout.site(n) for n in ("target", "target_change", "feed_forward", "signal_level")]
        if tick < 10:
            np.testing.assert_array_equal(first[known], second[known])
        else:
            assert not np.array_equal(first[known], second[known])


def test_policies_see_the_sensor_and_rewards_use_the_meter():
    env = PowerShapingEnv({"site": {"surfaces": ["a40/resnet50/b360"], "jobs": 2}})
    env.reset(seed=0)
    spec, column = env.task.spec, env.layout.site("power")
    middle, half = (spec.full_w + spec.floor_w) / 2.0, (spec.full_w - spec.floor_w) / 2.0
    apart = 0
    for tick in range(50):
        observation, _, _, _, info = env.step(np.full(2, (-1.0) ** tick, dtype=np.float32))
        sensed = observation[column] * half[0] + middle[0]
        error = observation[env.layout.site("error_1")] * env.task.capacity_w[0] + info["target_w"]
        assert error == pytest.approx(sensed, rel=1e-4)
        apart += abs(sensed / info["power_w"] - 1.0) > 0.005
    assert apart > 25
