"""Flower's client app: hands each message to the site's trainer and its answer back.

Flower starts a new process for every message, so nothing lives here: model, data, optimiser and devices belong to the
trainer, and neither torch nor peft is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from wattgym.errors import UserError
from wattgym.federated.flower.records import pack, unpack
from wattgym.federated.messages import Adapter, Evaluation, Fate, SiteFailure, TrainReply
from wattgym.federated.site.client import JOB_FOLDER, SOCKET_FILE, SiteClient
from wattgym.federated.site.wire import evaluation_header, failure_header, info_header, reply_header, request_from

Answer = tuple[dict[str, Any], Adapter | None]

app = ClientApp()
"""What `flwr run` loads at a site."""


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who the site is."""

    def ask(site: SiteClient, _header: dict[str, Any], _adapter: Adapter, timeout_s: float) -> Answer:
        try:
            return info_header(site.info(timeout_s)), None
        except UserError as error:
            return failure_header(SiteFailure(Fate.LOST, str(error))), None

    return _relayed(message, context, ask)


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round's work."""

    def ask(site: SiteClient, header: dict[str, Any], adapter: Adapter, timeout_s: float) -> Answer:
        reply = site.train(request_from(header, adapter), timeout_s)
        if isinstance(reply, TrainReply):
            return reply_header(reply), reply.adapter
        return failure_header(reply), None

    return _relayed(message, context, ask)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The global adapter on the evaluation records."""

    def ask(site: SiteClient, header: dict[str, Any], adapter: Adapter, timeout_s: float) -> Answer:
        found = site.evaluate(adapter, timeout_s, float(header.get("link_s", 0.0)))
        return (evaluation_header(found) if isinstance(found, Evaluation) else failure_header(found)), None

    return _relayed(message, context, ask)


def _relayed(
    message: Message, context: Context, ask: Callable[[SiteClient, dict[str, Any], Adapter, float], Answer]
) -> Message:
    """The reply to a message; how long the trainer took to answer is in its header."""
    header, adapter = unpack(message.content)
    begin_s = time.monotonic()
    answer, trained = ask(SiteClient(site_socket(context)), header, adapter, float(header["timeout_s"]))
    return Message(pack({**answer, "relay_s": time.monotonic() - begin_s}, trained), reply_to=message)


def site_socket(context: Context) -> Path:
    """The socket of the site that this node stands for.

    On a SuperNode it is `socket` of `--node-config`. Flower's simulation has no node configuration but numbers its
    nodes: there the run configuration's `site-folders` names the folder of the sites' folders, taken in order of name.
    A folder counts from its trainer's first start on, so that no node changes its site when a trainer goes.

    Raises:
        UserError: Neither names a site.
    """
    if path := context.node_config.get("socket"):
        return Path(str(path))
    folder, number = context.run_config.get("site-folders"), context.node_config.get("partition-id")
    if folder and number is not None:
        sites = sorted(job.parent for job in Path(str(folder)).glob(f"*/{JOB_FOLDER}"))
        if int(number) < len(sites):
            return sites[int(number)] / SOCKET_FILE
        raise UserError(f"{folder}: {len(sites)} sites, none for node {number}")
    raise UserError("this node has no site: start the SuperNode with --node-config 'socket=\"/path/of/site.sock\"'")
