"""What this process may do to a GPU, found out by reading only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CAP_SYS_ADMIN = 21
"""Bit number of the capability (linux/capability.h)."""


@dataclass(frozen=True)
class Privileges:
    """This process as the driver will see it.

    Attributes:
        root: Effective user id 0.
        sys_admin: The effective capability SYS_ADMIN; `None` where it cannot be told.
        container: Signs of a container were found.
    """

    root: bool
    sys_admin: bool | None
    container: bool

    def why_no_writes(self) -> str | None:
        """Why limits cannot be set, with the remedy; `None` if nothing speaks against it (a write alone proves it)."""
        if not self.root:
            return "not root: run as root, or let a privileged `wattgym hw serve` write for you"
        if self.sys_admin is False:
            where = "docker run --cap-add SYS_ADMIN" if self.container else "give the process CAP_SYS_ADMIN"
            return f"root without the capability SYS_ADMIN: {where}"
        return None


def read_privileges() -> Privileges:
    """Reads this process's user and capabilities."""
    return Privileges(root=os.geteuid() == 0, sys_admin=_has_sys_admin(), container=_in_container())


def _has_sys_admin() -> bool | None:
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_ADMIN & 1)
    return None


def _in_container() -> bool:
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return True
    try:
        return any(word in Path("/proc/1/cgroup").read_text(encoding="utf-8") for word in ("docker", "kubepods", "lxc"))
    except OSError:
        return False
