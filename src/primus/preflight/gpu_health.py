"""Checks of how the devices are: what their management tool says, who uses them, errors, heat and power."""

from __future__ import annotations

import os
from collections.abc import Iterator

from primus.preflight.finding import Finding
from primus.preflight.node import Node, judged, listed, ok, unknown

SMOKE = "AMD-AGI/Primus node_smoke"
TOOLS = {"amd": (("amd-smi", "list"), ("rocm-smi", "--showid")), "nvidia": (("nvidia-smi", "-L"),)}
"""The cheapest question to each vendor's tools, newest tool first."""
HARMLESS = ("gpuagent", "rocm-smi-daemon", "amd-smi", "dcgm-exporter", "nv-hostengine", "nvidia-persiste")
"""Programs that watch devices and compute nothing (AMD-AGI/Primus node_smoke); names as /proc/<pid>/comm cuts them."""


def tool_latency(node: Node) -> Iterator[Finding]:
    """The management tool answers, and soon: one that hangs stands for a hung driver."""
    if not node.has_devices or not node.tree.is_live:
        return
    vendor = node.facts.devices[0].vendor
    for argv in TOOLS[vendor]:
        answer = node.call(argv)
        if answer.state != "missing":
            break
    limit, warn = node.limits.smi_limit_s, node.limits.smi_warn_s
    expected = f"an answer within {warn:g} s"
    reason = f"a tool that hangs stands for a hung driver ({SMOKE})"
    if answer.state == "missing":
        tools = listed(argv[0] for argv in TOOLS[vendor])
        yield unknown(
            "gpu.tool", f"none of {tools} is installed", expected, reason, "install it, or mount it in the container"
        )
        return
    measured = f"{argv[0]} {answer.duration_s:.1f} s" if answer.state == "ok" else answer.problem
    is_slow_only = answer.state == "ok" and answer.duration_s <= limit
    yield judged(
        answer.state == "ok" and answer.duration_s <= warn,
        "warn" if is_slow_only else "fail",
        "gpu.tool",
        measured,
        expected,
        reason,
        "see the kernel log; drain the node and boot it again",
        value=round(answer.duration_s, 1),
    )


def foreign_processes(node: Node) -> Iterator[Finding]:
    """Nobody else uses the devices; a process that holds no memory counts as well."""
    if not any(device.vendor == "amd" for device in node.facts.devices):
        return
    folder = "sys/class/kfd/kfd/proc"
    names: dict[int, str] = {}
    for pid in map(int, filter(str.isdecimal, node.tree.names(folder))):
        names[pid] = node.tree.text(f"proc/{pid}/comm") or "of another PID namespace"
    yield processes_finding(node, {pid: name for pid, name in names.items() if pid != os.getpid()})


def processes_finding(node: Node, names: dict[int, str]) -> Finding:
    """What the programs that use the devices mean for a job."""
    allowed = {*HARMLESS, *node.expected.allowed_processes}
    foreign = [f"{name} ({pid})" for pid, name in sorted(names.items()) if name not in allowed]
    if node.expected.allows_foreign_processes:
        return ok("gpu.processes", listed(foreign) or "none", "any: --allow-foreign-procs")
    return judged(
        not foreign,
        "fail",
        "gpu.processes",
        listed(foreign) or "none",
        "none but watchers",
        f"who shares a device slows the job, or takes its memory ({SMOKE})",
        "end them, or name them with --allowed-procs; in a container the host's names need --pid=host",
        value=len(foreign),
    )


CHECKS = (tool_latency, foreign_processes)
