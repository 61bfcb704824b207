"""Checks of the state of the devices: tool responses, processes, errors, temperature and power."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from primus.machine import health as machine_health
from primus.machine.health import DeviceHealth, Health
from primus.machine.tools.vitals import NORMAL_LIMITS, Process
from primus.preflight.checks import gpu_memory, torch_devices
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import About, judge_readings, report_info

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
    profiles = {gpu.index: profile for gpu, profile in node.list_profiles}
    for device in read.devices:
        about = About(f"GPU {device.index}")
        yield from _judge_use(node, device, about, is_asked=any(not call.problem for call in read.calls))
        yield from gpu_memory.judge_errors(device, about)
        yield from judge_readings(device, ["gpu.temperature"], about, limits=node.limits)
        if device.throttle is not None:
            held = [reason for reason in device.throttle if reason.lower() not in NORMAL_LIMITS]
            yield node.judge("gpu.throttle", not held, format_names(held) or "none", about)
        profile, cap = profiles.get(device.index), device.power_cap_w
        if cap is not None and profile and profile.power_w is not None:
            words = {"wanted": profile.power_w, "model": profile.model, "value": cap}
            yield node.judge(
                "gpu.power_cap", cap >= profile.power_w * (1 - CAP_TOLERANCE), f"{cap:g} W", about, **words
            )
    yield from _judge_error_sums(node, read.devices)


def judge_tools(node: PreflightNode, read: Health) -> Iterator[CheckFinding]:
    """The management tools respond within the time limits."""
    limit = node.limits.smi_limit_s
    lacking = [said for name, said in REQUIRED.items() if any(_is_lacking(one, name) for one in read.devices)]
    without = "unknown" if lacking else "warn"
    so = (
        f"; not known: {format_names(lacking)}"
        if lacking
        else "; the kernel or another tool reports the essential values"
    )
    if not read.calls:
        if node.tree.is_live:
            yield node.judge("gpu.tool/missing", False, so, status=without)
        return
    # A call that was killed at the limit has the limit as its duration.
    hung = [call for call in read.calls if call.seconds >= limit]
    if hung:
        yield node.judge("gpu.tool/hung", False, format_names(call.tool for call in hung), value=limit)
        return
    for call in read.calls:
        if call.problem:
            yield node.judge("gpu.tool/problem", False, call.problem + so, About(call.tool), status=without)
    # The calls run concurrently and delay each other: the fastest shows how quickly the driver responds.
    fastest = min(read.calls, key=lambda call: call.seconds)
    seconds = round(fastest.seconds, 1)
    yield node.judge("gpu.tool", fastest.seconds, f"{seconds:.1f} s", tool=fastest.tool, value=seconds)


def _is_lacking(device: DeviceHealth, name: str) -> bool:
    return getattr(device, name) is None and not (name == "memory_used_bytes" and device.shares_host_memory)


def judge_processes(node: PreflightNode, devices: Sequence[DeviceHealth]) -> CheckFinding:
    """No other process uses the devices; a process without device memory counts as well."""
    if all(device.processes is None for device in devices):
        row = "gpu.processes/unknown" if node.tree.is_live else "gpu.processes/not_recorded"
        return node.judge(row, False)
    using = {process.pid: process for device in devices for process in device.processes or ()}
    foreign = [
        f"{process.name or 'process'} ({process.pid})"
        for pid, process in sorted(using.items())
        if pid != os.getpid() and not _is_allowed(process, node.expected.allowed_processes)
    ]
    if node.expected.allows_foreign_processes:
        return node.judge("gpu.processes/any", True, format_names(foreign) or "none")
    return node.judge("gpu.processes", not foreign, format_names(foreign) or "none", value=len(foreign))


def _is_allowed(process: Process, more: Sequence[str]) -> bool:
    name = process.name.rpartition("/")[2]
    return any(name[:COMMAND_LENGTH] == allowed[:COMMAND_LENGTH] for allowed in (*HARMLESS, *more))


def _judge_use(node: PreflightNode, device: DeviceHealth, about: About, *, is_asked: bool) -> Iterator[CheckFinding]:
    """Whether a device is free; a device without values from a responding tool is never ok."""
    if device.memory_used_bytes is None:
        if device.shares_host_memory:
            yield report_info("gpu.memory_used", "it has no separate memory; it uses host memory", about=about)
        elif node.tree.is_live and (device.sources or is_asked):
            yield node.judge("gpu.memory_used/unknown", False, "", about)
    yield from judge_readings(device, ("gpu.memory_used", "gpu.activity"), about, limits=node.limits)


def _judge_error_sums(node: PreflightNode, devices: Sequence[DeviceHealth]) -> Iterator[CheckFinding]:
    """Corrected errors of all devices, which are harmless up to a threshold."""
    for name in ("ecc_correctable", "pcie_replays"):
        counts = [getattr(device, name) for device in devices]
        known = [count for count in counts if count is not None]
        if known:
            total, worst = sum(known), counts.index(max(known))
            shown = f"{total}, most of them on GPU {worst}" if total else "0"
            yield node.judge(f"gpu.{name}", total, shown, worst=worst)


CHECKS = (check_live,)
