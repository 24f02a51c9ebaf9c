"""Trains a power-shaping policy with stable-baselines3 over the batched emulator."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from wattgym.agents.callbacks import StopTraining, TrainingCallback
from wattgym.agents.checkpoint import algorithm_class, load_checkpoint, load_resume_state
from wattgym.agents.config import DEFAULTS, TrainingConfig
from wattgym.agents.policy import checkpoint_folder
from wattgym.errors import UserError
from wattgym.runs import RunFolder


@dataclass(frozen=True)
class TrainingOutcome:
    """How a training ended.

    Attributes:
        run: The run folder.
        steps: Environment steps trained in all.
        best_reward: Best mean reward on validation; None if none took place.
        interrupted: Whether it was stopped before its end.
    """

    run: RunFolder
    steps: int
    best_reward: float | None
    interrupted: bool


def train(config: TrainingConfig, out: str | Path, *, resume: bool = False, progress: bool = True) -> TrainingOutcome:
    """Trains a policy into a run folder.

    Ctrl-C or SIGTERM stop after the present rollout and save a checkpoint from which `resume` continues as if nothing
    had happened; a second one stops at once.

    Args:
        config: What to train.
        out: Run folder, new or empty unless resuming.
        resume: Continue the run in the folder; `train.total_steps` may have grown.
        progress: Show a progress bar on stderr.

    Raises:
        UserError: The configuration or the folder cannot be used.
    """
    import torch

    torch.set_num_threads(config.train.threads)
    plain = config.model_dump(mode="json")
    # Whatever is wrong with the configuration shows before a folder is touched.
    env = _build_env(config)
    run = RunFolder.create(
        out, plain, "training", config.seed, resume=resume, may_change=("train.total_steps", "train.checkpoint_steps")
    )
    with run.recording_status(), _stop_requests() as stop:
        callback = TrainingCallback(config, run.path, stop, progress)
        has_checkpoint = any((run.path / "checkpoints").glob("step_*"))
        model = _resumed(run, callback) if resume and has_checkpoint else _fresh(config, env)
        model.set_logger(_logger(run.path / "tensorboard"))
        try:
            remaining = config.train.total_steps - model.num_timesteps
            if remaining > 0:
                model.learn(remaining, callback=callback, reset_num_timesteps=False)
            callback.finish(model)
        except StopTraining:
            pass
        finally:
            callback.close()
    if stop.requested:
        run.set_status("interrupted")
    return TrainingOutcome(run, int(model.num_timesteps), callback.best_reward, stop.requested)


def _build_env(config: TrainingConfig) -> Any:
    from stable_baselines3.common.vec_env import VecNormalize

    from wattgym.envs.vector import PowerShapingVecEnv

    env = PowerShapingVecEnv(config.env, config.train.num_envs)
    env.seed(config.seed)
    gamma = _hyperparameters(config)["gamma"]
    return VecNormalize(
        env,
        norm_obs=config.train.normalise_observations,
        norm_reward=config.train.normalise_rewards,
        gamma=gamma,
    )


def _fresh(config: TrainingConfig, env: Any) -> Any:
    import torch

    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[config.network.activation]
    policy: dict[str, Any] = {"net_arch": list(config.network.hidden), "activation_fn": activation}
    if config.train.algorithm == "ppo":
        policy["log_std_init"] = config.network.log_std_init
    try:
        return algorithm_class(config.train.algorithm)(
            "MlpPolicy", env, seed=config.seed, device="cpu", policy_kwargs=policy, **_hyperparameters(config)
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"train.hyperparameters: {' '.join(str(error).split())}") from None


def _resumed(run: RunFolder, callback: TrainingCallback) -> Any:
    checkpoint = load_checkpoint(checkpoint_folder(run, "last"))
    state = load_resume_state(checkpoint)
    model = checkpoint.model
    env = state["normalise"]
    env.set_venv(state["env"])
    model.set_env(env, force_reset=False)
    callback.restore(state["callback"])
    return model


def _hyperparameters(config: TrainingConfig) -> dict[str, Any]:
    return {**DEFAULTS[config.train.algorithm], **config.train.hyperparameters}


def _logger(folder: Path) -> Any:
    from stable_baselines3.common.logger import configure

    return configure(str(folder), ["tensorboard"])


@dataclass
class StopRequest:
    """Whether somebody asked the training to stop.

    Attributes:
        requested: Set by the first Ctrl-C or SIGTERM.
    """

    requested: bool = False


@contextmanager
def _stop_requests() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; the second acts as it did before."""
    stop = StopRequest()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        for known, handler in previous.items():
            signal.signal(known, handler)

    try:
        for number in numbers:
            previous[number] = signal.signal(number, request)
    except ValueError:
        # Only the main thread may set handlers; elsewhere whoever owns it decides.
        previous.clear()
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
