"""How `wattgym hw doctor` looks in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wattgym.hw.device import DeviceInfo
    from wattgym.hw.doctor import DoctorReport


def report_text(report: DoctorReport) -> str:
    """The report as plain text, findings with their remedies last, where they are seen."""
    rights = report.privileges
    capability = {True: "with", False: "without", None: "unknown"}[rights.sys_admin]
    lines = [
        f"NVML binding   {report.binding or 'not usable'}",
        f"driver         {report.driver or 'none'}",
        f"process        {'root' if rights.root else 'not root'}, {capability} SYS_ADMIN"
        + (", in a container" if rights.container else ""),
    ]
    if report.cuda_visible_devices is not None:
        lines.append(f"CUDA_VISIBLE_DEVICES {report.cuda_visible_devices!r}")
    if not report.devices:
        lines.append("No GPU was found; the simulated backend works without one.")
    for info in report.devices:
        lines += ["", *_device_lines(info)]
    lines += ["", f"simulated      {', '.join(report.simulated_presets)}"]
    if report.findings:
        lines += ["", "Findings:"]
        for finding in report.findings:
            lines.append(f"- {finding.device}: {finding.problem}")
            if finding.remedy:
                lines.append(f"  remedy: {finding.remedy}")
    elif report.devices:
        lines += ["", "Nothing stands in the way of controlling these devices."]
    return "\n".join(lines)


def _device_lines(info: DeviceInfo) -> list[str]:
    window = f" over {1000 * info.power_window_s:g} ms" if info.power_window_s is not None else ""
    limits = (info.min_limit_mw, info.default_limit_mw, info.max_limit_mw)
    missing = [name for name, reason in info.capabilities.items() if reason != "ok"]
    return [
        f"[{info.index}] {info.name}  {info.uuid}  {info.pci_bus_id or ''}".rstrip(),
        f"    limit          requested {_watts(info.requested_limit_mw)}, enforced {_watts(info.enforced_limit_mw)}",
        "    limit range    min {}, default {}, max {}".format(*map(_watts, limits)),
        f"    power reading  {info.power_kind}{window}",
        f"    not available  {', '.join(missing) or 'nothing'}",
    ]


def _watts(limit_mw: int | None) -> str:
    return "unknown" if limit_mw is None else f"{limit_mw / 1000:g} W"
