"""Error counters of memory, PCIe, links and device blocks: since boot, and under load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from primus.machine import pci
from primus.machine.facts import Device
from primus.preflight.checks.ports import list_counted_ports
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode, format_names
from primus.preflight.findings.rules import About, judge, report_info

Severity = Literal["fatal", "recovered", "flap"]
"""Severity: data or a transaction was lost, the hardware corrected the error, or a link went down."""

EDAC = "sys/devices/system/edac/mc"
AER_FILES: dict[str, Severity] = {
    "aer_dev_fatal": "fatal",
    "aer_dev_nonfatal": "fatal",
    "aer_dev_correctable": "recovered",
}
RAS_FILE = re.compile(r"(\w+)_err_count$")
MEMORY_BLOCK = "umc"
"""This block counts the errors of device memory, which gpu.ecc_correctable and gpu.ecc_uncorrectable report."""
NVLINK_LINE = re.compile(r"Link (\d+): ([\w ]+?)(?: Errors?| Error Counter)?: (\d{1,20})\s*$")
NVLINK_LOST = "recovery"
"""A recovery retrains the link; replays and CRC errors are corrected by retransmission (NVML API,
nvmlNvLinkErrorCounter)."""
NVLINK_TRAFFIC = re.compile(r"(tx|rx) (packets|bytes)")
"""Counters of NVLink 5 that do not count errors."""
FABRIC_READY = ("completed", "n/a", "not supported")
"""Fabric states in which a device can use NVLink switches, or has none (NVML API, nvmlGpuFabricState)."""
FABRIC_HEALTH = {"Summary": "Unhealthy", "Bandwidth": "Degraded"}
"""Values in the section ``Health`` that indicate a fault although the fabric is set up (NVML API, fabric
definitions)."""
NVLINK = ("nvidia-smi", "nvlink", "--errorcounters")
FABRIC = ("nvidia-smi", "-q")


class ErrorCounter(NamedTuple):
    """Location of an error counter."""

    check: str
    subject: str
    counter: str
    severity: Severity


Counts = dict[ErrorCounter, int]


def read_counts(node: PreflightNode) -> Counts:
    """All counters that the kernel and the tools expose without additional privileges."""
    found = dict(_read_host_memory_counts(node))
    found |= dict(_read_pcie_counts(node))
    for device in node.facts.devices:
        found |= dict(_read_block_counts(node, device))
    found |= dict(_read_nvlink_counts(node))
    found |= dict(_read_interface_counts(node))
    return found


def find_grown_counts(before: Counts, after: Counts) -> Iterator[CheckFinding]:
    """Errors counted under load, by check and subject; a counter that decreased was reset and starts at 0."""
    growth: dict[tuple[str, str], dict[ErrorCounter, int]] = {}
    for place, count in after.items():
        # Counters restart at 0 when a device is reset or a driver is reloaded under load: the new value is then the
        # growth.
        new = count - before.get(place, 0)
        new = count if new < 0 else new
        growth.setdefault((place.check, place.subject), {}).update({place: new} if new else {})
    for (check, subject), counts in growth.items():
        if not counts:
            continue
        is_lost = any(place.severity != "recovered" for place in counts)
        rising = format_names(f"{place.counter} +{count}" for place, count in counts.items())
        words = {"status": "fail" if is_lost else "warn", "value": sum(counts.values())}
        yield judge(f"{check}/load", False, rising, About(subject), **words)


def _read_host_memory_counts(node: PreflightNode) -> Iterator[tuple[ErrorCounter, int]]:
    for controller in node.tree.list_names(EDAC):
        if not re.fullmatch(r"mc\d+", controller):
            continue
        for file, severity in (("ue_count", "fatal"), ("ce_count", "recovered")):
            count = node.tree.read_number(f"{EDAC}/{controller}/{file}")
            if count is not None:
                yield ErrorCounter("host.memory_errors", controller, file.removesuffix("_count"), severity), count  # type: ignore[arg-type]


def _read_pcie_counts(node: PreflightNode) -> Iterator[tuple[ErrorCounter, int]]:
    """Counters of devices that carry a job's data, and of the bridges above them."""
    own = [(f"GPU {gpu.index}", gpu.bdf, gpu.pci_path) for gpu in node.facts.devices]
    own += [(device.name, device.bdf, device.pci_path) for device in node.facts.rdma]
    named = {bdf: name for name, bdf, _ in own if bdf}
    # Both ends of a link count its errors, so the bridges above a device are read as well.
    above = {
        part: f"bridge {part} above {name}" for name, _, path in own for part in path if pci.normalize_address(part)
    }
    for bdf, name in {**above, **named}.items():
        for file, severity in AER_FILES.items():
            text = node.tree.read_text(f"{pci.DEVICES}/{bdf}/{file}")
            total = re.search(r"^TOTAL_ERR_\w+ (\d{1,18})$", text or "", re.MULTILINE)
            if total:
                yield ErrorCounter("host.pcie_errors", name, file.removeprefix("aer_dev_"), severity), int(total[1])


def _read_block_counts(node: PreflightNode, device: Device) -> Iterator[tuple[ErrorCounter, int]]:
    """Errors of the blocks of an AMD device other than its memory: ``gfx``, ``sdma``, ``xgmi_wafl``, ..."""
    folder = f"{pci.DEVICES}/{device.bdf}/ras"
    for file in node.tree.list_names(folder) if device.bdf else []:
        match = RAS_FILE.fullmatch(file)
        if match is None or match[1] == MEMORY_BLOCK:
            continue
        counts = dict(re.findall(r"^(ue|ce): (\d{1,18})$", node.tree.read_text(f"{folder}/{file}") or "", re.MULTILINE))
        for kind, severity in (("ue", "fatal"), ("ce", "recovered")):
            if kind in counts:
                place = ErrorCounter("gpu.ras_errors", f"GPU {device.index}", f"{match[1]} {kind}", severity)  # type: ignore[arg-type]
                yield place, int(counts[kind])


def _read_nvlink_counts(node: PreflightNode) -> Iterator[tuple[ErrorCounter, int]]:
    if not node.tree.is_live or not any(device.vendor == "nvidia" for device in node.facts.devices):
        return
    yield from parse_nvlink_counts(node.run_program(NVLINK).text).items()


def parse_nvlink_counts(said: str) -> Counts:
    """The counters in the output of ``nvidia-smi nvlink -e``, summed over the links of a GPU by kind."""
    found: Counts = {}
    subject = ""
    for line in said.splitlines():
        # State of the parser: the lines of the links follow the line of their GPU.
        gpu = re.match(r"GPU (\d+):", line.strip())
        if gpu:
            subject = f"GPU {gpu[1]}"
            continue
        match = NVLINK_LINE.search(line)
        if match and subject:
            kind = match[2].lower()
            if NVLINK_TRAFFIC.fullmatch(kind):
                continue
            severity: Severity = "fatal" if NVLINK_LOST in kind else "recovered"
            place = ErrorCounter("gpu.nvlink_errors", subject, f"link {match[1]} {kind}", severity)
            found[place] = found.get(place, 0) + int(match[3])
    return found


def _read_interface_counts(node: PreflightNode) -> Iterator[tuple[ErrorCounter, int]]:
    """Carrier losses of the network interfaces of the RDMA ports (kernel ABI sysfs-class-net)."""
    for device, _ in list_counted_ports(node)[0]:
        if device.interface:
            count = node.tree.read_number(f"sys/class/net/{device.interface}/carrier_down_count")
            if count is not None:
                yield ErrorCounter("network.link_flaps", device.interface, "carrier_down", "flap"), count


def check_host_memory(node: PreflightNode) -> Iterator[CheckFinding]:
    """Errors of the host memory since boot."""
    counts = dict(_read_host_memory_counts(node))
    if not counts:
        reason = "the kernel has no EDAC driver for this memory controller"
        yield report_info("host.memory_errors", "not counted", reason)
    for subject, sums in _sum_by_subject(counts).items():
        yield _report_since_boot(node, "host.memory_errors", subject, sums, node.limits.host_ecc_correctable)


def check_pcie(node: PreflightNode) -> Iterator[CheckFinding]:
    """PCIe errors on the path to devices and NICs since boot."""
    sums = _sum_by_subject(dict(_read_pcie_counts(node)))
    limit = node.limits.pcie_correctable
    bad = {subject: each for subject, each in sums.items() if each.lost or each.corrected > limit}
    for subject, each in bad.items():
        yield _report_since_boot(node, "host.pcie_errors", subject, each, limit)
    if sums and not bad:
        shown = f"{len(sums)} functions, {sum(each.corrected for each in sums.values())} correctable errors"
        yield node.judge("host.pcie_errors/none", True, shown)


def check_blocks(node: PreflightNode) -> Iterator[CheckFinding]:
    """Errors of the blocks of AMD devices since the driver was loaded."""
    for device in node.facts.devices:
        counts = dict(_read_block_counts(node, device))
        if not counts:
            continue
        lost = [f"{place.counter} {count}" for place, count in counts.items() if place.severity == "fatal" and count]
        corrected = [f"{place.counter} {count}" for place, count in counts.items() if count]
        is_many = any(count > node.limits.ecc_correctable for count in counts.values())
        shown = format_names(lost or corrected) or f"none in {len(counts) // 2} blocks"
        words = {"status": "fail" if lost else "warn", "value": sum(counts.values())}
        yield node.judge("gpu.ras_errors", not lost and not is_many, shown, About(f"GPU {device.index}"), **words)


def check_nvlink(node: PreflightNode) -> Iterator[CheckFinding]:
    """NVLink errors since the driver was loaded."""
    yield from judge_nvlink_counts(dict(_read_nvlink_counts(node)))


def judge_nvlink_counts(counts: Mapping[ErrorCounter, int]) -> Iterator[CheckFinding]:
    """Finding for the NVLink counters: a recovery is a fault, retransmissions are reported only."""
    for subject, sums in _sum_by_subject(counts).items():
        bad = [f"{place.counter} {count}" for place, count in counts.items() if place.subject == subject and count]
        shown, value = format_names(bad) or "none", sums.lost + sums.corrected
        yield judge("gpu.nvlink_errors", not sums.lost, shown, About(subject), value=value)


def check_fabric(node: PreflightNode) -> Iterator[CheckFinding]:
    """Whether NVIDIA's fabric manager has configured the NVLink switches for each device."""
    if node.tree.is_live and any(device.vendor == "nvidia" for device in node.facts.devices):
        yield from judge_fabric(node.run_program(FABRIC).text)


def judge_fabric(said: str) -> Iterator[CheckFinding]:
    """Findings for the sections ``Fabric`` in the output of ``nvidia-smi -q``; drivers before R525 print none."""
    for number, gpu in enumerate(re.split(r"^GPU [0-9A-Fa-f:.]+$", said, flags=re.MULTILINE)[1:]):
        section = re.search(r"^    Fabric\n((?: {8}.*\n?)+)", gpu, re.MULTILINE)
        values = dict(re.findall(r"^ +([^:\n]+?) *: (.*?) *$", section[1] if section else "", re.MULTILINE))
        state, status = values.get("State", "N/A"), values.get("Status", "N/A")
        is_ready = state.lower() in FABRIC_READY and status.lower() in ("success", "n/a", "not supported")
        unhealthy = [f"{name} {values[name]}" for name, bad in FABRIC_HEALTH.items() if values.get(name) == bad]
        shown = [state, *([status] if status != "N/A" else []), *unhealthy]
        if section:
            yield judge("gpu.fabric", is_ready and not unhealthy, ", ".join(shown), About(f"GPU {number}"))


class ErrorSums(NamedTuple):
    """Errors of one subject."""

    lost: int
    corrected: int


def _sum_by_subject(counts: Mapping[ErrorCounter, int]) -> dict[str, ErrorSums]:
    """Uncorrected and corrected errors by subject."""
    found: dict[str, ErrorSums] = {}
    for place, count in counts.items():
        lost, corrected = found.get(place.subject, ErrorSums(0, 0))
        is_corrected = place.severity == "recovered"
        found[place.subject] = ErrorSums(lost + count * (not is_corrected), corrected + count * is_corrected)
    return found


def _report_since_boot(node: PreflightNode, check: str, subject: str, sums: ErrorSums, limit: int) -> CheckFinding:
    lost, corrected = sums
    words = {"lost": lost, "corrected": corrected, "value": lost + corrected} | ({} if lost else {"status": "warn"})
    return node.judge(check, not lost and corrected <= limit, "", About(subject), **words)


HOST_CHECKS = (check_host_memory, check_pcie)
GPU_CHECKS = (check_blocks, check_nvlink, check_fabric)
