"""Checks of the state of the devices: tool responses, processes, errors, temperature and power."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from primus.machine import health as machine_health
from primus.machine.health import DeviceHealth, Health
from primus.machine.tools.vitals import NORMAL_LIMITS, Process
from primus.preflight.checks import gpu_memory, torch_devices
from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import (
    PreflightNode,
    format_names,
    judge_value,
    report_info,
    report_ok,
    report_unknown,
)
from primus.report import table

SAFE = "AMD-AGI/Primus-SaFE node monitors"
SMOKE = "AMD-AGI/Primus node_smoke"
GIB = 1 << 30
HARMLESS = ("gpuagent", "rocm-smi-daemon", "amd-smi", "rocm-smi", "dcgm-exporter", "nv-hostengine", "nvidia-smi")
"""Programs that monitor devices and do not compute (AMD-AGI/Primus node_smoke)."""
COMMAND_LENGTH = 15
"""Number of characters of a program's name that the kernel stores (proc(5), comm)."""
REQUIRED = {
    "processes": "who uses the devices",
    "memory_used_bytes": "memory in use",
    "ecc_uncorrectable": "uncorrectable errors",
}
"""Without these values a device may be in use or broken; the others (temperature, clocks, power) affect only speed."""
CAP_TOLERANCE = 0.01
"""Relative tolerance of a power cap, as in power tests (ROCm Validation Suite)."""


def check_live(node: PreflightNode) -> Iterator[CheckFinding]:
    """The current state of the devices, as the management tools and the kernel report it."""
    if not node.has_devices:
        return
    read = machine_health.read_health(node.facts, node.environ, node.limits.smi_limit_s, root=node.tree.root)
    yield from judge_health(node, read)
    # PyTorch runs afterwards: its process opens the devices and would be listed among the processes that use them.
    yield from torch_devices.check_torch_devices(node)


def judge_health(node: PreflightNode, read: Health) -> Iterator[CheckFinding]:
    """Findings for the state of the devices."""
    yield from judge_tools(node, read)
    yield judge_processes(node, read.devices)
    for device in read.devices:
        subject = f"GPU {device.index}"
        yield from _judge_use(node, device, subject, is_asked=any(not call.problem for call in read.calls))
        yield from gpu_memory.judge_errors(device, subject)
        yield from _judge_heat_and_power(node, device, subject)
    yield from _judge_error_sums(node, read.devices)


def judge_tools(node: PreflightNode, read: Health) -> Iterator[CheckFinding]:
    """The management tools respond within the time limits."""
    limit, warn = node.limits.smi_limit_s, node.limits.smi_warn_s
    expected, reason = f"an answer within {warn:g} s", f"a hung tool indicates a hung driver ({SMOKE})"
    lacking = [said for name, said in REQUIRED.items() if any(_is_lacking(one, name) for one in read.devices)]
    without: Status = "unknown" if lacking else "warn"
    so = (
        f"; not known: {format_names(lacking)}"
        if lacking
        else "; the kernel or another tool reports the essential values"
    )
    if not read.calls:
        if node.tree.is_live:
            advice = "install amd-smi, rocm-smi or nvidia-smi, or mount it in the container"
            yield judge_value(
                False, without, "gpu.tool", f"no management tool is installed{so}", expected, reason, advice
            )
        return
    # A call that was killed at the limit has the limit as its duration.
    hung = [call for call in read.calls if call.seconds >= limit]
    if hung:
        yield judge_value(
            False,
            "fail",
            "gpu.tool",
            f"{format_names(call.tool for call in hung)}: no answer in {limit:g} s",
            expected,
            reason,
            "see the kernel log; drain and reboot the node",
            value=limit,
        )
        return
    for call in read.calls:
        if call.problem:
            advice = "run the tool in a shell; temperature, errors and processes are unknown without it"
            yield judge_value(
                False, without, "gpu.tool", call.problem + so, expected, reason, advice, subject=call.tool
            )
    # The calls run concurrently and delay each other: the fastest shows how quickly the driver responds.
    fastest = min(read.calls, key=lambda call: call.seconds)
    yield judge_value(
        fastest.seconds <= warn,
        "warn",
        "gpu.tool",
        f"{fastest.tool} {fastest.seconds:.1f} s",
        expected,
        reason,
        "run it again; see the kernel log if it stays slow",
        value=round(fastest.seconds, 1),
    )


def _is_lacking(device: DeviceHealth, name: str) -> bool:
    return getattr(device, name) is None and not (name == "memory_used_bytes" and device.shares_host_memory)


def judge_processes(node: PreflightNode, devices: Sequence[DeviceHealth]) -> CheckFinding:
    """No other process uses the devices; a process without device memory counts as well."""
    expected = "monitoring processes only"
    reason = f"a process that shares a GPU slows the job or takes its memory ({SMOKE})"
    if all(device.processes is None for device in devices):
        if not node.tree.is_live:
            return report_info("gpu.processes", "not recorded", reason)
        return report_unknown("gpu.processes", "not known", expected, reason, "install the vendor's management tool")
    using = {process.pid: process for device in devices for process in device.processes or ()}
    foreign = [
        f"{process.name or 'process'} ({process.pid})"
        for pid, process in sorted(using.items())
        if pid != os.getpid() and not _is_allowed(process, node.expected.allowed_processes)
    ]
    if node.expected.allows_foreign_processes:
        return report_ok("gpu.processes", format_names(foreign) or "none", "any: --allow-foreign-procs")
    return judge_value(
        not foreign,
        "fail",
        "gpu.processes",
        format_names(foreign) or "none",
        expected,
        reason,
        "end them, or allow them with --allowed-procs; host process names need the host's PID namespace",
        value=len(foreign),
    )


def _is_allowed(process: Process, more: Sequence[str]) -> bool:
    name = process.name.rpartition("/")[2]
    return any(name[:COMMAND_LENGTH] == allowed[:COMMAND_LENGTH] for allowed in (*HARMLESS, *more))


def _judge_use(node: PreflightNode, device: DeviceHealth, subject: str, *, is_asked: bool) -> Iterator[CheckFinding]:
    """Whether a device is free; a device without values from a responding tool is never ok."""
    limits = node.limits
    if device.shares_host_memory and device.memory_used_bytes is None:
        yield report_info("gpu.memory_used", "it has no separate memory; it uses host memory", subject=subject)
    elif device.memory_used_bytes is not None:
        yield judge_value(
            device.memory_used_bytes < limits.gpu_busy_gib * GIB,
            "fail",
            "gpu.memory_used",
            table.format_size(device.memory_used_bytes),
            f"< {limits.gpu_busy_gib:g} GiB",
            f"before the test; a dead process may hold it ({SMOKE})",
            "end the process that holds it; if there is none, reset the device",
            subject=subject,
            value=device.memory_used_bytes,
        )
    elif node.tree.is_live and (device.sources or is_asked):
        yield report_unknown(
            "gpu.memory_used", "not reported", f"< {limits.gpu_busy_gib:g} GiB",
            "a device that does not respond is not fit",
            "see the kernel log; reboot the node", subject=subject,
        )  # fmt: skip
    if device.activity_percent is not None:
        yield judge_value(
            device.activity_percent < limits.gpu_activity_percent,
            "warn",
            "gpu.activity",
            f"{device.activity_percent:g} %",
            f"< {limits.gpu_activity_percent:g} %",
            f"before the test ({SMOKE})",
            "see gpu.processes for the user",
            subject=subject,
            value=device.activity_percent,
        )


def _judge_heat_and_power(node: PreflightNode, device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    limits = node.limits
    if device.temperature_c is not None:
        yield judge_value(
            device.temperature_c < limits.temperature_c,
            "fail",
            "gpu.temperature",
            f"{device.temperature_c:g} C",
            f"< {limits.temperature_c:g} C",
            f"hotspot; hotter GPUs throttle ({SAFE})",
            "check the fans and the cooling of the rack",
            subject=subject,
            value=device.temperature_c,
        )
    if device.throttle is not None:
        held = [reason for reason in device.throttle if reason.lower() not in NORMAL_LIMITS]
        yield judge_value(
            not held,
            "fail",
            "gpu.throttle",
            format_names(held) or "none",
            "no thermal or hardware limit",
            "a throttled GPU slows all ranks",
            "check its cooling and its power supply",
            subject=subject,
        )
    yield from _judge_power_cap(node, device, subject)


def _judge_power_cap(node: PreflightNode, device: DeviceHealth, subject: str) -> Iterator[CheckFinding]:
    known = {gpu.index: profile for gpu, profile in node.list_profiles}
    profile = known.get(device.index)
    if device.power_cap_w is None or profile is None or profile.power_w is None:
        return
    yield judge_value(
        device.power_cap_w >= profile.power_w * (1 - CAP_TOLERANCE),
        "fail",
        "gpu.power_cap",
        f"{device.power_cap_w:g} W",
        f"{profile.power_w} W",
        f"what {profile.model} has by default, by its profile",
        "reset it: `amd-smi reset --power-cap` or `nvidia-smi -pl`",
        subject=subject,
        value=device.power_cap_w,
    )


def _judge_error_sums(node: PreflightNode, devices: Sequence[DeviceHealth]) -> Iterator[CheckFinding]:
    """Corrected errors of all devices, which are harmless up to a threshold."""
    limits = node.limits
    for name, counts, most in (
        ("ecc_correctable", [device.ecc_correctable for device in devices], limits.ecc_correctable),
        ("pcie_replays", [device.pcie_replays for device in devices], limits.pcie_replay),
    ):
        known = [count for count in counts if count is not None]
        if not known:
            continue
        worst = counts.index(max(known))
        yield judge_value(
            sum(known) <= most,
            "warn",
            f"gpu.{name}",
            f"{sum(known)}, most of them on GPU {worst}" if sum(known) else "0",
            f"<= {most} on the whole node",
            f"many correctable errors precede a failure ({SAFE})",
            f"watch GPU {worst}, and replace it when errors become uncorrectable",
            value=sum(known),
        )


CHECKS = (check_live,)
