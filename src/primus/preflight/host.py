"""Checks of the host: processors, memory, limits, settings of the kernel, clock and drives."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from primus.preflight.finding import Finding, Status
from primus.preflight.node import Node, info, judged, listed, ok, ranges, unknown
from primus.report import table

GIB = 1 << 30
SAFE = "AMD-AGI/Primus-SaFE node monitors"
SMOKE = "AMD-AGI/Primus node_smoke"


def system(node: Node) -> Iterator[Finding]:
    """What this node is."""
    facts, software, cpu = node.facts, node.facts.software, node.facts.cpu
    around = ", ".join(filter(None, [facts.container and f"in {facts.container}", facts.scheduler]))
    yield info("host.system", f"{software.os or 'unknown OS'}, kernel {software.kernel or '-'}")
    yield info("host.surroundings", around or "no container, no scheduler")
    smt = cpu.threads > cpu.cores if cpu.threads and cpu.cores else None
    counts = [
        f"{cpu.sockets or '-'} sockets",
        f"{cpu.cores or '-'} cores",
        f"{cpu.threads or '-'} threads ({cpu.usable or '-'} usable)",
        f"SMT {'unknown' if smt is None else 'on' if smt else 'off'}",
        f"{cpu.numa_nodes or '-'} NUMA nodes",
    ]
    yield info("host.cpu", f"{cpu.model}, {', '.join(counts)}")


def memory(node: Node) -> Iterator[Finding]:
    """Free memory, and swap."""
    held, least = node.facts.memory, node.limits.memory_available_percent
    reason = "a job that runs out of host memory is killed (AMD-AGI/Primus preflight)"
    if not held.total_bytes or held.available_bytes is None:
        yield unknown(
            "host.memory", "/proc/meminfo gives no total", f">= {least:g} %", reason, "mount /proc in the container"
        )
        return
    percent = 100 * held.available_bytes / held.total_bytes
    text = f"{table.size(held.available_bytes)} of {table.size(held.total_bytes)} available ({percent:.0f} %)"
    if held.limit_bytes is not None:
        text += f", {table.size(held.limit_bytes)} allowed by the control group"
    yield judged(
        percent >= least,
        "warn",
        "host.memory",
        text,
        f">= {least:g} %",
        reason,
        "end what else runs here: `ps aux --sort=-rss`",
        value=round(percent, 1),
    )
    yield info("host.swap", "none" if held.swap_bytes == 0 else table.size(held.swap_bytes or 0))


def limits(node: Node) -> Iterator[Finding]:
    """Locked memory, shared memory and open files of this process."""
    held, asked = node.facts.limits, node.limits
    locked, shared = held.memlock_bytes, held.shm_bytes
    yield judged(
        locked is None or locked >= asked.memlock_gib * GIB,
        "fail" if node.has_rdma else "info",
        "host.memlock",
        "unlimited" if locked is None else table.size(locked),
        f">= {asked.memlock_gib:g} GiB or unlimited",
        f"RDMA locks the buffers that it registers ({SMOKE})"
        if node.has_rdma
        else "it counts once RDMA registers buffers; no RDMA port is active here",
        "`ulimit -l unlimited`; in a container --ulimit memlock=-1; under Slurm PropagateResourceLimitsExcept=MEMLOCK",
    )
    yield judged(
        shared is not None and shared >= asked.shm_gib * GIB,
        "fail" if node.has_devices else "warn",
        "host.shm",
        "no /dev/shm" if shared is None else table.size(shared),
        f">= {asked.shm_gib:g} GiB",
        f"NCCL, RCCL and data loaders exchange data there ({SMOKE})"
        if node.has_devices
        else "data loaders exchange data there; less does for a small job",
        "in a container --shm-size or --ipc=host; else `mount -o remount,size=16G /dev/shm`",
    )
    yield info("host.nofile", "unlimited" if held.nofile is None else str(held.nofile))


def governors(node: Node) -> Iterator[Finding]:
    """The frequency governor of every processor."""
    if not node.facts.cpu.governors:
        yield info("host.governor", "the kernel offers none", "virtual machines often have none")
        return
    others: dict[str, list[int]] = {}
    folder = "sys/devices/system/cpu"
    for name in node.tree.names(folder):
        match = re.fullmatch(r"cpu(\d+)", name)
        governor = node.tree.text(f"{folder}/{name}/cpufreq/scaling_governor") if match else None
        if match and governor and governor != "performance":
            others.setdefault(governor, []).append(int(match[1]))
    counted = ", ".join(f"{count} {name}" for name, count in sorted(node.facts.cpu.governors.items()))
    named = "; ".join(f"{name}: CPU {ranges(cpus)}" for name, cpus in sorted(others.items()))
    is_good = set(node.facts.cpu.governors) == {"performance"}
    yield judged(
        is_good,
        "warn",
        "host.governor",
        counted if is_good or not named else named,
        "performance on every CPU",
        f"a slow processor holds up launches and data loading ({SAFE})",
        "`cpupower frequency-set -g performance`",
    )


def kernel_settings(node: Node) -> Iterator[Finding]:
    """NUMA balancing and transparent huge pages."""
    balancing = node.tree.text("proc/sys/kernel/numa_balancing")
    if balancing is None:
        yield info("host.numa_balancing", "the kernel has none")
    else:
        yield judged(
            balancing == "0",
            "warn" if node.has_devices else "info",
            "host.numa_balancing",
            balancing,
            "0",
            f"the kernel's moving of pages disturbs device transfers ({SAFE})",
            "`sysctl -w kernel.numa_balancing=0`",
        )
    pages = node.tree.text("sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", pages or "")
    if chosen is None:
        yield info("host.hugepages", "the kernel has no transparent huge pages")
        return
    yield judged(
        chosen[1] != "never",
        "warn",
        "host.hugepages",
        chosen[1],
        "always or madvise",
        f"large host buffers cost many page-table entries otherwise ({SAFE})",
        "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
    )


def boot_arguments(node: Node) -> Iterator[Finding]:
    """What the kernel was booted with, where AMD devices ask for something."""
    if not any(device.vendor == "amd" for device in node.facts.devices):
        return
    line = node.facts.software.boot_arguments
    expected = "pci=realloc=off and one of iommu=pt, amd_iommu=on, intel_iommu=on"
    if line is None:
        yield info("host.boot_arguments", "not readable: /proc/cmdline", f"{expected} ({SAFE})")
        return
    words = set(line.split())
    missing = [] if "pci=realloc=off" in words else ["pci=realloc=off"]
    if not words & {"iommu=pt", "amd_iommu=on", "intel_iommu=on"}:
        missing.append("iommu=pt")
    yield judged(
        not missing,
        "warn",
        "host.boot_arguments",
        f"without {listed(missing)}" if missing else "as expected",
        expected,
        f"devices reach each other's memory through the IOMMU ({SAFE})",
        "add them to the kernel's command line and boot again",
    )


def access_control(node: Node) -> Iterator[Finding]:
    """PCIe bridges that redirect traffic between devices to the root (ACS)."""
    if not node.has_devices or not node.tree.is_live:
        return
    reason = f"ACS sends traffic between devices through the root complex ({SAFE})"
    if not node.is_root:
        yield info("host.pcie_acs", "not read: lspci shows it to root only", reason)
        return
    answer = node.call(["lspci", "-vvv"])
    if answer.state != "ok":
        yield info("host.pcie_acs", f"not read: {answer.problem}", reason)
        return
    yield acs_finding(redirecting_bridges(answer.text), reason)


def acs_finding(bridges: list[str], reason: str) -> Finding:
    """What bridges that redirect traffic between devices mean."""
    text = f"on {len(bridges)} bridges: {listed(bridges, 4)}" if bridges else "off on every bridge"
    advice = "switch ACS off in the firmware, or with setpci on these bridges"
    return judged(not bridges, "warn", "host.pcie_acs", text, "off on every bridge", reason, advice)


def redirecting_bridges(lspci: str) -> list[str]:
    """Addresses of the devices in the text of ``lspci -vvv`` whose ACS source validation is on."""
    blocks = re.split(r"\n(?=\S)", lspci)
    return [block.split(maxsplit=1)[0] for block in blocks if re.search(r"ACSCtl:\s*SrcValid\+", block)]


CLOCK_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys", "openntpd", "ntpsec")
"""Names in /proc/<pid>/comm, which has 15 characters, of programs that set the clock."""


def clock(node: Node) -> Iterator[Finding]:
    """Whether something keeps the clock right."""
    running = {node.tree.text(f"proc/{pid}/comm") or "" for pid in node.tree.names("proc") if pid.isdecimal()}
    daemons = sorted(running & set(CLOCK_DAEMONS))
    reason = "logs and certificates of several nodes need one time"
    if daemons:
        yield ok("host.clock", listed(daemons), "a clock daemon", reason)
    elif node.facts.container:
        yield info("host.clock", f"no daemon seen from inside {node.facts.container}", "the host's own may be hidden")
    else:
        yield judged(
            False,
            "warn" if node.layout.nnodes > 1 else "info",
            "host.clock",
            "no clock daemon runs",
            "a clock daemon",
            reason,
            "start chronyd, or systemd-timesyncd",
        )


class SmartLog(msgspec.Struct, frozen=True):
    """What is read of ``nvme smart-log -o json``."""

    critical_warning: int = 0
    media_errors: int = 0
    num_err_log_entries: int = 0


def drives(node: Node) -> Iterator[Finding]:
    """The health of each NVMe drive, as it says itself."""
    names = [name for name in node.tree.names("sys/class/nvme") if re.fullmatch(r"nvme\d+", name)]
    if not names or not node.tree.is_live:
        return
    if not node.is_root:
        yield info("host.drives", f"{len(names)} NVMe drives, health not read", "drives tell it to root only")
        return
    for name in names:
        answer = node.call(["nvme", "smart-log", f"/dev/{name}", "-o", "json"])
        if answer.state != "ok":
            yield info("host.drives", f"health not read: {answer.problem}", subject=name)
        else:
            yield drive_finding(name, answer.text, node.limits.nvme_error_entries)


def drive_finding(name: str, smart_log: str, most_entries: int) -> Finding:
    """What a drive's log says of it."""
    expected = f"no critical warning, no media errors, <= {most_entries} failed entries"
    try:
        log = msgspec.json.decode(smart_log, type=SmartLog, strict=False)
    except msgspec.MsgspecError:
        return unknown(
            "host.drives",
            "nvme gave no log that can be read",
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
    advice = "move data away and have the drive replaced"
    return judged(
        is_good, status, "host.drives", text, expected, f"a failing drive stops a job ({SAFE})", advice, subject=name
    )


CHECKS = (system, memory, limits, governors, kernel_settings, boot_arguments, access_control, clock, drives)
