"""The shared memory: whole values only, whoever dies when."""

import json
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattgym.errors import UserError
from wattgym.live import channel as channel_module
from wattgym.live.channel import SLOT_BYTES, Channel, JobState, JobStatus, Knobs, is_channel, progress
from wattgym.live.folder import CHANNEL_FILE, LOCK_FILE, remove_stale_channels
from wattgym.phase import Phase


@pytest.fixture
def channel(tmp_path):
    made = Channel.create(tmp_path / CHANNEL_FILE, Knobs(duty=0.25), JobStatus(pid=7))
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    made = Channel.create(tmp_path_factory.mktemp("channel") / CHANNEL_FILE, Knobs(), JobStatus())
    yield made
    made.close()


def test_reader_sees_what_was_written(channel):
    reader = Channel.open(channel.path)
    status = JobStatus(
        pid=3, state=JobState.PAUSED, phase=Phase.EVALUATE, steps=12, loss=0.1 + 0.2, phase_s=(1.0, 2.0, 3.0, 4.0, 5.0),
        warning="Platte voll – ✓", error="line",
    )  # fmt: skip
    channel.write_status(status)
    assert reader.read_status() == status
    assert reader.read_knobs() == (1, Knobs(duty=0.25))
    assert reader.write_knobs(Knobs(speed=0.5, micro_batch=4, paused=True)) == 2
    assert channel.read_knobs() == (2, Knobs(speed=0.5, micro_batch=4, paused=True))
    reader.close()


@given(text=st.text(min_size=1, max_size=12).map(lambda t: (t * 1000)[:1000]))
def test_any_text_fits_and_the_numbers_survive_it(shared, text):
    shared.write_status(JobStatus(error=text, warning=text, loss=-1.2345678901234567e-300, tokens=2**62))
    status = shared.read_status()
    assert (status.loss, status.tokens) == (-1.2345678901234567e-300, 2**62)
    assert status.error == text[:500].encode("utf-8", "replace").decode("utf-8")


def test_a_writer_killed_in_the_middle_leaves_the_value_before(channel):
    channel.write_status(JobStatus(steps=1, error="x"))
    channel.write_status(JobStatus(steps=2, error="yy"))
    # The third value goes over the first; cut it short at every kind of place.
    offset = channel_module._HEADER_BYTES + SLOT_BYTES * (4 % 2)
    whole = bytes(channel._memory)
    channel.write_status(JobStatus(steps=3, error="zzz"))
    after = bytes(channel._memory)
    for cut in (1, 8, 12, 16, 20, 100, 300):
        channel._memory[:] = whole[:offset] + after[offset : offset + cut] + whole[offset + cut :]
        reader = Channel.open(channel.path)
        assert reader.read_status().steps == 2, cut
        reader.close()


def test_damage_in_both_slots_is_reported(channel):
    for slot in (0, 1):
        start = channel_module._HEADER_BYTES + slot * SLOT_BYTES
        channel._memory[start + 20 : start + 24] = b"\xff" * 4
    with pytest.raises(UserError, match="damaged"):
        channel.read_status()


def test_readers_in_another_process_never_see_a_torn_value(channel):
    """The writer keeps `steps == samples == tokens` and texts to match; a reader of a mixture would notice."""
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from wattgym.live.channel import Channel
        channel, seen, last = Channel.open(Path(sys.argv[1])), set(), 0
        print("ready", flush=True)
        while last < 4000:
            s = channel.read_status()
            n = s.steps
            assert (s.samples, s.tokens, s.error) == (n, n, str(n) * (n % 90)), s
            assert n >= last, (n, last)
            last = n
            seen.add(n)
        print(len(seen))
        """
    )
    channel.write_status(JobStatus())
    reader = subprocess.Popen([sys.executable, "-c", script, str(channel.path)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "ready\n"
    for n in range(1, 4001):
        channel.write_status(JobStatus(steps=n, samples=n, tokens=n, error=str(n) * (n % 90)))
        if n % 100 == 0:
            time.sleep(0.001)
    out, _ = reader.communicate(timeout=60)
    assert reader.returncode == 0
    assert int(out) > 5


def test_values_survive_the_reader(channel):
    code = (
        "import sys; from pathlib import Path; from wattgym.live.channel import *; import os, signal;"
        "c = Channel.open(Path(sys.argv[1])); c.write_knobs(Knobs(duty=0.5)); c.read_status();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(channel.path)], check=False).returncode == -9
    assert channel.read_knobs() == (2, Knobs(duty=0.5))
    channel.write_status(JobStatus(steps=9))
    again = Channel.open(channel.path)
    assert again.read_status().steps == 9
    assert again.write_knobs(Knobs(duty=0.75)) == 3
    assert channel.read_knobs()[1].duty == 0.75
    again.close()


def test_what_is_no_channel_is_refused(tmp_path):
    with pytest.raises(UserError, match="no job's channel"):
        Channel.open(tmp_path / "none")
    other = tmp_path / "other"
    other.write_text("hello")
    with pytest.raises(UserError, match="not a job's channel"):
        Channel.open(other)
    assert not is_channel(other)
    with pytest.raises(UserError, match="cannot write"):
        Channel.create(other / "below", Knobs(), JobStatus())


def test_unlink_spares_a_successor(channel):
    successor = Channel.create(channel.path, Knobs(), JobStatus(pid=8))
    channel.unlink()
    assert Channel.open(channel.path).read_status().pid == 8
    assert channel.read_status().pid == 7
    successor.unlink()
    assert not channel.path.exists()


def test_stale_channels_are_swept_but_not_a_live_job_s(tmp_path):
    for name in ("dead", "live"):
        Channel.create(tmp_path / name / CHANNEL_FILE, Knobs(), JobStatus()).close()
    foreign = tmp_path / "foreign" / CHANNEL_FILE
    foreign.parent.mkdir()
    foreign.write_text("a user's own file")
    code = f"import fcntl, sys; f = open({str(tmp_path / 'live' / LOCK_FILE)!r}, 'w'); fcntl.flock(f, 2);"
    holder = subprocess.Popen(
        [sys.executable, "-c", code + "print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    holder.stdout.readline()
    assert remove_stale_channels(tmp_path) == [tmp_path / "dead" / CHANNEL_FILE]
    holder.communicate()
    assert remove_stale_channels(tmp_path) == [tmp_path / "live" / CHANNEL_FILE]
    assert foreign.exists()


def test_progress_counts_the_running_phase_up_to_the_reading():
    first = JobStatus(pid=1, phase=Phase.COMPUTE, heartbeat_s=10.0, phase_s=(3.0, 5.0, 0.0, 0.0, 0.0), samples=4)
    later = JobStatus(pid=1, phase=Phase.COMPUTE, heartbeat_s=11.5, phase_s=(3.0, 6.5, 0.0, 0.0, 0.0), samples=10)
    between = progress(first.at(10.5), later.at(12.0))
    assert between.phase_s == (0.0, 1.5, 0.0, 0.0, 0.0)
    assert between.samples == 6
    with pytest.raises(UserError, match="process 2"):
        progress(first, JobStatus(pid=2))


def test_file_has_no_holes_and_only_its_owner_may_open_it(channel):
    entry = channel.path.stat()
    assert entry.st_blocks * 512 >= entry.st_size
    assert entry.st_mode & 0o777 == 0o600


def test_status_is_plain_json(channel):
    _, data = channel._status.read()
    assert json.loads(data)["pid"] == 7
