"""What happens beside learning: logs, validation, best policy, checkpoints, progress, orderly stops."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecNormalize

from wattgym.agents.checkpoint import policy_controller, save_checkpoint
from wattgym.agents.config import AnyTrainingConfig
from wattgym.agents.problem import Problem, Validator
from wattgym.files import atomic_write_json

VALIDATIONS = "validations.json"
"""File of the run folder with every validation so far."""

Progress = bool | Callable[[int], object]
"""A progress bar on stderr or none, or who is told the steps trained so far."""


class StopTraining(KeyboardInterrupt):
    """Raised at a rollout's start, where a checkpoint continues exactly; a Ctrl-C that has been dealt with."""


class StopFlag(Protocol):
    """Whether a stop was asked for."""

    requested: bool


class TrainingCallback(BaseCallback):
    """Validates, saves and reports at the start of rollouts, when model and environment are consistent."""

    def __init__(
        self,
        config: AnyTrainingConfig,
        problem: Problem,
        folder: Path,
        validation: Validator,
        stop: StopFlag,
        progress: Progress,
    ) -> None:
        """Prepares for a training.

        Args:
            config: The training's configuration.
            problem: Its control problem.
            folder: Run folder.
            validation: What policies are compared on.
            stop: Looked at before each rollout.
            progress: Show a progress bar on stderr, or whom to tell the steps.
        """
        super().__init__()
        self.best_reward: float | None = None
        self._validations: list[dict[str, Any]] = []
        self._config = config
        self._problem = problem
        self._folder = folder
        self._stop = stop
        self._show = progress
        self._bar: Any = None
        self._validation = validation
        self._next_validation = config.validate_steps
        self._next_checkpoint = config.train.checkpoint_steps

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up the schedule of an interrupted run."""
        self.best_reward = state["best_reward"]
        self._validations = state.get("validations", [])
        self._next_validation = state["next_validation"]
        self._next_checkpoint = state["next_checkpoint"]

    def validate_and_save_next(self) -> None:
        """Has the next rollout begin with a validation and a checkpoint."""
        self._next_validation = self._next_checkpoint = 0

    def finish(self) -> None:
        """Last validation and checkpoint of a completed training."""
        self._update_bar()
        self._validate()
        self._checkpoint()

    def close(self) -> None:
        """Ends the progress bar."""
        if self._bar is not None:
            self._bar.close()

    def _on_training_start(self) -> None:
        self._problem.begin(self._normalise.venv)
        if self._show is True:
            from tqdm import tqdm

            total = self._config.train.total_steps
            self._bar = tqdm(total=total, initial=self.model.num_timesteps, unit="step", unit_scale=True, desc="train")

    def _on_rollout_start(self) -> None:
        steps = self.model.num_timesteps
        self._update_bar()
        if steps >= self._next_validation:
            self._next_validation = steps + self._config.validate_steps
            self._validate()
        if self._stop.requested or steps >= self._next_checkpoint:
            self._next_checkpoint = steps + self._config.train.checkpoint_steps
            self._checkpoint()
        if self._stop.requested:
            raise StopTraining

    def _on_step(self) -> bool:
        self._problem.record(self._normalise.venv, self.logger.record_mean)
        return True

    @property
    def _normalise(self) -> VecNormalize:
        wrapper = self.model.get_vec_normalize_env()
        assert wrapper is not None
        return wrapper

    def _update_bar(self) -> None:
        if self._bar is not None:
            self._bar.update(self.model.num_timesteps - self._bar.n)
        elif callable(self._show):
            self._show(self.model.num_timesteps)

    def _features(self) -> tuple[str, ...]:
        return self._problem.features(self._normalise.venv)

    def _validate(self) -> None:
        features = self._features()
        scores = self._validation.run(policy_controller(self.model, features, "policy"))
        for family, metrics in scores.by_family.items():
            for name, value in metrics.items():
                self.model.logger.record(f"validation_{family}/{name}", value)
        self.model.logger.record("validation/reward", scores.reward)
        self.model.logger.dump(self.model.num_timesteps)
        if self.best_reward is None or scores.reward > self.best_reward:
            self.best_reward = scores.reward
            save_checkpoint(self._folder / "best", self.model, self._config.train.algorithm, features, None)
        self._validations.append(
            {
                "steps": self.model.num_timesteps,
                "reward": _finite(scores.reward),
                "families": {
                    family: {name: _finite(value) for name, value in metrics.items()}
                    for family, metrics in scores.by_family.items()
                },
            }
        )
        atomic_write_json(self._folder / VALIDATIONS, {"validations": self._validations})
        if self._bar is not None:
            self._bar.set_postfix_str(f"validation reward {scores.reward:.4f}, best {self.best_reward:.4f}")

    def _checkpoint(self) -> None:
        normalise = self._normalise
        state: dict[str, Any] = {
            "normalise": normalise,
            "returns": normalise.returns,
            "env": normalise.venv,
            "callback": {
                "best_reward": self.best_reward,
                "validations": self._validations,
                "next_validation": self._next_validation,
                "next_checkpoint": self._next_checkpoint,
            },
        }
        if self._config.train.algorithm == "recurrent_ppo":
            state["lstm_states"] = self.model._last_lstm_states  # type: ignore[attr-defined]
        folder = self._folder / "checkpoints" / f"step_{self.model.num_timesteps:012d}"
        save_checkpoint(folder, self.model, self._config.train.algorithm, self._features(), state)
        for older in sorted(folder.parent.glob("step_*"))[:-2]:
            shutil.rmtree(older, ignore_errors=True)


def _finite(value: float) -> float | None:
    """JSON has no word for what a policy that has diverged may score."""
    return value if math.isfinite(value) else None
