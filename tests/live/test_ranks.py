"""Two real ranks: what the knobs change and what not, dying, resuming."""

import csv
import os
import random
import signal
import threading
import time
from itertools import pairwise

import pytest

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')
pytest.importorskip("transformers", reason='needs transformers and peft: pip install "wattgym[llm]"')

from safetensors.torch import load_file

from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.checkpoint import newest_checkpoint
from wattgym.live.folder import CHANNEL_FILE, prepare_folder
from wattgym.live.handle import JobHandle
from wattgym.live.job import run_job
from wattgym.live.pacing import StopFlag

pytestmark = pytest.mark.slow
PATIENCE_S = 120.0


@pytest.fixture
def train(tmp_path):
    """Runs a job in this process, with its other ranks in theirs; `knobs` by the step before which they are set."""

    def run(config, name, knobs=None, resume=False, stop_in=None):
        knobs, stop = dict(knobs or {}), StopFlag()
        run, lock = prepare_folder(tmp_path / name, config, resume=resume)
        channel = Channel.create(tmp_path / name / CHANNEL_FILE, knobs.pop(0, Knobs()), JobStatus())

        def on_step(status):
            if status.steps in knobs:
                channel.write_knobs(knobs[status.steps])
            if status.steps == stop_in:
                threading.Thread(target=stop_within_step, args=(status.samples,)).start()

        def stop_within_step(samples):
            wait_until(lambda: channel.read_status().samples > samples)
            stop.reason = "SIGTERM"

        try:
            return run_job(run, config, channel, stop, on_step)
        finally:
            os.close(lock)
            channel.close()

    return run


def column(folder, name="loss"):
    with (folder / "steps.csv").open(newline="") as text:
        return [row[name] for row in csv.DictReader(text)]


def adapter(folder):
    return load_file(newest_checkpoint(folder / "checkpoints")[0] / "adapter" / "adapter_model.safetensors")


def other_rank(pid):
    """The only child of a job that is another rank."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        (child,) = file.read().split()
    return int(child)


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_knobs_at_random_leave_the_losses_alone(config, train, tmp_path):
    """Bit for bit while an update is the sum of the same two passes, in whatever order; then to rounding."""
    draw = random.Random(5)
    exact, steps = 12, 24

    def knobs(step):
        free = {} if step < exact else {"micro_batch": draw.choice([1, 2, 4, 8])}
        duty, speed = draw.choice([1.0, 0.7, 0.4]), draw.choice([1.0, 0.8, 0.5])
        return Knobs(duty=duty, speed=speed, active_ranks=draw.choice([1, 2, None]), **free)

    schedule = {step: knobs(step) for step in range(steps)}
    assert len({k.active_ranks for s, k in schedule.items() if s < exact}) == 3
    job = config(max_steps=steps, evaluate_every=6)
    train(job, "alone")
    job, stop_in = config(max_steps=steps, evaluate_every=6, ranks=2), 14
    standstill = schedule | {stop_in: Knobs(duty=0.0, micro_batch=2)}
    first = train(job, "two", standstill, stop_in=stop_in)
    # Both ranks were held in the middle of the step, which is dropped.
    assert (first.state, first.steps, first.samples) == (JobState.STOPPED, stop_in, 8 * stop_in)
    last = train(job, "two", {**schedule, 0: schedule[stop_in]}, resume=True)
    alone, two = column(tmp_path / "alone"), column(tmp_path / "two")
    assert two[:exact] == alone[:exact]
    assert [float(x) for x in two] == pytest.approx([float(x) for x in alone], rel=1e-5)
    for name in ("step", "samples", "tokens"):
        assert column(tmp_path / "two", name) == column(tmp_path / "alone", name)
    settings = [(k.active_ranks or 2, k.micro_batch or 4) for k in schedule.values()]
    assert column(tmp_path / "two", "active_ranks") == [str(active) for active, _ in settings]
    assert last.switches == sum(a != b for a, b in pairwise(settings[stop_in:]))
    assert (last.ranks, last.samples, last.checkpoint_step) == (2, 8 * steps, steps)
    assert last.exchange_s > 0
    assert last.duty_held_s > 0
    assert last.speed_held_s > 0
    assert {p.name for p in (tmp_path / "two").iterdir()} == {p.name for p in (tmp_path / "alone").iterdir()}


def test_unequal_local_steps_survive_every_death(config, train, tmp_path):
    """Rank 1 is killed, then rank 0; each time nobody is left, and in the end nothing shows of it."""
    settings = {"ranks": 2, "lora": {"targets": "all-linear", "dropout": 0.1}, "checkpoint_every": 2}
    knobs = Knobs(local_steps=(3, 2))
    folder = tmp_path / "parts"
    with JobHandle.start(config(**settings), folder, knobs=Knobs(local_steps=(3, 2), duty=0.5)) as job:
        with pytest.raises(UserError, match="active_ranks 3, but the job's ranks are 2"):
            job.set_knobs(active_ranks=3)
        with pytest.raises(UserError, match="local_steps has 3 entries for 2 ranks"):
            job.set_knobs(local_steps=(1, 1, 1))
        wait_until(lambda: job.check().steps >= 6)
        status = job.status()
        assert (status.local_steps, status.rank_steps, status.active_ranks) == (3, (3, 2), 2)
        assert status.steps % 3 == 0
        job.set_knobs(paused=True)
        wait_until(lambda: job.check().state is JobState.PAUSED)
        job.set_knobs(paused=False)
        wait_until(lambda: job.check().steps > status.steps)
        os.kill(other_rank(status.pid), signal.SIGKILL)
        with pytest.raises(UserError, match=r"rank 1 of 2 failed: its process was killed by SIGKILL"):
            job.wait(PATIENCE_S)
    with JobHandle.start(config(**settings), folder, resume=True, knobs=Knobs(local_steps=(3, 2), duty=0.5)) as job:
        begun = job.wait_ready(PATIENCE_S)
        wait_until(lambda: job.check().samples > begun.samples + 24)
        other = other_rank(begun.pid)
        job.kill()
        wait_until(lambda: gone(other))
    reached = newest_checkpoint(folder / "checkpoints")[1].steps
    assert reached >= 6
    end = reached + 5  # the last round is cut short
    last = train(config(**settings, max_steps=end), "parts", {0: knobs}, resume=True)
    assert (last.state, last.steps, last.samples) == (JobState.FINISHED, end, 8 * end)
    train(config(**settings, max_steps=end), "whole", {0: knobs})
    assert column(folder) == column(tmp_path / "whole")
    assert column(folder, "samples") == [str(8 * n) for n in range(1, end + 1)]
    assert column(folder, "tokens") == column(tmp_path / "whole", "tokens")
    assert column(folder, "rank_steps")[-5:] == ["3:2", "3:2", "3:2", "2:2", "2:2"]
    found, expected = adapter(folder), adapter(tmp_path / "whole")
    assert all(found[name].equal(expected[name]) for name in expected)
    assert not (folder / CHANNEL_FILE).exists()
