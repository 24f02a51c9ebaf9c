"""Configuration of a training run: environment, algorithm, validation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.envs.config import PowerShapingConfig

Algorithm = Literal["ppo", "recurrent_ppo", "sac", "tqc"]
ON_POLICY: tuple[Algorithm, ...] = ("ppo", "recurrent_ppo")


class NetworkConfig(FrozenModel):
    """The policy's and the critic's network.

    Attributes:
        hidden: Sizes of the hidden layers, the same for policy and critic.
        activation: Activation between them.
        log_std_init: PPO and recurrent PPO only: logarithm of the initial exploration noise.
        lstm_hidden: Recurrent PPO only: size of the LSTM between observation and hidden layers.
    """

    hidden: tuple[int, ...] = Field(default=(128, 128), min_length=1)
    activation: Literal["tanh", "relu"] = "tanh"
    log_std_init: float = -1.0
    lstm_hidden: int = Field(default=64, ge=1)


class ValidationConfig(FrozenModel):
    """How checkpoints are compared during training, on the validation split.

    Attributes:
        every_steps: Environment steps between validations.
        scenarios: Scenarios per signal family; the same each time.
        families: Signal families.
        episode_s: Episode length, seconds.
    """

    every_steps: int = Field(default=200_000, ge=1)
    scenarios: int = Field(default=16, ge=1)
    families: tuple[str, ...] = Field(default=("rega", "droop"), min_length=1)
    episode_s: float = Field(default=2400.0, gt=0.0)


class TrainConfig(FrozenModel):
    """How to train.

    Attributes:
        algorithm: PPO, SAC (stable-baselines3), recurrent PPO or TQC (sb3-contrib).
        total_steps: Environment steps over all environments of the batch.
        num_envs: Batch size.
        learning_rate_end: The learning rate falls linearly from its start to this one; None keeps it constant.
        hyperparameters: Keyword arguments of the algorithm's class beside the ones set here.
        normalise_observations: Scale observations by running statistics, which are saved with the policy.
        normalise_rewards: Scale rewards by the running spread of returns (training only).
        checkpoint_steps: Environment steps between checkpoints to resume from.
        threads: Threads of torch; one is fastest for small networks.
    """

    algorithm: Algorithm = "ppo"
    total_steps: int = Field(default=1_500_000, ge=1)
    num_envs: int = Field(default=64, ge=1)
    learning_rate_end: float | None = Field(default=None, gt=0.0)
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    normalise_observations: bool = True
    normalise_rewards: bool = True
    checkpoint_steps: int = Field(default=200_000, ge=1)
    threads: int = Field(default=1, ge=1)


class TrainingConfig(FrozenModel):
    """One training run.

    Attributes:
        env: The environment trained in.
        train: Algorithm and budget.
        network: Networks.
        validation: Selection of the best checkpoint.
        seed: The run's one seed.
    """

    env: PowerShapingConfig = Field(default_factory=PowerShapingConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _network_is_read(self) -> TrainingConfig:
        # Keys that nothing would read are refused, as misspelt ones are.
        default, algorithm = NetworkConfig(), self.train.algorithm
        readers: dict[str, tuple[Algorithm, ...]] = {"log_std_init": ON_POLICY, "lstm_hidden": ("recurrent_ppo",)}
        for key, algorithms in readers.items():
            if algorithm not in algorithms and getattr(self.network, key) != getattr(default, key):
                raise ValueError(
                    f"network.{key} has no meaning for '{algorithm}'; it goes with {', '.join(algorithms)}"
                )
        return self

    @model_validator(mode="after")
    def _trains_on_training_data(self) -> TrainingConfig:
        if self.env.signal.split != "train":
            raise ValueError(f"env.signal.split must be 'train' in a training run, got '{self.env.signal.split}'")
        if self.env.site.surfaces in ("validation", "test"):
            raise ValueError(f"env.site.surfaces must not be the held-out split '{self.env.site.surfaces}'")
        return self


DEFAULTS: dict[Algorithm, dict[str, Any]] = {
    "ppo": {
        "n_steps": 128,
        "n_epochs": 6,
        "gamma": 0.9,
        "gae_lambda": 0.9,
        "learning_rate": 1e-3,
        "ent_coef": 0.0,
        "clip_range": 0.2,
    },
    "recurrent_ppo": {
        "n_steps": 128,
        "n_epochs": 6,
        "gamma": 0.9,
        "gae_lambda": 0.9,
        "learning_rate": 1e-3,
        "ent_coef": 0.0,
        "clip_range": 0.2,
    },
    "sac": {
        "learning_rate": 1e-3,
        "gamma": 0.9,
        "batch_size": 256,
        "train_freq": 1,
        "gradient_steps": 1,
        "buffer_size": 300_000,
        "learning_starts": 5000,
    },
    "tqc": {
        "learning_rate": 1e-3,
        "gamma": 0.9,
        "batch_size": 256,
        "train_freq": 1,
        "gradient_steps": 1,
        "buffer_size": 300_000,
        "learning_starts": 5000,
    },
}
"""Hyper-parameters by algorithm; `train.hyperparameters` replaces single ones.

PPO's `batch_size` is a quarter of the rollout (`n_steps` times `train.num_envs`) unless it is given.

The discount is short because a limit acts within seconds: what a controller does now matters for the next few periods.
"""
