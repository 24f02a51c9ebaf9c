"""`wattgym hw`: look at power-managed devices, and (through a guard) change their limits.

Sub-commands that write live in modules of their own, which this one registers on `app`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wattgym.cli import calibrate, hw_guard
from wattgym.cli.hw_guard import BackendOption, StateDirOption

app = typer.Typer(
    name="hw",
    help="Devices: what is there, what it does, and its power limit.",
    no_args_is_help=True,
)
hw_guard.register(app)
app.command()(calibrate.calibrate)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what was found, what each device can do, what is missing and the exact remedy. Only reads."""
    from wattgym.cli.hw_doctor import report_text
    from wattgym.hw.doctor import examine

    report = examine()
    typer.echo(report.to_json() if as_json else report_text(report))


@app.command()
def watch(
    device: Annotated[
        list[str] | None,
        typer.Option(help="UUID or its start, NVML index, MIG id, or cuda:N; simulated: PRESET:N. Default: all."),
    ] = None,
    backend: BackendOption = "nvml",
    interval: Annotated[float, typer.Option(help="Seconds between samples, at least 0.1.")] = 1.0,
    count: Annotated[int | None, typer.Option(help="Stop after this many samples; default: until Ctrl-C.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Show power, clocks and limits: a live table in a terminal, else one line per device and sample."""
    from wattgym.hw.open import open_devices
    from wattgym.hw.state import StateDir
    from wattgym.hw.watch import watch_devices

    devices = open_devices(device, backend, state_dir=StateDir(state_dir).path)
    try:
        watch_devices(devices, interval_s=interval, count=count)
    finally:
        for opened in devices:
            opened.close()
