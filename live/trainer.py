"""The training loop: LoRA with a constant number of samples per update, whatever the pace and the micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from wattgym.errors import UserError
from wattgym.live.channel import JobState, JobStatus
from wattgym.live.checkpoint import Manifest, load_checkpoint, newest_checkpoint, save_checkpoint
from wattgym.live.config import JobConfig
from wattgym.live.learner import Learner, LoadedModel
from wattgym.live.log import EVALUATIONS, EVALUATIONS_FILE, STEPS, STEPS_FILE, Table
from wattgym.live.pacing import Reporter
from wattgym.live.parallel import Leader
from wattgym.live.records import Example
from wattgym.live.text import Order, split, tokenise
from wattgym.phase import Phase

CHECKPOINTS = "checkpoints"


class Trainer:
    """A loaded job.

    Args:
        config: The job.
        examples: Its records.
        folder: Run folder; takes up the newest checkpoint in it.
        reporter: The job's side of its channel.
        leader: The job's other ranks, if it has any.

    Raises:
        UserError: The model or the data cannot be used, the newest checkpoint does not fit, memory ran out, or another
            rank has failed.
    """

    def __init__(
        self,
        config: JobConfig,
        examples: Sequence[Example],
        folder: Path,
        reporter: Reporter,
        leader: Leader | None = None,
    ) -> None:
        self._config = config
        self._reporter = reporter
        self._leader = leader
        self._updates = 1  # of the last round
        self._checkpoints = folder / CHECKPOINTS
        loaded = LoadedModel(config)
        reporter.publish(device=loaded.device_name)
        data = tokenise(examples, loaded.tokeniser, config.data.max_tokens)
        self._digest = data.digest()
        self._order = Order(len(data.ids), config.data.holdout, config.seed)
        torch.manual_seed(config.seed)
        self._learner = Learner(config, loaded, data, reporter)
        self._evaluated_step: int | None = None
        found = newest_checkpoint(self._checkpoints)
        if found is not None:
            self._take_up(*found)
        if leader is not None:
            leader.join(self._learner, self._order, self._digest)
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
        """One round; False if a stop was asked for before it was complete, and then nothing has changed."""
        reporter, size = self._reporter, self._config.samples_per_update
        before = reporter.status
        losses = self._solo_step() if self._leader is None else self._leader.train()
        if losses is None:
            return False
        self._updates = len(losses)
        times = reporter.step_times(self._updates)
        status, tokens = reporter.status, before.tokens
        for number, loss in enumerate(losses):
            samples = before.samples + number * size
            tokens += self._learner.data.tokens(self._order.samples(samples, size))
            self._record(
                self._steps_table, before.steps + number + 1, samples + size, tokens, loss, status.micro_batch, *times,
                status.duty, status.speed, status.active_ranks, ":".join(map(str, status.rank_steps)),
            )  # fmt: skip
        return True

    def _solo_step(self) -> list[float] | None:
        size, steps = self._config.samples_per_update, self._reporter.status.steps
        loss = self._learner.step(self._order.samples(steps * size, size), self._config.optimiser.rate(steps))
        return None if loss is None else [loss]

    def _evaluate_if_due(self) -> None:
        reporter = self._reporter
        steps = reporter.status.steps
        if not self._due(self._config.evaluate_every) or steps == self._evaluated_step:
            return
        held_out, learner = self._order.held_out, self._learner
        total = 0.0
        with reporter.phase(Phase.EVALUATE), torch.no_grad():
            learner.model.eval()
            for batch in split(held_out, reporter.status.micro_batch):
                with reporter.work(), learner.memory_guard(learner.data, batch):
                    total += float(learner.loss_sum(learner.data, batch).item())
                if reporter.stop.reason:
                    break
            else:
                loss = total / learner.data.answer_tokens(held_out)
                self._evaluated_step = steps
                reporter.publish(eval_loss=loss, eval_step=steps)
                self._record(self._evaluations_table, steps, reporter.status.samples, loss)
            learner.model.train()

    def _due(self, every: int | None) -> bool:
        """Whether a multiple was reached by the last round."""
        steps = self._reporter.status.steps
        return every is not None and steps > 0 and steps % every < self._updates

    def _record(self, table: Table, *values: float | str) -> None:
        try:
            table.append(*values)
        except OSError as error:
            self._reporter.publish(warning=f"cannot write the log: {error.strerror}; rows are kept until it can")

    def _save_if_due(self) -> None:
        """A checkpoint in passing: where the disk refuses, the job goes on with the one before."""
        if not self._due(self._config.checkpoint_every):
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
            learner, keep = self._learner, self._config.keep_checkpoints
            save_checkpoint(self._checkpoints, manifest, learner.model, learner.optimiser, learner.rng, keep)
            self._reporter.publish(checkpoint_step=status.steps, warning="")

    def _kept(self) -> str:
        step = self._reporter.status.checkpoint_step
        return "there is none yet" if step is None else f"the one at step {step} is intact"

    def _take_up(self, folder: Path, manifest: Manifest) -> None:
        if manifest.samples != manifest.steps * self._config.samples_per_update:
            raise UserError(f"{folder}: {manifest.samples} samples in {manifest.steps} steps do not fit this job")
        if manifest.data != self._digest:
            raise UserError(f"{folder}: the records have changed since this checkpoint; start a new run with them")
        self._learner.restore_rng(load_checkpoint(folder, self._learner.model, self._learner.optimiser))
        self._evaluated_step = manifest.evaluated_step
        self._reporter.restore_losses(manifest.losses)
        last = manifest.losses[-1] if manifest.losses else None
        mean = sum(manifest.losses) / len(manifest.losses) if manifest.losses else None
        self._reporter.publish(
            steps=manifest.steps, samples=manifest.samples, tokens=manifest.tokens, loss=last, loss_mean=mean,
            eval_loss=manifest.eval_loss, eval_step=manifest.evaluated_step, checkpoint_step=manifest.steps,
        )  # fmt: skip
