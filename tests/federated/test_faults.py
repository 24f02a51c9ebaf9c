"""Faults of real processes: no round is lost, nobody else's work is touched, nothing is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.errors import UserError
from wattgym.federated.adapters import digest
from wattgym.federated.federation import Federation
from wattgym.federated.in_process import InProcessEngine
from wattgym.federated.messages import Fate, TrainReply, TrainRequest
from wattgym.federated.processes import CONFIG_FILE, ProcessEngine
from wattgym.federated.site.client import SOCKET_FILE, SiteClient

pytestmark = pytest.mark.slow

RELAY = """
    # Stands between the aggregator and a site, and spoils what the site answers.
    import socket, sys
    import numpy as np
    from wattgym.federated.adapters import from_bytes, to_bytes
    from wattgym.federated.site import wire

    own, site, fault = sys.argv[1:]
    kept = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(own)
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client, socket.socket(socket.AF_UNIX) as there:
                there.connect(site)
                header, body = wire.receive(client)
                wire.send(there, header, body)
                print(header["kind"], flush=True)
                header, body = wire.receive(there)
                if header["kind"] == "reply":
                    adapter = from_bytes(body)
                    name = sorted(adapter)[0]
                    if fault == "nan":
                        adapter[name].flat[3] = np.nan
                    elif fault == "shape":
                        adapter[name] = adapter[name][:1]
                    elif fault == "large":
                        adapter = {key: array * np.float32(1000) for key, array in adapter.items()}
                    elif fault == "twin":
                        header["site"] = "a"
                    elif fault == "replay":
                        header, adapter = kept.setdefault("first", (header, adapter))
                    body = to_bytes(adapter)
                elif header["kind"] == "info" and fault == "twin":
                    header["info"]["name"] = "a"
                wire.send(client, header, body)
"""


def wait_until(done, timeout_s=240.0):
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def processes_of(folder):
    """Processes whose command line names a folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if str(folder) in words and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def config(federation):
    return federation()


@pytest.fixture(scope="module")
def engine(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with ProcessEngine(config, folder) as made:
        wait_until(lambda: len(made.members()) == 3)
        made.folder = folder
        yield made
    assert processes_of(folder) == []


class Run:
    """A federation over the faulty engine, beside one over an engine in which the faulty site was never chosen."""

    def __init__(self, config, engine):
        self.run = Federation(config, engine)
        self.clean = Federation(config, InProcessEngine(config))

    def play(self, names="abc", clean="abc", unheard="", steps=2, deadline_s=120.0):
        """One round in both; `unheard` train in the clean one too, but what they answer counts for nothing."""

        def assigned(federation, chosen):
            return {name: federation.assignment(local_steps=steps) for name in chosen}

        record = self.run.run_round(assigned(self.run, names), deadline_s)
        for name in unheard:
            assignment = self.clean.assignment(local_steps=steps)
            request = TrainRequest(self.clean.run_id, self.clean.round + 1, self.clean.adapter, assignment)
            answers = self.clean.engine.exchange({name: request}, deadline_s)
            assert isinstance(answers[name][0], TrainReply)
        self.clean.run_round(assigned(self.clean, clean))
        assert digest(self.run.adapter) == digest(self.clean.adapter)
        return {outcome.site: outcome for outcome in record.outcomes}, record


@pytest.fixture
def pair(config, engine):
    return Run(config, engine)


def while_training(engine, name, act):
    """Does something to a site as soon as it trains."""

    def watch():
        wait_until(lambda: engine._sites[name].client.status()["state"] == "training")
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_site_that_is_killed_in_a_round(engine, pair):
    pair.play()
    killer = while_training(engine, "c", lambda: os.kill(engine.pids["c"], signal.SIGKILL))
    outcomes, record = pair.play(clean="ab", steps=60)
    killer.join()
    assert (outcomes["c"].fate, outcomes["c"].reason) == (Fate.LOST, "its process was killed by SIGKILL")
    assert {outcomes["a"].fate, outcomes["b"].fate} == {Fate.COUNTED}
    assert record.round == 2
    wait_until(lambda: "c" in engine.members())  # started again
    outcomes, record = pair.play()
    assert (outcomes["c"].fate, record.round) == (Fate.COUNTED, 3)


def test_a_site_that_hangs(engine, pair):
    pid = engine.pids["b"]
    stopper = while_training(engine, "b", lambda: os.kill(pid, signal.SIGSTOP))
    try:
        outcomes, record = pair.play(clean="ac", steps=60, deadline_s=10.0)
        stopper.join()
        assert (outcomes["b"].fate, record.round) == (Fate.LATE, 1)
        outcomes, record = pair.play(names="ac", clean="ac")
        assert record.round == 2
    finally:
        os.kill(pid, signal.SIGCONT)
    # It goes on with a round that nobody wants any more, gives that up when asked for another, and counts again.
    outcomes, record = pair.play()
    assert (outcomes["b"].fate, record.round) == (Fate.COUNTED, 3)


@contextlib.contextmanager
def relayed(engine, name, folder, fault="none"):
    """Puts a relay between the engine and a site; yields its process, which tells each request that has gone on."""
    site = engine._sites[name]
    honest, own = site.client, folder / "relay.sock"
    command = [sys.executable, "-c", textwrap.dedent(RELAY), str(own), str(honest.path), fault]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(own.exists)
            site.client = SiteClient(own)
            yield process
        finally:
            site.client = honest
            process.kill()


def test_a_relay_that_is_killed_in_a_round(engine, pair, tmp_path):
    site = engine._sites["c"].client
    with relayed(engine, "c", tmp_path) as relay:
        pair.play()
        trained, pid = site.status()["steps"], engine.pids["c"]
        os.kill(pid, signal.SIGSTOP)  # The site has the request and does not answer before the relay has died.

        def kill_when_asked():
            try:
                asked = (line for line in relay.stdout if line == "train\n")
                next(asked), next(asked)
                relay.kill()
                relay.wait()
            finally:
                os.kill(pid, signal.SIGCONT)

        killer = threading.Thread(target=kill_when_asked)
        killer.start()
        outcomes, record = pair.play(clean="ab", unheard="c")
        killer.join()
    assert (outcomes["c"].fate, record.round) == (Fate.LOST, 2)
    assert {outcomes["a"].fate, outcomes["b"].fate} == {Fate.COUNTED}
    wait_until(lambda: site.status()["steps"] == trained + 2 and site.status()["state"] == "idle")
    outcomes, record = pair.play()  # It has trained for the relay that died, and goes on from there.
    assert (outcomes["c"].fate, record.round) == (Fate.COUNTED, 3)
    assert (engine.pids["c"], site.status()["steps"]) == (pid, trained + 4)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "no finite number"),
        ("shape", "has shape"),
        ("large", "is plausible in 2 steps"),
        ("twin", "the answer is that of site 'a', not 'c'"),
        ("replay", "the answer is that of round 1, not 2"),
    ],
)
def test_answers_that_must_not_count(engine, pair, tmp_path, fault, reason):
    with relayed(engine, "c", tmp_path, fault):
        if fault == "replay":
            pair.play()  # an honest round, which is then played back
        outcomes, record = pair.play(clean="ab")
    assert outcomes["c"].fate is Fate.REJECTED
    assert reason in outcomes["c"].reason
    assert {outcomes["a"].fate, outcomes["b"].fate} == {Fate.COUNTED}
    assert record.round == pair.run.round
    outcomes, _ = pair.play(names="ab", clean="ab")
    assert all(outcome.fate is Fate.COUNTED for outcome in outcomes.values())


def test_a_second_process_of_a_site_is_refused(engine):
    folder = engine.folder
    command = [sys.executable, "-m", "wattgym.federated.site", "--federation", str(folder / CONFIG_FILE)]
    done = subprocess.run([*command, "--site", "a", "--folder", str(folder / "a")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "a job is running in this folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert engine._sites["a"].client.info().name == "a"


def test_running_sites_of_another_federation_are_not_taken_over(engine, federation):
    with pytest.raises(UserError, match=r"site 'a' \(process \d+\) runs there with another federation file"):
        ProcessEngine(federation(local_steps=9), engine.folder, outlive=True)
    assert len(engine.members()) == 3


def test_a_site_that_refuses_says_why(federation, tmp_path):
    config = federation(names=("a",), data={"source": "file", "path": str(tmp_path / "nowhere.jsonl")})
    with (
        ProcessEngine(config, tmp_path / "sites") as engine,
        pytest.raises(UserError, match=r"site 'a': wattgym site: error: .*nowhere\.jsonl"),
    ):
        wait_until(lambda: engine.members())
    assert processes_of(tmp_path / "sites") == []


AGGREGATOR = """
    import sys
    from pathlib import Path
    from wattgym.config import load_config
    from wattgym.federated.config import FederationConfig
    from wattgym.federated.federation import Federation
    from wattgym.federated.processes import ProcessEngine

    config, folder, resume = load_config(FederationConfig, sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "resume"
    with ProcessEngine(config, folder / "sites", outlive=sys.argv[3] != "mortal") as engine:
        run = Federation(config, engine, folder, resume=resume)
        while run.round < 3:
            steps = 60 if run.round == 1 else 2
            run.run_round({name: run.assignment(local_steps=steps) for name in config.names})
            print(run.round, flush=True)
        run.save_adapter(folder / "adapter")
    assert "torch" not in sys.modules
"""


@pytest.fixture
def ended(tmp_path):
    """Whatever a test leaves running below its folder is ended, even if it fails."""
    yield
    for pid in processes_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("ended")
def test_an_aggregator_that_is_killed_and_resumed(federation, tmp_path):
    from wattgym.files import atomic_write_json

    config = federation(names=("a", "b"))
    atomic_write_json(tmp_path / "federation.json", config.model_dump(mode="json"))
    command = [sys.executable, "-c", textwrap.dedent(AGGREGATOR), str(tmp_path / "federation.json")]
    first = subprocess.Popen([*command, str(tmp_path / "run"), "new"], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "1\n"
    sites = {name: SiteClient(tmp_path / "run" / "sites" / name / SOCKET_FILE) for name in config.names}
    wait_until(lambda: sites["a"].status()["round"] == 2)
    first.kill()
    first.wait()
    first.stdout.close()
    pids = {name: client.info().pid for name, client in sites.items()}
    done = subprocess.run([*command, str(tmp_path / "run"), "resume"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "3"]), done.stderr
    for name, client in sites.items():
        assert client.info().pid == pids[name]  # taken over, and the round that it was in went on
        assert client.status()["steps"] == 2 + 60 + 2  # nothing was trained twice
        client.stop()
    wait_until(lambda: processes_of(tmp_path / "run") == [])
    with InProcessEngine(config) as engine:
        whole = Federation(config, engine)
        for steps in (2, 60, 2):
            whole.run_round({name: whole.assignment(local_steps=steps) for name in config.names})
        whole.save_adapter(tmp_path / "whole")
    name = "adapter_model.safetensors"
    assert (tmp_path / "run" / "adapter" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.usefixtures("ended")
def test_sites_end_with_a_killed_engine(federation, tmp_path):
    from wattgym.files import atomic_write_json

    atomic_write_json(tmp_path / "federation.json", federation(names=("a",)).model_dump(mode="json"))
    command = [sys.executable, "-c", textwrap.dedent(AGGREGATOR), str(tmp_path / "federation.json")]
    with subprocess.Popen([*command, str(tmp_path / "run"), "mortal"], stdout=subprocess.DEVNULL) as engine:
        wait_until(lambda: processes_of(tmp_path / "run" / "sites"))  # it still loads
        engine.kill()
    wait_until(lambda: not processes_of(tmp_path / "run" / "sites"))
    assert "stopped: its owner died" in (tmp_path / "run" / "sites" / "a" / "site.log").read_text()
