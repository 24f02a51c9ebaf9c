"""Real controllers ended in every way: each case of the fail-safe benchmark, once or twice, on the NVML stand-in."""

import importlib.util
import random
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "fail_safe_trials.py"


def load_benchmark():
    spec = importlib.util.spec_from_file_location("fail_safe_trials", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fail_safe_trials"] = module
    spec.loader.exec_module(module)
    return module


trials = load_benchmark()


@pytest.mark.slow
@pytest.mark.parametrize("case", trials.CASES)
def test_the_hardware_is_as_it_was(case, make_standin, tmp_path):
    machine = trials.Machine(make_standin("H100"), tmp_path / "state", random.Random(case))
    for _ in range(2 if case in ("SIGKILL", "hang", "device lost") else 1):
        outcome = trials.run_trial(case, machine)
        assert not outcome.wrong
        assert outcome.restored in (True, None)
        assert (outcome.restored is None) == (case in ("foreign writer", "driver reload"))
        assert not outcome.foreign_overwritten
    assert machine.standin.get(0, "refused_sets") == 0
    assert machine.standin.get(0, "set_calls") > 0
