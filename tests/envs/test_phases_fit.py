"""The committed phase parameters are what the fit gives, fit runs that it has not seen, and mean what they say."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from wattgym.envs.emulator import phases
from wattgym.envs.emulator.phases import ComputeNoise, load_phase_families
from wattgym.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = load_phase_families()


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fit_phases", ROOT / "scripts" / "fit_phases.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_phases"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fit_phases"]


@pytest.fixture(scope="module")
def fit(script):
    return script.fit_all()


def test_the_committed_file_is_what_the_fit_gives(script, fit):
    committed = yaml.safe_load(script.OUT.read_text(encoding="utf-8"))
    assert committed == fit[0]
    assert script.OUT.read_text(encoding="utf-8") == script.render(fit[0])


def test_held_out_runs_lie_close_to_the_fit(fit):
    for name, runs in fit[1].items():
        assert runs, name
        for error in runs.values():
            assert abs(error["level"]) < 0.005
            assert abs(error["run_mean"]) < 0.005
            assert abs(error["length"]) < 0.005
            # Quantiles 25 to 99 %, then the two of the lower tail, in units of the mean compute power.
            assert np.abs(error["quantiles"][2:]).max() < 0.012
            assert np.abs(error["quantiles"][:2]).max() < 0.03
            measured, simulated = np.array(error["acf_measured"]), np.array(error["acf_simulated"])
            assert abs(measured[0] - simulated[0]) < 0.25


def test_step_ripple_reproduces_the_measured_autocorrelation(fit):
    (error,) = fit[1]["gpt3_512xh100"].values()
    np.testing.assert_allclose(error["acf_simulated"], error["acf_measured"], atol=0.12)
    assert error["acf_measured"][4] > 0.7  # 10 s apart: one optimiser step of 10.8 s


def test_parameters_agree_with_the_logs():
    lora, gpt3 = FAMILIES["lora_8xh100"], FAMILIES["gpt3_512xh100"]
    # From the logs: blocks of 184 s and 39-s evaluations; 12 steps in 129.2 s and 13-s evaluations.
    assert lora.compute_work_s.mean == pytest.approx(184.4, abs=0.5)
    assert lora.evaluate_s.mean + lora.evaluate_stall_s.mean == pytest.approx(38.8, abs=0.5)
    assert gpt3.compute_work_s.mean == pytest.approx(129.2, abs=0.2)
    assert gpt3.ripple.period_s == pytest.approx(129.2 / 12, abs=0.02)
    assert gpt3.evaluate_s.mean + gpt3.evaluate_stall_s.mean == pytest.approx(13.0, abs=0.2)
    # A node draws 7.2 kW while fine-tuning; evaluation is as heavy as training there and lighter in pre-training.
    assert lora.compute_w_per_gpu * 8 == pytest.approx(7230, abs=20)
    assert lora.evaluate_level == pytest.approx(1.0, abs=0.01)
    assert gpt3.evaluate_level == pytest.approx(0.926, abs=0.005)


def test_stalled_gpus_draw_what_an_idle_context_draws():
    lora = FAMILIES["lora_8xh100"]
    full_w = lora.compute_w_per_gpu - lora.host_w_per_gpu
    assert 570 <= full_w <= 700
    assert 95 <= lora.gpu_level(lora.load_level) * full_w <= 125
    assert lora.gpu_level(1.0) == 1.0
    assert lora.gpu_level(0.0) == 0.0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_simulated_compute_has_mean_one(script, name):
    family = FAMILIES[name]
    t_s = np.arange(0, 200_000, 2.0)
    simulated = script.simulate_compute(family, t_s, [1])
    assert simulated.mean() == pytest.approx(1.0, abs=5e-4)
    # Between dips the power stands above its mean by what the dips take away.
    assert family.plateau > 1
    assert np.median(simulated) == pytest.approx(family.plateau, abs=0.01)


@given(st.floats(-0.9, 0.95), st.floats(0.001, 0.1), st.floats(0.1, 30))
def test_noise_keeps_its_variance_at_any_period(ar1, innovation_sd, period_s):
    noise = ComputeNoise(sample_s=2.0, ar1=ar1, innovation_sd=innovation_sd, dip_probability=0.0, dip_depth=0.0)
    stationary = innovation_sd**2 / (1 - ar1**2)
    coefficient, innovation = noise.at_period(period_s)
    assert innovation**2 / (1 - coefficient**2) == pytest.approx(stationary)
    assert noise.at_period(2.0) == pytest.approx((ar1, innovation_sd))


def test_a_broken_file_is_refused_by_key(tmp_path):
    path = tmp_path / "phases.yaml"
    table = yaml.safe_load(Path(phases.__file__).with_name("phases.yaml").read_text(encoding="utf-8"))
    table["families"]["lora_8xh100"]["load_levle"] = 0.4
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    with pytest.raises(UserError, match="load_levle"):
        load_phase_families(path)
    path.write_text("families: {}\n", encoding="utf-8")
    with pytest.raises(UserError, match="is empty"):
        load_phase_families(path)
    with pytest.raises(UserError, match="cannot read"):
        load_phase_families(tmp_path / "absent.yaml")


def test_the_file_is_replaced_whole_or_not_at_all(script, tmp_path, monkeypatch):
    out = tmp_path / "phases.yaml"
    monkeypatch.setattr(sys, "argv", ["fit_phases.py", "--out", str(out)])
    script.main()
    assert load_phase_families(out) == FAMILIES
    assert [p.name for p in tmp_path.iterdir()] == ["phases.yaml"]


def test_a_place_that_cannot_be_written_is_one_line(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["fit_phases.py", "--out", str(tmp_path / "file" / "phases.yaml")])
    with pytest.raises(SystemExit) as exit_info:
        script.main()
    assert exit_info.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
