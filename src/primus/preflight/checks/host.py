"""Checks of the host: processors, memory, limits, kernel settings, clock and drives."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names, format_ranges
from primus.preflight.findings.rules import About, judge, report_info
from primus.preflight.findings.thresholds import Thresholds
from primus.report import table

GIB = 1 << 30


def check_system(node: PreflightNode) -> Iterator[CheckFinding]:
    """Hardware and operating system of this node."""
    facts, software, cpu = node.facts, node.facts.software, node.facts.cpu
    around = ", ".join(filter(None, [facts.container and f"in {facts.container}", facts.scheduler]))
    yield report_info("host.system", f"{software.os or 'unknown OS'}, kernel {software.kernel or '-'}")
    yield report_info("host.surroundings", around or "no container, no scheduler")
    smt = cpu.threads > cpu.cores if cpu.threads and cpu.cores else None
    counts = [
        f"{cpu.sockets or '-'} sockets",
        f"{cpu.cores or '-'} cores",
        f"{cpu.threads or '-'} threads ({cpu.usable or '-'} usable)",
        f"SMT {'unknown' if smt is None else 'on' if smt else 'off'}",
        f"{cpu.numa_nodes or '-'} NUMA nodes",
    ]
    yield report_info("host.cpu", f"{cpu.model}, {', '.join(counts)}")


def check_memory(node: PreflightNode) -> Iterator[CheckFinding]:
    """Free memory, and swap."""
    held = node.facts.memory
    if not held.total_bytes or held.available_bytes is None:
        yield node.judge("host.memory/unknown", False)
        return
    percent = 100 * held.available_bytes / held.total_bytes
    text = (
        f"{table.format_size(held.available_bytes)} of {table.format_size(held.total_bytes)} available "
        f"({percent:.0f} %)"
    )
    if held.limit_bytes is not None:
        text += f", {table.format_size(held.limit_bytes)} allowed by the control group"
    yield node.judge("host.memory", percent, text, value=round(percent, 1))
    yield report_info("host.swap", "none" if held.swap_bytes == 0 else table.format_size(held.swap_bytes or 0))


def check_limits(node: PreflightNode) -> Iterator[CheckFinding]:
    """Locked memory, shared memory and open files of this process."""
    held, asked = node.facts.limits, node.limits
    locked, shared = held.memlock_bytes, held.shm_bytes
    yield node.judge(
        "host.memlock/rdma" if node.has_rdma else "host.memlock",
        locked is None or locked >= asked.memlock_gib * GIB,
        "unlimited" if locked is None else table.format_size(locked),
    )
    yield node.judge(
        "host.shm/devices" if node.has_devices else "host.shm",
        shared is not None and shared >= asked.shm_gib * GIB,
        "no /dev/shm" if shared is None else table.format_size(shared),
    )
    yield report_info("host.nofile", "unlimited" if held.nofile is None else str(held.nofile))


def check_governors(node: PreflightNode) -> Iterator[CheckFinding]:
    """The frequency governor of every processor."""
    if not node.facts.cpu.governors:
        yield report_info("host.governor", "the kernel offers none", "virtual machines often have none")
        return
    others: dict[str, list[int]] = {}
    folder = "sys/devices/system/cpu"
    for name in node.tree.list_names(folder):
        match = re.fullmatch(r"cpu(\d+)", name)
        governor = node.tree.read_text(f"{folder}/{name}/cpufreq/scaling_governor") if match else None
        if match and governor and governor != "performance":
            others.setdefault(governor, []).append(int(match[1]))
    counted = ", ".join(f"{count} {name}" for name, count in sorted(node.facts.cpu.governors.items()))
    named = "; ".join(f"{name}: CPU {format_ranges(cpus)}" for name, cpus in sorted(others.items()))
    is_good = set(node.facts.cpu.governors) == {"performance"}
    yield node.judge("host.governor", is_good, counted if is_good or not named else named)


def check_kernel_settings(node: PreflightNode) -> Iterator[CheckFinding]:
    """NUMA balancing and transparent huge pages."""
    balancing = node.tree.read_text("proc/sys/kernel/numa_balancing")
    if balancing is None:
        yield report_info("host.numa_balancing", "the kernel has none")
    else:
        yield node.judge("host.numa_balancing", balancing, status="warn" if node.has_devices else "info")
    pages = node.tree.read_text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", pages or "")
    if chosen is None:
        yield report_info("host.hugepages", "the kernel has no transparent huge pages")
    else:
        yield node.judge("host.hugepages", chosen[1] != "never", chosen[1])


def check_boot_arguments(node: PreflightNode) -> Iterator[CheckFinding]:
    """Boot arguments of the kernel that AMD devices need."""
    if not any(device.vendor == "amd" for device in node.facts.devices):
        return
    line = node.facts.software.boot_arguments
    if line is None:
        yield node.judge("host.boot_arguments/unknown", False)
        return
    words = set(line.split())
    missing = [] if "pci=realloc=off" in words else ["pci=realloc=off"]
    if not words & {"iommu=pt", "amd_iommu=on", "intel_iommu=on"}:
        missing.append("iommu=pt")
    yield node.judge("host.boot_arguments", not missing, format_names(missing))


def check_access_control(node: PreflightNode) -> Iterator[CheckFinding]:
    """PCIe bridges that redirect peer-to-peer traffic to the root complex (ACS)."""
    if not node.has_devices or not node.tree.is_live:
        return
    if not node.is_root:
        yield node.judge("host.pcie_acs/unknown", False, "needs root (lspci)")
        return
    answer = node.run_program(["lspci", "-vvv"])
    if answer.state != "ok":
        yield node.judge("host.pcie_acs/unknown", False, answer.problem)
        return
    yield judge_acs(find_redirecting_bridges(answer.text))


def judge_acs(bridges: list[str]) -> CheckFinding:
    """Finding for the bridges that redirect peer-to-peer traffic."""
    return judge("host.pcie_acs", not bridges, format_names(bridges, 4), number=len(bridges))


def find_redirecting_bridges(lspci: str) -> list[str]:
    """Addresses of the devices in the output of ``lspci -vvv`` whose ACS source validation is on."""
    blocks = re.split(r"\n(?=\S)", lspci)
    return [block.split(maxsplit=1)[0] for block in blocks if re.search(r"ACSCtl:\s*SrcValid\+", block)]


CLOCK_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd", "ntpsec")
"""Programs that synchronise the clock, as named in /proc/<pid>/comm, which has 15 characters."""


def check_clock(node: PreflightNode) -> Iterator[CheckFinding]:
    """Whether a program synchronises the clock."""
    running = {node.tree.read_text(f"proc/{pid}/comm") or "" for pid in node.tree.list_names("proc") if pid.isdecimal()}
    daemons = sorted(running & set(CLOCK_DAEMONS))
    if not daemons and node.facts.container:
        hidden = f"no daemon visible inside {node.facts.container}"
        yield report_info("host.clock", hidden, "the host's daemon may be hidden")
        return
    status = "warn" if node.layout.nnodes > 1 else "info"
    yield node.judge("host.clock", bool(daemons), format_names(daemons) or "no clock daemon runs", status=status)


class SmartLog(msgspec.Struct, frozen=True):
    """Fields of the output of ``nvme smart-log -o json``."""

    critical_warning: int = 0
    media_errors: int = 0
    num_err_log_entries: int = 0


def check_drives(node: PreflightNode) -> Iterator[CheckFinding]:
    """The health of each NVMe drive, as its own log reports it."""
    names = [name for name in node.tree.list_names("sys/class/nvme") if re.fullmatch(r"nvme\d+", name)]
    if not names or not node.tree.is_live:
        return
    if not node.is_root:
        reason = "reading drive health needs root"
        yield report_info("host.drives", f"{len(names)} NVMe drives, health not read", reason)
        return
    for name in names:
        answer = node.run_program(["nvme", "smart-log", f"/dev/{name}", "-o", "json"])
        if answer.state != "ok":
            yield report_info("host.drives", f"health not read: {answer.problem}", about=About(name))
        else:
            yield judge_drive(name, answer.text, node.limits)


def judge_drive(name: str, smart_log: str, limits: Thresholds) -> CheckFinding:
    """Findings for the log of a drive."""
    try:
        log = msgspec.json.decode(smart_log, type=SmartLog, strict=False)
    except msgspec.MsgspecError:
        return judge("host.drives/unknown", False, "", About(name), drive=name, limits=limits)
    is_broken = bool(log.critical_warning or log.media_errors)
    is_good = not is_broken and log.num_err_log_entries <= limits.nvme_error_entries
    text = (
        f"critical warning {log.critical_warning}, {log.media_errors} media errors, "
        f"{log.num_err_log_entries} failed entries"
    )
    status = "fail" if is_broken else "warn"
    return judge("host.drives", is_good, text, About(name), status=status, limits=limits)


CHECKS = (
    check_system,
    check_memory,
    check_limits,
    check_governors,
    check_kernel_settings,
    check_boot_arguments,
    check_access_control,
    check_clock,
    check_drives,
)
