"""The shaped links of `benchmarks/wan.py`: what it asks of the machine, what goes through, and that nothing is left."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
spec = importlib.util.spec_from_file_location("wan_links", BENCHMARKS / "wan_links.py")
wan_links = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = wan_links
spec.loader.exec_module(wan_links)

PATIENCE_S = 300.0


@pytest.fixture
def shaping():
    """For tests that shape links."""
    lacks = wan_links.missing(rate_only=True)
    if lacks:
        pytest.skip(f"links cannot be shaped here, missing: {', '.join(lacks)}")


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "wan.py"), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def namespaces_of(pid):
    return [name for name in wan_links.existing() if name.startswith(f"{wan_links.PREFIX}-{pid}-")]


def wait_for(condition):
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_what_is_missing_is_one_line_and_exit_code_2(tmp_path):
    process = start(PATH=str(tmp_path))
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    lacks = "ip, tc" if os.geteuid() == 0 else "root, ip, tc"
    assert error == f"wan.py: links cannot be shaped here, missing: {lacks}; --rate-only needs no netem\n"


def test_without_root_nothing_else_is_tried(monkeypatch):
    monkeypatch.setattr(wan_links.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(wan_links, "command", lambda *words: pytest.fail(f"ran {words}"))
    monkeypatch.setattr(wan_links.shutil, "which", lambda tool: f"/sbin/{tool}")
    assert wan_links.missing(rate_only=False) == ["root"]


@pytest.mark.parametrize(
    ("refused", "told"),
    [("netns add", "network namespaces (no)"), ("link add", "veth (no)"), ("qdisc add", "sch_netem (no)")],
)
def test_the_first_thing_that_the_kernel_refuses_is_named_and_the_probe_is_gone(monkeypatch, refused, told):
    there = []

    def command(*words):
        if refused in " ".join(words):
            raise wan_links.LinkError("no")
        if words[:3] == ("ip", "netns", "add"):
            there.append(words[3])
        elif words[:3] == ("ip", "netns", "del"):
            there.remove(words[3])
        return "\n".join(f"{name} (id: 0)" for name in there)

    monkeypatch.setattr(wan_links.os, "geteuid", lambda: 0)
    monkeypatch.setattr(wan_links.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(wan_links, "command", command)
    assert wan_links.missing(rate_only=False) == [told]
    assert not there


def test_a_link_as_tc_is_told():
    delayed, paced = wan_links.Shape(0.085, 1e6, 5e5).qdisc(5e5), wan_links.Shape(None, 1e7, 1e6).qdisc(1e7)
    assert " ".join(delayed) == "netem delay 42500us rate 4000000bit limit 100000"
    assert " ".join(paced) == "tbf rate 80000000bit burst 40000 limit 67108864"


@pytest.mark.usefixtures("shaping")
def test_bytes_take_the_shaped_link_and_arrive_as_they_were(tmp_path):
    data = os.urandom(200_000)
    received = []

    def site(listener):
        connection, _ = listener.accept()
        with connection:
            received.append(b"".join(iter(lambda: connection.recv(65536), b"")))
            connection.sendall(received[0][::-1])

    with (
        socket.socket(socket.AF_UNIX) as listener,
        wan_links.ShapedLinks({"a": wan_links.Shape(None, 1e6, 5e5)}) as lab,
    ):
        listener.bind(str(tmp_path / "far"))
        listener.listen()
        threading.Thread(target=site, args=(listener,), daemon=True).start()
        lab.carry("a", tmp_path / "near", tmp_path / "far")
        begun_s = time.monotonic()
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(str(tmp_path / "near"))
            near.sendall(data)
            near.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: near.recv(65536), b""))
        took_s = time.monotonic() - begun_s
    assert received == [data]
    assert answer == data[::-1]
    # 0.2 s there and 0.4 s back, less what a bucket lets through at once.
    assert took_s > 0.6 - 16_384 / 1e6 - 16_384 / 5e5
    assert not namespaces_of(os.getpid())


@pytest.mark.usefixtures("shaping")
def test_links_that_cannot_all_be_made_are_all_gone(monkeypatch):
    command = wan_links.command

    def until_the_second_link(*words):
        if "site1" in words:
            raise wan_links.LinkError("no")
        return command(*words)

    monkeypatch.setattr(wan_links, "command", until_the_second_link)
    shape = wan_links.Shape(None, 1e6, 1e6)
    with pytest.raises(wan_links.LinkError), wan_links.ShapedLinks({"a": shape, "b": shape}):
        pass
    assert not namespaces_of(os.getpid())


@pytest.mark.slow
@pytest.mark.usefixtures("shaping")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_leaves_nothing(number):
    process = start("--rate-only")
    wait_for(lambda: len(namespaces_of(process.pid)) == 3)
    process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert not error
    assert not namespaces_of(process.pid)


@pytest.mark.slow
@pytest.mark.usefixtures("shaping")
def test_what_a_killed_run_left_goes_with_the_next_and_nothing_else_does(tmp_path):
    process = start("--rate-only", TMPDIR=str(tmp_path))
    wait_for(lambda: len(namespaces_of(process.pid)) == 3)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    others = [f"{wan_links.PREFIX}-{os.getpid()}-hub", f"{wan_links.PREFIX}-mine{os.getpid()}", f"other{os.getpid()}"]
    with wan_links.namespaces(others):
        left = namespaces_of(process.pid)
        assert len(left) == 3
        assert set(left) <= set(wan_links.remove_leftovers())
        assert not namespaces_of(process.pid)
        assert set(others) <= set(wan_links.existing())
