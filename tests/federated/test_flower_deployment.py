"""Everything real and at once: SuperLink, SuperNodes, TLS, keys, trainers, `wattgym federate`'s run, and deaths."""

import os
import pickle
import signal
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the Flower engine is an optional extra")
pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.cli import main
from wattgym.errors import UserError
from wattgym.federated.adapters import digest, initial
from wattgym.federated.checkpoint import load_newest
from wattgym.federated.federation import CHECKPOINTS, Federation
from wattgym.federated.flower.app_folder import RUN_CONFIG
from wattgym.federated.flower.control import Control
from wattgym.federated.flower.credentials import create
from wattgym.federated.flower.deploy import Loopback
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.log import LOG_FILE, read_log, record_from
from wattgym.federated.messages import Assignment, Fate, TrainRequest
from wattgym.federated.processes import ProcessEngine
from wattgym.federated.site.client import SOCKET_FILE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


CONFORMANCE = """
    # A server app that asks what `test_engines.py` asks of every engine, in as few messages as it takes.
    import pickle
    from pathlib import Path

    import numpy as np
    from flwr.serverapp import ServerApp

    from wattgym.federated.adapters import initial
    from wattgym.federated.config import load_federation
    from wattgym.federated.flower.engine import FlowerEngine
    from wattgym.federated.messages import Assignment, TrainRequest

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config = load_federation(context.run_config["federation"])
        with FlowerEngine(grid) as engine:
            members = {}
            while len(members) < 2:
                members = engine.members()
            adapter = initial(members["a"].shapes, config.seed)

            def request(run, number, link_s=(0.0, 0.0), adapter=adapter):
                return TrainRequest(run, number, adapter, Assignment(local_steps=2), link_s)

            wrong = {**adapter, next(iter(adapter)): np.zeros((1, 1), np.float32)}
            linked = request("x", 1, link_s=(0.2, 0.3))
            found = {
                "members": members,
                "first": engine.exchange({"a": linked, "b": request("x", 1, adapter=wrong)}, 600.0),
                "second": engine.exchange({name: request("x", 1) for name in members}, 600.0),
                "late": engine.exchange({name: request("late", 1) for name in members}, 0.1),
                "after": engine.exchange({name: request("late", 2) for name in members}, 600.0),
            }
        Path(context.run_config["out"]).write_bytes(pickle.dumps(found))
"""


def running(loopback, program, of=b""):
    """Processes of a program among those of a deployment, whose environment names something."""
    found = []
    for pid in loopback.family.members():
        try:
            command, names = (Path(f"/proc/{pid}/{what}").read_bytes() for what in ("cmdline", "environ"))
        except OSError:  # It has just ended.
            continue
        if f"/{program}\0".encode() in command and of in names:
            found.append(pid)
    return found


def connections(socket_path):
    """How many have connected to a listening Unix socket and not been heard yet, or are being heard."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    count = sum(line.endswith(f" {socket_path}") for line in lines)
    assert count, "nobody listens, or the path is too long for an address"
    return count - 1


def wait_until(done):
    until_s = time.monotonic() + 300.0
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def recorded(out):
    return [record for record, _ in read_log(out / LOG_FILE)] if (out / LOG_FILE).exists() else []


def of_site(records, name, *fates):
    """The rounds in which a site had one of these fates."""
    return [r for r in records for outcome in r.outcomes if outcome.site == name and outcome.fate in fates]


@pytest.fixture(scope="module")
def config(federation):
    return federation(names=("a", "b"))


@pytest.fixture(scope="module")
def deployment(config, tmp_path_factory):
    """Two trainers with SuperLink and SuperNodes, started once; nothing is left of them."""
    folder = tmp_path_factory.mktemp("deployment")
    with ProcessEngine(config, folder / "sites") as trainers:
        wait_until(lambda: len(trainers.members()) == 2)
        sockets = {name: folder / "sites" / name / SOCKET_FILE for name in config.names}
        with Loopback(sockets, folder / "flower") as loopback:
            yield SimpleNamespace(
                loopback=loopback,
                control=loopback.control,
                certificate=folder / "flower" / "credentials" / "ca.crt",
                sockets=sockets,
                pids=trainers.pids,
            )
        assert loopback.family.members() == set()


def test_the_engine_conforms_over_a_real_superlink(deployment, config, tmp_path):
    file, out = tmp_path / "federation.json", tmp_path / "found"
    file.write_text(config.model_dump_json())
    control = Control(deployment.control.address, deployment.certificate, tmp_path)
    project = tmp_path / "app" / "pyproject.toml"
    project.write_text(project.read_text().replace("wattgym.federated.flower.server_app", "conformance"))
    (tmp_path / "app" / "conformance.py").write_text(textwrap.dedent(CONFORMANCE))
    control.run({"federation": str(file), "out": str(out)}, lambda line: None)
    found = pickle.loads(out.read_bytes())
    adapter = initial(found["members"]["a"].shapes, config.seed)
    asked = TrainRequest("x", 1, adapter, Assignment(local_steps=2))
    with InProcessEngine(config) as engine:
        assert {name: vars(info) | {"pid": 0} for name, info in found["members"].items()} == {
            name: vars(info) | {"pid": 0} for name, info in engine.members().items()
        }
        expected = {
            name: answer.adapter for name, (answer, _) in engine.exchange(dict.fromkeys("ab", asked), 600.0).items()
        }
    (first, seconds), (refused, _) = found["first"]["a"], found["first"]["b"]
    assert digest(first.adapter) == digest(expected["a"])
    assert seconds >= first.metrics.train_s + 0.5  # an emulated link takes its time
    assert (refused.fate, "has shape (1, 1)" in refused.reason) == (Fate.FAILED, True)
    (again, _), (healed, _) = found["second"]["a"], found["second"]["b"]
    assert digest(again.adapter) == digest(first.adapter)
    assert again.metrics.train_s == first.metrics.train_s  # it was not trained a second time
    assert digest(healed.adapter) == digest(expected["b"])  # nothing was used up in vain
    assert {answer.fate for answer, _ in found["late"].values()} == {Fate.LATE}
    assert {answer.round for answer, _ in found["after"].values()} == {2}


class ServerKilledError(Exception):
    """The test has killed the server app."""


class Killer:
    """Kills the relay of one site in a round, the node of the other, and the server when it has missed the latter."""

    def __init__(self, deployment, out):
        self.loopback, self.sockets, self.pids = deployment.loopback, deployment.sockets, deployment.pids
        self.out, self.killed = out, []

    def __call__(self):
        records = recorded(self.out)
        if not self.killed and records and records[-1].round >= 1:
            os.kill(self.pids["a"], signal.SIGSTOP)  # Whatever it is asked next, it does not answer yet.
            os.kill(self.loopback.node_pid("b"), signal.SIGKILL)
            self.killed = ["b's node"]
        elif self.killed == ["b's node"] and connections(self.sockets["a"]):
            relays = running(self.loopback, "flwr-clientapp", b"/nodes/a\0")
            assert relays
            for pid in relays:  # One that has done its work may take a while to end.
                os.kill(pid, signal.SIGKILL)
            os.kill(self.pids["a"], signal.SIGCONT)
            self.killed.append("a's relay")
        elif (
            len(self.killed) == 2
            and of_site(records, "b", Fate.LATE, Fate.LOST)
            # A node that got half a message from a server that is gone waits a minute for the rest.
            and running(self.loopback, "flwr-clientapp", b"/nodes/a\0")
        ):
            [server] = running(self.loopback, "flwr-serverapp")
            os.kill(server, signal.SIGKILL)
            raise ServerKilledError


def test_a_deployment_outlives_a_relay_a_node_and_its_server(deployment, config, federation, tmp_path, capsys):
    file, out, loopback = tmp_path / "federation.json", tmp_path / "run", deployment.loopback
    # Flower gives relays and nodes up after a minute, and the site that lives is to count even then.
    file.write_text(federation(names=("a", "b"), deadline_s=600.0).model_dump_json())
    settings = {**RUN_CONFIG, "federation": str(file), "rounds": 100, "out": str(out)}
    killer = Killer(deployment, out)
    with pytest.raises(ServerKilledError):
        deployment.control.run(settings, lambda line: None, killer)
    assert killer.killed == ["b's node", "a's relay"]

    # Nobody's death has lost what another had trained.
    state, adapter = load_newest(out / CHECKPOINTS)
    records = recorded(out)[1:]
    if records[-1].round < state.round:
        records.append(record_from(state.record))
    with InProcessEngine(config) as engine:
        expected = Federation(config, engine)
        for record in records:
            counted = [outcome for outcome in record.outcomes if outcome.fate is Fate.COUNTED]
            expected.run_round({outcome.site: outcome.assignment for outcome in counted})
    assert digest(adapter) == digest(expected.adapter)
    assert [record.evaluation.loss for record in records] == [each.evaluation.loss for each in expected.records[1:]]
    assert len(of_site(records, "a", Fate.COUNTED)) == len(records) == state.round

    # The SuperLink takes the dead node for online for a while and refuses the new one.
    wait_until(lambda: loopback.revive() or loopback.is_let_in("b"))

    arguments = {
        "--sites": file,
        "--policy": "all sites",
        "--rounds": state.round + 1,
        "--engine": "flower",
        "--superlink": deployment.control.address,
        "--ca-certificate": deployment.certificate,
        "--out": out,
    }
    with pytest.raises(SystemExit) as ended:
        main(["federate", "--resume", *(str(word) for pair in arguments.items() for word in pair)])
    assert not ended.value.code
    assert f"round {state.round + 1}/{state.round + 1} | trained: a, b" in capsys.readouterr().out
    records = recorded(out)
    assert [record.round for record in records] == list(range(state.round + 2))
    assert {outcome.site: outcome.fate for outcome in records[-1].outcomes} == dict.fromkeys("ab", Fate.COUNTED)
    assert records[-1].evaluation.loss < records[0].evaluation.loss
    assert (out / "adapter" / "adapter_config.json").is_file()


def test_a_superlink_of_another_authority_is_refused(deployment, tmp_path):
    stranger = create(tmp_path / "stranger", ["127.0.0.1"], ["a"])
    with pytest.raises(UserError, match=r"SuperLink at .*: .*certificate"):
        Control(deployment.control.address, stranger.ca_certificate, tmp_path / "other").check()
