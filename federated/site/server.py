"""The site's process: loads once, then trains and evaluates for whoever asks at its socket, until it is stopped."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from wattgym.errors import UserError
from wattgym.federated.adapters import AdapterError, from_bytes, to_bytes
from wattgym.federated.config import FederationConfig
from wattgym.federated.messages import Evaluation, Fate, SiteFailure, SiteInfo, TrainReply, TrainRequest
from wattgym.federated.partition import Partition
from wattgym.federated.site import wire
from wattgym.federated.site.client import SOCKET_FILE
from wattgym.federated.site.desk import Answer, Desk
from wattgym.federated.site.holder import PowerHolder
from wattgym.federated.site.store import REPLIES
from wattgym.federated.site.trainer import SiteStop, SiteTrainer, peak_memory_mb
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.folder import CHANNEL_FILE
from wattgym.live.learner import LoadedModel
from wattgym.live.pacing import Reporter
from wattgym.phase import Phase
from wattgym.runs import RunFolder

_IDLE_S = 0.2


def serve(
    config: FederationConfig, name: str, partition: Partition, run: RunFolder, folder: Path, *, owner: int = 0
) -> None:
    """Runs a site to its end.

    Args:
        config: The federation.
        name: The site.
        partition: Its records.
        run: Run folder of its training, locked for this process.
        folder: The site's folder.
        owner: Process whose death ends the site, which must be its parent; 0: it outlives whoever started it.

    Raises:
        UserError: Model, data or devices cannot be used.
    """
    stop = SiteStop()
    stop.on_signals()
    if owner:
        stop.on_death_of(owner)
    sizes: dict[str, Any] = {
        "pid": os.getpid(),
        "micro_batch": config.micro_batch,
        "samples_per_update": config.samples_per_update,
    }
    channel = Channel.create(run.path / CHANNEL_FILE, Knobs(), JobStatus(**sizes))
    reporter = Reporter(channel, stop, JobStatus(**sizes))
    try:
        loaded = LoadedModel(config.job(name))
        trainer = SiteTrainer(
            config, name, partition, loaded, reporter=reporter, folder=folder / REPLIES, pid=os.getpid()
        )
        _serve(config, trainer, reporter, channel, folder)
        run.set_status("interrupted")
        reporter.publish(state=JobState.STOPPED, phase=Phase.IDLE)
        print(f"site '{name}' stopped: {stop.ended}", flush=True)
    except BaseException as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reporter.publish(state=JobState.FAILED, phase=Phase.IDLE, error=" ".join(text.split()))
        raise
    finally:
        channel.unlink()


def _serve(config: FederationConfig, trainer: SiteTrainer, reporter: Reporter, channel: Channel, folder: Path) -> None:
    stop, desk = trainer.stop, Desk(trainer.stop)
    info = trainer.info()
    holder = PowerHolder(config, trainer.name, folder, channel) if config.site(trainer.name).shaping else None
    reporter.publish(state=JobState.RUNNING, phase=Phase.IDLE)
    try:
        if holder is not None:
            holder.start()
            _warm_up(trainer, holder)
        with _listening(
            folder, lambda connection: _answer(connection, desk, info, _status(reporter, desk, holder, stop))
        ):
            while not stop.ended:
                reporter.publish()
                job = desk.take(_IDLE_S)
                if job is not None:
                    desk.finish(job, _worked(trainer, holder, job.work))
            desk.close()
            time.sleep(_IDLE_S)  # what was answered last is still being sent
    finally:
        if holder is not None:
            holder.close()


def _warm_up(trainer: SiteTrainer, holder: PowerHolder) -> None:
    """Trains for nothing until the power controller has measured the speed."""
    for _ in trainer.rehearse():
        if trainer.stop.ended or holder.ready or not holder.alive:
            break
    holder.check()


def _worked(trainer: SiteTrainer, holder: PowerHolder | None, work: Any) -> Answer:
    """One request, from beginning to end; whatever goes wrong is the answer."""
    try:
        if not isinstance(work, TrainRequest):
            return trainer.evaluate(work)
        known = trainer.stored(work)
        if known is not None:
            return known
        begun = holder.begin(work.assignment.power_w) if holder is not None else None
        try:
            reply = trainer.train(work)
        finally:
            ended = holder.end() if holder is not None else None
        if begun is not None and ended is not None:
            measured: dict[str, Any] = ended.since(begun)
            reply = replace(reply, metrics=replace(reply.metrics, **measured))
        trainer.keep(work, reply)
        return reply
    except UserError as error:
        return SiteFailure(Fate.FAILED, str(error))


def _status(
    reporter: Reporter, desk: Desk, holder: PowerHolder | None, stop: SiteStop
) -> Callable[[str], dict[str, Any]]:
    """What clients may ask beside work, by the kind of their question."""

    def tell(kind: str) -> dict[str, Any]:
        if kind == "stop":
            stop.ended = stop.ended or "a client asked for it"
            return {"kind": "stopping"}
        current = desk.current
        work = current.work if current is not None else None
        training = work if isinstance(work, TrainRequest) else None
        state = "idle" if work is None else "training" if training is not None else "evaluating"
        return {
            "kind": "status",
            "state": state,
            "run_id": training.run_id if training else None,
            "round": training.round if training else None,
            "steps": reporter.status.steps,
            "memory_mb": peak_memory_mb(),
            "power": holder.last if holder is not None else None,
        }

    return tell


@contextlib.contextmanager
def _listening(folder: Path, answer: Callable[[socket.socket], None]) -> Any:
    """Answers connections at the site's socket in threads of their own while the block runs."""
    path = folder / SOCKET_FILE
    path.unlink(missing_ok=True)  # of a killed process: this one holds the site's lock
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with wire.address(path) as where:
            listener.bind(where)
        path.chmod(0o600)
        listener.listen(16)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return  # closed
                threading.Thread(target=answer, args=(connection,), name="wattgym-client", daemon=True).start()

        threading.Thread(target=accept, name="wattgym-socket", daemon=True).start()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _answer(connection: socket.socket, desk: Desk, info: SiteInfo, tell: Callable[[str], dict[str, Any]]) -> None:
    """One request of one client, who may go away at any time."""
    with connection, contextlib.suppress(OSError, wire.WireError):
        header, body = wire.receive(connection)
        try:
            if header["kind"] == "train":
                request = wire.request_from(header, from_bytes(body))
                time.sleep(request.link_s[0])  # the emulated link: the request is on its way
                job = desk.hand_in(request)
                job.done.wait()
                time.sleep(request.link_s[1])
                reply = job.answer
            elif header["kind"] == "evaluate":
                adapter = from_bytes(body)
                time.sleep(float(header.get("link_s", 0.0)))
                job = desk.hand_in(adapter)
                job.done.wait()
                reply = job.answer
            elif header["kind"] == "info":
                wire.send(connection, wire.info_header(info))
                return
            elif header["kind"] in ("status", "stop"):
                wire.send(connection, tell(header["kind"]))
                return
            else:
                reply = SiteFailure(Fate.FAILED, f"unknown request '{header['kind']}'")
        except (AdapterError, wire.WireError) as error:
            reply = SiteFailure(Fate.FAILED, str(error))
        if isinstance(reply, TrainReply):
            wire.send(connection, wire.reply_header(reply), to_bytes(reply.adapter))
        elif isinstance(reply, Evaluation):
            wire.send(connection, wire.evaluation_header(reply))
        else:
            wire.send(connection, wire.failure_header(reply))
