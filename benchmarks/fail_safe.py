"""Kills controllers of power limits in every way and counts how often the hardware is as it was before.

Real processes on an NVML stand-in (a C library with simulated GPUs that processes share; a C compiler is needed):

    python benchmarks/fail_safe.py --trials 210

Prints, per case, the share of limits restored where a restore is possible and the time that it took; then foreign
limits overwritten and writes outside the constraints (both must be 0), and what a guard costs beside a bare NVML call.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fail_safe_trials import CASES, LEASE_S, Machine, Outcome, run_trial

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def simulated_machine(folder: Path, seed: int) -> Iterator[Machine]:
    """A machine with one H100, from the stand-in that the tests use."""
    tools = _load(ROOT / "tests" / "hw" / "conftest.py")
    for name in ("nvml", "hooks"):
        (folder / name).mkdir()
    library = tools.build_standin(folder / "nvml")
    # A copy under another name, so that this process steers the machine but does not find "NVML" itself.
    hooks = ctypes.CDLL(str(tools.build_standin(folder / "hooks", name="standin_hooks.so")))
    hooks.standin_get.restype = ctypes.c_double
    state = folder / "gpus.state"
    if hooks.standin_open(str(state).encode(), b"H100"):
        raise OSError(f"cannot map {state}")
    yield Machine(tools.StandIn(library, state, "H100", hooks), folder / "state", random.Random(seed))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --- what a guard costs


def measure(options: dict[str, Any]) -> None:
    """Runs in a process that sees the GPU: microseconds per call, bare and guarded."""
    import pynvml

    from wattgym.hw.guard import Guard
    from wattgym.hw.limits import CommandRules
    from wattgym.hw.nvml import NvmlDevice
    from wattgym.hw.preflight import GuardConfig

    def cost_us(call: Callable[[], object], repeat: int) -> float:
        times = []
        for _ in range(repeat):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return 1e6 * statistics.median(times)

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(options["uuid"])
    device = NvmlDevice(options["uuid"])
    ticks = [0.0]
    rules = CommandRules(dead_band_w=1.0, dead_band_fraction=0.0, raise_fraction_per_s=10.0)
    found: dict[str, float] = {}
    found["bare limit getter"] = cost_us(lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle), 2000)
    found["bare power getter"] = cost_us(lambda: pynvml.nvmlDeviceGetPowerUsage(handle), 2000)
    found["device limit getter"] = cost_us(device.requested_limit_mw, 2000)
    found["device read (all values)"] = cost_us(device.read, 500)
    found["bare setter"] = cost_us(lambda: pynvml.nvmlDeviceSetPowerManagementLimit(handle, 700_000), 500)
    config = GuardConfig(rules=rules)
    with Guard(device, arm=True, config=config, state_dir=options["state_dir"], clock=lambda: ticks[0]) as guard:
        limits = [400.0, 600.0]

        def write() -> None:
            ticks[0] += 2.0
            limits.reverse()
            guard.set_limit_w(limits[0])

        found["guard read"] = cost_us(guard.read, 500)
        found["guard set, held by dead band"] = cost_us(lambda: guard.set_limit_w(700.0), 500)
        found["guard set, written and read back"] = cost_us(write, 200)
    print(json.dumps(found))


# --- report


def report(outcomes: list[Outcome], refused: int, overhead_us: dict[str, float]) -> bool:
    """Prints the tables; whether everything was as it must be."""
    print(f"\n{'case':26} {'trials':>6} {'restored':>10} {'median s':>9} {'max s':>7}")
    for case in CASES:
        mine = [o for o in outcomes if o.case == case]
        if mine:
            print(f"{case:26} {len(mine):6d} {_share(mine):>10} {_times(mine)}")
    print(f"{'all':26} {len(outcomes):6d} {_share(outcomes):>10} {_times([o for o in outcomes if o.case != 'hang'])}")
    print(f"  (the last two columns of 'all' leave out hangs, whose lease is {LEASE_S:g} s)")
    overwritten = sum(o.foreign_overwritten for o in outcomes)
    print(f"\nforeign limits overwritten   {overwritten}\nwrites outside constraints   {refused}")
    wrong = [o for o in outcomes if o.wrong]
    print(f"other faults                 {len(wrong)}")
    for outcome in wrong:
        print(f"  {outcome.case}: {outcome.wrong}")
    bare = overhead_us["bare limit getter"]
    print(f"\n{'cost of one call':34} {'us':>9} {'x bare getter':>14}")
    for name, us in overhead_us.items():
        print(f"{name:34} {us:9.1f} {us / bare:14.1f}")
    restorable = [o for o in outcomes if o.restored is not None]
    return not overwritten and not refused and not wrong and all(o.restored for o in restorable)


def _share(outcomes: list[Outcome]) -> str:
    possible = [o for o in outcomes if o.restored is not None]
    return f"{sum(bool(o.restored) for o in possible)}/{len(possible)}" if possible else "not ours"


def _times(outcomes: list[Outcome]) -> str:
    seconds = [o.seconds for o in outcomes if o.seconds is not None]
    return f"{statistics.median(seconds):9.3f} {max(seconds):7.3f}" if seconds else f"{'-':>9} {'-':>7}"


def main() -> int:
    """Runs the trials; exit code 1 if anything was not as it must be."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=15 * len(CASES), help="how many, dealt out over the cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), help="only this case")
    wanted = parser.parse_args()
    if shutil.which("gcc") is None and shutil.which("cc") is None:
        parser.error("no C compiler (gcc or cc) was found, so the NVML stand-in cannot be built")
    if wanted.trials < 1:
        parser.error(f"--trials {wanted.trials}: give at least 1")
    # Ignored under nohup or in the background, and then by the controllers too that are to die of them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    cases = [wanted.case] if wanted.case else list(CASES)
    with tempfile.TemporaryDirectory() as folder, simulated_machine(Path(folder), wanted.seed) as machine:
        plan = [cases[n % len(cases)] for n in range(wanted.trials)]
        outcomes = [run_trial(case, machine) for case in tqdm(plan, desc="trials", unit="trial")]
        refused = int(machine.standin.get(0, "refused_sets"))
        machine.prepare()
        options = json.dumps({"uuid": machine.uuid, "state_dir": str(machine.state_dir)})
        line = [sys.executable, __file__, "measure", options]
        measured = subprocess.run(
            line, env=machine.standin.env(WATTGYM_ARM="1"), capture_output=True, text=True, check=True
        )
        return 0 if report(outcomes, refused, json.loads(measured.stdout)) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
