"""`wattgym hw set`, `restore`, `log` and `serve`: everything that writes to a device, and the record of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wattgym.errors import UserError

if TYPE_CHECKING:
    from wattgym.hw.guard import Guard

DeviceOption = Annotated[
    str,
    typer.Option(help="UUID or its start, NVML index, MIG id, or cuda:N; simulated: PRESET:N."),
]
BackendOption = Annotated[str, typer.Option(help="nvml or simulated.")]
StateDirOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for locks, saved limits, audit log and simulated devices; default: WATTGYM_STATE_DIR, "
        "for root /var/lib/wattgym, else ~/.local/state/wattgym."
    ),
]
ArmOption = Annotated[bool, typer.Option("--arm", help="Really write; WATTGYM_ARM=1 in the environment is needed too.")]


def register(app: typer.Typer) -> None:
    """Adds the commands to `wattgym hw`."""
    app.command("set")(set_limit)
    app.command("restore")(restore)
    app.command("log")(log)
    app.command("serve")(serve)


def set_limit(
    device: DeviceOption,
    watts: Annotated[float, typer.Option(help="Power limit, W.")],
    arm: ArmOption = False,
    hold: Annotated[
        float | None,
        typer.Option("--for", help="Hold for this many seconds or until Ctrl-C, then give it back.", min=0.0),
    ] = None,
    backend: BackendOption = "nvml",
    state_dir: StateDirOption = None,
    allow_no_persistence: Annotated[bool, typer.Option("--allow-no-persistence")] = False,
    allow_mig: Annotated[bool, typer.Option("--allow-mig", help="The limit acts on every instance.")] = False,
    allow_enforced_below: Annotated[
        bool, typer.Option("--allow-enforced-below", help="Something else limits the board further.")
    ] = False,
) -> None:
    """Set a power limit through a guard. Without --arm it only says what would happen.

    The limit stays when the command ends; `wattgym hw restore` gives the old one back.
    """
    from wattgym.hw.guard import Guard
    from wattgym.hw.limits import CommandRules
    from wattgym.hw.open import open_device
    from wattgym.hw.preflight import GuardConfig
    from wattgym.hw.state import StateDir

    # A person may use the whole range, and means exactly what was asked for; raises still take their time.
    rules = CommandRules(floor_fraction=0.0, ceiling_fraction=100.0, dead_band_w=0.0, dead_band_fraction=0.0)
    config = GuardConfig(
        rules=rules,
        allow_persistence_off=allow_no_persistence,
        allow_mig=allow_mig,
        allow_enforced_below=allow_enforced_below,
    )
    folder = StateDir(state_dir).path
    opened = open_device(device, backend, state_dir=folder)
    try:
        with Guard(opened, arm=arm, config=config, state_dir=folder, policy="wattgym hw set") as guard:
            before_w = guard.telemetry.limit_mw / 1000
            for note in guard.notes:
                typer.echo(f"{guard.info.uuid}: {note}")
            _walk(guard, watts)
            _report(guard, before_w, watts)
            if guard.telemetry.why == "" and hold is None:
                guard.keep()
            elif guard.telemetry.why == "":
                _hold(guard, hold or 0.0)
                typer.echo(f"{guard.info.uuid}: giving {before_w:g} W back")
    finally:
        opened.close()


def _walk(guard: Guard, watts: float) -> None:
    """Repeats a request until a raise, which is slowed, has arrived."""
    import time

    while True:
        result = guard.set_limit_w(watts, reason="command line")
        arrived = round(result.limit_w * 1000) == round(watts * 1000)
        if arrived or guard.telemetry.why:
            return
        time.sleep(0.1)


def _report(guard: Guard, before_w: float, watts: float) -> None:
    from wattgym.hw.telemetry import GuardState

    telemetry, uuid = guard.telemetry, guard.info.uuid
    change = f"{before_w:g} W -> {watts:g} W"
    if telemetry.state is GuardState.DRY_RUN:
        typer.echo(f"{uuid}: dry run, nothing written: {change} ({telemetry.why})")
    elif telemetry.state is GuardState.ARMED:
        typer.echo(f"{uuid}: {change}")
    else:
        raise UserError(f"{uuid}: {telemetry.state}: {telemetry.why}")


def _hold(guard: Guard, seconds: float) -> None:
    import time

    from wattgym.hw.telemetry import GuardState

    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        guard.read()
        if guard.telemetry.state is not GuardState.ARMED:
            raise UserError(f"{guard.info.uuid}: {guard.telemetry.state}: {guard.telemetry.why}")
        time.sleep(min(left, 0.5))


def restore(
    device: Annotated[str | None, typer.Option(help="Only devices whose UUID starts so.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Give back every limit that a dead controller, or `hw set`, left in place. Doing it again does no harm."""
    from wattgym.hw.restore import Outcome, restore_all
    from wattgym.hw.state import StateDir

    folder = StateDir(state_dir)
    done, failed = restore_all(folder, uuid=device)
    for result in done:
        change = ""
        if result.outcome is Outcome.RESTORED:
            change = f" ({(result.found_mw or 0) / 1000:g} W -> {result.saved_mw / 1000:g} W)"
        typer.echo(f"{result.uuid}: {result.outcome}{change}")
    if not done and not failed:
        typer.echo(f"nothing to restore in {folder.path}")
    if failed:
        for message in failed[:-1]:
            typer.echo(f"wattgym: error: {message}", err=True)
        raise UserError(failed[-1])


def log(
    last: Annotated[int, typer.Option(help="How many of the newest records.", min=1)] = 20,
    device: Annotated[str | None, typer.Option(help="Only devices whose UUID starts so.")] = None,
    state_dir: StateDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show the audit log: everything that was done to devices, by whom and why."""
    import json

    from wattgym.hw.audit import read_audit
    from wattgym.hw.state import StateDir

    path = StateDir(state_dir).audit_path
    records = read_audit(path, last=last, uuid=device)
    if not records and not as_json:
        typer.echo(f"no records in {path}")
    for record in records:
        if as_json:
            typer.echo(json.dumps(record))
            continue
        head = f"{record.pop('time', '?')}  {record.pop('uuid', '?')}  {record.pop('event', '?')}"
        record.pop("session", None)
        typer.echo(head + "".join(f"  {key}={value}" for key, value in record.items()))


def serve(
    socket_path: Annotated[
        Path | None, typer.Option("--socket", help="Where to listen; default: hw.sock in the state folder.")
    ] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices to serve; default: all.")] = None,
    backend: BackendOption = "nvml",
    arm: ArmOption = False,
    mode: Annotated[str, typer.Option(help="Permission bits of the socket, octal.")] = "600",
    group: Annotated[str | None, typer.Option(help="Group that owns the socket.")] = None,
    allow_user: Annotated[list[str] | None, typer.Option(help="User (name or number) who may connect.")] = None,
    allow_group: Annotated[list[str] | None, typer.Option(help="Group whose members may connect.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with guard settings.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Own all writes for unprivileged programs, over a Unix socket. Gives every device back at the end."""
    import signal

    from wattgym.config import load_config
    from wattgym.hw.open import open_devices
    from wattgym.hw.preflight import GuardConfig
    from wattgym.hw.serve import SERVER_CONFIG, Access, GuardServer, group_id, user_id
    from wattgym.hw.state import StateDir

    try:
        bits = int(mode, 8)
    except ValueError:
        bits = -1
    if not 0 <= bits <= 0o777:
        raise UserError(f"--mode {mode}: give octal permission bits such as 660")
    access = Access(
        mode=bits,
        group=None if group is None else group_id(group),
        uids=frozenset(user_id(name) for name in allow_user or []),
        gids=frozenset(group_id(name) for name in allow_group or []),
    )
    settings = SERVER_CONFIG if config is None else load_config(GuardConfig, config)
    folder = StateDir(state_dir).path
    path = socket_path or folder / "hw.sock"
    devices = open_devices(device, backend, state_dir=folder)
    try:
        server = GuardServer(devices, path, access=access, arm=arm, config=settings, state_dir=folder)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: server.stop())
        names = ", ".join(opened.info().uuid for opened in devices)
        typer.echo(f"serving {names} on {path}" + ("" if arm else " (readings only: not armed)"))
        server.serve()
    finally:
        for opened in devices:
            opened.close()
