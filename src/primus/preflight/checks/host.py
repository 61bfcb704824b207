"""Checks of the host: processors, memory, limits, kernel settings, clock and drives."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from primus.preflight.findings.finding import CheckFinding, Status
from primus.preflight.findings.node import (
    PreflightNode,
    format_names,
    format_ranges,
    judge_value,
    report_info,
    report_ok,
    report_unknown,
)
from primus.report import table

GIB = 1 << 30
SAFE = "AMD-AGI/Primus-SaFE node monitors"
SMOKE = "AMD-AGI/Primus node_smoke"


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
    held, least = node.facts.memory, node.limits.memory_available_percent
    reason = "a job that runs out of host memory is killed (AMD-AGI/Primus preflight)"
    if not held.total_bytes or held.available_bytes is None:
        yield report_unknown(
            "host.memory", "/proc/meminfo gives no total", f">= {least:g} %", reason, "mount /proc in the container"
        )
        return
    percent = 100 * held.available_bytes / held.total_bytes
    text = (
        f"{table.format_size(held.available_bytes)} of {table.format_size(held.total_bytes)} available "
        f"({percent:.0f} %)"
    )
    if held.limit_bytes is not None:
        text += f", {table.format_size(held.limit_bytes)} allowed by the control group"
    yield judge_value(
        percent >= least,
        "warn",
        "host.memory",
        text,
        f">= {least:g} %",
        reason,
        "end other processes: `ps aux --sort=-rss`",
        value=round(percent, 1),
    )
    yield report_info("host.swap", "none" if held.swap_bytes == 0 else table.format_size(held.swap_bytes or 0))


def check_limits(node: PreflightNode) -> Iterator[CheckFinding]:
    """Locked memory, shared memory and open files of this process."""
    held, asked = node.facts.limits, node.limits
    locked, shared = held.memlock_bytes, held.shm_bytes
    yield judge_value(
        locked is None or locked >= asked.memlock_gib * GIB,
        "fail" if node.has_rdma else "info",
        "host.memlock",
        "unlimited" if locked is None else table.format_size(locked),
        f">= {asked.memlock_gib:g} GiB or unlimited",
        f"RDMA locks the buffers that it registers ({SMOKE})"
        if node.has_rdma
        else "needed only for RDMA; no RDMA port is active here",
        "`ulimit -l unlimited`; in a container --ulimit memlock=-1; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
    )
    yield judge_value(
        shared is not None and shared >= asked.shm_gib * GIB,
        "fail" if node.has_devices else "warn",
        "host.shm",
        "no /dev/shm" if shared is None else table.format_size(shared),
        f">= {asked.shm_gib:g} GiB",
        f"NCCL, RCCL and data loaders exchange data there ({SMOKE})"
        if node.has_devices
        else "data loaders exchange data there; a small job needs less",
        "in a container --shm-size or --ipc=host; else `mount -o remount,size=16G /dev/shm`",
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
    yield judge_value(
        is_good,
        "warn",
        "host.governor",
        counted if is_good or not named else named,
        "performance on every CPU",
        f"a slow CPU delays launches and data loading ({SAFE})",
        "`cpupower frequency-set -g performance`",
    )


def check_kernel_settings(node: PreflightNode) -> Iterator[CheckFinding]:
    """NUMA balancing and transparent huge pages."""
    balancing = node.tree.read_text("proc/sys/kernel/numa_balancing")
    if balancing is None:
        yield report_info("host.numa_balancing", "the kernel has none")
    else:
        yield judge_value(
            balancing == "0",
            "warn" if node.has_devices else "info",
            "host.numa_balancing",
            balancing,
            "0",
            f"automatic page migration disturbs device transfers ({SAFE})",
            "`sysctl -w kernel.numa_balancing=0`",
        )
    pages = node.tree.read_text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", pages or "")
    if chosen is None:
        yield report_info("host.hugepages", "the kernel has no transparent huge pages")
        return
    yield judge_value(
        chosen[1] != "never",
        "warn",
        "host.hugepages",
        chosen[1],
        "always or madvise",
        f"large host buffers otherwise need many page-table entries ({SAFE})",
        "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
    )


def check_boot_arguments(node: PreflightNode) -> Iterator[CheckFinding]:
    """Boot arguments of the kernel that AMD devices need."""
    if not any(device.vendor == "amd" for device in node.facts.devices):
        return
    line = node.facts.software.boot_arguments
    expected = "pci=realloc=off and one of iommu=pt, amd_iommu=on, intel_iommu=on"
    if line is None:
        yield report_info("host.boot_arguments", "not readable: /proc/cmdline", f"{expected} ({SAFE})")
        return
    words = set(line.split())
    missing = [] if "pci=realloc=off" in words else ["pci=realloc=off"]
    if not words & {"iommu=pt", "amd_iommu=on", "intel_iommu=on"}:
        missing.append("iommu=pt")
    yield judge_value(
        not missing,
        "warn",
        "host.boot_arguments",
        f"without {format_names(missing)}" if missing else "as expected",
        expected,
        f"peer-to-peer transfers pass the IOMMU ({SAFE})",
        "add them to the kernel command line and reboot",
    )


def check_access_control(node: PreflightNode) -> Iterator[CheckFinding]:
    """PCIe bridges that redirect peer-to-peer traffic to the root complex (ACS)."""
    if not node.has_devices or not node.tree.is_live:
        return
    reason = f"ACS routes peer-to-peer traffic through the root complex ({SAFE})"
    if not node.is_root:
        yield report_info("host.pcie_acs", "not read: needs root (lspci)", reason)
        return
    answer = node.run_program(["lspci", "-vvv"])
    if answer.state != "ok":
        yield report_info("host.pcie_acs", f"not read: {answer.problem}", reason)
        return
    yield judge_acs(find_redirecting_bridges(answer.text), reason)


def judge_acs(bridges: list[str], reason: str) -> CheckFinding:
    """Finding for the bridges that redirect peer-to-peer traffic."""
    text = f"on {len(bridges)} bridges: {format_names(bridges, 4)}" if bridges else "off on every bridge"
    advice = "disable ACS in the firmware, or with setpci on these bridges"
    return judge_value(not bridges, "warn", "host.pcie_acs", text, "off on every bridge", reason, advice)


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
    reason = "logs and certificates need synchronized clocks"
    if daemons:
        yield report_ok("host.clock", format_names(daemons), "a clock daemon", reason)
    elif node.facts.container:
        yield report_info(
            "host.clock", f"no daemon visible inside {node.facts.container}", "the host's daemon may be hidden"
        )
    else:
        yield judge_value(
            False,
            "warn" if node.layout.nnodes > 1 else "info",
            "host.clock",
            "no clock daemon runs",
            "a clock daemon",
            reason,
            "start chronyd, or systemd-timesyncd",
        )


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
        yield report_info(
            "host.drives", f"{len(names)} NVMe drives, health not read", "reading drive health needs root"
        )
        return
    for name in names:
        answer = node.run_program(["nvme", "smart-log", f"/dev/{name}", "-o", "json"])
        if answer.state != "ok":
            yield report_info("host.drives", f"health not read: {answer.problem}", subject=name)
        else:
            yield judge_drive(name, answer.text, node.limits.nvme_error_entries)


def judge_drive(name: str, smart_log: str, most_entries: int) -> CheckFinding:
    """Findings for the log of a drive."""
    expected = f"no critical warning, no media errors, <= {most_entries} failed entries"
    try:
        log = msgspec.json.decode(smart_log, type=SmartLog, strict=False)
    except msgspec.MsgspecError:
        return report_unknown(
            "host.drives",
            "nvme returned no readable log",
            expected,
            f"({SAFE})",
            f"try `nvme smart-log /dev/{name}`",
            subject=name,
        )
    is_broken = bool(log.critical_warning or log.media_errors)
    status: Status = "fail" if is_broken else "warn"
    text = (
        f"critical warning {log.critical_warning}, {log.media_errors} media errors, "
        f"{log.num_err_log_entries} failed entries"
    )
    is_good = not is_broken and log.num_err_log_entries <= most_entries
    advice = "move the data and replace the drive"
    return judge_value(
        is_good, status, "host.drives", text, expected, f"a failing drive stops a job ({SAFE})", advice, subject=name
    )


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
