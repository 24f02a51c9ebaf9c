import contextlib
import itertools
import os
import threading
import time

import pytest

from wattgym.config import parse_config
from wattgym.federated.config import FederationConfig

REGIONS = ("aws:us-east-1", "aws:eu-west-1", "aws:ap-northeast-1", "aws:us-west-2")


@pytest.fixture(scope="session")
def federation():
    """Configuration of a federation of tiny sites; keyword arguments replace top-level keys."""

    def make(names=("a", "b", "c"), **changes):
        values = {
            "seed": 3,
            "sites": [{"name": name, "region": REGIONS[i]} for i, name in enumerate(names)],
            "model": {"source": "tiny", "tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
            "data": {"source": "tasks", "records": 400, "max_tokens": 96, "evaluation": 16},
            "lora": {"targets": "all-linear", "rank": 4},
            "optimiser": {"learning_rate": 0.01},
            "samples_per_update": 4,
            "micro_batch": 4,
            "local_steps": 3,
            "deadline_s": 120.0,
            "backoff_s": 0.0,
            "device": "cpu",
        }
        return parse_config(FederationConfig, {**values, **changes}, "federation")

    return make


@pytest.fixture(scope="session")
def flower_grid():  # noqa: C901 - a class that exists only where Flower is installed
    """Class of grids inside this process: SuperLink and SuperNodes as an engine sees them.

    Messages are taken apart and put together again as they are for Flower's wire; a reply is given out once, and what
    was lost comes back as the errors that a SuperLink makes.
    """
    pytest.importorskip("flwr", reason="the Flower engine is an optional extra")
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.serverapp import Grid
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.task_identity import TaskIdentity

    from wattgym.federated.flower.client_app import app

    def carried(message):
        identifier = message.object_id
        contents = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        copy = inflate_object_from_contents(identifier, contents)
        copy.metadata.__dict__["_message_id"] = identifier
        return copy

    class InProcessGrid(Grid):
        def __init__(self):
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
            self.nodes, self.ready, self.sent, self.pulled, self.count = {}, {}, {}, [], itertools.count(2)

        def join(self, path):
            key = next(self.count)
            self.nodes[key] = Context(7, key, {"socket": str(path)}, RecordDict(), {}, 0)
            return key

        def leave(self, key):
            """The node is gone, and so are its replies."""
            del self.nodes[key]
            for identifier, message in self.sent.items():
                if message.metadata.dst_node_id == key and identifier not in self.ready:
                    self.ready[identifier] = Message(Error(5, "Node Unavailable"), reply_to=message)

        # Flower's interface asks for these three; the engine uses none of them, and one that did would fail here.
        run = property(lambda self: None)

        def set_run(self, run):
            raise NotImplementedError

        def create_message(self, *args, **kwargs):
            raise NotImplementedError

        def send_and_receive(self, messages, *, timeout=None):
            raise NotImplementedError

        def get_node_ids(self):
            return list(self.nodes)

        def push_messages(self, messages):
            return [self.push(carried(message)) for message in messages]

        def push(self, message):
            if message.metadata.dst_node_id not in self.nodes:
                return None
            identifier = message.metadata.message_id
            self.sent[identifier] = message
            threading.Thread(target=self.deliver, args=(identifier, message), daemon=True).start()
            return identifier

        def deliver(self, identifier, message):
            try:
                reply = carried(app(message, self.nodes[message.metadata.dst_node_id]))
            except Exception as error:  # As Flower's own runtime does.
                reply = Message(Error(2, str(error)), reply_to=message)
            self.ready.setdefault(identifier, reply)

        def pull_messages(self, message_ids):
            found = []
            for identifier in message_ids:
                metadata = self.sent[identifier].metadata
                if identifier in self.pulled or time.time() > metadata.created_at + metadata.ttl:
                    found.append(Message(Error(3, "Message Unavailable"), reply_to=self.sent[identifier]))
                elif identifier in self.ready:
                    self.pulled.append(identifier)
                    found.append(self.ready[identifier])
            return found

    return InProcessGrid


@pytest.fixture(scope="session")
def flower(flower_grid):
    """Lends a Flower engine over such a grid; its sites are processes."""
    from wattgym.federated.flower.engine import FlowerEngine
    from wattgym.federated.processes import ProcessEngine
    from wattgym.federated.site.client import SOCKET_FILE

    @contextlib.contextmanager
    def lend(config, folder):
        with ProcessEngine(config, folder) as trainers:
            grid, until_s = flower_grid(), time.monotonic() + 300.0
            while len(trainers.members()) < len(config.names):
                assert time.monotonic() < until_s
                time.sleep(0.1)
            for name in config.names:
                grid.join(folder / name / SOCKET_FILE)
            with FlowerEngine(grid, poll_s=0.05) as engine:
                assert set(engine.members()) == set(config.names)
                yield engine

    return lend
