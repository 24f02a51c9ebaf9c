"""Training by several ranks at once: each takes its share of a round, then they meet.

Gradients are added up, or weights are averaged, over all ranks; an idle rank contributes nothing but stays in step, so
that the degree of parallelism changes without a restart and without sending state. When they have met, weights and
optimiser are the same everywhere; rank 0 alone evaluates and saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wattgym.live.config import JobConfig
from wattgym.live.folder import RENDEZVOUS_FILE
from wattgym.live.group import Group, LostContactError
from wattgym.live.learner import Learner, find_device
from wattgym.live.pacing import Reporter, StepTime
from wattgym.live.ranks import Followers
from wattgym.live.rounds import Round, plan_round, steps_by_speed
from wattgym.live.text import Order

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SPEED_MEMORY = 0.8  # share of the former estimate of a rank's speed, at each round


class Share:
    """One rank's part of the training.

    Args:
        config: The job.
        learner: The rank's model and optimiser.
        order: Which record is the n-th sample.
        group: The ranks.
        reporter: Paces this rank.

    Attributes:
        speeds: Samples per second of each rank while it works, 0 where unknown.
    """

    def __init__(self, config: JobConfig, learner: Learner, order: Order, group: Group, reporter: Reporter) -> None:
        self.speeds = [0.0] * group.size
        self._config = config
        self._learner = learner
        self._order = order
        self._group = group
        self._reporter = reporter

    def synchronise(self, steps: int) -> None:
        """Takes weights and optimiser over from rank 0.

        Args:
            steps: Steps before.
        """
        state = self._state()
        self._group.spread(state)
        self._restore(state, steps)

    def train(self, plan: Round, first: int, steps: int) -> list[float] | None:
        """Trains this rank's share of a round and meets the others.

        Args:
            plan: The round.
            first: Samples before.
            steps: Steps before.

        Returns:
            The loss of each update, nats; None if a stop was asked for before the round was complete, and then nothing
            has changed. With averaged weights, a micro-batch that belongs to two updates counts to both in proportion
            to their answer tokens in it.

        Raises:
            UserError: Memory ran out, or the loss is no number.
            LostContactError: Another rank is gone.
        """
        learner, reporter, rank = self._learner, self._reporter, self._group.rank
        records = self._order.samples(first, plan.updates * self._config.samples_per_update)
        before = self._state() if plan.averaged else None
        if rank > 0:
            # Rank 0's generators are saved; the others' begin anew with each round, which needs no saving.
            seed = np.random.SeedSequence([self._config.seed, 2, rank, first]).generate_state(1)[0]
            torch.manual_seed(int(seed))
        losses = torch.zeros(len(records), dtype=torch.float64)
        complete = self._own_steps(plan, records, steps, losses)
        began_s = reporter.clock()
        losses, times, complete = self._exchange_reports(losses, complete)
        if not complete:
            learner.optimiser.zero_grad()
            if before is not None:
                self._restore(before, steps)
            return None
        if plan.averaged:
            self._average(plan, steps)
        else:
            self._add_gradients_up()
        reporter.meet(times[:rank] + times[rank + 1 :], reporter.clock() - began_s)
        self._measure_speeds(plan, times)
        of_updates = self._of_updates(plan, records, losses)
        with reporter.work():
            if not plan.averaged:
                learner.update(steps, of_updates[0], self._config.optimiser.rate(steps))
            reporter.end_step(*of_updates)
            learner.rng = learner.rng_state()
        return of_updates

    def _own_steps(self, plan: Round, records: list[int], steps: int, losses: torch.Tensor) -> bool:
        """Takes this rank's steps; False if a stop was asked for meanwhile."""
        learner, reporter, data = self._learner, self._reporter, self._learner.data
        progress = plan.keeping_pace()
        mine = plan.shares[self._group.rank]
        for number, step in enumerate(mine):
            own = [records[i] for batch in step for i in batch]
            answer_tokens = data.answer_tokens(own if plan.averaged else records)
            loss = 0.0
            for batch in step:
                if reporter.stop.reason:
                    return False
                with reporter.work():
                    chosen = [records[i] for i in batch]
                    part = learner.backward(chosen, answer_tokens)
                    loss += part
                    if plan.averaged:
                        per_token = part * answer_tokens / data.answer_tokens(chosen)
                        losses[batch.start : batch.stop] = torch.tensor(
                            [per_token * data.answer_tokens([record]) for record in chosen], dtype=torch.float64
                        )
                    else:
                        losses[batch.start] = part
                    if self._group.rank == 0:
                        done = [records[i] for i in next(progress)]
                        reporter.publish(
                            samples=reporter.status.samples + len(done),
                            tokens=reporter.status.tokens + data.tokens(done),
                        )
                    if plan.averaged and batch is step[-1]:
                        at = steps + number * plan.updates // len(mine)
                        with learner.memory_guard(data, chosen):
                            learner.update(at, loss, self._config.optimiser.rate(at))
        return True

    def _exchange_reports(self, losses: torch.Tensor, complete: bool) -> tuple[torch.Tensor, list[StepTime], bool]:
        """Losses of all ranks, their times, and whether all of them have done their share."""
        times = torch.zeros((self._group.size, 3), dtype=torch.float64)
        own = self._reporter.step_time
        times[self._group.rank] = torch.tensor([own.work_s, own.speed_held_s, own.duty_held_s])
        broken_off = torch.tensor([0.0 if complete else 1.0], dtype=torch.float64)
        report = torch.cat([losses, broken_off, times.flatten()]).to(self._group.device)
        self._group.add_up(report)
        losses, broken_off, times = torch.split(report.cpu(), [len(losses), 1, times.numel()])
        rows = times.view(self._group.size, 3).tolist()
        return losses, [StepTime(*row) for row in rows], broken_off.item() == 0.0

    def _measure_speeds(self, plan: Round, times: list[StepTime]) -> None:
        for rank, (samples, time) in enumerate(zip(plan.samples, times, strict=True)):
            if samples:
                now = samples / max(time.work_s + time.speed_held_s, 1e-9)
                former = self.speeds[rank] or now
                self.speeds[rank] = _SPEED_MEMORY * former + (1 - _SPEED_MEMORY) * now

    def _of_updates(self, plan: Round, records: list[int], losses: torch.Tensor) -> list[float]:
        if not plan.averaged:
            return [sum(losses.tolist())]
        size, tokens = self._config.samples_per_update, self._learner.data.answer_tokens
        starts = range(0, len(records), size)
        return [float(losses[i : i + size].sum()) / tokens(records[i : i + size]) for i in starts]

    def _add_gradients_up(self) -> None:
        parameters = self._learner.parameters
        total = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
        self._group.add_up(total)
        for p, part in zip(parameters, torch.split(total, [p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)

    def _average(self, plan: Round, steps: int) -> None:
        """Averages weights and moments by samples (FedAvg, arXiv 1602.05629, of weights; moments alike)."""
        state = self._state() * (plan.samples[self._group.rank] / sum(plan.samples))
        self._group.add_up(state)
        self._restore(state, steps + plan.updates)

    def _state(self) -> torch.Tensor:
        """Weights, then both moments, in one row."""
        parameters, optimiser = self._learner.parameters, self._learner.optimiser
        rows = [p.detach().flatten() for p in parameters]
        for kind in _MOMENTS:
            rows += [optimiser.state.get(p, {}).get(kind, torch.zeros_like(p)).flatten() for p in parameters]
        return torch.cat(rows)

    def _restore(self, state: torch.Tensor, steps: int) -> None:
        parameters, optimiser = self._learner.parameters, self._learner.optimiser
        parts = iter(torch.split(state, [p.numel() for p in parameters] * (1 + len(_MOMENTS))))
        with torch.no_grad():
            for p in parameters:
                p.copy_(next(parts).view_as(p))
        moments: list[dict[str, Any]] = [{"step": torch.tensor(float(steps))} for _ in parameters]
        for kind in _MOMENTS:
            for p, values in zip(parameters, moments, strict=True):
                values[kind] = next(parts).view_as(p).clone()
        optimiser.state.clear()
        if steps:
            optimiser.state.update(zip(parameters, moments, strict=True))


class Leader:
    """Rank 0's side of a job with several ranks.

    Args:
        config: The job.
        folder: Its run folder, where the ranks meet.
        reporter: Rank 0's.

    Raises:
        UserError: The other ranks cannot be started.
    """

    def __init__(self, config: JobConfig, folder: Path, reporter: Reporter) -> None:
        self._config = config
        self._reporter = reporter
        self._rendezvous = (folder / RENDEZVOUS_FILE).absolute()
        self._device = find_device(config.device)
        hello = {
            "config": config.model_dump(mode="json"),
            "channel": str(reporter.channel_path.absolute()),
            "rendezvous": str(self._rendezvous),
            "device": self._device,
        }
        gpus = torch.cuda.device_count() if self._device == "cuda" else None
        self._followers = Followers(config.ranks - 1, hello, gpus)
        self._group: Group | None = None
        self._share: Share | None = None

    def join(self, learner: Learner, order: Order, digest: str) -> None:
        """Waits until the other ranks have loaded, and gives them rank 0's weights and optimiser.

        Args:
            learner: Rank 0's.
            order: Which record is the n-th sample.
            digest: Identifies the records.

        Raises:
            UserError: A rank has failed.
        """
        steps = self._reporter.status.steps
        with self._blaming():
            self._reporter.wait_for(self._followers.all_ready)
            self._followers.tell({"steps": steps, "digest": digest})
            self._group = Group(0, self._config.ranks, self._rendezvous, self._device, self._wait)
            self._share = Share(self._config, learner, order, self._group, self._reporter)
            self._share.synchronise(steps)

    def train(self) -> list[float] | None:
        """Trains a round by the knobs, all ranks together.

        Returns:
            The loss of each update, nats; None if a stop was asked for before the round was complete, and then nothing
            has changed.

        Raises:
            UserError: A rank has failed.
        """
        assert self._share is not None
        reporter = self._reporter
        reporter.begin_step()
        before, local_steps = reporter.status, reporter.wanted_local_steps
        if isinstance(local_steps, int):
            rank_steps = steps_by_speed(local_steps, self._share.speeds[: before.active_ranks])
        else:
            rank_steps = local_steps[: before.active_ranks]
        left = None if self._config.max_steps is None else self._config.max_steps - before.steps
        shape = (before.samples_per_update, before.micro_batch, before.ranks, rank_steps, left)
        plan = plan_round(*shape)
        reporter.publish(rank_steps=tuple(len(share) for share in plan.shares[: before.active_ranks]))
        with self._blaming():
            self._followers.tell({"first": before.samples, "steps": before.steps, "shape": shape})
            losses = self._share.train(plan, before.samples, before.steps)
        if losses is None:
            reporter.publish(samples=before.samples, tokens=before.tokens)
            reporter.stop.reason = reporter.stop.reason or "another rank was told to stop"
        return losses

    def close(self) -> None:
        """Lets the other ranks end."""
        self._followers.close()
        if self._group is not None:
            self._group.leave()
        self._rendezvous.unlink(missing_ok=True)

    def kill(self) -> None:
        """Ends the other ranks at once."""
        self._followers.kill()
        self._rendezvous.unlink(missing_ok=True)

    def _wait(self, done: Callable[[], bool]) -> None:
        def attend() -> bool:
            if self._reporter.stop.reason:
                self._followers.stop()
            self._followers.check()
            return done()

        self._reporter.wait_for(attend)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except LostContactError:
            self._followers.blame()


@contextlib.contextmanager
def lead(config: JobConfig, folder: Path, reporter: Reporter) -> Iterator[Leader | None]:
    """The other ranks of a job, which end with the block; None if there are none.

    Raises:
        UserError: They cannot be started.
    """
    if config.ranks == 1:
        yield None
        return
    leader = Leader(config, folder, reporter)
    try:
        yield leader
    except BaseException:
        leader.kill()
        raise
    leader.close()
