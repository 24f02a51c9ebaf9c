"""Processes end with their owner; credentials; bad input. Real processes, no Flower needed for the former."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from wattgym.errors import UserError
from wattgym.federated import flower
from wattgym.federated.flower.keeper import MARK, ProcessFamily, end, marked

pytestmark = pytest.mark.xdist_group("flower")

# A process that ignores SIGTERM and has a child in a session of its own, as Flower's programs have.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""
OWNER = f"""
import os, signal, sys, time
from pathlib import Path
from wattgym.federated.flower.keeper import ProcessFamily
family = ProcessFamily(grace_s=0.5)
family.start([sys.executable, "-c", {STUBBORN!r}], Path(sys.argv[1]), os.environ)
while "ready" not in Path(sys.argv[1]).read_text():
    time.sleep(0.02)
print(family.mark, flush=True)
time.sleep(600)
"""


def wait_until(true, seconds=30.0):
    until_s = time.monotonic() + seconds
    while not true() and time.monotonic() < until_s:
        time.sleep(0.05)
    return true()


def test_closing_ends_members_their_children_and_those_that_ignore_sigterm(tmp_path):
    log = tmp_path / "log"
    with ProcessFamily(grace_s=0.5) as family:
        family.start([sys.executable, "-c", STUBBORN], log, os.environ)
        assert wait_until(lambda: "ready" in log.read_text())
        assert wait_until(lambda: len(family.members()) == 2)
    assert family.members() == set()
    family.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_an_owner_that_dies(tmp_path, number):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    mark = owner.stdout.readline().strip()
    assert wait_until(lambda: len(marked(mark)) == 2)
    owner.send_signal(number)
    owner.wait()
    owner.stdout.close()
    assert wait_until(lambda: not marked(mark))


def test_closing_works_without_the_keeper(tmp_path):
    family = ProcessFamily(grace_s=0.5)
    family.start([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log", os.environ)
    family._keeper.kill()
    family.close()
    assert family.members() == set()


def test_a_guards_watchdog_is_left_to_end_by_itself(tmp_path):
    code = "import time; time.sleep(1.5)"
    process = subprocess.Popen([sys.executable, "-c", code, "wattgym.hw.watchdog"], env={**os.environ, MARK: "m1"})
    assert marked("m1") == {process.pid: True}
    reaper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: "m1"})
    end("m1", grace_s=0.2, patience_s=20.0)
    assert reaper.wait() == -signal.SIGTERM
    assert process.wait() == 0  # It was not signalled.


def test_missing_or_other_flower_is_one_line(monkeypatch):
    def missing(name):
        raise flower.PackageNotFoundError(name)

    monkeypatch.setattr(flower, "version", missing)
    with pytest.raises(UserError, match=r"^engine 'flower' needs Flower: pip install 'wattgym\[federated\]'$"):
        flower.require_flower()
    monkeypatch.setattr(flower, "version", lambda name: "1.43.0")
    with pytest.raises(UserError, match=r"needs Flower 1.42.\*, found 1.43.0"):
        flower.require_flower()


class TestWithFlower:
    """Needs the optional extra."""

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("flwr", reason="the Flower engine is an optional extra")

    @pytest.fixture
    def made(self, tmp_path):
        from wattgym.federated.flower.credentials import create

        return create(tmp_path / "credentials", ["localhost", "127.0.0.1"], ["a", "b"], timedelta(days=2))

    def test_credentials_are_private_complete_and_sign_each_other(self, made):
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

        private = [made.folder / "ca.key", made.key, made.site_key("a"), made.site_key("b")]
        assert {path.stat().st_mode & 0o077 for path in [made.folder, *private]} == {0}
        ca, server = (x509.load_pem_x509_certificate(p.read_bytes()) for p in (made.ca_certificate, made.certificate))
        server.verify_directly_issued_by(ca)
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost"]
        assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
        key = load_ssh_private_key(made.site_key("a").read_bytes(), None)
        assert key.public_key() == load_ssh_public_key(made.site_public_key("a").read_bytes())
        assert made.site_key("a").read_bytes() != made.site_key("b").read_bytes()
        made.check(["a", "b"])

    @pytest.mark.parametrize(
        ("later", "message"),
        [
            (timedelta(days=3), r"ca\.crt: certificate expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC; `wattgym federated"),
            (timedelta(days=-1), r"ca\.crt: certificate is not valid before .*; check this host's clock$"),
        ],
    )
    def test_certificates_out_of_date_are_named(self, made, later, message):
        with pytest.raises(UserError, match=message):
            made.check(["a"], now=datetime.now(UTC) + later)

    def test_incomplete_or_spoiled_credentials_are_named(self, made):
        with pytest.raises(UserError, match=r"sites/c: no such file"):
            made.check(["a", "c"])
        made.certificate.write_text("nonsense")
        with pytest.raises(UserError, match=r"superlink\.crt: not a certificate in PEM format"):
            made.check(["a"])

    def test_credentials_are_never_overwritten(self, made):
        from wattgym.federated.flower.credentials import create

        before = made.key.read_bytes()
        with pytest.raises(UserError, match="not empty; credentials are made in a new folder"):
            create(made.folder, ["localhost"], ["a"])
        assert made.key.read_bytes() == before

    def test_a_deployment_that_cannot_work_starts_nothing(self, tmp_path, made):
        from wattgym.federated.flower.deploy import Loopback

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(UserError, match=rf"^port {port} on 127.0.0.1: Address already in use; choose another"):
                Loopback({"a": tmp_path / "a.sock"}, tmp_path / "run", port=port)
        with pytest.raises(UserError, match="port 70000: expected 1 to 65535"):
            Loopback({"a": tmp_path / "a.sock"}, tmp_path / "run", port=70000)
        with pytest.raises(UserError, match="sites/c: no such file"):
            Loopback({"c": tmp_path / "c.sock"}, tmp_path / "run", credentials=made)
        with pytest.raises(UserError, match="quotation mark"):
            Loopback({"a": tmp_path / "it's.sock"}, tmp_path / "run")

    def test_a_superlink_that_is_not_there_or_not_to_be_trusted_is_one_line(self, tmp_path, made):
        from wattgym.federated.flower.control import Control
        from wattgym.federated.flower.deploy import free_port

        port = free_port()
        with pytest.raises(UserError, match=rf"^no SuperLink answers at 127.0.0.1:{port}: Connection refused$"):
            Control(f"127.0.0.1:{port}", made.ca_certificate, tmp_path / "x").check()
        with pytest.raises(UserError, match="nowhere: cannot read: No such file or directory"):
            Control(f"127.0.0.1:{port}", tmp_path / "nowhere", tmp_path / "x")
        with pytest.raises(UserError, match=r"superlink\.key: not a certificate in PEM format"):
            Control(f"127.0.0.1:{port}", made.key, tmp_path / "x")
        with pytest.raises(UserError, match="expected host:port"):
            Control("superlink", made.ca_certificate, tmp_path / "x")

    def test_the_command_makes_credentials_for_the_sites_of_a_federation_file(self, tmp_path, capsys):
        from wattgym.cli import main
        from wattgym.federated.flower.credentials import Credentials

        federation, out = tmp_path / "federation.yaml", tmp_path / "credentials"
        federation.write_text("sites: [{name: paris, region: x}, {name: tokyo, region: y}]\nmodel: {source: tiny}\n")
        arguments = ["federated", "credentials", str(federation), "--out", str(out), "--host", "10.0.0.5"]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        Credentials(out).check(["paris", "tokyo"])
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"wattgym: error: {out}: not empty")

    def test_the_relay_loads_no_training_libraries(self):
        code = "import sys, wattgym.federated.flower.client_app; print(*(m for m in sys.modules if '.' not in m))"
        loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert not {"torch", "peft", "transformers", "pandas", "scipy", "gymnasium"} & set(loaded)

    def test_the_committed_app_folder_is_what_deployments_use(self, tmp_path, request):
        from wattgym.federated.flower.app_folder import write_app

        committed = request.config.rootpath / "examples" / "flower" / "pyproject.toml"
        assert (write_app(tmp_path / "app") / "pyproject.toml").read_text() == committed.read_text()
