"""What a federated fine-tune computes and sends: bytes a round, samples a joule.

Model sizes, LoRA parameter counts and GPU throughputs with their sources are in `workload.yaml` beside this module.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pydantic import Field

from wattgym.config import FrozenModel, load_config
from wattgym.envs.federation.config import WorkloadConfig
from wattgym.errors import UserError
from wattgym.hw.presets import gpu_preset


class ModelSize(FrozenModel):
    """A model's size.

    Attributes:
        params: Weights.
        lora_qv: LoRA parameters per rank with adapters on the query and value projections.
        lora_all: LoRA parameters per rank with adapters on every linear layer.
    """

    params: float = Field(gt=0)
    lora_qv: int = Field(gt=0)
    lora_all: int = Field(gt=0)


class _WorkloadFile(FrozenModel):
    models: dict[str, ModelSize]
    gpus: dict[str, float]


@cache
def _file() -> _WorkloadFile:
    return load_config(_WorkloadFile, Path(__file__).with_name("workload.yaml"))


def model_size(name: str) -> ModelSize:
    """Size of a model.

    Raises:
        UserError: The model is not in the table; the message lists those that are.
    """
    models = _file().models
    if name not in models:
        raise UserError(f"workload.model: unknown '{name}'; known: {', '.join(models)}")
    return models[name]


def transfer_bytes(config: WorkloadConfig) -> float:
    """Bytes that one site sends (and receives) in one round.

    Adapters: rank × LoRA parameters per rank × bytes a value; full fine-tuning sends every weight.

    Raises:
        UserError: The model is unknown.
    """
    size = model_size(config.model)
    if config.adapter == "full":
        return size.params * config.bytes_per_value
    per_rank = size.lora_qv if config.adapter == "lora_qv" else size.lora_all
    return float(config.rank * per_rank * config.bytes_per_value)


def flop_per_sample(config: WorkloadConfig) -> float:
    """Floating-point operations to train on one sample.

    Full training costs 6 operations per weight and token (forward 2, activation gradients 2, weight gradients 2); LoRA
    leaves out the weight gradients of the frozen weights and costs about 4.

    Raises:
        UserError: The model is unknown.
    """
    per_weight = 6.0 if config.adapter == "full" else 4.0
    return per_weight * model_size(config.model).params * config.sequence_tokens


def gpu_power_w(gpu: str, config: WorkloadConfig) -> float:
    """IT power of one GPU in training with its share of the host, W.

    Raises:
        UserError: The GPU is unknown.
    """
    return gpu_preset(gpu).training_w.value * (1.0 + config.host_share)


def samples_per_joule(gpu: str, config: WorkloadConfig) -> float:
    """Samples trained on per joule of IT energy.

    Raises:
        UserError: The GPU or the model is unknown.
    """
    peaks = _file().gpus
    if gpu not in peaks:
        raise UserError(f"unknown GPU '{gpu}'; known: {', '.join(peaks)}")
    samples_per_s = peaks[gpu] * 1e12 * config.mfu / flop_per_sample(config)
    return samples_per_s / gpu_power_w(gpu, config)
