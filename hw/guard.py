"""The only object that writes to a device: it refuses what is wrong, slows what is hasty, and gives the device back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from wattgym.errors import UserError
from wattgym.hw.audit import AuditLog
from wattgym.hw.device import (
    Device,
    DeviceError,
    DeviceInfo,
    DeviceLostError,
    DeviceReading,
    DriverError,
    NotSupportedError,
    PermissionDeniedError,
)
from wattgym.hw.exits import ExitHooks
from wattgym.hw.limits import Decision, ShapedLimits
from wattgym.hw.preflight import (
    GuardConfig,
    checked_constraints,
    checked_milliwatts,
    checked_watts_mw,
    implausible,
    preflight,
)
from wattgym.hw.restore import GivenBack, address_of, wait_for_limit_mw
from wattgym.hw.session import DurableSession, Session
from wattgym.hw.state import DeviceAddress, StateDir
from wattgym.hw.telemetry import CommandResult, GuardState, GuardTelemetry
from wattgym.hw.watchdog import Guarding

ARM_VARIABLE = "WATTGYM_ARM"
SLOW_WRITE_S = 0.25
ROUNDING_MW = 1000
"""A limit that reads back this close to what was just written is the device's own rounding, not a foreign value."""
FATAL = (DeviceLostError, DriverError, PermissionDeniedError, NotSupportedError)


@dataclass
class _Memory:
    """What a guard remembers between calls."""

    last_write_s: float = -np.inf
    failed_reads: int = 0
    failed_writes: int = 0
    energy_j: float = -np.inf
    writer: int | None = None


class Guard:
    """Wraps one device; use it as a context manager.

    Without arming it is a dry run: every decision is made, counted and shown, nothing is written. Armed, it takes the
    device's lock, saves the limit, starts a watchdog, and gives the device back at the end. Whatever it does not
    understand afterwards (a foreign change, a limit that does not show, a lost device, a dead watchdog) freezes it: it
    writes nothing more, and does not fight.

    Args:
        device: The device; the guard does not close it.
        arm: First key. The second is the environment variable `WATTGYM_ARM=1`.
        config: How strict to be.
        state_dir: Folder for lock, saved limits and audit log; the default one if `None`.
        policy: Who commands, for the log.
        clock: Monotonic time, s; a virtual clock suits simulated devices.
        environ: Where the second key is looked up.
        exit_hooks: Give the device back at interpreter exit and on SIGTERM, SIGINT and SIGHUP.

    Raises:
        LockedError: Another controller owns the device.
        StateError: The state folder cannot be written, or holds a damaged file for this device.
        DeviceError: The device is not fit to be controlled; the message says what to do.

    Attributes:
        info: The device's description.
        telemetry: Counters and state.
        notes: What the operator should know about how this began.
    """

    def __init__(
        self,
        device: Device,
        *,
        arm: bool = False,
        config: GuardConfig | None = None,
        state_dir: str | Path | None = None,
        policy: str = "",
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] | None = None,
        exit_hooks: bool = True,
    ) -> None:
        self.info: DeviceInfo = device.info()
        self.telemetry = GuardTelemetry()
        self.notes: list[str] = []
        self._device = device
        self._config = config or GuardConfig()
        self._policy = policy
        self._clock = clock
        self._pid = os.getpid()
        self._mutex = threading.RLock()
        self._memory = _Memory()
        self._limits = checked_constraints(self.info)
        watts = (self._limits.min_mw / 1000, self._limits.max_mw / 1000, self._limits.default_mw / 1000)
        self._shaped = ShapedLimits(*watts, self._config.rules)
        self.telemetry.limit_mw = device.requested_limit_mw()
        self._session: Session | None = None
        self._audit: AuditLog | None = None
        self._hooks = ExitHooks(self._close_quietly, self._is_writing)
        if not arm:
            self.telemetry.why = "not armed: arm=True (on the command line --arm) is missing"
        elif (os.environ if environ is None else environ).get(ARM_VARIABLE) != "1":
            self.telemetry.why = f"not armed: the environment variable {ARM_VARIABLE}=1 is missing"
        else:
            self._arm(state_dir, exit_hooks=exit_hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._log("exception", why=f"{type(error).__name__}: {error}")
        self.close()

    @property
    def lowest_w(self) -> float:
        """Lowest limit that the guard lets through, W."""
        return float(self._shaped.low_w)

    @property
    def highest_w(self) -> float:
        """Highest limit that the guard lets through, W."""
        return float(self._shaped.high_w)

    @property
    def watchdog_pid(self) -> int | None:
        """Process of the watchdog; `None` in a dry run, for a device without one, and after the end."""
        return None if self._session is None else self._session.watchdog_pid

    def set_limit_w(self, watts: float, *, reason: str = "") -> CommandResult:
        """Asks for a power limit.

        Args:
            watts: The limit, W, within the device's range; below the guard's floor or above its ceiling it is
                clipped and counted.
            reason: For the log.

        Returns:
            What became of it. A frozen or closed guard, or a device that fails, changes nothing and says so here and
            in the telemetry; it does not raise, so that a control loop goes on.

        Raises:
            DeviceError: Not a finite number, or outside the device's range; counted, nothing was changed.
        """
        with self._counting_rejects():
            requested_mw = checked_watts_mw(watts, self._limits)
        return self._command(requested_mw, reason, exact=False)

    def set_limit_mw(self, limit_mw: int, *, reason: str = "", exact: bool = False) -> CommandResult:
        """Asks for a power limit in milliwatts.

        Args:
            limit_mw: The limit, an integer.
            reason: For the log.
            exact: Refuse what the rules would alter, instead of altering it; the limit in force and the one before the
                session are always let through.

        Raises:
            DeviceError: Not an integer, outside the device's range, or altered though it must be exact.
        """
        with self._counting_rejects():
            requested_mw = checked_milliwatts(limit_mw, self._limits)
        return self._command(requested_mw, reason, exact=exact)

    def lock_clocks_mhz(self, *, min_mhz: int, max_mhz: int, reason: str = "") -> bool:
        """Locks the SM clock; released when the device is given back.

        Returns:
            Whether the device was written to.

        Raises:
            DeviceError: The device refuses the range.
        """
        with self._writing():
            if not self._may_write() or self._session is None:
                return False
            self._session.announce_clocks()
            self._device.lock_clocks_mhz(min_mhz=min_mhz, max_mhz=max_mhz)
            self._log("lock_clocks", min_mhz=min_mhz, max_mhz=max_mhz, reason=reason or None)
            return True

    def read(self, *, alive: bool = True) -> DeviceReading:
        """One reading, without values that cannot be true; also a sign of life to the watchdog.

        Args:
            alive: False for a thread that reads on while the control loop itself may hang: no sign of life then.

        Raises:
            DeviceError: The reading failed; after several in a row, or at once for a lost device, the guard is frozen.
        """
        with self._mutex:
            try:
                reading = self._device.read()
            except DeviceError as error:
                self._failed_read(str(error), at_once=isinstance(error, FATAL))
                raise
            reading = self._believable(reading)
            if self.telemetry.state is GuardState.ARMED and reading.requested_limit_mw is not None:
                self._check_foreign(reading.requested_limit_mw)
            if alive:
                self.heartbeat()
            return reading

    def heartbeat(self) -> GuardState:
        """Tells the watchdog that the control loop is alive, and asks whether the device is still ours."""
        with self._mutex:
            guarding = Guarding.ON if self._session is None else self._session.beat()
            if guarding is Guarding.FENCED:
                self._freeze("the watchdog gave the device back: no sign of life came within the lease")
            elif guarding is Guarding.DEAD:
                self._freeze("the watchdog is dead")
                with contextlib.suppress(UserError):  # logged; the state stays for `wattgym hw restore`
                    self._give_back()  # nobody else would
            return self.telemetry.state

    def close(self) -> GivenBack | None:
        """Gives the device back and ends the session; again it does nothing.

        Returns:
            What giving back came to; `None` after a dry run or where it had been done before.

        Raises:
            DeviceError: The device could not be given back; the watchdog goes on trying, then `wattgym hw restore`.
        """
        if os.getpid() != self._pid:  # a forked child owns nothing
            return None
        with self._mutex:
            self._hooks.remove()
            if self.telemetry.state is not GuardState.CLOSED:
                self._log("close", counts={k: v for k, v in self.telemetry.as_dict().items() if v})
                self.telemetry.state = GuardState.CLOSED
            return self._give_back()

    def keep(self) -> None:
        """Ends the session but leaves the limit in place; `wattgym hw restore` undoes it."""
        with self._mutex:
            if self._session is not None:
                self._session.keep()
                self._session = None
        self.close()

    def _arm(self, state_dir: str | Path | None, *, exit_hooks: bool) -> None:
        preflight(self._device, self.info, self._config)
        address = address_of(self._device)
        folder = StateDir(state_dir)
        if address is not None or state_dir is not None:
            sizes = {"max_bytes": self._config.audit_max_bytes, "keep": self._config.audit_keep}
            self._audit = AuditLog(folder.audit_path, **sizes)
        if address is None or self._audit is None:
            here = DeviceAddress(self.info.backend, self.info.uuid)
            self._session = Session(here, self._device.requested_limit_mw())
        else:
            timing = {"lease_s": self._config.lease_s, "retry_s": self._config.retry_s}
            self._session = DurableSession(self._device, address, folder, self._audit, **timing)
        self.notes = self._session.notes
        self.telemetry.limit_mw = self._session.state.saved_mw
        try:
            # The only sure test of the right to write is to write; the present value changes nothing.
            self._device.set_power_limit_mw(self.telemetry.limit_mw)
        except BaseException:
            self._give_back()
            raise
        self.telemetry.state = GuardState.ARMED
        if exit_hooks:
            self._hooks.install()
        self._log("armed", old_mw=self.telemetry.limit_mw)

    def _command(self, requested_mw: int, reason: str, *, exact: bool) -> CommandResult:
        with self._writing():
            self.telemetry.requests += 1
            dry = self.telemetry.state is GuardState.DRY_RUN
            if not dry and not self._may_write():
                self.telemetry.refused += 1
                return self._result(requested_mw, Decision.NONE, written=False)
            now_s = self._clock()
            shaped_w, mask = self._shaped.shape(
                np.asarray(requested_mw / 1000),
                np.asarray(self.telemetry.limit_mw / 1000),
                now_s - self._memory.last_write_s,
            )
            decisions = Decision(int(mask))
            self._count(decisions)
            command_mw = min(max(round(float(shaped_w) * 1000), self._limits.min_mw), self._limits.max_mw)
            if exact and self._session is not None and requested_mw in self._session.state.free_mw:
                command_mw = requested_mw
            if exact and command_mw != requested_mw:
                self.telemetry.rejected += 1
                raise DeviceError(
                    f"{self.info.uuid}: {requested_mw} mW refused ({_names(decisions)}); "
                    f"{command_mw} mW would be let through now"
                )
            if command_mw == self.telemetry.limit_mw:
                return self._result(requested_mw, decisions, written=False)
            if dry:
                self.telemetry.would_write += 1
                self.telemetry.limit_mw = command_mw
                self._memory.last_write_s = now_s
                return self._result(requested_mw, decisions, written=False)
            written = self._write(command_mw, decisions, reason)
            self._memory.last_write_s = now_s
            return self._result(requested_mw, decisions, written=written)

    def _may_write(self) -> bool:
        """Whether the device is still ours, by everything that can be known before a write."""
        if os.getpid() != self._pid or self.heartbeat() is not GuardState.ARMED:
            return False
        try:
            self._check_foreign(self._device.requested_limit_mw())
        except DeviceError as error:
            self._failed_read(str(error), at_once=isinstance(error, FATAL))
            return False
        return self.telemetry.state is GuardState.ARMED

    def _write(self, command_mw: int, decisions: Decision, reason: str) -> bool:
        assert self._session is not None
        old_mw = self.telemetry.limit_mw
        started_s = time.monotonic()
        try:
            self._session.announce(old_mw, command_mw)
            # Saving takes milliseconds, in which somebody else may have come; now it is a matter of microseconds.
            self._check_foreign(self._device.requested_limit_mw())
            if self.telemetry.state is not GuardState.ARMED:
                return False
            self._device.set_power_limit_mw(command_mw)
            seen_mw, retries = wait_for_limit_mw(
                self._device,
                command_mw,
                enforced=not self._config.allow_enforced_below,
                timeout_s=self._config.read_back_s,
            )
        except UserError as error:
            self._failed_write(old_mw, command_mw, error)
            return False
        self._memory.failed_writes = 0
        took_s = time.monotonic() - started_s
        self.telemetry.written += 1
        self.telemetry.slow_writes += took_s > SLOW_WRITE_S
        self.telemetry.read_back_retries += retries
        self._log(
            "set",
            old_mw=old_mw,
            new_mw=command_mw,
            read_back_mw=seen_mw,
            decisions=_names(decisions) or None,
            took_s=round(took_s, 4),
            reason=reason or None,
        )
        self._settle(old_mw, command_mw, seen_mw)
        return True

    def _settle(self, old_mw: int, command_mw: int, seen_mw: int) -> None:
        """Decides what a read-back means, and records which limit is ours."""
        assert self._session is not None
        self.telemetry.limit_mw = command_mw
        requested_mw = self._device.requested_limit_mw()
        if requested_mw not in (old_mw, command_mw) and abs(requested_mw - command_mw) < ROUNDING_MW:
            self.telemetry.rounded += 1
            self.telemetry.limit_mw = requested_mw
        elif seen_mw != command_mw:
            if requested_mw == old_mw:
                self.telemetry.limit_mw = old_mw
                self._freeze(f"the device accepted {command_mw} mW but its limit stayed at {old_mw} mW")
            elif requested_mw == command_mw:
                self._freeze(f"{seen_mw} mW are enforced, not the {command_mw} mW written: something else limits it")
            else:
                self._freeze(f"somebody else set {requested_mw} mW while {command_mw} mW were being written")
        try:
            self._session.confirm(self.telemetry.limit_mw)
        except UserError as error:
            self._freeze(str(error))

    def _failed_write(self, old_mw: int, command_mw: int, error: UserError) -> None:
        self.telemetry.failed_writes += 1
        self._memory.failed_writes += 1
        self._log("write_failed", old_mw=old_mw, new_mw=command_mw, why=str(error))
        if isinstance(error, FATAL) or self._memory.failed_writes >= self._config.max_failures:
            self._give_up(str(error))

    def _failed_read(self, why: str, *, at_once: bool) -> None:
        self.telemetry.failed_reads += 1
        self._memory.failed_reads += 1
        if at_once or self._memory.failed_reads >= self._config.max_failures:
            self._give_up(why)

    def _believable(self, reading: DeviceReading) -> DeviceReading:
        wrong = implausible(reading, self._limits, self._config.max_temperature_c)
        self.telemetry.implausible += len(wrong)
        if "power_w" in wrong:
            self._failed_read(f"implausible power {wrong['power_w']:g} W", at_once=False)
        else:
            self._memory.failed_reads = 0
        reading = replace(reading, **dict.fromkeys(wrong)) if wrong else reading  # type: ignore[arg-type]
        if reading.energy_j is not None:
            self.telemetry.energy_resets += reading.energy_j < self._memory.energy_j
            self._memory.energy_j = reading.energy_j
        return reading

    def _check_foreign(self, present_mw: int) -> None:
        assert self._session is not None
        if present_mw == self.telemetry.limit_mw:
            return
        if present_mw in self._session.state.ours_mw:  # a write that failed half-way took effect after all
            self.telemetry.limit_mw = present_mw
            return
        hint = " (its default: was the driver reloaded?)" if present_mw == self._limits.default_mw else ""
        self._freeze(f"somebody else set {present_mw} mW{hint}; our last limit was {self.telemetry.limit_mw} mW")

    def _freeze(self, why: str) -> None:
        if self.telemetry.state is GuardState.ARMED:
            self.telemetry.state = GuardState.FROZEN
            self.telemetry.why = why
            self._log("frozen", why=why)

    def _give_up(self, why: str) -> None:
        """Freezes over a device that fails, and leaves giving it back to the watchdog."""
        self._freeze(why)
        session, self._session = self._session, None
        if session is not None:
            session.hand_over(self._device)

    def _give_back(self) -> GivenBack | None:
        session, self._session = self._session, None
        return None if session is None else session.end(self._device)

    def _close_quietly(self) -> None:
        """For exit hooks: a failure is in the audit log, and the watchdog goes on trying."""
        try:
            self.close()
        except UserError as error:
            self.telemetry.why = str(error)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One command at a time; a signal that comes meanwhile in the same thread waits until it is whole."""
        with self._mutex:
            self._memory.writer = threading.get_ident()
            try:
                yield
            finally:
                self._memory.writer = None
        self._hooks.run_pending()

    def _is_writing(self) -> bool:
        return self._memory.writer == threading.get_ident()

    @contextlib.contextmanager
    def _counting_rejects(self) -> Iterator[None]:
        try:
            yield
        except DeviceError as error:
            self.telemetry.rejected += 1
            self._log("rejected", why=str(error))
            raise

    def _count(self, decisions: Decision) -> None:
        self.telemetry.clipped_low += Decision.CLIPPED_LOW in decisions
        self.telemetry.clipped_high += Decision.CLIPPED_HIGH in decisions
        self.telemetry.too_soon += Decision.TOO_SOON in decisions
        self.telemetry.dead_banded += Decision.DEAD_BANDED in decisions
        self.telemetry.raise_limited += Decision.RAISE_LIMITED in decisions

    def _result(self, requested_mw: int, decisions: Decision, *, written: bool) -> CommandResult:
        return CommandResult(requested_mw / 1000, self.telemetry.limit_mw / 1000, decisions, written)

    def _log(self, event: str, **details: Any) -> None:
        if self._audit is not None:
            session = self._session.state.session if self._session is not None else None
            self._audit.record(event, self.info.uuid, session=session, policy=self._policy or None, **details)
            self.telemetry.audit_failures = self._audit.failures


def _names(decisions: Decision) -> str:
    return ", ".join(str(d.name).lower().replace("_", " ") for d in Decision if d and d in decisions)
