"""A site's training: model, adapter, optimiser and its own records, from request to reply."""

from __future__ import annotations

import hashlib
import itertools
import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from wattgym.errors import UserError
from wattgym.federated.adapters import check_form
from wattgym.federated.config import FederationConfig
from wattgym.federated.messages import Adapter, Evaluation, SiteInfo, SiteMetrics, TrainReply, TrainRequest
from wattgym.federated.partition import Partition, Record, domain_counts
from wattgym.federated.site.store import ReplyStore
from wattgym.live.channel import JobState, JobStatus, Knobs
from wattgym.live.learner import Learner, LoadedModel
from wattgym.live.pacing import Reporter, StopFlag
from wattgym.live.text import Order, Sequences, Tokeniser, split, tokenise
from wattgym.phase import Phase

EVALUATION_BATCH = 16
"""Evaluation records of one pass."""


class AbandonedError(UserError):
    """A round was given up before it was complete; the site is where it was before it."""


class SiteStop(StopFlag):
    """Ends the site, for good, or only the round that is under way.

    Attributes:
        ended: Why the site shall end; empty to go on.
        round: Why the round shall end; empty to go on.
    """

    def __init__(self) -> None:
        self.ended = self.round = ""
        self._until_s: float | None = None
        super().__init__()

    def until(self, time_s: float | None) -> None:
        """Ends the round when the monotonic clock shows so much; None: whenever it is done."""
        self._until_s = time_s

    @property
    def reason(self) -> str:
        """Why to stop now; empty to go on."""
        late = self._until_s is not None and time.monotonic() > self._until_s
        return self.ended or self.round or ("the deadline has passed" if late else "")

    @reason.setter
    def reason(self, value: str) -> None:
        self.ended = value


class Unwatched:
    """A channel that nobody looks at: for sites without a process of their own."""

    path = Path(os.devnull)

    def write_status(self, status: JobStatus) -> None:
        """Nobody reads it."""

    def read_knobs(self) -> tuple[int, Knobs]:
        """Nobody turns them."""
        return 0, Knobs()


class SiteTrainer:
    """One site's share of the federation.

    Attributes:
        name: The site's name.
        stop: Ends a round early.
    """

    def __init__(
        self,
        config: FederationConfig,
        name: str,
        partition: Partition,
        loaded: LoadedModel,
        *,
        reporter: Reporter | None = None,
        folder: Path | None = None,
        pid: int = 0,
    ) -> None:
        """Takes up the site's data, and where it was in them.

        Args:
            config: The federation.
            name: The site.
            partition: Its records.
            loaded: The model; sites of one process may share it, since each round begins with the global adapter.
            reporter: The job's side of its channel; without one nobody watches or paces the training.
            folder: Where position and replies are kept over a restart; None: they live as long as the process.
            pid: Process to tell of in `info`.

        Raises:
            UserError: The site has no samples that fit, or the folder holds another site's state.
        """
        self.name = name
        self._config = config
        self._loaded = loaded
        self._partition = partition
        if reporter is None:
            sizes = {"micro_batch": config.micro_batch, "samples_per_update": config.samples_per_update}
            reporter = Reporter(Unwatched(), SiteStop(), JobStatus(**sizes))  # type: ignore[arg-type]
        assert isinstance(reporter.stop, SiteStop)
        self._reporter, self.stop = reporter, reporter.stop
        records = partition.slice(name)
        data, kept = tokenised(records, loaded.tokeniser, config.data.max_tokens, f"site '{name}'")
        self._domain_samples = domain_counts(kept)
        self._learner = Learner(config.job(name), loaded, data, reporter)
        self._parameters = {
            key.replace(".default.", "."): parameter
            for key, parameter in loaded.model.named_parameters()
            if parameter.requires_grad
        }
        index = config.names.index(name)
        self._order = Order(len(data.ids), 0, config.seed * 1000 + index)
        self._store = ReplyStore(folder, name, data.digest())
        self._evaluation: tuple[Sequences, list[Record]] | None = None
        self._pid = pid
        self._hash = ""

    def info(self) -> SiteInfo:
        """Who the site is."""
        self._hash = self._hash or model_hash(self._loaded, self._config)
        return SiteInfo(
            name=self.name,
            samples=sum(self._domain_samples.values()),
            domain_samples=self._domain_samples,
            model_hash=self._hash,
            shapes={key: tuple(parameter.shape) for key, parameter in self._parameters.items()},
            device=self._loaded.device_name,
            pid=self._pid,
        )

    def rehearse(self) -> Iterator[float]:
        """Trains without learning or using up samples, a step at a time, for those who measure how fast that is."""
        size = self._config.samples_per_update
        with self._reporter.phase(Phase.COMPUTE):
            for step in itertools.count():
                loss = self._learner.step(self._order.samples(step * size, size), 0.0)
                self._learner.optimiser.state.clear()
                if loss is None:
                    return
                self._reporter.step_times()
                yield loss

    def stored(self, request: TrainRequest) -> TrainReply | None:
        """The reply to a request that has been answered before.

        Raises:
            UserError: The round is past and its reply is kept no longer.
        """
        return self._store.find(request)

    def train(self, request: TrainRequest) -> TrainReply:
        """Trains for one round; a request that was answered before gets the same reply, untrained.

        Returns:
            The reply; energy and power are left to whoever watches the devices.

        Raises:
            AbandonedError: The stop flag was raised; nothing has changed.
            UserError: The request does not fit the site, memory ran out, or the loss is no number.
        """
        known = self._store.find(request)
        if known is not None:
            return known
        check_form(request.adapter, {key: tuple(each.shape) for key, each in self._parameters.items()})
        steps, size = request.assignment.local_steps, self._config.samples_per_update
        if steps < 1:
            raise UserError(f"{steps} local steps; valid: 1 or more")
        before_s, reporter = time.monotonic(), self._reporter
        tokens = 0
        losses: list[float] = []
        self._begin(request)
        first = self._store.position(request.run_id)
        with reporter.phase(Phase.COMPUTE):
            reporter.publish(state=JobState.RUNNING)
            for step in range(steps):
                indices = self._order.samples((first + step) * size, size)
                loss = self._learner.step(indices, self._rate(request, step))
                if loss is None:
                    raise AbandonedError(f"round {request.round} was abandoned: {self.stop.reason}")
                reporter.step_times()
                losses.append(loss)
                tokens += self._learner.data.tokens(indices)
        metrics = SiteMetrics(
            samples=steps * size,
            tokens=tokens,
            steps=steps,
            loss=float(np.mean(losses)),
            train_s=time.monotonic() - before_s,
            peak_memory_mb=peak_memory_mb(),
        )
        return TrainReply(request.run_id, request.round, self.name, self._adapter(), metrics)

    def keep(self, request: TrainRequest, reply: TrainReply) -> None:
        """Settles a round: its samples are used up, and its reply is kept for whoever asks again.

        Raises:
            UserError: The state could not be written; the round does not count then.
        """
        self._store.keep(request, reply, self._moments() if self._config.keep_optimiser else None)

    def evaluate(self, adapter: Adapter) -> Evaluation:
        """An adapter on the records that all sites keep for evaluation.

        Raises:
            UserError: The adapter does not fit, or memory ran out.
        """
        check_form(adapter, {key: tuple(each.shape) for key, each in self._parameters.items()})
        if self._evaluation is None:
            self._evaluation = tokenised(
                self._partition.evaluation, self._loaded.tokeniser, self._config.data.max_tokens, "data.evaluation"
            )
        data, records = self._evaluation
        domains = np.array([domain for _, domain in records])
        losses, right = np.zeros(len(records)), np.zeros(len(records), dtype=np.bool_)
        self._put(adapter)
        with self._reporter.phase(Phase.EVALUATE):
            self._loaded.model.eval()
            for batch in split(range(len(records)), EVALUATION_BATCH):
                with self._reporter.work(), self._learner.memory_guard(data, batch):
                    losses[batch], right[batch] = self._learner.scores(data, batch)
            self._loaded.model.train()
        tokens = np.array([data.answer_tokens([i]) for i in range(len(records))])
        names = sorted(set(domains.tolist()))
        by_domain = {name: float(losses[domains == name].sum() / tokens[domains == name].sum()) for name in names}
        accuracy = float(np.mean([right[domains == name].mean() for name in names]))
        return Evaluation(float(np.mean(list(by_domain.values()))), by_domain, accuracy, self.name)

    def _begin(self, request: TrainRequest) -> None:
        """Puts everything where this site, in this round, always has it, whatever became of rounds before."""
        self._put(request.adapter)
        optimiser = self._learner.optimiser
        optimiser.zero_grad()  # of a step that failed
        optimiser.state.clear()
        for name, value in self._store.optimiser(request.run_id).items():
            key, kind = name.rsplit("/", 1)
            parameter = self._parameters[key]
            # AdamW counts its steps on the CPU and keeps its moments beside the parameter.
            tensor = torch.from_numpy(value.copy())
            optimiser.state[parameter][kind] = tensor if kind == "step" else tensor.to(parameter.device)
        seed = hashlib.sha256(f"{self._config.seed}/{self.name}/{request.round}".encode()).digest()
        torch.manual_seed(int.from_bytes(seed[:7], "big"))

    def _rate(self, request: TrainRequest, step: int) -> float:
        settings = self._config.optimiser
        rate = request.assignment.learning_rate
        base = settings.learning_rate if rate is None else rate
        return base * min(1.0, (step + 1) / (settings.warmup_steps + 1))

    def _moments(self) -> Adapter:
        """A copy of the optimiser's state, by parameter and kind."""
        state = self._learner.optimiser.state
        return {
            f"{key}/{kind}": value.detach().cpu().numpy().copy()
            for key, parameter in self._parameters.items()
            for kind, value in state.get(parameter, {}).items()
        }

    def _put(self, adapter: Adapter) -> None:
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(adapter[key]))

    def _adapter(self) -> Adapter:
        return {key: parameter.detach().cpu().numpy().copy() for key, parameter in self._parameters.items()}


def tokenised(
    records: Sequence[Record], tokeniser: Tokeniser, max_tokens: int, whose: str
) -> tuple[Sequences, list[Record]]:
    """Records as token sequences, and those of them that have room for an answer.

    Raises:
        UserError: None has.
    """
    kept = []
    for record in records:
        ids, prompt = tokeniser.encode(record[0])
        if len(ids[:max_tokens]) > max(prompt, 1):
            kept.append(record)
    if not kept:
        raise UserError(
            f"{whose}: none of {len(records)} records has room for an answer within data.max_tokens = {max_tokens}"
        )
    return tokenise([example for example, _ in kept], tokeniser, max_tokens), kept


def model_hash(loaded: LoadedModel, config: FederationConfig) -> str:
    """Identifies the base model's weights, the tokeniser's vocabulary use and the adapter's settings."""
    digest = hashlib.sha256(config.lora.model_dump_json().encode())
    for name, tensor in sorted(loaded.model.state_dict().items()):
        if "lora_" in name:
            continue
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def peak_memory_mb() -> float:
    """Highest resident memory of this process so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
