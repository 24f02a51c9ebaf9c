import warnings

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.env_checker import check_env

import wattgym.envs  # noqa: F401 (registers the environments)
from wattgym.errors import UserError

JOB = {
    "devices": ["h100-sxm:0"],
    "training": {
        "model": {"source": "tiny"},
        "data": {"max_records": 100, "holdout": 4},
        "samples_per_update": 4,
        "micro_batch": 1,
        "checkpoint_every": None,
    },
    "pace": 0.4,
}
CONFIG = {
    "site": {"jobs": 1},
    "period_s": 0.2,
    "episode_s": 1.0,
    "rules": {"interval_s": 0.2, "raise_window_s": 0.2},
    "signal": {"trace": "regd"},
}


def test_jobs_of_site_and_plant_must_agree():
    with pytest.raises(UserError, match=r"site\.jobs is 2, the live plant has 1 jobs"):
        gym.make("wattgym/PowerShapingLive-v0", live={"jobs": [JOB]}, config=CONFIG | {"site": {"jobs": 2}})


@pytest.mark.slow
def test_the_live_environment_passes_the_checkers_that_do_not_ask_for_repeatable_noise(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # gym.make wraps it in Gymnasium's passive checker, which looks at every reset and step.
        with gym.make("wattgym/PowerShapingLive-v0", live={"jobs": [JOB]}, config=CONFIG, folder=tmp_path) as env:
            check_env(env.unwrapped, skip_render_check=True)
            observation, info = env.reset(seed=3)
            assert info["signal"] == "pjm-regd-test-wave" or info["signal"]
            truncated, steps = False, 0
            while not truncated:
                observation, reward, terminated, truncated, info = env.step(np.array([-1.0], dtype=np.float32))
                steps += 1
                assert not terminated
                assert observation in env.observation_space
                assert np.isfinite(reward)
            assert steps <= 5
            assert info["power_w"] > 0.0
            assert env.unwrapped.plant.job_status[0].steps > 0
    assert (tmp_path / "job0" / "steps.csv").is_file()
