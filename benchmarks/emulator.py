"""Speed, memory and scaling of the emulator and the power-shaping environment, as figures of one run.

    python benchmarks/emulator.py [--json FILE]

Times are CPU time of this process. Machines differ, so the run measures yardsticks of its own: Gymnasium's CartPole
under the same loop, and PPO over environments that do nothing. Aims are printed beside the figures, not asserted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from stable_baselines3.common.vec_env import VecEnv

from wattgym.envs.config import PowerShapingConfig
from wattgym.envs.power_shaping import PowerShapingEnv
from wattgym.envs.vector import PowerShapingVecEnv

PPO_ENVS = 64
PPO = {"n_steps": 128, "batch_size": 2048, "n_epochs": 6, "policy_kwargs": {"net_arch": [128, 128]}}
"""What training uses for 64 environments: mini-batches are a quarter of the rollout."""
REPEATS = 3


@dataclass(frozen=True)
class Figure:
    """One line of the result.

    Attributes:
        name: What was measured.
        value: The figure.
        unit: Its unit.
        aim: What is aimed at, as `>= 10000`; empty for figures that only inform.
    """

    name: str
    value: float
    unit: str
    aim: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        if not self.aim:
            return None
        sign, bound = self.aim.split()
        return self.value >= float(bound) if sign == ">=" else self.value <= float(bound)


class NothingVecEnv(VecEnv):
    """Environments of the same spaces, batch size and episode length that do nothing."""

    def __init__(self, like: PowerShapingVecEnv) -> None:
        super().__init__(like.num_envs, like.observation_space, like.action_space)
        self._ticks, self._tick = like.config.ticks, 0
        self._observation = np.zeros((like.num_envs, *like.observation_space.shape), np.float32)
        self._reward = np.zeros(like.num_envs, np.float32)

    def reset(self) -> Any:
        """The one observation."""
        return self._observation

    def step_async(self, actions: Any) -> None:
        """Ignores the actions."""

    def step_wait(self) -> Any:
        """The one observation again, and an end every episode length."""
        self._tick += 1
        over = self._tick % self._ticks == 0
        end = {"TimeLimit.truncated": True, "terminal_observation": self._observation[0]}
        infos = [dict(end) if over else {} for _ in range(self.num_envs)]
        return self._observation, self._reward, np.full(self.num_envs, over), infos

    def close(self) -> None:
        """Nothing to release."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The batch's own attribute, once per environment."""
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Nothing to set."""

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Nothing to call."""
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never wrapped."""
        return [False] * self.num_envs


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds that some work takes, without garbage of the work before."""
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def single_rate(env: gym.Env[Any, Any], actions: list[Any], steps: int) -> float:
    """Steps per CPU-second of one environment, resets included; the best of some repeats."""

    def loop() -> None:
        for k in range(steps):
            _, _, terminated, truncated, _ = env.step(actions[k % len(actions)])
            if terminated or truncated:
                env.reset()

    env.reset(seed=0)
    loop()
    return max(steps / cpu_s(loop) for _ in range(REPEATS))


def batch_step_s(num_envs: int, jobs: int, ticks: int, *, repeats: int = REPEATS) -> float:
    """CPU seconds per step of a batch over whole episodes, resets included; the best of some repeats."""
    config = PowerShapingConfig.model_validate({"site": {"jobs": jobs}, "episode_s": 2.0 * ticks})
    env = PowerShapingVecEnv(config, num_envs)
    env.seed(0)
    env.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (16, num_envs, jobs)).astype(np.float32)

    def episode() -> None:
        for k in range(ticks):
            env.step(actions[k % 16])

    return min(cpu_s(episode) for _ in range(repeats)) / ticks


def learner(kind: str) -> Any:
    """PPO over the emulator or over nothing."""
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    emulator = PowerShapingVecEnv(None, PPO_ENVS)
    env = emulator if kind == "emulator" else NothingVecEnv(emulator)
    return stable_baselines3.PPO("MlpPolicy", env, seed=0, device="cpu", **PPO)


def ppo_ratio(turns: int) -> tuple[float, float]:
    """PPO steps per CPU-second over the emulator, and that over the same over nothing.

    The two take turns, a rollout and its updates each; the best turn of either counts, the one least disturbed by
    whatever else the machine does.
    """
    models = {kind: learner(kind) for kind in ("emulator", "nothing")}
    steps = models["emulator"].n_steps * PPO_ENVS
    best = dict.fromkeys(models, 0.0)
    for _ in range(turns):
        for kind, model in models.items():
            used = cpu_s(lambda model=model: model.learn(steps, reset_num_timesteps=False))
            best[kind] = max(best[kind], steps / used)
    return best["emulator"], best["emulator"] / best["nothing"]


def own_peak_mib() -> float:
    """Peak resident memory of this process (`ru_maxrss` would count what it was forked from, too)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(float(line.split()[1]) / 1024.0 for line in status.splitlines() if line.startswith("VmHWM:"))


def peak_memory_mib(kind: str) -> float:
    """Peak resident memory of a fresh process that trains over one kind of environment."""
    done = subprocess.run([sys.executable, __file__, "--peak-memory", kind], check=True, capture_output=True, text=True)
    return float(done.stdout)


def measure(quick: bool) -> list[Figure]:
    """All figures; `quick` only tries the code."""
    steps, ticks, wide = (200, 20, 64) if quick else (12_000, 600, 4096)
    rng = np.random.default_rng(0)
    env = PowerShapingEnv()
    actions = list(rng.uniform(-1.0, 1.0, (64, *env.action_space.shape)).astype(np.float32))
    single = single_rate(env, actions, steps)
    cartpole = single_rate(CartPoleEnv(), [0, 1], steps)
    batch = batch_step_s(256, 4, ticks)
    few_jobs, many_jobs = batch_step_s(16, 4, ticks), batch_step_s(16, 256, ticks)
    one, many = batch_step_s(1, 4, ticks), batch_step_s(wide, 4, ticks, repeats=1)
    learn_rate, ratio = ppo_ratio(1 if quick else 10)
    return [
        Figure("single environment", single, "steps / CPU-s", ">= 10000"),
        Figure("CartPole-v1 in the same loop", cartpole, "steps / CPU-s"),
        Figure("single environment over CartPole-v1", single / cartpole, ""),
        Figure("batch of 256 environments, 4 jobs", 256.0 / batch, "environment-steps / CPU-s", ">= 300000"),
        Figure(f"PPO, {PPO_ENVS} environments", learn_rate, "environment-steps / CPU-s"),
        Figure("PPO over the emulator over PPO over nothing", ratio, "", ">= 0.8"),
        Figure("peak memory, PPO over the emulator", peak_memory_mib("emulator"), "MiB"),
        Figure("peak memory, PPO over nothing", peak_memory_mib("nothing"), "MiB"),
        Figure("cost per job, 256 jobs a site over 4", many_jobs / few_jobs / 64.0, "", "<= 1"),
        Figure(f"cost per environment, {wide} over 1", many / one / wide, "", "<= 1"),
        Figure(f"batch of {wide} environments, 4 jobs", wide / many, "environment-steps / CPU-s"),
    ]


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="WattGym emulator")
    for column in ("figure", "value", "unit", "aim", "met"):
        table.add_column(column, justify="right" if column in ("value", "aim") else "left")
    for f in figures:
        value = f"{f.value:,.0f}" if f.value >= 100 else f"{f.value:.3f}"
        table.add_row(f.name, value, f.unit, f.aim, {True: "yes", False: "NO", None: ""}[f.met])
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the code; the figures mean nothing")
    parser.add_argument("--peak-memory", choices=("emulator", "nothing"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory:
        model = learner(arguments.peak_memory)
        model.learn(2 * model.n_steps * PPO_ENVS)
        print(own_peak_mib())
        return
    figures = measure(arguments.quick)
    show(figures)
    if arguments.json:
        rows = [{**asdict(f), "met": f.met} for f in figures]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
