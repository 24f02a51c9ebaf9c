"""A federation as its aggregator sees it: rounds, checks, the global adapter, checkpoints; whatever the engine."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wattgym.errors import UserError
from wattgym.federated import checkpoint
from wattgym.federated.adapters import AdapterError, check_form, difference, initial, save_peft, size_bytes
from wattgym.federated.aggregation import NormLimit, aggregate, effective_sites, noise_scale
from wattgym.federated.config import FederationConfig
from wattgym.federated.engine import Engine
from wattgym.federated.links import Links
from wattgym.federated.log import record_from, record_json
from wattgym.federated.messages import (
    Adapter,
    Assignment,
    Evaluation,
    Fate,
    RoundRecord,
    SiteFailure,
    SiteInfo,
    SiteOutcome,
    TrainReply,
    TrainRequest,
)
from wattgym.federated.power import AvailablePower

CHECKPOINTS = "checkpoints"
_MOST_BACKOFFS = 5


class Federation:
    """Rounds of federated fine-tuning over an engine.

    A round's outcome is decided by its replies alone, not by the order in which they came: the global adapter has the
    same bits on every engine. A faulty site costs its own contribution and nothing else.

    Attributes:
        config: The federation.
        engine: What carries messages; whoever made it closes it.
        adapter: The global adapter.
        round: Rounds that are complete.
        time_s: Time since the run began, s.
        rng: Generator for policies; its state is part of every checkpoint.
        evaluation: The global adapter on the evaluation records.
        records: Rounds of this process; the first is the one that a resumed run had saved last, or the evaluation
            before training (round 0).
    """

    def __init__(
        self,
        config: FederationConfig,
        engine: Engine,
        folder: Path | None = None,
        *,
        resume: bool = False,
        join_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Waits for the sites, checks that they fit together, and evaluates the adapter to begin with.

        Args:
            config: The federation.
            engine: The engine.
            folder: Where checkpoints go; None: nowhere.
            resume: Take up the newest checkpoint in the folder.
            join_s: Longest wait for all sites; those that are there by then begin without the others.
            sleep: Waits.

        Raises:
            UserError: No site came, sites have different models, there is nothing to resume, the folder holds another
                run, or the adapter could not be evaluated.
        """
        self.config = config
        self.engine = engine
        self.rng = np.random.default_rng([config.seed, 17])
        self.records: list[RoundRecord] = []
        self._sleep = sleep
        self._links = Links(config).by_site if config.network is not None else None
        self._power = AvailablePower(config)
        self._checkpoints = folder / CHECKPOINTS if folder is not None else None
        found = checkpoint.load_newest(self._checkpoints) if self._checkpoints is not None else None
        if resume and found is None:
            raise UserError(f"{self._checkpoints or 'no folder'}: no checkpoint to resume from")
        if found is not None and not resume:
            raise UserError(f"{self._checkpoints}: holds a run; resume it or choose another folder")
        members = self._join(join_s)
        first = next(iter(members.values()))
        self._model_hash, self._forms = first.model_hash, {key: tuple(form) for key, form in first.shapes.items()}
        self.round, self._attempt, self.time_s = 0, 0, 0.0
        self._limit = NormLimit(config.aggregation)
        if found is not None:
            self._take_up(*found)
        else:
            self.run_id = secrets.token_hex(8)
            self.adapter = initial(self._forms, config.seed)
        self._begun_s = time.monotonic() - self.time_s
        if found is None:
            self.evaluation = self._evaluated()
            self.records.append(self._record((), 0.0, []))
            self._save()

    @property
    def emulated(self) -> bool:
        """Whether transfers are only added to the clock."""
        return self.config.clock == "emulated"

    def members(self) -> Mapping[str, SiteInfo]:
        """Sites that are there now and may be chosen; one with another model than the rest may not."""
        return {
            name: info
            for name, info in self.engine.members().items()
            if name in self.config.names and info.model_hash == self._model_hash
        }

    def available_w(self) -> dict[str, float]:
        """Power that is free at each site now, by its trace, W."""
        return {name: self._power.at(name, self.time_s) for name in self.config.names}

    def transfer_s(self, name: str) -> tuple[float, float]:
        """Time to send the adapter to a site and back by the network table, s; zero without one."""
        if self._links is None:
            return 0.0, 0.0
        return self._links[name].seconds(self.config.link_bytes or float(size_bytes(self.adapter)))

    def evaluate(self) -> Evaluation:
        """The global adapter as it is now; known from the last round that counted."""
        return self.evaluation

    def run_round(self, assignments: Mapping[str, Assignment], deadline_s: float | None = None) -> RoundRecord:
        """Plays one round; whatever sites do, it ends with a record.

        A round in which nobody counts leaves the global adapter as it is and keeps its number: the next call tries it
        again, after a wait that doubles from one vain attempt to the next. Sites that have finished it meanwhile answer
        at once, if they are asked for the same.

        Args:
            assignments: The sites that take part, by name, and what each is asked to do.
            deadline_s: Longest wait for replies, s; the federation's if None.

        Raises:
            UserError: A name is unknown, or the checkpoint cannot be written.
        """
        asked = {name: assignments[name] for name in sorted(assignments)}
        for name in asked:
            self.config.site(name)
        self._back_off()
        deadline = self.config.deadline_s if deadline_s is None else deadline_s
        start_s, self._attempt = time.monotonic(), self._attempt + 1
        outcomes, adapters = self._exchange(asked, deadline)
        return self._conclude(outcomes, adapters, deadline, start_s)

    def assignment(self, **changes: Any) -> Assignment:
        """The federation's own assignment, with changes."""
        return replace(Assignment(self.config.local_steps), **changes)

    def save_adapter(self, folder: Path) -> None:
        """Writes the global adapter in peft's format.

        Raises:
            UserError: It cannot be written.
        """
        save_peft(folder, self.adapter, self.config.lora, self.config.model)

    def _join(self, join_s: float) -> Mapping[str, SiteInfo]:
        until_s = time.monotonic() + join_s
        while True:
            members = {name: info for name, info in self.engine.members().items() if name in self.config.names}
            if len(members) == len(self.config.sites):
                break
            if time.monotonic() >= until_s:
                if members:
                    break
                raise UserError(f"none of the sites {', '.join(self.config.names)} was there within {join_s:g} s")
            self._sleep(0.1)
        groups: dict[str, list[str]] = {}
        for name in sorted(members):
            groups.setdefault(members[name].model_hash, []).append(name)
        if len(groups) > 1:
            told = "; ".join(f"{', '.join(names)}: {key[:12]}" for key, names in sorted(groups.items()))
            raise UserError(f"sites have different models or adapter settings, by hash: {told}")
        return members

    def _exchange(
        self, asked: Mapping[str, Assignment], deadline_s: float
    ) -> tuple[list[SiteOutcome], dict[str, Adapter]]:
        members = self.members()
        size = size_bytes(self.adapter)
        requests, transfer = {}, {}
        for name, assignment in asked.items():
            transfer[name] = self.transfer_s(name)
            link_s = (0.0, 0.0) if self.emulated else transfer[name]
            if name in members:
                requests[name] = TrainRequest(self.run_id, self.round + 1, self.adapter, assignment, link_s)
        # An emulated transfer leaves less of the deadline for the site.
        answers = self.engine.exchange(requests, deadline_s) if requests else {}
        outcomes, adapters = [], {}
        for name, assignment in asked.items():
            absent = SiteFailure(Fate.LOST, "the site is not there"), math.nan
            answer, seconds = answers.get(name, absent)
            outcome = SiteOutcome(name, Fate.COUNTED, "", assignment, bytes_each_way=size)
            if isinstance(answer, SiteFailure):
                outcomes.append(replace(outcome, fate=answer.fate, reason=answer.reason))
                continue
            outcome = self._timed(outcome, answer, seconds, sum(transfer[name]))
            if outcome.round_trip_s > deadline_s:
                reason = f"answered after {outcome.round_trip_s:.3g} s, the deadline is {deadline_s:g} s"
                outcomes.append(replace(outcome, fate=Fate.LATE, reason=reason))
                continue
            try:
                outcome = replace(outcome, delta_norm=self._checked(name, assignment, answer))
                adapters[name] = answer.adapter
            except AdapterError as error:
                outcome = replace(outcome, fate=Fate.REJECTED, reason=str(error))
            outcomes.append(outcome)
        return outcomes, adapters

    def _timed(self, outcome: SiteOutcome, reply: TrainReply, seconds: float, link_s: float) -> SiteOutcome:
        """An outcome with its times; those of emulated transfers are told as such."""
        measured = self._links is None
        return replace(
            outcome,
            metrics=reply.metrics,
            # Without a wait on the link, what else the engine needed is no part of the emulated federation.
            round_trip_s=reply.metrics.train_s + link_s if self.emulated else seconds,
            transfer_s=max(seconds - reply.metrics.train_s, 0.0) if measured else link_s,
            transfer_emulated=not measured,
        )

    def _checked(self, name: str, assignment: Assignment, reply: TrainReply) -> float:
        """Norm of a reply's change.

        Raises:
            AdapterError: The reply must not be used.
        """
        for what, found, expected in (
            ("site", reply.site, name),
            ("run", reply.run_id, self.run_id),
            ("round", reply.round, self.round + 1),
        ):
            if found != expected:
                raise AdapterError(f"the answer is that of {what} {found!r}, not {expected!r}")
        metrics, steps = reply.metrics, assignment.local_steps
        most = steps * self.config.samples_per_update
        if not 1 <= metrics.steps <= steps or not 1 <= metrics.samples <= most:
            raise AdapterError(
                f"the answer tells of {metrics.steps} steps and {metrics.samples} samples; "
                f"asked for {steps} steps, {most} samples at most"
            )
        if not math.isfinite(metrics.loss):
            raise AdapterError("the answer's loss is no finite number")
        check_form(reply.adapter, self._forms)
        rate = assignment.learning_rate
        rate = self.config.optimiser.learning_rate if rate is None else rate
        return self._limit.check(reply.adapter, self.adapter, metrics.steps, rate)

    def _conclude(
        self, outcomes: Sequence[SiteOutcome], adapters: Mapping[str, Adapter], deadline_s: float, start_s: float
    ) -> RoundRecord:
        """Aggregates, evaluates, records and saves."""
        counted = {each.site: each for each in outcomes if each.site in adapters}
        samples = {name: each.metrics.samples for name, each in counted.items() if each.metrics is not None}
        deltas = [difference(adapters[name], self.adapter) for name in sorted(adapters)]
        attempt, link_s = self._attempt, 0.0
        if counted:
            self.adapter = aggregate(self.config.aggregation.method, adapters, samples)
            pairs = [(each.delta_norm, each.metrics.steps) for each in counted.values() if each.metrics is not None]
            self._limit.learn(pairs)
            self.round, self._attempt = self.round + 1, 0
            # An evaluation that fails must not undo the round: the last one stands until the next succeeds.
            before, self.evaluation = self.evaluation, self._evaluated(self.evaluation)
            if self.emulated and self.evaluation is not before:
                link_s = self._to_sites_s().get(self.evaluation.site, 0.0)
        if self.emulated:
            seconds = max((_busy_s(each, deadline_s) for each in outcomes), default=0.0) + link_s
            self.time_s += seconds
        else:
            seconds = time.monotonic() - start_s
            self.time_s = time.monotonic() - self._begun_s
        record = replace(
            self._record(tuple(outcomes), seconds, list(samples.values())),
            round=self.round if counted else self.round + 1,
            noise_scale=noise_scale(deltas),
            attempt=attempt,
        )
        self.records.append(record)
        self._save()
        return record

    def _record(self, outcomes: tuple[SiteOutcome, ...], seconds: float, samples: Sequence[int]) -> RoundRecord:
        return RoundRecord(
            round=self.round,
            seconds=seconds,
            time_s=self.time_s,
            outcomes=outcomes,
            evaluation=self.evaluation,
            effective_sites=effective_sites(samples),
            noise_scale=math.nan,
            emulated_clock=self.emulated,
        )

    def _evaluated(self, otherwise: Evaluation | None = None) -> Evaluation:
        links_s = None if self.emulated else self._to_sites_s()
        found = self.engine.evaluate(self.adapter, self.config.evaluation_s, links_s)
        if isinstance(found, Evaluation):
            return found
        if otherwise is None:
            raise UserError(f"the adapter could not be evaluated: {found.reason}")
        return otherwise

    def _to_sites_s(self) -> dict[str, float]:
        """Time that the adapter takes to each site by the network table, s."""
        return {name: self.transfer_s(name)[0] for name in self.config.names}

    def _back_off(self) -> None:
        """Waits before a round is tried again; on the emulated clock the time only passes."""
        if not self._attempt:
            return
        wait_s = self.config.backoff_s * 2.0 ** min(self._attempt - 1, _MOST_BACKOFFS)
        if self.emulated:
            self.time_s += wait_s
        else:
            self._sleep(wait_s)

    def _save(self) -> None:
        if self._checkpoints is None:
            return
        state = checkpoint.FederationState(
            run_id=self.run_id,
            round=self.round,
            attempt=self._attempt,
            time_s=self.time_s,
            history=tuple(self._limit.history),
            model_hash=self._model_hash,
            record=record_json(self.records[-1]),
            rng=dict(self.rng.bit_generator.state),
        )
        checkpoint.save(self._checkpoints, state, self.adapter, self.config.lora, self.config.model)

    def _take_up(self, state: checkpoint.FederationState, adapter: Adapter) -> None:
        if state.model_hash != self._model_hash:
            raise UserError(
                f"{self._checkpoints}: the run was made with another model or adapter, by hash "
                f"{state.model_hash[:12]}; the sites have {self._model_hash[:12]}"
            )
        check_form(adapter, self._forms)
        self.adapter, self.run_id = adapter, state.run_id
        self.round, self._attempt, self.time_s = state.round, state.attempt, state.time_s
        self._limit = NormLimit(self.config.aggregation, state.history)
        self.records = [record_from(state.record)]
        self.evaluation = self.records[-1].evaluation
        self.rng.bit_generator.state = state.rng


def _busy_s(outcome: SiteOutcome, deadline_s: float) -> float:
    """How long the aggregator waits for a site on the emulated clock."""
    if outcome.fate in (Fate.LATE, Fate.LOST) or not math.isfinite(outcome.round_trip_s):
        return deadline_s if outcome.fate is Fate.LATE else 0.0
    return min(outcome.round_trip_s, deadline_s)
