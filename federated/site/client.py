"""Reaches a site's trainer process over its Unix socket; imports neither torch nor peft."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.adapters import from_bytes, to_bytes
from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, SiteInfo, TrainReply, TrainRequest
from wattgym.federated.site.wire import (
    WireError,
    address,
    evaluation_from,
    failure_from,
    info_from,
    receive,
    reply_from,
    request_header,
    send,
)

SOCKET_FILE = "site.sock"
"""Name of the socket in a site's folder; it is there while the trainer is."""

JOB_FOLDER = "job"
"""Name of the trainer's run folder in a site's folder; it stays."""


class SiteClient:
    """One site, as seen by an engine or a relay; each call is a connection of its own, so a restart is harmless.

    Args:
        path: The site's socket.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def info(self, timeout_s: float = 10.0) -> SiteInfo:
        """Who the site is.

        Raises:
            UserError: It cannot be reached, or says why it cannot tell.
        """
        header, _ = self._asked({"kind": "info"}, timeout_s)
        return info_from(header)

    def is_there(self) -> bool:
        """Whether somebody listens at the socket, however busy."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, address(self.path) as where:
                connection.connect(where)
        except OSError:
            return False
        return True

    def wait_ready(self, timeout_s: float) -> SiteInfo:
        """Waits until the site has loaded its model.

        Raises:
            UserError: It had not by then.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.info(max(until_s - time.monotonic(), 0.1))
            except UserError as error:
                if time.monotonic() >= until_s:
                    raise UserError(f"{self.path}: the site is not ready after {timeout_s:g} s: {error}") from None
            time.sleep(0.1)

    def train(self, request: TrainRequest, deadline_s: float) -> TrainReply | SiteFailure:
        """Has the site train; a request that it has answered before gets the same answer again.

        Args:
            request: What to do.
            deadline_s: Longest wait, s. The site goes on training after it, and keeps the answer.

        Returns:
            The reply; or `LATE` when the deadline has passed, `LOST` when the site is not there (any more), `FAILED`
            with the site's own reason, `REJECTED` for an answer that cannot be read.
        """
        answer = self._exchange(request_header(request), deadline_s, to_bytes(request.adapter))
        if isinstance(answer, SiteFailure):
            return answer
        header, body = answer
        try:
            return reply_from(header, from_bytes(body))
        except UserError as error:
            return SiteFailure(Fate.REJECTED, str(error))

    def evaluate(self, adapter: Adapter, deadline_s: float, link_s: float = 0.0) -> Evaluation | SiteFailure:
        """Has the site evaluate an adapter on the records that all sites share; failures as in `train`.

        Args:
            adapter: The adapter.
            deadline_s: Longest wait, s.
            link_s: How long the adapter's way to the site takes on an emulated link, s.
        """
        answer = self._exchange({"kind": "evaluate", "link_s": link_s}, deadline_s, to_bytes(adapter))
        if isinstance(answer, SiteFailure):
            return answer
        try:
            return evaluation_from(answer[0])
        except UserError as error:
            return SiteFailure(Fate.REJECTED, str(error))

    def status(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """What the site does now.

        Returns:
            `state` (`idle`, `training`, `evaluating`), `run_id` and `round` of the newest request, `steps` since it
            started, `memory_mb`, and `power`, what its devices draw and may (None without devices).

        Raises:
            UserError: It cannot be reached.
        """
        header, _ = self._asked({"kind": "status"}, timeout_s)
        return {name: value for name, value in header.items() if name != "kind"}

    def stop(self, timeout_s: float = 10.0) -> None:
        """Asks the site to save its state, give its devices back and end.

        Raises:
            UserError: It cannot be reached.
        """
        self._asked({"kind": "stop"}, timeout_s)

    def _asked(self, header: Mapping[str, Any], timeout_s: float) -> tuple[dict[str, Any], bytes]:
        answer = self._exchange(header, timeout_s)
        if isinstance(answer, SiteFailure):
            raise UserError(f"{self.path}: {answer.reason}")
        return answer

    def _exchange(
        self, header: Mapping[str, Any], timeout_s: float, body: bytes = b""
    ) -> tuple[dict[str, Any], bytes] | SiteFailure:
        until_s = time.monotonic() + timeout_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, address(self.path) as where:
                connection.settimeout(max(timeout_s, 0.001))
                connection.connect(where)
                send(connection, header, body)
                connection.settimeout(max(until_s - time.monotonic(), 0.001))
                answer = receive(connection)
        except TimeoutError:
            return SiteFailure(Fate.LATE, f"no answer within {timeout_s:g} s")
        except (ConnectionError, FileNotFoundError):
            return SiteFailure(Fate.LOST, "no trainer answers at the site's socket")
        except (OSError, WireError) as error:
            return SiteFailure(Fate.LOST, f"the site is gone: {error}")
        return failure_from(answer[0]) if answer[0]["kind"] == "failure" else answer
