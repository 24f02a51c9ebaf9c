"""Configuration of a training run: environment, algorithm, validation; one form for either control problem."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from wattgym.agents.episodes import Problem
from wattgym.agents.search_space import SearchRange
from wattgym.config import FrozenModel, parse_config, read_yaml
from wattgym.envs.config import PowerShapingConfig, RewardConfig
from wattgym.envs.federation.config import SiteSelectionConfig
from wattgym.errors import UserError

Algorithm = Literal["ppo", "recurrent_ppo", "sac", "tqc"]
ON_POLICY: tuple[Algorithm, ...] = ("ppo", "recurrent_ppo")


class NetworkConfig(FrozenModel):
    """The policy's and the critic's network.

    Attributes:
        architecture: `mlp` reads the observation as it is. `per_job` has one network for every job, which sees the
            site's features and the job's own (power shaping with PPO only). `deep_sets` and `set_attention` share
            weights over sites, so that one policy serves any number of them (site selection with PPO only).
        hidden: Sizes of the hidden layers, the same for policy and critic; over sites all the same.
        activation: Activation between them.
        log_std_init: PPO and recurrent PPO only: logarithm of the initial exploration noise.
        lstm_hidden: Recurrent PPO only: size of the LSTM between observation and hidden layers.
        heads: Set attention only: heads of each layer.
        zero_head: `mlp` and `per_job` only: the layer that gives the (mean) action begins at zero, so that a residual
            policy begins as what it is added to.
    """

    architecture: Literal["mlp", "per_job", "deep_sets", "set_attention"] = "mlp"
    hidden: tuple[int, ...] = Field(default=(128, 128), min_length=1)
    activation: Literal["tanh", "relu"] = "tanh"
    log_std_init: float = -1.0
    lstm_hidden: int = Field(default=64, ge=1)
    heads: int = Field(default=4, ge=1)
    zero_head: bool = False

    @model_validator(mode="after")
    def _sizes(self) -> NetworkConfig:
        if self.over_sites and len(set(self.hidden)) > 1:
            raise ValueError(f"'{self.architecture}' needs hidden layers of one size, got {list(self.hidden)}")
        if self.architecture == "set_attention" and self.hidden[0] % self.heads:
            raise ValueError(f"hidden size {self.hidden[0]} is no multiple of {self.heads} heads")
        if self.over_sites and self.zero_head:
            raise ValueError(f"zero_head goes with network.architecture 'mlp' or 'per_job', not '{self.architecture}'")
        return self

    @property
    def over_sites(self) -> bool:
        """Whether weights are shared over sites."""
        return self.architecture in ("deep_sets", "set_attention")


class ValidationConfig(FrozenModel):
    """How checkpoints are compared during training, on the validation split.

    Attributes:
        every_steps: Environment steps between validations.
        scenarios: Scenarios per signal family; the same each time.
        families: Signal families.
        episode_s: Episode length, seconds.
        reward: Weights of the reward that policies are compared by; None: those they are trained for. A policy may be
            trained for other weights than it is judged by.
    """

    every_steps: int = Field(default=200_000, ge=1)
    scenarios: int = Field(default=16, ge=1)
    families: tuple[str, ...] = Field(default=("rega", "droop"), min_length=1)
    episode_s: float = Field(default=2400.0, gt=0.0)
    reward: RewardConfig | None = None


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


class BaseTrainingConfig(FrozenModel):
    """What trainings for either control problem have in common.

    Attributes:
        problem: Which control problem is trained for.
        train: Algorithm and budget.
        network: Networks.
        seed: The run's one seed.
        search: Ranges of `wattgym tune`, by dotted key; a training does not read them.
    """

    problem: Problem
    train: TrainConfig = Field(default_factory=TrainConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    seed: int = Field(default=0, ge=0)
    search: dict[str, SearchRange] = Field(default_factory=dict)

    @property
    @abstractmethod
    def validate_steps(self) -> int:
        """Environment steps between validations."""

    @model_validator(mode="after")
    def _network_is_read(self) -> BaseTrainingConfig:
        # Keys that nothing would read are refused, as misspelt ones are.
        default, network, algorithm = NetworkConfig(), self.network, self.train.algorithm
        readers: dict[str, tuple[Algorithm, ...]] = {"log_std_init": ON_POLICY, "lstm_hidden": ("recurrent_ppo",)}
        for key, algorithms in readers.items():
            if algorithm not in algorithms and getattr(network, key) != getattr(default, key):
                raise ValueError(
                    f"network.{key} has no meaning for '{algorithm}'; it goes with {', '.join(algorithms)}"
                )
        if network.architecture != "set_attention" and network.heads != default.heads:
            raise ValueError("network.heads goes with network.architecture 'set_attention'")
        return self


class CloningConfig(FrozenModel):
    """Warm start on training scenarios: the policy learns to act as a controller does.

    Attributes:
        expert: The controller, by its name among the baselines; None: no warm start.
        steps: Environment steps that the expert plays.
        passes: After them, how often the policy plays as many steps itself and the expert says what it would have done.
        epochs: Sweeps over all steps so far after each share.
        batch_size: Decisions a gradient step.
        learning_rate: Step size of Adam.
    """

    expert: str | None = None
    steps: int = Field(default=40_000, ge=1)
    passes: int = Field(default=2, ge=0)
    epochs: int = Field(default=4, ge=1)
    batch_size: int = Field(default=1024, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0.0)


class TrainingConfig(BaseTrainingConfig):
    """A training for power shaping.

    Attributes:
        problem: Power shaping.
        env: The environment trained in.
        imitation: Warm start.
        validation: Selection of the best checkpoint.
    """

    problem: Literal["power_shaping"] = "power_shaping"
    env: PowerShapingConfig = Field(default_factory=PowerShapingConfig)
    imitation: CloningConfig = Field(default_factory=CloningConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)

    @property
    def validate_steps(self) -> int:
        """Environment steps between validations."""
        return self.validation.every_steps

    @model_validator(mode="after")
    def _trains_on_training_data(self) -> TrainingConfig:
        if self.env.signal.split != "train":
            raise ValueError(f"env.signal.split must be 'train' in a training run, got '{self.env.signal.split}'")
        if self.env.site.surfaces in ("validation", "test"):
            raise ValueError(f"env.site.surfaces must not be the held-out split '{self.env.site.surfaces}'")
        if self.network.over_sites:
            raise ValueError(f"network.architecture '{self.network.architecture}' goes with problem 'site_selection'")
        if self.network.architecture == "per_job" and self.train.algorithm != "ppo":
            raise ValueError("network.architecture 'per_job' goes with train.algorithm 'ppo'")
        return self

    @model_validator(mode="after")
    def _expert_is_known(self) -> TrainingConfig:
        expert = self.imitation.expert
        if expert is None:
            if self.imitation != CloningConfig():
                raise ValueError("imitation has settings but no expert")
            return self
        from wattgym.agents.adviser import ADVISER
        from wattgym.agents.baselines import BASELINES, ENERGY_MATCHED, usable

        if (expert == ADVISER) != (self.env.action.kind == "advice"):
            raise ValueError(f"imitation.expert '{ADVISER}' and env.action.kind 'advice' go together")
        if expert == ADVISER:
            return self
        known = [name for name in BASELINES if name != ENERGY_MATCHED and usable(name, self.env.action.knobs)]
        if expert not in known:
            raise ValueError(f"imitation.expert '{expert}' is unknown or needs other knobs; known: {', '.join(known)}")
        if self.train.algorithm == "recurrent_ppo":
            raise ValueError("imitation goes with algorithms without memory, train.algorithm is 'recurrent_ppo'")
        return self


class FamilyConfig(FrozenModel):
    """One family of training scenarios.

    Attributes:
        envs: Share of the batch's environments, relative to the other families'.
        env: The family's environment.
    """

    envs: float = Field(default=1.0, gt=0.0)
    env: SiteSelectionConfig = Field(default_factory=SiteSelectionConfig)


class SelectionValidationConfig(FrozenModel):
    """How site-selection checkpoints are compared during training, on the validation split.

    Attributes:
        every_steps: Environment steps between validations.
        scenarios: Scenarios per family; the same each time.
    """

    every_steps: int = Field(default=100_000, ge=1)
    scenarios: int = Field(default=32, ge=1)


class ImitationConfig(FrozenModel):
    """Warm start on training scenarios: the policy learns from an expert, then from counterfactuals of its own choices.

    Attributes:
        expert: `oracle`: the myopic oracle, which knows the emulator's true state. `powertrip`: PowerTrip's greedy on
            predicted efficiency. None: no warm start.
        steps: Environment steps of expert decisions to learn from.
        passes: After them, how often the policy plays as many steps itself and learns, for every site, what the other
            decision would have changed in the round just played.
        window: Shares of steps, the latest ones, that are learnt from at a time.
        epochs: Sweeps over them after each share.
        batch_size: Decisions a gradient step.
        learning_rate: Step size of Adam.
    """

    expert: Literal["oracle", "powertrip"] | None = None
    steps: int = Field(default=12_000, ge=1)
    passes: int = Field(default=8, ge=0)
    window: int = Field(default=4, ge=1)
    epochs: int = Field(default=2, ge=1)
    batch_size: int = Field(default=256, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0.0)


class SelectionTrainingConfig(BaseTrainingConfig):
    """A training for site selection.

    Attributes:
        problem: Site selection.
        families: Scenarios trained on, by name; each has its part of the batch and its own validation.
        slots: Sites that observations and actions have room for, the same in every family.
        imitation: Warm start.
        validation: Selection of the best checkpoint.
    """

    problem: Literal["site_selection"]
    families: dict[str, FamilyConfig] = Field(min_length=1)
    slots: int = Field(default=20, ge=1)
    imitation: ImitationConfig = Field(default_factory=ImitationConfig)
    validation: SelectionValidationConfig = Field(default_factory=SelectionValidationConfig)

    @property
    def validate_steps(self) -> int:
        """Environment steps between validations."""
        return self.validation.every_steps

    @property
    def envs(self) -> dict[str, SiteSelectionConfig]:
        """Each family's environment, with the training's slots."""
        return {
            name: family.env.model_copy(
                update={"sites": family.env.sites.model_copy(update={"slots": max(self.slots, family.env.sites.most)})}
            )
            for name, family in self.families.items()
        }

    @model_validator(mode="after")
    def _trains_on_training_data(self) -> SelectionTrainingConfig:
        for name, family in self.families.items():
            for key in ("power", "network", "market"):
                split = getattr(family.env, key).split
                if split != "train":
                    raise ValueError(
                        f"families.{name}.env.{key}.split must be 'train' in a training run, got '{split}'"
                    )
            if family.env.sites.most > self.slots:
                raise ValueError(f"families.{name} has up to {family.env.sites.most} sites, slots is {self.slots}")
        return self

    @model_validator(mode="after")
    def _one_policy_fits_all(self) -> SelectionTrainingConfig:
        (first, one), *others = self.families.items()
        for name, other in others:
            for key in ("action", "observation"):
                if getattr(one.env, key) != getattr(other.env, key):
                    raise ValueError(f"families.{name}.env.{key} differs from that of '{first}'; one policy sees both")
            if one.env.learning.domains != other.env.learning.domains:
                raise ValueError(f"families.{name}.env.learning.domains differs from that of '{first}'")
        if self.network.architecture == "per_job":
            raise ValueError("network.architecture 'per_job' goes with problem 'power_shaping'")
        if self.network.over_sites:
            if self.train.algorithm != "ppo":
                raise ValueError(f"network.architecture '{self.network.architecture}' goes with train.algorithm 'ppo'")
            if one.env.action.kind != "binary":
                raise ValueError(
                    f"network.architecture '{self.network.architecture}' chooses with bits: "
                    "set env.action.kind to 'binary' in every family"
                )
            if self.train.normalise_observations:
                raise ValueError(
                    "train.normalise_observations must be false for a network over sites: "
                    "statistics of single slots would tell equal sites apart"
                )
        elif self.imitation.expert is not None:
            raise ValueError("imitation goes with a network over sites: set network.architecture")
        return self


AnyTrainingConfig = TrainingConfig | SelectionTrainingConfig


def parse_training(data: Any, source: str) -> AnyTrainingConfig:
    """Validates a training configuration of either problem; `problem` says which, power shaping if it is left out.

    Args:
        data: What the file held.
        source: Where it is from, for messages.

    Raises:
        UserError: Names the key and the reason.
    """
    problem = data.get("problem", "power_shaping") if isinstance(data, dict) else "power_shaping"
    if problem == "site_selection":
        return parse_config(SelectionTrainingConfig, data, source)
    if problem != "power_shaping":
        raise UserError(f"{source}: problem is {problem!r}; valid: power_shaping, site_selection")
    return parse_config(TrainingConfig, data, source)


def with_family_files(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A site-selection training's mapping with the families that it names by file in place.

    A family is either a mapping or the name of a scenario file beside the configuration, whose `env` it takes; a
    mapping may name one as `file` and change single keys of its `env`.

    Args:
        data: What the training's file held.
        folder: Where that file lies.

    Raises:
        UserError: A scenario file cannot be read or holds no `env`.
    """
    families = data.get("families")
    if not isinstance(families, dict):
        return dict(data)
    return {**data, "families": {name: _family(name, value, folder) for name, value in families.items()}}


def _family(name: str, value: Any, folder: Path) -> Any:
    value = {"file": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or "file" not in value:
        return value
    rest = {key: item for key, item in value.items() if key != "file"}
    path = folder / str(value["file"])
    scenario = read_yaml(path)
    if not isinstance(scenario, dict) or not isinstance(scenario.get("env"), dict):
        raise UserError(f"families.{name}: {path} holds no 'env'")
    return {**rest, "env": _merged(scenario["env"], rest.get("env") or {})}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


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
