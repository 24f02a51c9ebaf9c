"""Every knob on a live plant: a real training job on two ranks, on simulated boards."""

import time

import numpy as np
import pytest

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.knobs import KNOBS, Command
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.env import PowerShapingLiveEnv
from wattgym.envs.live.plant import LivePlant
from wattgym.envs.profile_fit import fitted_jobs
from wattgym.envs.profiling import ProfilePlan, Sweep, table
from wattgym.errors import UserError
from wattgym.hw.limits import CommandRules

pytestmark = pytest.mark.slow

PERIOD_S = 0.5
RULES = CommandRules(interval_s=0.2, raise_window_s=0.5, raise_fraction_per_s=10.0, dead_band_w=0.0)
LIVE = LiveConfig.model_validate(
    {
        "jobs": [
            {
                "devices": ["h100-sxm:0", "h100-sxm:1"],
                "pace": 0.3,
                "training": {
                    "model": {"source": "tiny"}, "data": {"max_records": 100, "holdout": 4}, "samples_per_update": 8,
                    "micro_batch": 4, "checkpoint_every": None, "ranks": 2, "device": "cpu",
                },
            }
        ]
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def plant(tmp_path_factory):
    with LivePlant(LIVE, PERIOD_S, RULES, tmp_path_factory.mktemp("jobs"), "test", KNOBS) as plant:
        plant.reset([np.random.default_rng(0)])
        yield plant


def whole(plant, **setting):
    return Command(plant.spec.max_limit_w, **{name: np.array([[value]]) for name, value in setting.items()})


def held(plant, command, periods=2):
    """Mean power of some periods once a command is in force, W, and what is in force."""
    wanted = plant.spec.knobs.filled(command, plant.spec.n_gpus)
    names = ("duty", "micro_batch", "active_gpus", "local_steps")
    shown = names[:1] if (wanted.duty == 0.0).all() else names  # a paused job takes nothing else up
    deadline_s = time.monotonic() + 120.0
    while True:
        plant.apply(command)
        found = plant.advance().in_force
        if all((getattr(found, name) == getattr(wanted, name)).all() for name in shown):
            break
        assert time.monotonic() < deadline_s, f"{command} is not in force: {found}"
    plant.apply(command)
    plant.advance()
    power = []
    for _ in range(periods):
        plant.apply(command)
        power.append(plant.advance().meter_w[0, 0])
    return float(np.mean(power)), found


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"micro_batch": 1},
        {"local_steps": 3},
        {"micro_batch": 2, "active_gpus": 1, "duty": 0.4},
        {"duty": 0.0},
    ],
)
def test_a_real_job_takes_a_setting_up_and_its_boards_draw_what_it_says(plant, setting):
    steps = plant.job_status[0].steps
    # With a duty below one, the edges of the periods cut a work or a pause short: more of them, not a wider bound.
    periods = 8 if 0.0 < setting.get("duty", 1.0) < 1.0 else 2
    power, _ = held(plant, whole(plant, **setting), periods)
    expected, _ = plant.spec.response(whole(plant, **setting))
    assert power == pytest.approx(expected[0, 0], rel=0.03)
    assert plant.ticks.failed_commands == 0
    if setting.get("duty") == 0.0:
        before = plant.job_status[0].samples
        held(plant, whole(plant, **setting))
        assert plant.job_status[0].samples == before
    else:
        assert plant.job_status[0].steps > steps


def test_a_setting_that_the_job_cannot_have_is_refused_before_anything_moves(plant):
    held(plant, whole(plant))
    with pytest.raises(UserError, match=r"micro-batch of 3: its 8 samples .* allow 1, 2, 4; nearest: 2, 4"):
        plant.apply(whole(plant, micro_batch=3))
    with pytest.raises(UserError, match="active GPUs of 3; valid: 1 to 2"):
        plant.apply(whole(plant, active_gpus=3))
    assert held(plant, whole(plant))[1].micro_batch[0, 0] == 4


def test_a_live_plant_is_profiled(plant):
    plan = ProfilePlan(limits=2, repeats=2, settle_s=0.5, dwell_s=4.0, duties=(0.5,), active_shares=(0.5,))
    sweep = Sweep(plant, ("active_gpus", "duty_cycle"), plan)
    assert list(sweep.run())[-1] == sweep.visits
    found = table(sweep.rows)
    assert len(found) == 2 + 1 + 1
    (job,) = fitted_jobs(plant.profiles, found)
    # The board's idle power with a context, told by the duty of one half: 2 P(1/2) - P(1), so that what the edges of a
    # visit cut counts twice, and visits must be long beside a step.
    assert job.knobs.idle_w == pytest.approx(110.0, rel=0.1)
    assert job.power_w[-1] == pytest.approx(620.0, rel=0.03)


def test_the_live_environment_drives_them(tmp_path):
    config = PowerShapingConfig.model_validate(
        {
            "site": {"jobs": 1}, "signal": {"trace": "rega"}, "action": {"knobs": KNOBS}, "period_s": 1.0,
            "episode_s": 60.0, "rules": {"interval_s": 0.5, "raise_window_s": 1.0},
            "knob_rules": {"micro_batch_dwell_s": 0.0, "active_gpus_dwell_s": 0.0, "local_steps_dwell_s": 0.0},
        }
    )  # fmt: skip
    with PowerShapingLiveEnv(LIVE, config, tmp_path) as env:
        observation, _ = env.reset(seed=0)
        layout = env.layout
        assert (observation[[layout.job(name).start for name in KNOBS[1:]]] == 1.0).all()
        action = np.array([1.0, -1.0, -1.0, 0.0, 1.0], np.float32)
        deadline_s = time.monotonic() + 50.0
        while observation[layout.job("micro_batch")][0] > -1.0 or observation[layout.job("active_gpus")][0] > -1.0:
            observation, *_ = env.step(action)
            assert time.monotonic() < deadline_s
        assert observation[layout.job("duty_cycle")][0] == pytest.approx(0.0, abs=1e-6)
        status = env.plant.job_status[0]
        assert (status.micro_batch, status.active_ranks) == (1, 1)
