"""The training loop: LoRA with a constant number of samples per update, whatever the pace and the micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from wattgym.errors import UserError
from wattgym.live.channel import JobState, JobStatus
from wattgym.live.checkpoint import Manifest, load_checkpoint, newest_checkpoint, save_checkpoint
from wattgym.live.config import JobConfig
from wattgym.live.log import EVALUATIONS, EVALUATIONS_FILE, STEPS, STEPS_FILE, Table
from wattgym.live.models import is_out_of_memory, load_model
from wattgym.live.pacing import Reporter
from wattgym.live.records import Example
from wattgym.live.text import IGNORED, Order, Sequences, split, tokenise
from wattgym.phase import Phase

CHECKPOINTS = "checkpoints"


class Trainer:
    """A loaded job.

    The loss of an update is the mean over its answer tokens. Each micro-batch contributes its sum over that count, so
    that every split of the same samples gives the same gradient but for rounding.

    Args:
        config: The job.
        examples: Its records.
        folder: Run folder; takes up the newest checkpoint in it.
        reporter: The job's side of its channel.

    Raises:
        UserError: The model or the data cannot be used, the newest checkpoint does not fit, or memory ran out.
    """

    def __init__(self, config: JobConfig, examples: Sequence[Example], folder: Path, reporter: Reporter) -> None:
        torch.set_num_threads(config.threads)
        self._config = config
        self._reporter = reporter
        self._checkpoints = folder / CHECKPOINTS
        self._device = _device(config.device)
        reporter.publish(device=_device_name(self._device))
        try:
            self._model, tokeniser = load_model(config, self._device)
        except (RuntimeError, MemoryError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"out of memory on {reporter.status.device} while loading the model") from None
        self._data: Sequences = tokenise(examples, tokeniser, config.data.max_tokens)
        self._digest = self._data.digest()
        self._order = Order(len(self._data.ids), config.data.holdout, config.seed)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._parameters, lr=config.optimiser.learning_rate, weight_decay=config.optimiser.weight_decay
        )
        torch.manual_seed(config.seed)
        self._rng = self._rng_state()
        self._evaluated_step: int | None = None
        found = newest_checkpoint(self._checkpoints)
        if found is not None:
            self._take_up(*found)
        steps = reporter.status.steps
        self._steps_table = Table(folder / STEPS_FILE, STEPS, steps)
        self._evaluations_table = Table(folder / EVALUATIONS_FILE, EVALUATIONS, self._evaluated_step or 0)

    def run(self, on_step: Callable[[JobStatus], None] = lambda status: None) -> JobState:
        """Trains until `max_steps`, or until the stop flag is raised; then saves a last checkpoint.

        Args:
            on_step: Told the status after each step.

        Returns:
            `FINISHED` or `STOPPED`.

        Raises:
            UserError: Memory ran out, the loss is no number, or the last checkpoint could not be written.
        """
        reporter = self._reporter
        with reporter.phase(Phase.COMPUTE):
            reporter.publish(state=JobState.RUNNING)
            while True:
                self._evaluate_if_due()
                self._save_if_due()
                if reporter.stop.reason or self._done or not self._step():
                    break
                on_step(reporter.status)
        self._save()
        return JobState.FINISHED if self._done else JobState.STOPPED

    @property
    def _done(self) -> bool:
        return self._config.max_steps is not None and self._reporter.status.steps >= self._config.max_steps

    def _step(self) -> bool:
        """One optimiser step; False if a stop was asked for before it was complete, and then nothing has changed."""
        reporter, size = self._reporter, self._config.samples_per_update
        micro_batch = reporter.begin_step()
        before = reporter.status
        self._rng = self._rng_state()
        indices = self._order.samples(before.steps * size, size)
        answer_tokens = self._data.answer_tokens(indices)
        batches = list(split(indices, micro_batch))
        loss = 0.0
        for number, batch in enumerate(batches, start=1):
            if reporter.stop.reason:
                self._optimiser.zero_grad()
                reporter.publish(samples=before.samples, tokens=before.tokens)
                return False
            with reporter.work():
                loss += self._backward(batch, answer_tokens)
                reporter.publish(
                    samples=reporter.status.samples + len(batch),
                    tokens=reporter.status.tokens + self._data.tokens(batch),
                )
                if number == len(batches):
                    with self._memory_guard(batch):
                        self._update(before.steps, loss)
                    reporter.end_step(loss)
                    self._rng = self._rng_state()
        times = reporter.step_times()
        status = reporter.status
        self._record(
            self._steps_table, status.steps, status.samples, status.tokens, loss, micro_batch, *times,
            status.duty, status.speed,
        )  # fmt: skip
        return True

    def _backward(self, batch: list[int], answer_tokens: int) -> float:
        with self._memory_guard(batch):
            loss = self._loss_sum(batch) / answer_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            return float(loss.item())  # also waits for the GPU, so that the unit's time is its real one

    @contextmanager
    def _memory_guard(self, batch: list[int]) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            longest = max(self._data.ids[i].size for i in batch)
            raise UserError(
                f"out of memory on {self._reporter.status.device} in a micro-batch of {len(batch)} x {longest} tokens; "
                "lower micro_batch or data.max_tokens, or set gradient_checkpointing"
            ) from None

    def _loss_sum(self, batch: list[int]) -> torch.Tensor:
        """Summed loss of the answer tokens of some records, nats."""
        ids, labels = self._data.batch(batch)
        inputs = torch.from_numpy(ids).to(self._device)
        targets = torch.from_numpy(labels).to(self._device)
        # Padding lies on the right, where a causal model never looks: no attention mask is needed.
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self._device == "cuda"):
            logits = self._model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def _update(self, steps: int, loss: float) -> None:
        settings = self._config.optimiser
        if not math.isfinite(loss):
            raise UserError(
                f"step {steps + 1}: the loss is {loss}; lower optimiser.learning_rate ({settings.learning_rate:g})"
            )
        for group in self._optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (steps + 1) / (settings.warmup_steps + 1))
        torch.nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        self._optimiser.step()
        self._optimiser.zero_grad()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _evaluate_if_due(self) -> None:
        reporter, every = self._reporter, self._config.evaluate_every
        steps = reporter.status.steps
        if not every or steps == 0 or steps % every or steps == self._evaluated_step:
            return
        held_out = self._order.held_out
        total = 0.0
        with reporter.phase(Phase.EVALUATE), torch.no_grad():
            self._model.eval()
            for batch in split(held_out, reporter.status.micro_batch):
                with reporter.work(), self._memory_guard(batch):
                    total += float(self._loss_sum(batch).item())
                if reporter.stop.reason:
                    break
            else:
                loss = total / self._data.answer_tokens(held_out)
                self._evaluated_step = steps
                reporter.publish(eval_loss=loss, eval_step=steps)
                self._record(self._evaluations_table, steps, reporter.status.samples, loss)
            self._model.train()

    def _record(self, table: Table, *values: float) -> None:
        try:
            table.append(*values)
        except OSError as error:
            self._reporter.publish(warning=f"cannot write the log: {error.strerror}; rows are kept until it can")

    def _save_if_due(self) -> None:
        """A checkpoint in passing: where the disk refuses, the job goes on with the one before."""
        every, steps = self._config.checkpoint_every, self._reporter.status.steps
        if not every or steps == 0 or steps % every:
            return
        try:
            self._save()
        except UserError as error:
            self._reporter.publish(warning=f"{error}; {self._kept()}")

    def _save(self) -> None:
        status = self._reporter.status
        if status.checkpoint_step == status.steps:
            return
        manifest = Manifest(
            steps=status.steps,
            samples=status.samples,
            tokens=status.tokens,
            data=self._digest,
            evaluated_step=self._evaluated_step,
            eval_loss=status.eval_loss,
            losses=self._reporter.recent_losses,
            sha256={},
        )
        with self._reporter.phase(Phase.CHECKPOINT):
            save_checkpoint(
                self._checkpoints, manifest, self._model, self._optimiser, self._rng, self._config.keep_checkpoints
            )
            self._reporter.publish(checkpoint_step=status.steps, warning="")

    def _kept(self) -> str:
        step = self._reporter.status.checkpoint_step
        return "there is none yet" if step is None else f"the one at step {step} is intact"

    def _take_up(self, folder: Path, manifest: Manifest) -> None:
        if manifest.samples != manifest.steps * self._config.samples_per_update:
            raise UserError(f"{folder}: {manifest.samples} samples in {manifest.steps} steps do not fit this job")
        if manifest.data != self._digest:
            raise UserError(f"{folder}: the records have changed since this checkpoint; start a new run with them")
        self._rng = load_checkpoint(folder, self._model, self._optimiser)
        torch.set_rng_state(self._rng["cpu"])
        if self._device == "cuda" and "cuda" in self._rng:
            torch.cuda.set_rng_state(self._rng["cuda"])
        self._evaluated_step = manifest.evaluated_step
        self._reporter.restore_losses(manifest.losses)
        last = manifest.losses[-1] if manifest.losses else None
        mean = sum(manifest.losses) / len(manifest.losses) if manifest.losses else None
        self._reporter.publish(
            steps=manifest.steps, samples=manifest.samples, tokens=manifest.tokens, loss=last, loss_mean=mean,
            eval_loss=manifest.eval_loss, eval_step=manifest.evaluated_step, checkpoint_step=manifest.steps,
        )  # fmt: skip

    def _rng_state(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        if self._device == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        return state


def _device(wanted: str) -> str:
    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UserError("device 'cuda' was asked for, but torch finds no usable GPU; valid here: cpu, auto")
    return "cpu"


def _device_name(device: str) -> str:
    return f"cuda ({torch.cuda.get_device_name()}), bfloat16" if device == "cuda" else "cpu, float32"
