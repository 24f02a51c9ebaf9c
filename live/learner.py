"""A model with its adapter, its optimiser and its records: gradient steps and losses, paced by the knobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wattgym.errors import UserError
from wattgym.live.config import JobConfig
from wattgym.live.models import is_out_of_memory, load_model
from wattgym.live.pacing import Reporter
from wattgym.live.text import IGNORED, Sequences, Tokeniser, split


class LoadedModel:
    """A model with a fresh adapter, on its device.

    Attributes:
        model: The peft model.
        tokeniser: Its tokeniser.
        device: `cpu` or `cuda`.
        device_name: Device and number format, for people.
    """

    def __init__(self, config: JobConfig) -> None:
        """Loads it.

        Raises:
            UserError: The model cannot be loaded, the adapter does not fit it, or memory ran out.
        """
        torch.set_num_threads(config.threads)
        self.device = find_device(config.device)
        self.device_name = _device_name(self.device)
        self.tokeniser: Tokeniser
        try:
            self.model, self.tokeniser = load_model(config, self.device)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"out of memory on {self.device_name} while loading the model") from None

    @property
    def parameters(self) -> list[Any]:
        """The adapter's parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class Learner:
    """Trains one adapter.

    The loss of an update is the mean over its answer tokens. Each micro-batch contributes its sum over that count, so
    that every split of the same samples gives the same gradient but for rounding.

    Args:
        config: Optimiser and what is told in messages.
        loaded: The model.
        data: The records.
        reporter: The job's side of its channel; paces the work.

    Attributes:
        model: The peft model.
        data: The records.
        parameters: The adapter's parameters.
        optimiser: AdamW over them.
        rng: Random generators' states as a checkpoint needs them: before the running step, or after the last one.
    """

    def __init__(self, config: JobConfig, loaded: LoadedModel, data: Sequences, reporter: Reporter) -> None:
        self.model = loaded.model
        self.data = data
        self._config = config
        self._reporter = reporter
        self._device = loaded.device
        self.parameters = loaded.parameters
        self.optimiser = torch.optim.AdamW(
            self.parameters, lr=config.optimiser.learning_rate, weight_decay=config.optimiser.weight_decay
        )
        self.rng = self.rng_state()

    def step(self, indices: Sequence[int], learning_rate: float) -> float | None:
        """One optimiser step.

        Args:
            indices: The records of the update.
            learning_rate: Learning rate.

        Returns:
            The loss, nats; None if a stop was asked for before the step was complete, and then nothing has changed.

        Raises:
            UserError: Memory ran out, or the loss is no number.
        """
        reporter = self._reporter
        micro_batch = reporter.begin_step()
        before = reporter.status
        self.rng = self.rng_state()
        answer_tokens = self.data.answer_tokens(indices)
        batches = list(split(indices, micro_batch))
        loss = 0.0
        for number, batch in enumerate(batches, start=1):
            if reporter.stop.reason:
                self.optimiser.zero_grad()
                reporter.publish(samples=before.samples, tokens=before.tokens)
                return None
            with reporter.work():
                loss += self.backward(batch, answer_tokens)
                reporter.publish(
                    samples=reporter.status.samples + len(batch),
                    tokens=reporter.status.tokens + self.data.tokens(batch),
                )
                if number == len(batches):
                    with self.memory_guard(self.data, batch):
                        self.update(before.steps, loss, learning_rate)
                    reporter.end_step(loss)
                    self.rng = self.rng_state()
        return loss

    def loss_sum(self, data: Sequences, batch: Sequence[int]) -> torch.Tensor:
        """Summed loss of the answer tokens of some records, nats."""
        logits, targets = self._logits(data, batch)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def scores(self, data: Sequences, batch: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Of each of some records, the summed loss of its answer (nats) and whether the answer is exactly right.

        Right means that each of its tokens is the likeliest one after those before it, which is when greedy decoding
        would write it.
        """
        with torch.no_grad():
            logits, targets = self._logits(data, batch)
            logits = logits.float()
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none"
            )
            right = (logits.argmax(dim=-1) == targets) | (targets == IGNORED)
        return losses.double().sum(dim=1).cpu().numpy(), right.all(dim=1).cpu().numpy()

    @contextmanager
    def memory_guard(self, data: Sequences, batch: Sequence[int]) -> Iterator[None]:
        """Turns an exhausted memory into one line.

        Raises:
            UserError: Memory ran out in the block.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            longest = max(data.ids[i].size for i in batch)
            raise UserError(
                f"out of memory on {_device_name(self._device)} in a micro-batch of {len(batch)} x {longest} tokens; "
                "lower micro_batch or data.max_tokens, or set gradient_checkpointing"
            ) from None

    def rng_state(self) -> dict[str, Any]:
        """States of the random generators."""
        state = {"cpu": torch.get_rng_state()}
        if self._device == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def restore_rng(self, state: dict[str, Any]) -> None:
        """Puts states of the random generators back."""
        self.rng = state
        torch.set_rng_state(state["cpu"])
        if self._device == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    def _logits(self, data: Sequences, batch: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = data.batch(batch)
        inputs = torch.from_numpy(ids).to(self._device)
        targets = torch.from_numpy(labels).to(self._device)
        # Padding lies on the right, where a causal model never looks: no attention mask is needed.
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._device == "cuda"):
            logits = self.model(input_ids=inputs, use_cache=False).logits
        return logits, targets

    def backward(self, batch: list[int], answer_tokens: int) -> float:
        """Adds the gradient of some records to what there is.

        Args:
            batch: The records.
            answer_tokens: Answer tokens of all records of the step.

        Returns:
            Their part of the step's loss, nats.

        Raises:
            UserError: Memory ran out.
        """
        with self.memory_guard(self.data, batch):
            loss = self.loss_sum(self.data, batch) / answer_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.item())  # also waits for the GPU, so that the unit's time is its real one

    def update(self, steps: int, loss: float, learning_rate: float) -> None:
        """Takes a step along the gradient that there is, and clears it.

        Args:
            steps: Steps before.
            loss: Loss of the step, nats.
            learning_rate: Learning rate.

        Raises:
            UserError: The loss is no number.
        """
        if not math.isfinite(loss):
            raise UserError(
                f"step {steps + 1}: the loss is {loss}; lower optimiser.learning_rate "
                f"({self._config.optimiser.learning_rate:g})"
            )
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate
        torch.nn.utils.clip_grad_norm_(self.parameters, self._config.optimiser.max_grad_norm)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self._device == "cuda":
            torch.cuda.synchronize()


def find_device(wanted: str) -> str:
    """`cpu` or `cuda`.

    Args:
        wanted: One of these, or `auto`.

    Raises:
        UserError: There is no usable GPU though one was asked for.
    """
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UserError("device 'cuda' was asked for, but torch finds no usable GPU; valid here: cpu, auto")
    return "cpu"


def _device_name(device: str) -> str:
    return f"cuda ({torch.cuda.get_device_name()}), bfloat16" if device == "cuda" else "cpu, float32"
