"""A profile as the emulator and the live plant read it."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from wattgym.agents.validation import held_out
from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.emulator.emulator import Emulator
from wattgym.envs.emulator.phases import load_phase_families
from wattgym.envs.live.config import LiveConfig
from wattgym.envs.live.fit import fitted_profile
from wattgym.envs.plant import Command, Phase
from wattgym.envs.profile import JobProfile, PlantProfile, load_profile, nominal_profile, save_profile
from wattgym.errors import UserError
from wattgym.hw.limits import CommandRules
from wattgym.hw.simulated import SimulatedDevice

SURFACE = "h100-sxm/assumed/compute_bound"

STILL = load_phase_families()["lora_8xh100"].model_dump() | {
    "compute_work_s": {"mean": 1e6, "sd": 0.0},
    "noise": {"sample_s": 1.0, "ar1": 0.0, "innovation_sd": 0.0, "dip_probability": 0.0, "dip_depth": 0.0},
    "ripple": None,
    "host_w_per_gpu": 0.0,
    "checkpoint": {"level": (1.0, 1.0), "duration_s": (1.0, 1.0), "compute_work_s": (1e9, 1e9)},
}
"""A job that only ever computes, without noise."""

JOB = {
    "gpu": "h100-sxm",
    "n_gpus": 4,
    "limit_w": [350.0, 500.0, 600.0, 700.0],
    "power_w": [340.0, 480.0, 570.0, 600.0],
    "throughput": [0.6, 0.85, 0.95, 1.0],
    "phases": STILL,
}
OTHER = JOB | {
    "gpu": "a40",
    "n_gpus": 2,
    "limit_w": [150.0, 200.0, 250.0, 300.0],
    "power_w": [145.0, 195.0, 240.0, 270.0],
}


def write(tmp_path, *jobs, **changes):
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({"schema_version": 1, "jobs": list(jobs), **changes}))
    return str(path)


def emulator(path, jobs=1, **site):
    settings = {"jobs": jobs, "profile": path, "control_delay_periods": (0, 0), "command_loss": 0.0, "randomise": 0.0}
    # Rules that let any limit through at once.
    rules = CommandRules(floor_fraction=0.0, raise_fraction_per_s=10.0, dead_band_w=0.0, dead_band_fraction=0.0)
    return Emulator(PowerShapingConfig.model_validate({"site": settings | site, "rules": rules.model_dump()}))


def held(plant, limit_w, periods=6):
    """Telemetry after limits were held for some periods."""
    for _ in range(periods):
        plant.apply(Command(np.asarray(limit_w, dtype=float)))
        telemetry = plant.advance()
    return telemetry


def test_the_emulator_draws_what_was_measured(tmp_path):
    plant = emulator(write(tmp_path, JOB, OTHER), jobs=2)
    plant.reset([np.random.default_rng(0)])
    assert plant.spec.n_gpus.tolist() == [[4, 2]]
    assert plant.spec.min_limit_w.tolist() == [[350.0, 150.0]]
    assert plant.spec.max_limit_w.tolist() == [[700.0, 300.0]]
    np.testing.assert_allclose(plant.spec.full_w, 4 * 600.0 + 2 * 270.0)
    for limits, power, speed in (
        ([350.0, 300.0], [4 * 340.0, 2 * 270.0], [0.6, 1.0]),
        ([500.0, 200.0], [4 * 480.0, 2 * 195.0], [0.85, 0.85]),
        ([550.0, 225.0], [4 * 525.0, 2 * 217.5], [0.9, 0.9]),
    ):
        telemetry = held(plant, [limits])
        np.testing.assert_allclose(telemetry.meter_w[0], power, rtol=0.004)
        np.testing.assert_allclose(telemetry.throughput[0], speed, atol=0.004)
        assert (telemetry.phase == Phase.COMPUTE).all()


def test_the_measured_spread_is_what_jobs_are_drawn_with(tmp_path):
    job = JOB | {"power_sd_w": [8.0, 8.0, 8.0, 12.0], "throughput_sd": [0.03, 0.02, 0.02, 0.01]}
    plant = emulator(write(tmp_path, job), randomise=1.0)
    plant.reset([np.random.default_rng(seed) for seed in range(600)])
    low = held(plant, np.full((600, 1), 350.0))
    np.testing.assert_allclose(low.meter_w.mean() / 4, 340.0, rtol=0.005)
    # Board by board: where the limit binds, the spread is relative to the power, 8 of 340 to 570 W.
    assert low.meter_w.std() / 4 == pytest.approx(np.mean([8 / 340, 8 / 480]) * 340, rel=0.15)
    assert low.throughput.std() == pytest.approx(0.03, rel=0.35)
    full = held(plant, np.full((600, 1), 700.0))
    assert full.meter_w.std() / 4 == pytest.approx(12.0, rel=0.15)


def test_delay_gain_and_sensor_are_the_measured_ones(tmp_path):
    quick, slow = (
        emulator(write(tmp_path, JOB | {"delay_s": delay_s, "sensor_gain": 1.03, "sensor_window_s": 0.025}))
        for delay_s in (0.1, 0.6)
    )
    energies = []
    for plant in (quick, slow):
        plant.reset([np.random.default_rng(0)])
        plant.apply(Command(np.array([[350.0]])))
        energies.append(plant.advance().meter_w[0, 0] * 2.0)
        telemetry = held(plant, [[350.0]])
        assert telemetry.sensor_w / telemetry.meter_w == pytest.approx(1.03, abs=1e-6)
    # Half a second later, the same fall of 4 x 260 W.
    assert energies[1] - energies[0] == pytest.approx(0.5 * 4 * 260.0, rel=0.02)


def test_phases_are_the_profiles_unless_families_are_named(tmp_path):
    evaluating = STILL | {
        "compute_work_s": {"mean": 10.0, "sd": 0.0}, "evaluate_s": {"mean": 5.0, "sd": 0.0},
        "evaluate_stall_s": {"mean": 0.0, "sd": 0.0}, "evaluate_level": 0.5,
    }  # fmt: skip
    path = write(tmp_path, JOB | {"phases": evaluating})
    plant = emulator(path)
    plant.reset([np.random.default_rng(0)])
    seen = [(float(t.phase[0, 0]), float(t.meter_w[0, 0])) for t in (held(plant, [[700.0]], 1) for _ in range(300))]
    assert np.mean([phase == Phase.EVALUATE for phase, _ in seen]) == pytest.approx(1 / 3, abs=0.05)
    assert min(power for _, power in seen) == pytest.approx(4 * 300.0, rel=0.01)
    named = emulator(path, phase_families=("lora_8xh100",))
    named.reset([np.random.default_rng(0)])
    # That family evaluates for 37 s after each 184 s of work.
    share = np.mean([held(named, [[700.0]], 1).phase[0, 0] == Phase.EVALUATE for _ in range(300)])
    assert share == pytest.approx(37 / 221, abs=0.06)
    # Without phases of its own, a job has one of the fitted families.
    plain = emulator(write(tmp_path, {k: v for k, v in JOB.items() if k != "phases"}))
    plain.reset([np.random.default_rng(0)])
    powers = [held(plain, [[700.0]], 1).meter_w[0, 0] for _ in range(20)]
    assert np.std(powers) > 1.0


def test_batches_of_a_calibrated_site_are_those_of_single_ones(tmp_path):
    job = JOB | {"power_sd_w": [8.0] * 4, "throughput_sd": [0.03] * 4}
    together = emulator(write(tmp_path, job, OTHER), jobs=2, randomise=1.0)
    together.reset([np.random.default_rng(seed) for seed in (1, 2)])
    batch = held(together, [[400.0, 200.0], [500.0, 250.0]])
    alone = emulator(write(tmp_path, job, OTHER), jobs=2, randomise=1.0)
    alone.reset([np.random.default_rng(2)])
    single = held(alone, [[500.0, 250.0]])
    np.testing.assert_array_equal(batch.meter_w[1], single.meter_w[0])
    np.testing.assert_array_equal(batch.throughput[1], single.throughput[0])


def test_a_written_profile_reads_back(tmp_path):
    profile = PlantProfile(made_by="test", jobs=(JobProfile.model_validate(JOB), nominal_profile(SURFACE, 2)))
    save_profile(profile, tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit_w": [350.0, 500.0, 500.0, 700.0]}, "limit_w must ascend"),
        ({"power_w": [340.0, 480.0]}, "power_w has 2 values for 4 limits"),
        ({"power_sd_w": [1.0]}, "power_sd_w has 1 values for 4 limits"),
        ({"throughput": [0.0, 0.85, 0.95, 1.0]}, "throughput must be above 0"),
        ({"throughput": [float("nan"), 0.85, 0.95, 1.0]}, "jobs.0.throughput.0"),
        ({"gpu": "h100"}, "unknown GPU 'h100'"),
        ({"actuator": "fan"}, "jobs.0.actuator"),
        ({"powr_w": [1.0]}, "unknown key 'jobs.0.powr_w', did you mean 'power_w'"),
        ({"n_gpus": 0}, "jobs.0.n_gpus"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        load_profile(write(tmp_path, JOB | changes))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_profile_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_profile(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="expected a mapping"):
        load_profile(tmp_path / "list.yaml")
    with pytest.raises(UserError, match="schema version 2, this WattGym reads version 1"):
        load_profile(write(tmp_path, JOB, schema_version=2))


def test_a_site_of_another_size_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"describes 2 jobs, site\.jobs is 3"):
        emulator(write(tmp_path, JOB, OTHER), jobs=3)
    for key, value in (("surfaces", "test"), ("gpus_per_job", (8,)), ("power_spread", 0.1), ("sensor", "instant")):
        with pytest.raises(ValueError, match=f"profile and {key} exclude each other"):
            emulator(write(tmp_path, JOB), **{key: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gpu", "h200-sxm", "gpu is 'h200-sxm', the plant's is 'h100-sxm'"),
        ("n_gpus", 4, "n_gpus is 4, the plant's is 1"),
        ("actuator", "duty_cycle", "actuator is 'duty_cycle', the plant's is 'power_limit'"),
        ("device", "NVIDIA H200", "device is 'NVIDIA H200', the plant's is 'Simulated h100-sxm'"),
        ("model", "smollm2", "model is 'smollm2', the plant's is 'tiny 2x64'"),
        ("samples_per_update", 16, "samples_per_update is 16, the plant's is 8"),
    ],
)
def test_a_live_plant_refuses_the_profile_of_another_job_by_field(tmp_path, field, value, message):
    job = {"devices": ("h100-sxm",), "training": {"model": {"source": "tiny"}}}
    info = SimulatedDevice("h100-sxm").info()
    nominal = fitted_profile(LiveConfig.model_validate({"jobs": [job]}), 0, info, "power_limit")
    assert getattr(nominal, field) != value
    save_profile(PlantProfile(jobs=(nominal,)), tmp_path / "own.yaml")
    own = LiveConfig.model_validate({"jobs": [job], "profile": str(tmp_path / "own.yaml")})
    assert fitted_profile(own, 0, info, "power_limit") == nominal
    path = tmp_path / "other.yaml"
    save_profile(PlantProfile(jobs=(nominal.model_copy(update={field: value}),)), path)
    config = LiveConfig.model_validate({"jobs": [job], "profile": str(path)})
    with pytest.raises(UserError, match=message) as caught:
        fitted_profile(config, 0, info, "power_limit")
    assert str(path) in str(caught.value)


def test_a_live_plant_refuses_the_profile_of_another_number_of_jobs(tmp_path):
    profile = nominal_profile(SURFACE, 1)
    save_profile(PlantProfile(jobs=(profile, profile)), tmp_path / "two.yaml")
    config = LiveConfig.model_validate({"jobs": [{"devices": ("h100-sxm",)}], "profile": str(tmp_path / "two.yaml")})
    with pytest.raises(UserError, match="jobs: describes 2 jobs, the plant has 1"):
        fitted_profile(config, 0, SimulatedDevice("h100-sxm").info(), "power_limit")


def test_the_example_profile_is_one():
    assert len(load_profile(Path(__file__).with_name("profile.yaml")).jobs) == 2


def test_the_page_on_calibration_shows_valid_files(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text(encoding="utf-8")
    profile, site = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "plant.yaml").write_text(profile, encoding="utf-8")
    loaded = load_profile(tmp_path / "plant.yaml")
    # Every field of a job is on the page.
    assert set(yaml.safe_load(profile)["jobs"][0]) == set(JobProfile.model_fields)
    settings = yaml.safe_load(site)["site"]
    assert settings["jobs"] == len(loaded.jobs)
    Emulator(PowerShapingConfig.model_validate({"site": settings | {"profile": str(tmp_path / "plant.yaml")}}))


def test_a_calibrated_site_is_not_evaluated_as_held_out_plants(tmp_path):
    env = PowerShapingConfig.model_validate({"site": {"jobs": 1, "profile": write(tmp_path, JOB)}})
    config = held_out(env, "regd", "test", 900.0)
    assert config.site.profile == env.site.profile
    assert not config.site.by_split
    assert PowerShapingConfig().site.by_split
    Emulator(config).reset([np.random.default_rng(0)])
