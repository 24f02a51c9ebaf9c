"""Everything real and at once: SuperLink, SuperNodes, TLS, keys, trainers, `wattgym federate`'s run, and deaths."""

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the Flower engine is an optional extra")
pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.cli import main
from wattgym.errors import UserError
from wattgym.federated.adapters import digest
from wattgym.federated.checkpoint import load_newest
from wattgym.federated.federation import CHECKPOINTS, Federation
from wattgym.federated.flower.app_folder import RUN_CONFIG
from wattgym.federated.flower.control import Control
from wattgym.federated.flower.credentials import create
from wattgym.federated.flower.deploy import Loopback
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.log import LOG_FILE, read_log, record_from
from wattgym.federated.messages import Fate
from wattgym.federated.processes import ProcessEngine
from wattgym.federated.site.client import SOCKET_FILE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


class ServerKilledError(Exception):
    """The test has killed the server app."""


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


class Killer:
    """Kills the relay of one site in a round, the node of the other, and the server when it has missed the latter."""

    def __init__(self, loopback, out, sockets, pids):
        self.loopback, self.out, self.sockets, self.pids = loopback, out, sockets, pids
        self.killed = []

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
        elif of_site(records, "b", Fate.LATE, Fate.LOST) and len(self.killed) == 2:
            [server] = running(self.loopback, "flwr-serverapp")
            os.kill(server, signal.SIGKILL)
            raise ServerKilledError


def test_a_deployment_outlives_a_relay_a_node_and_its_server(federation, tmp_path, capsys):
    config = federation(names=("a", "b"))
    file, out = tmp_path / "federation.json", tmp_path / "run"
    settings = {**RUN_CONFIG, "federation": str(file), "rounds": 100, "out": str(out)}
    stranger = create(tmp_path / "stranger", ["127.0.0.1"], ["a"])
    with ProcessEngine(config, tmp_path / "sites") as trainers:
        sockets = {name: tmp_path / "sites" / name / SOCKET_FILE for name in config.names}
        begin_s = time.monotonic()
        with Loopback(sockets, tmp_path / "flower") as loopback:
            # Flower gives relays and nodes up after a minute, and the site that lives is to count even then.
            deadline_s = 120.0 + 5.0 * (time.monotonic() - begin_s)
            file.write_text(federation(names=("a", "b"), deadline_s=deadline_s).model_dump_json())
            killer = Killer(loopback, out, sockets, trainers.pids)
            with pytest.raises(ServerKilledError):
                loopback.control.run(settings, lambda line: None, killer)
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
            assert len(of_site(records, "a", Fate.COUNTED)) == len(records) == state.round

            # The SuperLink takes the dead node for online for a while and refuses the new one.
            wait_until(lambda: loopback.revive() or loopback.is_let_in("b"))

            arguments = {
                "--sites": file,
                "--policy": "all sites",
                "--rounds": state.round + 1,
                "--engine": "flower",
                "--superlink": loopback.control.address,
                "--ca-certificate": tmp_path / "flower" / "credentials" / "ca.crt",
                "--out": out,
            }
            with pytest.raises(SystemExit) as ended:
                main(["federate", "--resume", *(str(word) for pair in arguments.items() for word in pair)])
            assert not ended.value.code
            assert f"round {state.round + 1}/{state.round + 1} | trained: a, b" in capsys.readouterr().out

            with pytest.raises(UserError, match=r"SuperLink at .*: .*certificate"):
                Control(loopback.control.address, stranger.ca_certificate, tmp_path / "other").check()
        assert loopback.family.members() == set()

    records = recorded(out)
    assert [record.round for record in records] == list(range(state.round + 2))
    assert {outcome.site: outcome.fate for outcome in records[-1].outcomes} == dict.fromkeys("ab", Fate.COUNTED)
    assert records[-1].evaluation.loss < records[0].evaluation.loss
    assert (out / "adapter" / "adapter_config.json").is_file()
