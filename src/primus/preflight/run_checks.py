"""Run all checks of one node concurrently and independently."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Thread

from primus.errors import format_error_place
from primus.machine.network.selection import find_roce_v2_index
from primus.preflight.checks import (
    error_counts,
    gpu,
    gpu_health,
    host,
    kernel_log,
    network,
    nic_health,
    peer_memory,
    ports,
    software,
    storage,
    torch_devices,
)
from primus.preflight.checks import site as site_checks
from primus.preflight.findings.finding import CheckFinding, NodeReport
from primus.preflight.findings.node import GROUPS, Group, PreflightNode

Check = Callable[[PreflightNode], Iterator[CheckFinding]]
MARGIN_S = 15.0
"""Time that a check may take in addition to the programs that it runs."""
CHECKS: dict[Group, tuple[Check, ...]] = {
    "host": host.CHECKS + kernel_log.CHECKS + error_counts.HOST_CHECKS + site_checks.HOST_CHECKS,
    "gpu": gpu.CHECKS + gpu_health.CHECKS + error_counts.GPU_CHECKS + site_checks.GPU_CHECKS,
    "network": network.CHECKS + ports.CHECKS + nic_health.CHECKS + peer_memory.CHECKS + site_checks.NETWORK_CHECKS,
    "storage": storage.CHECKS + site_checks.STORAGE_CHECKS,
    "software": software.CHECKS + site_checks.SOFTWARE_CHECKS,
}


def compute_limit_s(node: PreflightNode) -> float:
    """Time limit of the slowest check, in seconds: `gpu_health.check_live` runs the management tools, then PyTorch."""
    return node.limits.smi_limit_s + torch_devices.compute_limit_s(node) + MARGIN_S


def run(node: PreflightNode, groups: Iterable[Group] = GROUPS, limit_s: float | None = None) -> NodeReport:
    """Run the checks of `groups` concurrently; a check that is still running after `compute_limit_s` has failed."""
    limit_s = compute_limit_s(node) if limit_s is None else limit_s
    began = time.monotonic()
    asked = set(groups)
    chosen = [(group, check) for group in GROUPS if group in asked for check in CHECKS[group]]
    found: dict[Check, Sequence[CheckFinding]] = {}

    def do(group: Group, check: Check) -> None:
        found[check] = _run_check(group, check, node)

    # Threads, not a pool: a read from a hung file system or driver cannot be interrupted, and an executor would wait
    # for its threads at exit. Daemon threads are abandoned at the limit.
    threads = [Thread(target=do, args=pair, daemon=True) for pair in chosen]
    for thread in threads:
        thread.start()
    # All threads share one deadline, so that several hung checks cost one limit and not one each.
    for thread in threads:
        thread.join(max(0.0, began + limit_s - time.monotonic()))
    return NodeReport(
        host=(node.facts.host or socket.gethostname()).partition(".")[0],
        node_rank=node.layout.node_rank,
        time=node.now,
        duration_s=round(time.monotonic() - began, 3),
        findings=tuple(
            # A check stores its findings in one assignment when it has finished: a missing entry means that it is
            # still running.
            finding
            for group, check in chosen
            for finding in found.get(check, [_report_timeout(group, check, limit_s)])
        ),
        stack=describe_stack(node),
    )


def _report_timeout(group: Group, check: Check, limit_s: float) -> CheckFinding:
    """The failure of a check that did not finish within the limit."""
    return CheckFinding(
        check=f"{group}.{check.__name__.removeprefix('check_')}",
        status="fail",
        measured=f"not finished within {limit_s:g} s",
        expected="an answer",
        reason="a hung file system or driver blocks every process that queries it",
        advice="see the kernel log; find a hung mount with `df`",
    )


def _run_check(group: Group, check: Check, node: PreflightNode) -> Sequence[CheckFinding]:
    """The findings of one check; an exception is a failure of that check only."""
    try:
        return list(check(node))
    except Exception as error:  # noqa: BLE001 - a bug in one check must neither pass a node nor hide other findings
        return [
            CheckFinding(
                check=f"{group}.{check.__name__.removeprefix('check_')}",
                status="fail",
                measured=f"the check failed with an internal error: {type(error).__name__}: {error} "
                f"({format_error_place(error)})",
                expected="it ends",
                advice="report it; --preflight-ignore skips the check",
            )
        ]


def describe_stack(node: PreflightNode) -> dict[str, str]:
    """Properties that must be the same on all nodes of a cluster, by name."""
    facts, held = node.facts, node.facts.software
    nics: dict[str, int] = {}
    for device in facts.rdma:
        key = f"{device.hca_type or device.kind or 'NIC'} {device.firmware or '-'}"
        nics[key] = nics.get(key, 0) + 1
    indexes = [find_roce_v2_index(port) for _, port in ports.list_counted_ports(node)[0] if port.is_active]
    installed = software.list_installed_packages()
    all_packages = "\n".join(f"{name} {version}" for name, version in sorted(installed.items()))
    firmware = {f"{name} {version}" for device in facts.devices for name, version in device.firmware.items()}
    values = {
        "OS": held.os,
        "kernel": held.kernel,
        "CPU": facts.cpu.model,
        "NUMA nodes": str(facts.cpu.numa_nodes) if facts.cpu.numa_nodes else None,
        "Python": held.python,
        "amd driver": held.amd_driver,
        "nvidia driver": held.nvidia_driver,
        "ROCm": held.rocm,
        "CUDA": held.cuda,
        "GPU model": ", ".join(sorted({device.model or device.name for device in facts.devices})),
        "GPU count": str(len(facts.partitions)),
        "GPU firmware": ", ".join(sorted(firmware)),
        "RoCE GID index": ", ".join(sorted({str(index) for index in indexes if index is not None})),
        "RDMA ports": str(sum(port.is_active for _, port in ports.list_counted_ports(node)[0])),
        "NIC firmware": ", ".join(f"{count} x {key}" for key, count in sorted(nics.items())),
        "packages": hashlib.sha256(all_packages.encode()).hexdigest()[:12],
        **{name: installed.get(name) for name in software.PACKAGES},
    }
    return {name: value for name, value in values.items() if value}
