"""The training job's process: `python -m wattgym.live.job --config job.yaml --out runs/job [--resume]`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from wattgym.config import load_config, parse_config
from wattgym.errors import UserError
from wattgym.live.channel import Channel, JobState, JobStatus, Knobs
from wattgym.live.config import JobConfig
from wattgym.live.folder import CHANNEL_FILE, KIND, prepare_folder
from wattgym.live.handle import first_status, offline_environment, preflight
from wattgym.live.pacing import Reporter, StopFlag
from wattgym.live.records import read_examples
from wattgym.phase import Phase
from wattgym.runs import RunFolder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a job to its end.

    Returns:
        0 when it finished or was stopped, 2 after one line on stderr when the user can do something about it.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.owner is None and options.config is None:
        parser.error("--config is required")
    try:
        if options.owner is not None:
            # Started by a handle, which has made the folder and the channel and passed its lock on.
            run = RunFolder.open(options.out, KIND)
            config = parse_config(JobConfig, run.config, str(options.out))
            channel = Channel.open(options.out / CHANNEL_FILE)
        else:
            config = load_config(JobConfig, options.config)
            preflight(config)
            # The descriptor stays open, and with it the lock, until the process ends.
            run, _ = prepare_folder(options.out, config, resume=options.resume)
            channel = Channel.create(options.out / CHANNEL_FILE, Knobs(), JobStatus())
        stop = StopFlag()
        stop.on_signals()
        if options.owner:
            stop.on_death_of(options.owner)
        os.environ |= offline_environment(config.threads)
        with _progress_bar(config.max_steps, shown=options.owner is None) as on_step:
            status = run_job(run, config, channel, stop, on_step)
    except UserError as error:
        print(f"wattgym job: error: {error}", file=sys.stderr)
        return 2
    print(f"{status.state}: {status.steps} steps, {status.samples} samples, loss {status.loss}", file=sys.stderr)
    return 0


def run_job(
    run: RunFolder,
    config: JobConfig,
    channel: Channel,
    stop: StopFlag,
    on_step: Callable[[JobStatus], None] = lambda status: None,
) -> JobStatus:
    """Loads and trains; publishes how it ended, records it in the run folder and removes the channel.

    Args:
        run: The run's folder, locked for this process.
        config: The job.
        channel: The job's channel.
        stop: Asks the job to end.
        on_step: Told the status after each step.

    Raises:
        UserError: The job failed for a reason that the user can do something about.
    """
    first = replace(first_status(config), pid=os.getpid())
    reporter = Reporter(channel, stop, first)
    try:
        reporter.publish()
        examples = read_examples(config.data)
        from wattgym.live.parallel import lead
        from wattgym.live.trainer import Trainer

        with lead(config, run.path, reporter) as leader:
            state = Trainer(config, examples, run.path, reporter, leader).run(on_step)
        run.set_status("finished" if state is JobState.FINISHED else "interrupted")
        reporter.publish(state=state, phase=Phase.IDLE)
    except BaseException as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        reporter.publish(state=JobState.FAILED, phase=Phase.IDLE, error=" ".join(text.split()))
        with contextlib.suppress(UserError):  # the reason may be a full disk
            run.set_status("failed")
        raise
    finally:
        channel.unlink()
    return reporter.status


@contextlib.contextmanager
def _progress_bar(max_steps: int | None, *, shown: bool) -> Iterator[Callable[[JobStatus], None]]:
    """A bar of steps with the loss, where somebody looks at it."""
    from tqdm import tqdm

    with tqdm(total=max_steps, unit="step", disable=not (shown and sys.stderr.isatty())) as bar:

        def on_step(status: JobStatus) -> None:
            bar.n = status.steps
            bar.set_postfix_str(f"loss {status.loss_mean:.3f}", refresh=False)
            bar.update(0)

        yield on_step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wattgym.live.job", description="Run one LoRA fine-tune.")
    parser.add_argument("--config", type=Path, help="job configuration, YAML")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--resume", action="store_true", help="take up the run in the folder")
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
