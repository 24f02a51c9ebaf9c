"""Everything real and at once: SuperLink, SuperNodes, TLS, keys, trainers, `wattgym federate`'s run, and deaths."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower engine is an optional extra")
pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.errors import UserError
from wattgym.federated.adapters import digest
from wattgym.federated.checkpoint import load_newest
from wattgym.federated.federation import CHECKPOINTS, Federation
from wattgym.federated.flower.app_folder import RUN_CONFIG
from wattgym.federated.flower.control import Control
from wattgym.federated.flower.credentials import create
from wattgym.federated.flower.deploy import Loopback
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.log import LOG_FILE, read_log
from wattgym.federated.messages import Fate
from wattgym.federated.processes import ProcessEngine
from wattgym.federated.site.client import SOCKET_FILE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


class ServerKilledError(Exception):
    """The test has killed the server app."""


def running(loopback, program):
    """Processes of a program among those of a deployment."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in loopback.family.members()}
    return [pid for pid, command in commands.items() if f"/{program}\0".encode() in command]


def recorded(out):
    return [record for record, _ in read_log(out / LOG_FILE)]


def test_a_deployment_outlives_its_node_and_its_server(federation, tmp_path):
    config = federation(names=("a", "b"))
    file, out, lines = tmp_path / "federation.json", tmp_path / "run", []
    settings = {**RUN_CONFIG, "federation": str(file), "rounds": 3, "out": str(out)}
    stranger = create(tmp_path / "stranger", ["127.0.0.1"], ["a"])
    with ProcessEngine(config, tmp_path / "sites") as trainers:
        sockets = {name: tmp_path / "sites" / name / SOCKET_FILE for name in config.names}
        begin_s = time.monotonic()
        with Loopback(sockets, tmp_path / "flower") as loopback:
            # Flower gives a node up after 41 s; on a busy machine a round of the living may need longer than that.
            deadline_s = max(45.0, 5.0 * (time.monotonic() - begin_s))
            file.write_text(federation(names=("a", "b"), deadline_s=deadline_s).model_dump_json())

            def watch():
                trainers.members()
                said = [line.split("/")[0] for line in lines if line.startswith("round ")]
                if said == ["round 1"] and loopback.node_pid("b") in loopback.family.members():
                    os.kill(loopback.node_pid("b"), signal.SIGKILL)
                if said == ["round 1", "round 2"]:
                    [server] = running(loopback, "flwr-serverapp")
                    os.kill(server, signal.SIGKILL)
                    loopback.start_node("b")
                    raise ServerKilledError

            with pytest.raises(ServerKilledError):
                loopback.control.run(settings, lines.append, watch)

            _, state = load_newest(out / CHECKPOINTS)
            with InProcessEngine(config) as engine:
                expected = Federation(config, engine)
                for record in recorded(out)[1:]:
                    counted = [outcome for outcome in record.outcomes if outcome.fate is Fate.COUNTED]
                    expected.run_round({outcome.site: outcome.assignment for outcome in counted})
            assert digest(state) == digest(expected.adapter)

            loopback.control.run({**settings, "resume": True}, lines.append, trainers.members)

            with pytest.raises(UserError, match=r"SuperLink at .*: .*certificate"):
                Control(loopback.control.address, stranger.ca_certificate, tmp_path / "other").check()
        assert loopback.family.members() == set()

    records = recorded(out)
    fates = [{outcome.site: outcome.fate for outcome in record.outcomes} for record in records]
    assert [record.round for record in records] == [0, 1, 2, 3]
    assert fates[1] == fates[3] == {"a": Fate.COUNTED, "b": Fate.COUNTED}
    assert fates[2]["a"] is Fate.COUNTED
    assert fates[2]["b"] in (Fate.LATE, Fate.LOST)
    assert records[3].evaluation.loss < records[0].evaluation.loss
    assert (out / "adapter" / "adapter_config.json").is_file()
