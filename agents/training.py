"""Trains a policy for either control problem with stable-baselines3 over the batched emulator."""

from __future__ import annotations

import difflib
import inspect
import math
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from stable_baselines3.common.logger import Logger

from wattgym.agents.callbacks import Progress, StopTraining, TrainingCallback
from wattgym.agents.checkpoint import algorithm_class, load_checkpoint, load_resume_state
from wattgym.agents.config import DEFAULTS, ON_POLICY, AnyTrainingConfig, SelectionTrainingConfig
from wattgym.agents.event_log import EventLog
from wattgym.agents.policy import checkpoint_folder
from wattgym.agents.problem import Problem, Validator, problem_of
from wattgym.config import FrozenModel
from wattgym.errors import UserError
from wattgym.files import atomic_write_json
from wattgym.runs import RunFolder

MAY_CHANGE = ("train.total_steps", "train.checkpoint_steps")
"""Keys that may differ when a run is taken up again."""

_SET_ELSEWHERE = {"policy", "env", "seed", "device", "policy_kwargs", "tensorboard_log", "verbose", "_init_setup_model"}
"""Arguments of the algorithms that are no hyperparameters here: other keys decide them."""


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


def train(
    config: AnyTrainingConfig, out: str | Path, *, resume: bool = False, progress: Progress = True
) -> TrainingOutcome:
    """Trains a policy into a run folder.

    Ctrl-C or SIGTERM stop after the present rollout and save a checkpoint from which `resume` continues as if nothing
    had happened; a second one stops at once.

    Args:
        config: What to train.
        out: Run folder, new or empty unless resuming.
        resume: Continue the run in the folder; `train.total_steps` may have grown.
        progress: Show a progress bar on stderr, or whom to tell the steps trained so far.

    Raises:
        UserError: The configuration or the folder cannot be used, or the disk is full.
    """
    import torch

    torch.set_num_threads(config.train.threads)
    plain = config.model_dump(mode="json")
    # Whatever is wrong with the configuration shows before a folder is touched.
    problem, validation, model = _prepare(config)
    run = RunFolder.create(out, plain, "training", config.seed, resume=resume, may_change=MAY_CHANGE)
    interrupted = False
    with stop_requests() as stop:
        callback = TrainingCallback(config, problem, run.path, validation, stop, progress)
        try:
            with run.recording_status():
                if any((run.path / "checkpoints").glob("step_*")):
                    model = _resumed(run, callback)
                else:
                    _warm_start(model, config, run, callback, stop, progress)
                    if config.network.zero_head:
                        # What a residual is added to is a policy to compare with.
                        callback.validate_and_save_next()
                _learn(model, config, run, callback)
        except StopTraining:
            interrupted = True
        except OSError as error:
            raise UserError(f"{run.path}: cannot write: {error.strerror or error}") from None
        finally:
            callback.close()
    return TrainingOutcome(run, int(model.num_timesteps), callback.best_reward, interrupted)


def check_training(config: AnyTrainingConfig) -> None:
    """Looks at everything that can be wrong with a configuration before it is trained; writes nothing.

    Raises:
        UserError: It cannot be trained.
    """
    _prepare(config)


def _prepare(config: AnyTrainingConfig) -> tuple[Problem, Validator, Any]:
    problem = problem_of(config)
    validation = problem.validation()
    problem.check()
    return problem, validation, _fresh(config, problem)


def _learn(model: Any, config: AnyTrainingConfig, run: RunFolder, callback: TrainingCallback) -> None:
    remaining = config.train.total_steps - model.num_timesteps
    if remaining <= 0:
        # The run was complete when it was taken up again.
        return
    folder = run.path / "tensorboard"
    model.set_logger(Logger(str(folder), [EventLog(folder)]))
    try:
        model.learn(remaining, callback=callback, reset_num_timesteps=False)
        callback.finish()
    finally:
        model.logger.close()


def _warm_start(
    model: Any,
    config: AnyTrainingConfig,
    run: RunFolder,
    callback: TrainingCallback,
    stop: StopRequest,
    progress: Progress,
) -> None:
    """Imitates the configured expert, if there is one, and writes down what came of it."""
    if config.imitation.expert is None:
        return
    record: FrozenModel
    if isinstance(config, SelectionTrainingConfig):
        from wattgym.agents.imitation import imitate

        record = imitate(model, config, stop, progress=progress is True)
    else:
        from wattgym.agents.cloning import clone

        record = clone(model, config, stop, progress=progress is True)
    atomic_write_json(run.path / "imitation.json", record.model_dump(mode="json"))
    # What was imitated is a policy to compare with, and not to be learnt again after a stop.
    callback.validate_and_save_next()


def _fresh(config: AnyTrainingConfig, problem: Problem) -> Any:
    from stable_baselines3.common.vec_env import VecNormalize

    settings = _hyperparameters(config)
    batch = problem.batch()
    env = VecNormalize(
        batch,
        norm_obs=config.train.normalise_observations,
        norm_reward=config.train.normalise_rewards,
        gamma=settings["gamma"],
    )
    policy, arguments = problem.policy(batch)
    try:
        with warnings.catch_warnings():
            # What stable-baselines3 merely warns of (a mini-batch that does not divide the rollout) is a mistake too.
            warnings.simplefilter("error", UserWarning)
            model = algorithm_class(config.train.algorithm)(
                policy,
                env,
                seed=config.seed,
                device="cpu",
                policy_kwargs=arguments,
                **settings,
            )
    except (TypeError, AssertionError, ValueError, UserWarning) as error:
        reason = " ".join(str(error).split()) or f"{config.train.algorithm} refuses {settings}"
        raise UserError(f"train.hyperparameters: {reason}") from None
    if config.network.zero_head:
        import torch

        head = model.policy.action_net if config.train.algorithm in ON_POLICY else model.policy.actor.mu
        with torch.no_grad():
            head.weight.zero_()
            head.bias.zero_()
    return model


def _resumed(run: RunFolder, callback: TrainingCallback) -> Any:
    checkpoint = load_checkpoint(checkpoint_folder(run, "last"))
    state = load_resume_state(checkpoint)
    model = checkpoint.model
    env = state["normalise"]
    env.set_venv(state["env"])
    # VecNormalize leaves its running returns out of its own state.
    env.returns = state["returns"]
    if "lstm_states" in state:
        # stable-baselines3 leaves it out of the model's file.
        model._last_lstm_states = state["lstm_states"]
    model.set_env(env, force_reset=False)
    callback.restore(state["callback"])
    return model


def _hyperparameters(config: AnyTrainingConfig) -> dict[str, Any]:
    """Keyword arguments of the algorithm's class.

    Raises:
        UserError: A name is unknown or set elsewhere, or the discount is no number between 0 and 1.
    """
    own = config.train.hyperparameters
    known = inspect.signature(algorithm_class(config.train.algorithm)).parameters.keys() - _SET_ELSEWHERE
    for name in own:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(known))}"
            raise UserError(f"train.hyperparameters: unknown key '{name}' of {config.train.algorithm}, {hint}")
    settings = {**DEFAULTS[config.train.algorithm], **own}
    for name, low, high in (("gamma", 0.0, 1.0), ("learning_rate", 0.0, math.inf)):
        value = settings[name]
        if not (isinstance(value, int | float) and low <= value <= high):
            raise UserError(f"train.hyperparameters.{name}: {value!r} is no number from {low:g} to {high:g}")
    if config.train.algorithm in ON_POLICY and "batch_size" not in own:
        settings["batch_size"] = _mini_batch(settings["n_steps"], config.train.num_envs)
    if config.train.learning_rate_end is not None:
        settings["learning_rate"] = LinearSchedule(settings["learning_rate"], config.train.learning_rate_end)
    return settings


@dataclass(frozen=True)
class LinearSchedule:
    """A rate that falls (or rises) linearly over a training.

    Attributes:
        start: Rate at the beginning.
        end: Rate at the end.
    """

    start: float
    end: float

    def __call__(self, remaining: float) -> float:
        """The rate when `remaining` of the training (1 to 0) is left, as stable-baselines3 asks for it."""
        return self.end + remaining * (self.start - self.end)


def _mini_batch(n_steps: Any, num_envs: int) -> int:
    """A quarter of a rollout, or all of it where it has no quarters."""
    if not isinstance(n_steps, int) or n_steps < 1:
        raise UserError(f"train.hyperparameters.n_steps: {n_steps!r} is no positive whole number")
    rollout = n_steps * num_envs
    return rollout // 4 if rollout % 4 == 0 and rollout > 4 else rollout


@dataclass
class StopRequest:
    """Whether somebody asked the training to stop.

    Attributes:
        requested: Set by the first Ctrl-C or SIGTERM.
    """

    requested: bool = False


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request; the second acts as it did before."""
    stop = StopRequest()
    previous: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        restore()

    def restore() -> None:
        for known, handler in previous.items():
            signal.signal(known, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, request)
    except ValueError:
        # Only the main thread may set handlers; elsewhere whoever owns it decides.
        previous.clear()
    try:
        yield stop
    finally:
        restore()
