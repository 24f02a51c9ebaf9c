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
from wattgym.federated.messages import Fate
from wattgym.federated.processes import CONFIG_FILE, ProcessEngine
from wattgym.federated.site.client import SOCKET_FILE, SiteClient

pytestmark = pytest.mark.slow

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
