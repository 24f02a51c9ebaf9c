"""The engine over Flower's grid: messages are pushed, replies polled, and nodes known by the names of their sites."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from wattgym.errors import UserError
from wattgym.federated.engine import Engine
from wattgym.federated.flower.records import pack, unpack
from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, SiteInfo, TrainReply, TrainRequest
from wattgym.federated.site.wire import evaluation_from, failure_from, info_from, reply_from, request_header

POLL_S = 0.3
JOIN_S = 30.0
ASK_AGAIN_S = 5.0
MOST_PATIENCE_S = 240.0
TIMING_FILE = "flower.jsonl"

# A message outlives its deadline by this, s: what its sender takes for late must not come back as unavailable before.
_AFTER_DEADLINE_S: Final = 10.0

# Numbers of `flwr.common.constant.ErrorCode`: a message or its reply is no longer there, the node sends no heartbeat.
_LOST_CODES: Final = frozenset({3, 4, 5})
# The relay's process has stopped responding; the trainer has not.
_RELAY_CODE: Final = 8

Content = tuple[dict[str, Any], Adapter]
"""A message's header and adapter."""

_log = logging.getLogger(__name__)


@dataclass
class _Node:
    """A node of the grid: who it stands for, once it has said so."""

    info: SiteInfo | None = None
    question: str | None = None
    asked_s: float = float("-inf")
    patience_s: float = field(default_factory=lambda: JOIN_S)
    waited_for: bool = False


@dataclass(frozen=True)
class Timing:
    """Where the time of one answer went, by the aggregator's clock but for `relay_s`.

    Attributes:
        kind: Message type.
        round: Round; 0 for what belongs to none.
        site: Who answered.
        total_s: From before the request was pushed until its reply was read, s.
        push_s: Handing all requests of the exchange to the SuperLink, s.
        pull_s: Fetching the reply from the SuperLink once it was there, s.
        relay_s: From the relay's question to the trainer's answer, s; NaN if it did not get so far.
    """

    kind: str
    round: int
    site: str
    total_s: float
    push_s: float
    pull_s: float
    relay_s: float


class FlowerEngine(Engine):
    """Carries messages over a Flower grid; runs inside a `ServerApp`.

    Attributes:
        name: `flower`.
    """

    name = "flower"

    def __init__(self, grid: Grid, poll_s: float = POLL_S, timing: Path | None = None) -> None:
        """Takes over a grid.

        Args:
            grid: The grid that Flower gives to the server app.
            poll_s: Time between two looks for replies, s; Flower's own loop waits 3 s.
            timing: File to which a JSON line is added for every answer, see `Timing`.
        """
        self._grid = grid
        self._poll_s = poll_s
        self._timing = timing
        self._nodes: dict[int, _Node] = {}
        self._failed: set[str] = set()

    def members(self) -> Mapping[str, SiteInfo]:
        """The sites that are there now, by name.

        A node that is new, or whose trainer was lost, is asked who it is. Only the first answer of a new node is waited
        for, `JOIN_S` at most. Of two nodes with one site's name the first counts, unless both say exactly the same:
        then the same trainer has got a new node, and the old one is about to go.
        """
        present = set(self._grid.get_node_ids())
        for gone in self._nodes.keys() - present:
            del self._nodes[gone]
        for new in present - self._nodes.keys():
            self._nodes[new] = _Node()
        self._ask_nodes()
        until_s = time.monotonic() + JOIN_S
        while self._read_answers() and time.monotonic() < until_s:
            time.sleep(self._poll_s)
        for node in self._nodes.values():
            node.waited_for = True
        return {node.info.name: node.info for node in self._nodes.values() if node.info is not None}

    def exchange(
        self, requests: Mapping[str, TrainRequest], deadline_s: float
    ) -> Mapping[str, tuple[TrainReply | SiteFailure, float]]:
        """Sends every site its request and waits until all have answered, failed or the deadline has passed.

        An answer that is late is never fetched, and the SuperLink drops it soon after the deadline.
        """
        contents = {site: (request_header(request), request.adapter) for site, request in requests.items()}
        number = next((request.round for request in requests.values()), 0)
        answers: dict[str, tuple[TrainReply | SiteFailure, float]] = {}
        for site, (answer, seconds) in self._send(MessageType.TRAIN, contents, deadline_s, number).items():
            answers[site] = (answer if isinstance(answer, SiteFailure) else _train_reply(*answer), seconds)
        self._failed = {site for site, (answer, _) in answers.items() if isinstance(answer, SiteFailure)}
        return answers

    def evaluate(
        self, adapter: Adapter, deadline_s: float, links_s: Mapping[str, float] | None = None
    ) -> Evaluation | SiteFailure:
        """Has a present site evaluate an adapter; if it fails, the next one, until the deadline has passed."""
        until_s = time.monotonic() + deadline_s
        found: Evaluation | SiteFailure = SiteFailure(Fate.LOST, "no site is there")
        for site in sorted(self.members(), key=lambda name: (name in self._failed, name)):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            header = {"kind": "evaluate", "link_s": (links_s or {}).get(site, 0.0)}
            answer, _ = self._send(MessageType.EVALUATE, {site: (header, adapter)}, left_s)[site]
            found = answer if isinstance(answer, SiteFailure) else _evaluation(answer[0])
            if isinstance(found, Evaluation):
                return found
        return found

    def close(self) -> None:
        """Nothing to end: grid, nodes and trainers belong to others."""

    def _send(
        self, kind: str, contents: Mapping[str, Content], deadline_s: float, number: int = 0
    ) -> dict[str, tuple[Content | SiteFailure, float]]:
        """Pushes one message a site and polls for the replies.

        A message whose relay has died is sent again as long as there is time: the trainer has kept its answer.
        """
        begin_s = time.monotonic()
        until_s = begin_s + deadline_s
        answers: dict[str, tuple[Content | SiteFailure, float]] = {}
        waiting: dict[str, str] = {}

        def post(sites: Iterable[str]) -> None:
            posted, failed = self._post(kind, {site: contents[site] for site in sites}, until_s, number)
            waiting.update(posted)
            answers.update({site: (failure, 0.0) for site, failure in failed.items()})

        post(contents)
        push_s = time.monotonic() - begin_s
        while waiting:
            asked_s = time.monotonic()
            again = []
            for reply in self._grid.pull_messages(list(waiting)):
                site = waiting.pop(reply.metadata.reply_to_message_id, None)
                now_s = time.monotonic()
                if site is None:
                    continue
                if reply.has_error() and reply.error.code == _RELAY_CODE and now_s < until_s:
                    _log.warning("site '%s': its relay died; asked again", site)
                    again.append(site)
                    continue
                answers[site] = (self._read(site, reply), now_s - begin_s)
                timing = Timing(kind, number, site, now_s - begin_s, push_s, now_s - asked_s, float("nan"))
                self._note(timing, answers[site][0])
            post(again)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            if waiting:
                time.sleep(min(self._poll_s, left_s))
        for site in waiting.values():
            answers[site] = (SiteFailure(Fate.LATE, f"no answer within {deadline_s:g} s"), deadline_s)
        return answers

    def _post(
        self, kind: str, contents: Mapping[str, Content], until_s: float, number: int
    ) -> tuple[dict[str, str], dict[str, SiteFailure]]:
        """Pushes messages that are answered by `until_s`.

        Returns:
            Sites by the number of their message, and the failures of those that could not be sent one.
        """
        nodes = {node.info.name: key for key, node in self._nodes.items() if node.info is not None}
        failed = {site: SiteFailure(Fate.LOST, "the site is not connected") for site in contents if site not in nodes}
        sites = [site for site in contents if site in nodes]
        left_s = max(until_s - time.monotonic(), 0.0)
        messages = [
            Message(
                pack({**header, "timeout_s": left_s}, adapter),
                nodes[site],
                kind,
                ttl=left_s + _AFTER_DEADLINE_S,
                group_id=str(number) if number else None,
            )
            for site, (header, adapter) in ((site, contents[site]) for site in sites)
        ]
        posted = {}
        for site, message_id in zip(sites, self._push(messages), strict=True):
            if message_id is None:
                failed[site] = SiteFailure(Fate.LOST, "the SuperLink did not take the message")
            else:
                posted[message_id] = site
        return posted, failed

    def _push(self, messages: list[Message]) -> list[str | None]:
        """Ids of the messages in order, None for those that the SuperLink refused."""
        ids: list[str | None] = list(self._grid.push_messages(messages)) if messages else []
        return ids if len(ids) == len(messages) else [None] * len(messages)

    def _read(self, site: str, reply: Message) -> Content | SiteFailure:
        """A reply's content, or what its failure means; a site that is lost must say again who it is."""
        if reply.has_error():
            lost = reply.error.code in _LOST_CODES
            reason = " ".join((reply.error.reason or "no reason given").split())
            answer: Content | SiteFailure = SiteFailure(Fate.LOST if lost else Fate.FAILED, reason)
        else:
            try:
                header, adapter = unpack(reply.content)
                answer = failure_from(header) if header["kind"] == "failure" else (header, adapter)
            except UserError as error:
                answer = SiteFailure(Fate.REJECTED, str(error))
        if isinstance(answer, SiteFailure) and answer.fate is Fate.LOST:
            for node in self._nodes.values():
                if node.info is not None and node.info.name == site:
                    node.info = None
        return answer

    def _ask_nodes(self) -> None:
        """Asks the nodes whose site is not known who they are, unless they have just been asked.

        A node that was restarted under its old number never answers what it was asked before, so it is asked again; a
        machine that is merely slow gets twice the time each time.
        """
        now_s = time.monotonic()
        asked: dict[int, _Node] = {}
        for key, node in self._nodes.items():
            if node.question is not None and now_s - node.asked_s > node.patience_s:
                node.question, node.patience_s = None, min(2 * node.patience_s, MOST_PATIENCE_S)
            if node.info is None and node.question is None and now_s - node.asked_s > ASK_AGAIN_S:
                asked[key] = node
        question = {"kind": "info", "timeout_s": JOIN_S}
        messages = [Message(pack(question), key, MessageType.QUERY, ttl=node.patience_s) for key, node in asked.items()]
        for node, message_id in zip(asked.values(), self._push(messages), strict=True):
            node.question, node.asked_s = message_id, now_s

    def _read_answers(self) -> bool:
        """Takes in who nodes are; true while a new one has yet to answer."""
        open_questions = {node.question: key for key, node in self._nodes.items() if node.question is not None}
        if open_questions:
            for reply in self._grid.pull_messages(list(open_questions)):
                key = open_questions.get(reply.metadata.reply_to_message_id)
                if key is not None:
                    self._nodes[key].question = None
                    self._introduce(key, reply)
        return any(node.question is not None and not node.waited_for for node in self._nodes.values())

    def _introduce(self, key: int, reply: Message) -> None:
        """Gives a node its site, if it has one and no other node has it."""
        node = self._nodes[key]
        node.waited_for = True
        if reply.has_error():
            node.patience_s = min(2 * node.patience_s, MOST_PATIENCE_S)
            _log.warning("node %d does not say who it is: %s", key, reply.error.reason)
            return
        try:
            header, _ = unpack(reply.content)
            if header["kind"] == "failure":
                _log.warning("node %d: %s", key, failure_from(header).reason)
                return
            info = info_from(header)
        except UserError as error:
            _log.warning("node %d: %s", key, error)
            return
        for other in self._nodes.values():
            if other is not node and other.info is not None and other.info.name == info.name:
                if other.info != info:
                    _log.warning("node %d: site '%s' is there already, with another trainer; refused", key, info.name)
                    return
                other.info = None
        node.info, node.patience_s = info, JOIN_S

    def _note(self, timing: Timing, answer: Content | SiteFailure) -> None:
        """Adds a line to the timing file."""
        if self._timing is not None:
            relay_s = float("nan") if isinstance(answer, SiteFailure) else float(answer[0].get("relay_s", "nan"))
            line = {**asdict(timing), "relay_s": relay_s if relay_s == relay_s else None}
            with self._timing.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _train_reply(header: dict[str, Any], adapter: Adapter) -> TrainReply | SiteFailure:
    try:
        return reply_from(header, adapter)
    except UserError as error:
        return SiteFailure(Fate.REJECTED, str(error))


def _evaluation(header: dict[str, Any]) -> Evaluation | SiteFailure:
    try:
        return evaluation_from(header)
    except UserError as error:
        return SiteFailure(Fate.REJECTED, str(error))
