"""Where a site's requests are handed in and answers called for: one is worked on at a time, the newest round first."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, TrainReply, TrainRequest
from wattgym.federated.site.store import request_digest
from wattgym.federated.site.trainer import SiteStop

Answer = TrainReply | Evaluation | SiteFailure


@dataclass(eq=False)
class Job:
    """A request and, once there is one, its answer.

    Attributes:
        work: A round to train, or an adapter to evaluate.
        key: Identifies a round's request; empty for evaluations.
        answer: What came of it.
        done: Set when there is an answer.
    """

    work: TrainRequest | Adapter
    key: str = ""
    answer: Answer = field(default_factory=lambda: SiteFailure(Fate.FAILED, "the site has ended"))
    done: threading.Event = field(default_factory=threading.Event)


class Desk:
    """Shared by the threads that talk to clients and the one that works.

    Attributes:
        current: What is being worked on; None in between.
    """

    def __init__(self, stop: SiteStop) -> None:
        self.current: Job | None = None
        self._stop = stop
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._rounds: dict[str, Job] = {}
        self._lock = threading.Lock()

    def hand_in(self, work: TrainRequest | Adapter) -> Job:
        """Takes a request.

        A request that is under way already is joined. One for another round than the one under way makes that one be
        given up: an aggregator that asks for another has no use for it any more.
        """
        if not isinstance(work, TrainRequest):
            job = Job(work)
            self._waiting.put(job)
            return job
        key = request_digest(work)
        with self._lock:
            job = self._rounds.get(key) or Job(work, key)
            if key not in self._rounds:
                for other in self._rounds.values():
                    if isinstance(other.work, TrainRequest) and _newer(work, other.work):
                        self._supersede(other, work)
                self._rounds[key] = job
                self._waiting.put(job)
        return job

    def take(self, timeout_s: float) -> Job | None:
        """The next request to work on; None if there is none within the time."""
        try:
            job = self._waiting.get(timeout=timeout_s)
        except queue.Empty:
            return None
        with self._lock:
            if job.done.is_set():
                return None  # superseded before it began
            self._stop.round = ""
            self.current = job
        return job

    def finish(self, job: Job, answer: Answer) -> None:
        """Answers a request."""
        with self._lock:
            self._settle(job, answer)
            self.current = None

    def close(self) -> None:
        """Answers everybody who still waits: the site ends."""
        with self._lock:
            for job in list(self._rounds.values()):
                self._settle(job, job.answer)
        while True:
            try:
                self._waiting.get_nowait().done.set()
            except queue.Empty:
                return

    def _supersede(self, job: Job, by: TrainRequest) -> None:
        reason = f"superseded by round {by.round} of run {by.run_id}"
        if job is self.current:
            self._stop.round = reason
        else:
            job.answer = SiteFailure(Fate.FAILED, reason)
            job.done.set()

    def _settle(self, job: Job, answer: Answer) -> None:
        self._rounds.pop(job.key, None)
        job.answer = answer
        job.done.set()


def _newer(request: TrainRequest, than: TrainRequest) -> bool:
    return request.run_id != than.run_id or request.round >= than.round
