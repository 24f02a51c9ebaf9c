"""Showing what devices do: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table

from wattgym.errors import UserError
from wattgym.hw.device import Device, DeviceInfo
from wattgym.hw.poller import DevicePoller, Polled

COLUMNS = ("device", "power W", "kind", "age s", "limit W", "enforced W", "SM MHz", "°C", "use %", "energy J", "note")


def watch_devices(
    devices: Sequence[Device], *, interval_s: float = 1.0, count: int | None = None, console: Console | None = None
) -> None:
    """Shows samples until `count` or Ctrl-C.

    Args:
        devices: What to watch.
        interval_s: Time between samples, at least 0.1 s.
        count: How many samples; `None` for no end.
        console: Where to; standard output by default.

    Raises:
        UserError: Interval or count out of range.
    """
    if count is not None and count < 1:
        raise UserError(f"count {count} must be at least 1")
    poller = DevicePoller(devices, interval_s=interval_s)
    out = console if console is not None else Console()
    infos = [device.info() for device in devices]
    with suppress(KeyboardInterrupt):  # the way to end it
        if out.is_terminal:
            _show_live(poller, infos, interval_s, count, out)
        else:
            _print_lines(poller, infos, interval_s, count, out)


def _show_live(
    poller: DevicePoller, infos: Sequence[DeviceInfo], interval_s: float, count: int | None, out: Console
) -> None:
    # The thread keeps the screen alive, and Ctrl-C working, while a driver call hangs.
    with poller, Live(console=out, auto_refresh=False) as live:
        for _ in _ticks(interval_s, count):
            table = Table(*COLUMNS)
            for info in infos:
                table.add_row(*cells(info, poller.latest(info.uuid)))
            live.update(table, refresh=True)


def _print_lines(
    poller: DevicePoller, infos: Sequence[DeviceInfo], interval_s: float, count: int | None, out: Console
) -> None:
    for _ in _ticks(interval_s, count):
        poller.poll_once()
        for info in infos:
            row = zip(COLUMNS, cells(info, poller.latest(info.uuid)), strict=True)
            line = "  ".join(f"{name.replace(' ', '_')}={value}" for name, value in row if value != "")
            # One line per sample whatever the width: the reader is a file or another program.
            out.print(line, soft_wrap=True, markup=False, highlight=False)


def cells(info: DeviceInfo, polled: Polled) -> tuple[str, ...]:
    """One table row, in the order of `COLUMNS`; what is not known is a dash."""
    reading = polled.reading
    note = "" if polled.error is None else str(polled.error)
    if reading is None:
        return (info.uuid, *("-",) * (len(COLUMNS) - 2), note or "no reading yet")
    age_s = None if reading.age_s is None else reading.age_s + polled.age_s
    return (
        info.uuid,
        _number(reading.power_w, 1),
        str(reading.power_kind),
        _number(age_s, 1),
        _number(_watts(reading.requested_limit_mw), 0),
        _number(_watts(reading.enforced_limit_mw), 0),
        _number(reading.sm_clock_mhz, 0),
        _number(reading.temperature_c, 0),
        _number(None if reading.utilisation is None else 100 * reading.utilisation, 0),
        _number(reading.energy_j, 0),
        note,
    )


def _ticks(interval_s: float, count: int | None) -> Iterator[int]:
    """Counts, with a pause between one and the next, on a grid that does not drift."""
    started_s, tick = time.monotonic(), 0
    while count is None or tick < count:
        if tick:
            time.sleep(max(started_s + tick * interval_s - time.monotonic(), 0.0))
        yield tick
        tick += 1


def _watts(limit_mw: int | None) -> float | None:
    return None if limit_mw is None else limit_mw / 1000.0


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
