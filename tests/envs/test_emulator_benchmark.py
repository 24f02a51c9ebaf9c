"""The benchmark runs; what it measures is left to a quiet machine."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from wattgym.envs.vector import PowerShapingVecEnv


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "emulator.py"
    spec = importlib.util.spec_from_file_location("benchmark_emulator", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_rates_are_measured(bench):
    assert bench.batch_step_s(3, 2, 5, repeats=1) > 0.0
    assert bench.single_rate(bench.CartPoleEnv(), [0, 1], 50) > 0.0
    assert 20.0 < bench.own_peak_mib() < 1e5


def test_the_idle_environments_look_like_the_emulated_ones(bench):
    real = PowerShapingVecEnv({"episode_s": 20.0}, 3)
    idle = bench.NothingVecEnv(real)
    actions = np.zeros((3, 4), np.float32)
    assert idle.reset().shape == real.reset().shape
    for _ in range(25):
        ours, theirs = idle.step(actions), real.step(actions)
        for a, b in zip(ours[:3], theirs[:3], strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(ours[2], theirs[2])
        assert [set(i) - {"episode"} for i in theirs[3]] == [set(i) for i in ours[3]]


def test_aims_are_judged_and_shown(bench, monkeypatch, tmp_path, capsys):
    figures = [bench.Figure("fast", 2e4, "1/s", ">= 10000"), bench.Figure("grows", 1.5, "", "<= 1")]
    figures.append(bench.Figure("told", 3.0, "MiB"))
    assert [f.met for f in figures] == [True, False, None]
    monkeypatch.setattr(bench, "measure", lambda quick: figures)
    monkeypatch.setattr(sys, "argv", ["emulator.py", "--json", str(tmp_path / "out.json")])
    bench.main()
    shown = capsys.readouterr().out
    assert "20,000" in shown
    assert "NO" in shown
    rows = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["met"] for row in rows] == [True, False, None]
