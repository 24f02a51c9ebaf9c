"""The privileged helper: who may connect, what it refuses, and that a client's end gives its devices back."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from wattgym.errors import UserError
from wattgym.hw.audit import read_audit
from wattgym.hw.device import DeviceError, DeviceLostError, DeviceNotFoundError, PermissionDeniedError
from wattgym.hw.guard import Guard
from wattgym.hw.preflight import GuardConfig
from wattgym.hw.remote import RemoteDevice
from wattgym.hw.serve import SERVER_CONFIG, Access, GuardServer, Peer, group_id, user_id
from wattgym.hw.simulated import Faults, SimulatedDevice
from wattgym.hw.telemetry import GuardState
from wattgym.hw.wire import MAX_REQUEST

ARMED = {"WATTGYM_ARM": "1"}
UUID = "SIM-h100-sxm-0"


def until(condition, timeout_s=15.0):
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


class Helper:
    """A helper in a thread of this process, with two simulated boards; the owner of the first has set 600 W."""

    def __init__(self, folder, **options):
        self.state_dir = folder / "state"
        self.path = folder / "hw.sock"
        self.boards = [SimulatedDevice("h100-sxm", index=n, state_path=folder / f"board{n}") for n in range(2)]
        self.boards[0].set_power_limit_mw(600_000)
        options = {"arm": True, "environ": ARMED, "state_dir": self.state_dir, **options}
        self.server = GuardServer(self.boards, self.path, **options)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()

    def stop(self):
        self.server.stop()
        self.thread.join()

    @property
    def limit_mw(self):
        return self.boards[0].requested_limit_mw()

    def refusals(self):
        return [r["why"] for r in read_audit(self.state_dir / "audit.jsonl") if r["event"] == "refused"]

    def raw(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(10.0)
        connection.connect(str(self.path))
        return connection


@pytest.fixture
def serve(tmp_path):
    helpers = []

    def make(**options):
        helpers.append(Helper(tmp_path, **options))
        return helpers[-1]

    yield make
    for helper in helpers:
        helper.stop()


@pytest.fixture
def helper(serve):
    return serve()


def remote(helper, uuid=UUID):
    return contextlib.closing(RemoteDevice(helper.path, uuid))


def test_a_remote_device_reads_like_a_local_one(helper):
    with remote(helper) as device:
        local = helper.boards[0]
        assert device.info().uuid == UUID
        assert device.info().backend == "remote"
        assert device.info().max_limit_mw == 700_000
        assert device.info().power_kind is local.info().power_kind
        reading = device.read()
        assert reading.requested_limit_mw == 600_000
        assert reading.power_kind is local.read().power_kind
        assert device.requested_limit_mw() == device.enforced_limit_mw() == 600_000


def test_writes_go_through_the_guard_and_disconnecting_gives_back(helper):
    with remote(helper) as device:
        device.set_power_limit_mw(400_000)
        assert helper.limit_mw == 400_000
        with pytest.raises(DeviceError, match="clipped low"):
            device.set_power_limit_mw(300_000)
        with pytest.raises(DeviceError, match="outside 200000 to 700000"):
            device.set_power_limit_mw(800_000)
        with pytest.raises(DeviceError, match="not an integer"):
            device.set_power_limit_mw(400_000.5)
        assert helper.limit_mw == 400_000
    assert until(lambda: helper.limit_mw == 600_000)
    assert len(helper.refusals()) == 3


def test_a_guard_works_on_a_remote_device_unchanged(helper):
    config = GuardConfig(rules={"interval_s": 0.2, "raise_window_s": 0.2})
    with remote(helper) as device, Guard(device, arm=True, environ=ARMED, config=config, exit_hooks=False) as guard:
        for watts in (400.0, 500.0, 450.0, 600.0):
            time.sleep(0.25)
            guard.set_limit_w(watts)
            guard.read()
            assert guard.telemetry.state is GuardState.ARMED, guard.telemetry.why
            assert helper.limit_mw == guard.telemetry.limit_mw
        assert guard.telemetry.raise_limited > 0
        guard.close()
        assert helper.limit_mw == 600_000


def test_a_lease_that_runs_out_takes_a_hung_clients_device(serve):
    helper = serve(config=SERVER_CONFIG.model_copy(update={"lease_s": 0.4}))
    with remote(helper) as device:
        device.set_power_limit_mw(400_000)
        assert until(lambda: helper.limit_mw == 600_000)
        with pytest.raises(PermissionDeniedError, match="no sign of life"):
            device.set_power_limit_mw(450_000)


def test_two_clients_cannot_control_one_device(helper):
    with remote(helper) as first, remote(helper) as second:
        first.set_power_limit_mw(400_000)
        with pytest.raises(DeviceError, match="already controls"):
            second.set_power_limit_mw(500_000)
        assert second.read().requested_limit_mw == 400_000
        with remote(helper, "SIM-h100-sxm-1") as other:
            other.set_power_limit_mw(500_000)
            assert helper.boards[1].requested_limit_mw() == 500_000
        assert until(lambda: helper.boards[1].requested_limit_mw() == 700_000)
    assert until(lambda: helper.limit_mw == 600_000)


def test_an_unarmed_helper_only_reads(serve):
    helper = serve(environ={})
    with remote(helper) as device:
        assert device.read().requested_limit_mw == 600_000
        with pytest.raises(PermissionDeniedError, match="WATTGYM_ARM=1"):
            device.set_power_limit_mw(400_000)
    assert helper.limit_mw == 600_000


def test_clocks_are_released_with_the_limit(helper):
    with remote(helper) as device:
        device.lock_clocks_mhz(min_mhz=600, max_mhz=900)
        helper.boards[0].set_demand(1.0)
        assert device.read().sm_clock_mhz <= 900
        with pytest.raises(DeviceError):
            device.lock_clocks_mhz(min_mhz=900, max_mhz=600)
        device.reset_clocks()
        assert until(lambda: device.read().sm_clock_mhz > 900)


def test_faults_keep_their_kind_over_the_socket(helper):
    with remote(helper) as device:
        helper.boards[0].inject(Faults(lost=True))
        with pytest.raises(DeviceLostError, match="lost"):
            device.read()
        helper.boards[0].inject(Faults(permission_denied=True))
        with pytest.raises(PermissionDeniedError, match="SYS_ADMIN"):
            device.set_power_limit_mw(400_000)
    with pytest.raises(DeviceNotFoundError, match=UUID):
        RemoteDevice(helper.path, "GPU-none")


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b"null",
        b"5",
        b"{}",
        b'{"op": "shutdown"}',
        b'{"op": ["set"]}',
        b'{"op": {}}',
        b"\xff\xfe",
        b"[" * 3000,
        b'{"op": "hello"}',
        b'{"op": "hello", "protocol": 99}',
        b'{"op": "read"}',
        b'{"op": "read", "uuid": {"a": 1}}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0"}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": true}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": "400000"}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": NaN}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": 1e99}',
        b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": ' + b"9" * 3000 + b"}",
        b'{"op": "lock_clocks", "uuid": "SIM-h100-sxm-0", "min_mhz": null}',
    ],
)
def test_malformed_requests_are_refused_and_logged_and_the_helper_goes_on(helper, line):
    with contextlib.closing(helper.raw()) as connection, connection.makefile("rb") as answers:
        connection.sendall(line + b"\n")
        answer = json.loads(answers.readline())
        assert answer["ok"] is False
        assert "\n" not in answer["message"]
        connection.sendall(b'{"op": "hello", "protocol": 1}\n')
        assert json.loads(answers.readline())["ok"] is True
    assert len(helper.refusals()) == 1
    assert helper.limit_mw == 600_000


def test_an_oversized_request_ends_the_connection_and_gives_back(helper):
    with contextlib.closing(helper.raw()) as connection, connection.makefile("rb") as answers:
        connection.sendall(b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_mw": 400000}\n')
        assert json.loads(answers.readline())["ok"] is True
        with contextlib.suppress(OSError):  # the helper may hang up before it is all sent
            connection.sendall(b"x" * (MAX_REQUEST + 5000))
        assert b"was refused" in answers.readline()
    assert until(lambda: helper.limit_mw == 600_000)
    assert any("bytes" in why for why in helper.refusals())


def test_half_a_request_and_a_hang_up_change_nothing(helper):
    with contextlib.closing(helper.raw()) as connection:
        connection.sendall(b'{"op": "set", "uuid": "SIM-h100-sxm-0", "limit_m')
    with remote(helper) as device:
        assert device.requested_limit_mw() == 600_000


# --- access


def test_the_sockets_mode_and_group_are_set(serve):
    helper = serve(access=Access(mode=0o660, group=os.getgid()))
    status = helper.path.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())


@pytest.mark.parametrize(
    ("access", "peer", "admitted"),
    [
        (Access(), Peer(1, 0, 0), True),
        (Access(), Peer(1, os.geteuid(), 0), True),
        (Access(), Peer(1, 54321, 54321), False),
        (Access(uids=frozenset({54321})), Peer(1, 54321, 1), True),
        (Access(gids=frozenset({777})), Peer(1, 54321, 777), True),
        (Access(gids=frozenset({777})), Peer(1, 54321, 778), False),
    ],
)
def test_who_is_admitted(access, peer, admitted):
    assert access.admits(peer) is admitted


CLIENT = """
import os, sys
from wattgym.errors import UserError
from wattgym.hw.remote import RemoteDevice
os.setgroups([]); os.setgid(54321); os.setuid(54321)
try:
    device = RemoteDevice(sys.argv[1], "SIM-h100-sxm-0")
    device.set_power_limit_mw(400_000)
    print("set", device.requested_limit_mw())
except UserError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become another user")
@pytest.mark.parametrize("allowed", [True, False])
def test_the_kernel_says_who_the_client_is(serve, tmp_path, allowed):
    helper = serve(access=Access(mode=0o666, uids=frozenset({54321} if allowed else ())))
    for folder in (tmp_path, *tmp_path.parents):  # a plain user must be able to reach the socket
        if folder.stat().st_mode & 0o011 != 0o011 and str(folder).startswith("/tmp/pytest-"):
            folder.chmod(0o755)
    line = [sys.executable, "-c", CLIENT, str(helper.path)]
    said = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    if allowed:
        assert said == "set 400000\n"
        assert until(lambda: helper.limit_mw == 600_000)
    else:
        assert "user 54321 may not use this helper" in said
        assert "--allow-user" in helper.refusals()[0]


def test_users_and_groups_by_name_and_number():
    assert (user_id("root"), user_id("1234"), group_id("0")) == (0, 1234, 0)
    with pytest.raises(UserError, match="no user 'nobody-here'"):
        user_id("nobody-here")
    with pytest.raises(UserError, match="no group 'nobody-here'"):
        group_id("nobody-here")


# --- the socket and the process


def test_a_second_helper_is_refused_and_a_dead_ones_socket_replaced(helper, tmp_path):
    options = {"arm": True, "environ": ARMED, "state_dir": tmp_path / "state"}
    with pytest.raises(UserError, match="another helper serves there"):
        GuardServer(helper.boards, helper.path, **options)
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(dead))
    server = GuardServer(helper.boards, dead, **options)
    server.stop()
    server.serve()
    assert not dead.exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [("nowhere/hw.sock", "cannot listen"), ("x" * 150, "cannot listen"), ("file", "not a socket")],
)
def test_a_socket_that_cannot_be_made_is_one_line(tmp_path, where, message):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match=message):
        GuardServer([], tmp_path / where, state_dir=tmp_path / "state")
    assert (tmp_path / "file").read_text() == "precious"


def test_no_helper_is_one_line(tmp_path):
    with pytest.raises(UserError, match="wattgym hw serve"):
        RemoteDevice(tmp_path / "hw.sock", UUID)


@pytest.mark.parametrize("how", ["client SIGKILL", "helper SIGKILL", "helper SIGTERM"])
def test_whoever_dies_the_device_is_given_back(standin, tmp_path, how):
    standin.set(0, "requested_mw", 650_000)
    path = tmp_path / "hw.sock"
    serving = [sys.executable, "-m", "wattgym", "hw", "serve", "--arm", "--device", "0", "--socket", str(path)]
    serving += ["--state-dir", str(tmp_path / "state")]
    helper = subprocess.Popen(serving, env=standin.env(WATTGYM_ARM="1"), stdout=subprocess.PIPE, text=True)
    code = (
        "import sys, time; from wattgym.hw.remote import RemoteDevice\n"
        "device = RemoteDevice(sys.argv[1], 'GPU-'); device.set_power_limit_mw(400_000)\n"
        "print(device.info().uuid, flush=True); time.sleep(60)"
    )
    assert helper.stdout.readline().startswith(f"serving {standin.uuid(0)}")
    client = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline().strip() == standin.uuid(0)
    assert standin.get(0, "requested_mw") == 400_000
    victim, name = (client, "SIGKILL") if how.startswith("client") else (helper, how.split()[1])
    victim.send_signal(getattr(signal, name))
    assert until(lambda: standin.get(0, "requested_mw") == 650_000)
    client.kill()
    client.wait()
    helper.terminate()
    code = helper.wait()
    assert code == (-signal.SIGKILL if how == "helper SIGKILL" else 0)
    assert until(lambda: not list((tmp_path / "state").glob("*.json")))
    client.stdout.close()
    helper.stdout.close()
