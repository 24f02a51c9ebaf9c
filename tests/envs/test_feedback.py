"""The identified model that residual actions may be added to, worked out by hand on plants of two jobs."""

import numpy as np
import pytest

from wattgym.agents.rollout import Arena
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.feedback import IdentifiedModel
from wattgym.envs.plant import Phase, PlantSpec, Telemetry

# One site, two jobs; limits 100 to 300 W, at which both draw 100, 200 and 300 W nominally.
SPEC = PlantSpec(
    period_s=2.0,
    n_gpus=np.array([[1, 1]]),
    min_limit_w=np.array([[100.0, 100.0]]),
    max_limit_w=np.array([[300.0, 300.0]]),
    limit_grid=np.array([0.0, 0.5, 1.0]),
    power_table_w=np.array([[[100.0, 200.0, 300.0]] * 2]),
    throughput_table=np.array([[[0.5, 0.8, 1.0]] * 2]),
    host_w=np.array([50.0]),
)


def telemetry(sensor, limit=(200.0, 200.0), phase=(Phase.COMPUTE, Phase.COMPUTE)):
    return Telemetry(
        tick=1,
        sensor_w=np.array([sensor]),
        meter_w=np.array([sensor]),
        host_w=SPEC.host_w,
        throughput=np.ones((1, 2)),
        phase=np.array([[int(p) for p in phase]]),
        limit_w=np.array([limit]),
        age_s=np.zeros(1),
        decisions=np.zeros((1, 2), dtype=np.uint8),
    )


def asked(model, target, *args, **kwargs):
    return float(model.common_limit(np.array([target]), telemetry(*args, **kwargs))[0])


def test_the_first_answer_is_the_nominal_model():
    # 450 W less 50 W of the host are 200 W a job, at half of the range.
    assert asked(IdentifiedModel(0.1, SPEC), 450.0, (230.0, 200.0)) == pytest.approx(0.5)
    assert asked(IdentifiedModel(0.1, SPEC), 550.0, (230.0, 200.0)) == pytest.approx(0.75)
    assert asked(IdentifiedModel(0.1, SPEC), 9000.0, (230.0, 200.0)) == 1.0
    assert asked(IdentifiedModel(0.1, SPEC), 10.0, (230.0, 200.0)) == 0.0


def test_a_resting_job_teaches_what_it_draws():
    model = IdentifiedModel(0.5, SPEC)
    asked(model, 450.0, (240.0, 200.0))
    # Half of the deviation of 20 % is learnt: the jobs draw 1.1 and 1 times (100 + 200 p).
    assert asked(model, 450.0, (240.0, 200.0)) == pytest.approx((400.0 / 2.1 - 100.0) / 200.0)
    # A limit that has just moved by half of its range says nothing; nor does a missing reading.
    assert asked(model, 450.0, (240.0, 300.0), limit=(200.0, 300.0)) == pytest.approx((400.0 / 2.15 - 100.0) / 200.0)
    assert np.isfinite(asked(model, 450.0, (np.nan, 300.0), limit=(200.0, 300.0)))


def test_jobs_that_compute_make_up_for_one_that_does_not():
    model = IdentifiedModel(0.1, SPEC)
    assert asked(model, 450.0, (200.0, 200.0)) == pytest.approx(0.5)
    # The second job saves and draws 120 W: 280 W are left for the first, at 0.9 of its range.
    paused = (Phase.COMPUTE, Phase.CHECKPOINT)
    assert asked(model, 450.0, (200.0, 120.0), phase=paused) == pytest.approx(0.9)
    assert asked(model, 450.0, (200.0, 120.0), phase=(Phase.CHECKPOINT, Phase.CHECKPOINT)) == 1.0


class Still:
    name = "still"

    def reset(self, task):
        self._shape = task.spec.min_limit_w.shape

    def act(self, observation):
        return np.zeros(self._shape)


def test_identification_tracks_better_where_plants_differ_from_the_model():
    plain = {"proportional": 0.0, "integral": 0.0}
    site = {"jobs": 3, "power_spread": 0.2}
    errors = []
    for gains in (plain, {**plain, "identify": 0.1}):
        config = PowerShapingConfig.model_validate(
            {
                "site": site,
                "signal": {"families": {"rega": 1.0}},
                "action": {"kind": "residual_pi", "gains": gains},
                "episode_s": 1200.0,
            }
        )
        rollout = Arena(config).run(Still(), list(range(8)))
        errors.append(np.abs(rollout.power_w - rollout.target_w).mean())
    assert errors[1] < 0.95 * errors[0]
