import importlib.util
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "site_selection.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("site_selection_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_round_times_over_the_oracles_by_hand(benchmark):
    # Work 100: together 100/10 + 5 = 15 s; without the far site 100/6 + 1 = 17.7 s; the nearest alone 26 s.
    power, cost = np.array([[4.0, 2.0, 4.0]]), np.array([[1.0, 1.0, 5.0]])
    found = benchmark._over_oracle(power, cost, np.zeros((1, 3)), np.array([100.0]))
    assert found["all sites"] == pytest.approx(1.0)
    assert found["best single"] == pytest.approx(26.0 / 15.0)
    assert found["greedy, patience 0"] == pytest.approx(1.0)
    narrow = benchmark._over_oracle(power, np.array([[1.0, 1.0, 50.0]]), np.zeros((1, 3)), np.array([100.0]))
    assert narrow["all sites"] == pytest.approx(60.0 / (100.0 / 6.0 + 1.0))
    assert narrow["greedy, patience 2"] == pytest.approx(1.0)


def test_nobody_beats_the_oracle_and_patience_never_hurts_in_the_mean(benchmark, capsys):
    benchmark.plausible(draws=60)
    rows = [line for line in capsys.readouterr().out.splitlines() if line[:24].strip() in benchmark.EXPECTED]
    assert len(rows) == 2 * len(benchmark.EXPECTED)
    for line in rows:
        ours = [float(cell.split()[0]) for cell in line[24:].split(")")[:-1]]
        assert min(ours) >= 1.0
        if line.startswith("greedy"):
            assert max(ours) < 1.2
