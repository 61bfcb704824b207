"""Checks of the devices without load: identity and connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from primus.machine import devices as visible
from primus.machine import topology as relations
from primus.machine.accelerators import find_access_problems
from primus.machine.facts import Device, Link
from primus.machine.profile import Profile
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import (
    PreflightNode,
    format_names,
    format_pcie,
    judge_value,
    report_info,
    report_unknown,
)
from primus.report import table

SAFE = "AMD-AGI/Primus-SaFE node monitors"
MODE_PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
"""Partitions of a GPU by its mode; in CPX mode every accelerator die is one (AMD, MI300X partitioning guide)."""
MEMORY_TOLERANCE = 0.05
"""Share of the memory that firmware and error correction may reserve."""


def check_count(node: PreflightNode) -> Iterator[CheckFinding]:
    """The number of devices is as expected, and processes can see all of them."""
    facts, asked = node.facts, node.expected.gpus
    there = len(facts.partitions)
    if not there:
        yield _report_no_devices(len(facts.devices), asked)
        return
    text = _describe_devices(node)
    if asked is None:
        yield _find_usual_count(node, text)
    else:
        yield judge_value(
            there == asked,
            "fail",
            "gpu.count",
            text,
            str(asked),
            "--expected-gpus",
            "see the kernel log for a device that fell off the bus; reboot the node",
            value=there,
        )
    seen = visible.count_devices(node.environ, node.tree.root)
    yield judge_value(
        seen > 0,
        "fail",
        "gpu.visible",
        f"{seen} of {there}",
        "at least one",
        "processes see only the devices in *_VISIBLE_DEVICES",
        "unset ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES",
        value=seen,
    )


def check_access(node: PreflightNode) -> Iterator[CheckFinding]:
    """This user may open the files of the devices."""
    if not node.facts.partitions:
        return
    problems = list(find_access_problems(node.facts, node.tree.root))
    yield judge_value(
        not problems,
        "fail",
        "gpu.access",
        "; ".join(problems) or "the files in /dev can be opened",
        "files in /dev that this user may open",
        "no process of this user can use the GPUs",
        "see docs/install.md, Troubleshooting",
    )


def _find_usual_count(node: PreflightNode, text: str) -> CheckFinding:
    """The number of GPUs fits the server sizes of this model; a hypervisor may pass through only some of them."""
    gpus = len(node.facts.devices)
    sizes = sorted({size for _, profile in node.list_profiles for size in profile.server_sizes})
    is_whole = not sizes or gpus == 1 or any(gpus % size == 0 for size in sizes)
    is_share = any(size % gpus == 0 for size in sizes)
    return judge_value(
        is_whole,
        "warn" if is_share else "fail",
        "gpu.count",
        text,
        f"servers of {' or '.join(map(str, sizes))}, or --expected-gpus" if sizes else "at least one",
        "a GPU may have fallen off the bus",
        "see the kernel log; set --expected-gpus if fewer are correct",
        value=len(node.facts.partitions),
    )


def check_undriven(node: PreflightNode) -> Iterator[CheckFinding]:
    """Every GPU on the bus can be used. A job or a container sees all GPUs of its host, and may be allocated only
    some: those count unless the bus shows that they have failed."""
    without = [device for device in node.facts.devices if device.failure or not device.partitions]
    failed = [device for device in without if device.failure]
    if not without or not (failed or node.facts.partitions):
        return
    is_shared = bool(node.facts.container) or _is_given(node)
    yield judge_value(
        False,
        "fail" if failed or not is_shared else "warn",
        "gpu.driver",
        f"no driver shows {format_names(map(_describe_failure, failed or without))}",
        "the driver shows every GPU on the bus",
        "the driver gave up on a GPU, or it is not assigned to this job or container",
        "see the kernel log for these addresses; reboot the node",
        value=len(failed or without),
    )


def _describe_failure(device: Device) -> str:
    return f"{_name_device(device)} ({device.bdf}{f': {device.failure}' if device.failure else ''})"


def _is_given(node: PreflightNode) -> bool:
    """Whether the scheduler has allocated exactly the visible devices to this job."""
    return node.environ.get("SLURM_GPUS_ON_NODE") == str(len(node.facts.partitions))


def _report_no_devices(gpus: int, asked: int | None) -> CheckFinding:
    if not asked and not gpus:
        return report_info("gpu.count", "none: CPU only", "a node without GPUs is fit for CPU work")
    return judge_value(
        False,
        "fail",
        "gpu.count",
        f"0, of {gpus} GPUs on the bus" if gpus else "0",
        str(asked or "at least one"),
        "--expected-gpus" if asked else "no process can use these GPUs",
        "load the driver (lsmod); pass /dev/kfd and /dev/dri, or --gpus all, to the container",
        value=0,
    )


def _describe_devices(node: PreflightNode) -> str:
    gpus = Counter(device.model or device.name or "unknown model" for device in node.facts.devices)
    text = ", ".join(f"{number} x {model}" for model, number in sorted(gpus.items()))
    partitions = len(node.facts.partitions)
    return text if partitions == len(node.facts.devices) else f"{text}, {partitions} devices"


def check_model(node: PreflightNode) -> Iterator[CheckFinding]:
    """All devices of the node are of one known model."""
    if not node.has_devices:
        return
    models = sorted({device.model or device.name or "unknown" for device in node.facts.devices})
    yield judge_value(
        len(models) == 1,
        "fail",
        "gpu.model",
        format_names(models),
        "one model",
        "the slowest device sets the pace of the job",
        "start processes on devices of one model: *_VISIBLE_DEVICES",
    )
    for device in node.facts.devices:
        if device.model is None:
            name = f"{device.name or 'no name'} (device id {device.device_id:#x})" if device.device_id else device.name
            yield report_unknown(
                "gpu.profile",
                f"no profile describes {name}",
                "a known model",
                "floors and settings come from the profile",
                "--preflight-ignore gpu.profile, or add a profile of this model",
                subject=_name_device(device),
            )


def check_memory(node: PreflightNode) -> Iterator[CheckFinding]:
    """The devices have the memory of their model."""
    for device, profile in node.list_profiles:
        least = (profile.memory_bytes or 0) * (1 - MEMORY_TOLERANCE)
        if not profile.memory_bytes:
            continue
        expected = f"about {table.format_size(profile.memory_bytes)}"
        if device.memory_bytes is None:
            yield report_info("gpu.memory", "not reported by the driver", expected, subject=_name_device(device))
            continue
        yield judge_value(
            device.memory_bytes >= least,
            "fail",
            "gpu.memory",
            table.format_size(device.memory_bytes),
            expected,
            f"what {profile.model} has, by its profile",
            "reboot the node; pages may be retired",
            subject=_name_device(device),
            value=device.memory_bytes,
        )


def check_partitions(node: PreflightNode) -> Iterator[CheckFinding]:
    """All GPUs with a driver use the same partition mode, and no partition is missing."""
    devices = [device for device in node.facts.devices if device.partitions]
    if not devices:
        return
    modes = Counter(f"{device.partition_mode or '-'}/{device.memory_mode or '-'}" for device in devices)
    if any(device.partition_mode for device in devices):
        yield judge_value(
            len(modes) == 1,
            "fail",
            "gpu.partition_mode",
            format_names(sorted(modes)),
            "the same on every GPU",
            "ranks would get different devices",
            "`amd-smi set --compute-partition SPX`, on all GPUs",
        )
    usual = Counter(len(device.partitions) for device in devices).most_common(1)[0][0]
    profiles = {device.index: profile for device, profile in node.list_profiles}
    for device in devices:
        wanted = _count_wanted_partitions(device, profiles.get(device.index), usual)
        there = len(device.partitions)
        if there == wanted == 1:
            continue
        yield judge_value(
            there >= wanted,
            "fail",
            "gpu.partitions",
            f"{there} of {wanted}",
            str(wanted),
            f"{device.partition_mode or 'as the other GPUs'}",
            "set the partition mode again; reboot the node",
            subject=_name_device(device),
            value=there,
        )


def _count_wanted_partitions(device: Device, profile: Profile | None, usual: int) -> int:
    mode = (device.partition_mode or "").upper()
    if profile and mode == "CPX":
        return profile.xcds
    if profile and mode in MODE_PARTITIONS:
        return MODE_PARTITIONS[mode] * profile.devices_per_gpu
    return max(usual, profile.devices_per_gpu if profile else 1)


def check_pcie_link(node: PreflightNode) -> Iterator[CheckFinding]:
    """The slowest PCIe link between the host and each GPU has the speed and width that its ports support."""
    known = {device.index: profile for device, profile in node.list_profiles}
    for device in node.facts.devices:
        yield _judge_pcie_link(device, known.get(device.index))


def _judge_pcie_link(device: Device, profile: Profile | None) -> CheckFinding:
    link, subject = device.pcie, _name_device(device)
    reason = f"host copies use this link ({SAFE})"
    if link.speed_gts is None or link.width is None:
        return report_info("gpu.pcie_link", "not reported by the kernel", reason, subject=subject)
    speed, width = profile.pcie_gts if profile else None, profile.pcie_width if profile else None
    allowed_speed, allowed_width = link.max_speed_gts or speed, link.max_width or width
    shown = format_pcie(link)
    if allowed_speed is None or allowed_width is None:
        return report_info("gpu.pcie_link", shown, reason, subject=subject)
    is_wide, is_fast = link.width >= allowed_width, link.speed_gts >= allowed_speed
    if not (is_wide and is_fast):
        saves_power = is_wide and device.vendor == "nvidia" and link.port is None
        return judge_value(
            False,
            "info" if saves_power else "fail",
            "gpu.pcie_link",
            shown,
            f"{allowed_speed:g} GT/s x{allowed_width}",
            "an idle NVIDIA GPU lowers its link speed to save power" if saves_power else reason,
            "reseat the GPU or its riser; `lspci -vv` shows the limiting port",
            subject=subject,
        )
    return judge_value(
        allowed_speed >= (speed or 0) and allowed_width >= (width or 0),
        "warn",
        "gpu.pcie_link",
        shown,
        f"{speed or allowed_speed:g} GT/s x{width or allowed_width}, as the GPU can",
        f"the slot supports less than the GPU; {reason}",
        "move the GPU to another slot, or check the firmware settings of this slot",
        subject=subject,
    )


def check_links(node: PreflightNode) -> Iterator[CheckFinding]:
    """The GPUs of a hive are linked as their model specifies."""
    gpus = [device for device, profile in node.list_profiles if (profile.hive_size or 1) > 1 and device.partitions]
    if len(gpus) < 2:
        return
    size = max(profile.hive_size or 1 for _, profile in node.list_profiles)
    kind = "NVLink" if gpus[0].vendor == "nvidia" else "xGMI"
    layout = relations.describe_link_layout(gpus[0])
    reason = f"collectives run over {kind}; a typical server of this model has hives of {size}"
    direct = relations.list_direct_links(node.facts)
    if not direct:
        has_hives = any(device.hive for device in gpus)
        yield _report_missing_links(kind, reason, is_optional=layout == "bridge" and not has_hives)
        return
    hives: dict[str, list[int]] = {}
    for device in gpus:
        hives.setdefault(device.hive or f"{kind} node", []).append(device.index)
    problem = _find_lacking_pairs(hives, direct) if layout == "mesh" else _find_lacking_gpus(node, hives)
    yield judge_value(
        not problem,
        "fail",
        "gpu.links",
        problem or (f"every pair by {kind}" if layout == "mesh" else f"every GPU linked alike by {kind}"),
        "every pair of a hive" if layout == "mesh" else "the same number of links for every GPU of a hive",
        reason,
        "reboot the node; a GPU or its bridge may be loose",
        value=len(direct),
    )
    yield from _check_link_widths(node, kind, reason)
    wanted = -(-len(gpus) // size)
    yield judge_value(
        len(hives) <= wanted or layout == "bridge",
        "fail",
        "gpu.hives",
        f"GPUs by hive: {format_names(map(len, hives.values()))}",
        f"{wanted} of up to {size}",
        reason,
        "reboot the node; the firmware builds hives",
        value=len(hives),
    )


def _report_missing_links(kind: str, reason: str, *, is_optional: bool) -> CheckFinding:
    """The finding for a node without any link between GPUs."""
    if is_optional:
        return report_info("gpu.links", f"no {kind} link: GPUs without a bridge", "a bridge is optional on this model")
    return report_unknown(
        "gpu.links",
        f"no {kind} link is reported",
        "every pair of a hive",
        reason,
        "`nvidia-smi topo -m` and `nvidia-smi nvlink -s`" if kind == "NVLink" else "`amd-smi topology`",
    )


def _check_link_widths(node: PreflightNode, kind: str, reason: str) -> Iterator[CheckFinding]:
    """No two GPUs have fewer links than others."""
    weak = relations.find_weak_links(node.facts)
    if weak:
        yield judge_value(
            False,
            "fail",
            "gpu.link_width",
            f"fewer {kind}s between {format_names(f'{first}-{second}' for first, second in weak)}",
            "as many links between every two",
            reason,
            "reboot the node; a link may be down",
            value=len(weak),
        )


def _find_lacking_pairs(hives: Mapping[str, Sequence[int]], direct: Sequence[Link]) -> str:
    """Pairs of GPUs of one hive without a direct link."""
    joined = {frozenset((link.first, link.second)) for link in direct}
    missing = [
        f"{first}-{second}"
        for hive in hives.values()
        for first, second in combinations(hive, 2)
        if frozenset((first, second)) not in joined
    ]
    return f"no link between {format_names(missing)}" if missing else ""


def _find_lacking_gpus(node: PreflightNode, hives: Mapping[str, Sequence[int]]) -> str:
    """GPUs with fewer links than the others of their hive, or without a path to some of them."""
    weak = relations.find_weakly_linked_gpus(node.facts)
    islands = relations.build_topology(node.facts).islands
    apart = [
        index
        for hive in hives.values()
        for index in hive
        if len(hive) > 1 and not any(index in island and set(hive) <= set(island) for island in islands)
    ]
    parts = [f"GPU {index} has {number} of {usual} links" for index, number, usual in weak]
    parts += [f"GPU {index} does not reach its whole hive" for index in apart]
    return format_names(parts, 4)


def check_affinity(node: PreflightNode) -> Iterator[CheckFinding]:
    """Each GPU has an RDMA device on its NUMA node."""
    if not node.has_rdma:
        return
    near = {nic.numa_node for nic in node.facts.rdma if any(port.is_active for port in nic.ports)}
    apart = [device for device in node.facts.devices if device.numa_node is not None and device.numa_node not in near]
    if node.has_devices:
        yield judge_value(
            not apart,
            "warn",
            "gpu.nic_affinity",
            f"no active NIC near {format_names(map(_name_device, apart))}"
            if apart
            else "an active NIC on the NUMA node of every GPU",
            "an active NIC on the NUMA node of every GPU",
            "otherwise transfers between nodes cross CPU sockets",
            "bring that NIC up, or move it to the other PCIe root",
        )


def check_readings(node: PreflightNode) -> Iterator[CheckFinding]:
    """Values that could not be read, or that differ between two sources."""
    for problem in node.facts.problems:
        if problem.where.startswith(("GPU", "/sys/class/kfd", "/sys/class/drm", "/proc/driver/nvidia")):
            yield judge_value(
                False,
                "warn",
                "gpu.reading",
                problem.problem,
                "readable, and equal in all sources",
                "decisions depend on it",
                "run as root, or query the device with the vendor's tool",
                subject=problem.where,
            )


def _name_device(device: Device) -> str:
    return f"GPU {device.index}"


CHECKS = (
    check_count,
    check_access,
    check_undriven,
    check_model,
    check_memory,
    check_partitions,
    check_pcie_link,
    check_links,
    check_affinity,
    check_readings,
)
