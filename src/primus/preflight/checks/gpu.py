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
from primus.preflight.findings.node import PreflightNode, format_names, format_pcie
from primus.preflight.findings.rules import About, report_info
from primus.report import table

MODE_PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
"""Partitions of a GPU by its mode; in CPX mode every accelerator die is one (AMD, MI300X partitioning guide)."""
MEMORY_TOLERANCE = 0.05
"""Share of the memory that firmware and error correction may reserve."""


def check_count(node: PreflightNode) -> Iterator[CheckFinding]:
    """The number of devices is as expected, and processes can see all of them."""
    facts, asked = node.facts, node.expected.gpus
    there = len(facts.partitions)
    if not there:
        yield _report_no_devices(node, asked)
        return
    if asked is None:
        yield _find_usual_count(node)
    else:
        yield node.judge("gpu.count/expected", there == asked, _describe_devices(node), wanted=asked, value=there)
    seen = visible.count_devices(node.environ, node.tree.root)
    yield node.judge("gpu.visible", seen > 0, f"{seen} of {there}", value=seen)


def check_access(node: PreflightNode) -> Iterator[CheckFinding]:
    """This user may open the files of the devices."""
    if node.facts.partitions:
        problems = list(find_access_problems(node.facts, node.tree.root))
        yield node.judge("gpu.access", not problems, "; ".join(problems) or "the files in /dev can be opened")


def _find_usual_count(node: PreflightNode) -> CheckFinding:
    """The number of GPUs fits the server sizes of this model; a hypervisor may pass through only some of them."""
    gpus = len(node.facts.devices)
    sizes = sorted({size for _, profile in node.list_profiles for size in profile.server_sizes})
    is_whole = not sizes or gpus == 1 or any(gpus % size == 0 for size in sizes)
    is_share = any(size % gpus == 0 for size in sizes)
    return node.judge(
        "gpu.count/usual",
        is_whole,
        _describe_devices(node),
        wanted=f"servers of {' or '.join(map(str, sizes))}, or --expected-gpus" if sizes else "at least one",
        status="warn" if is_share else "fail",
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
    named, status = failed or without, "fail" if failed or not is_shared else "warn"
    shown = format_names(map(_describe_failure, named))
    yield node.judge("gpu.driver", False, shown, status=status, value=len(named))


def _describe_failure(device: Device) -> str:
    return f"{_name_device(device)} ({device.bdf}{f': {device.failure}' if device.failure else ''})"


def _is_given(node: PreflightNode) -> bool:
    """Whether the scheduler has allocated exactly the visible devices to this job."""
    return node.environ.get("SLURM_GPUS_ON_NODE") == str(len(node.facts.partitions))


def _report_no_devices(node: PreflightNode, asked: int | None) -> CheckFinding:
    gpus = len(node.facts.devices)
    if not asked and not gpus:
        return report_info("gpu.count", "none: CPU only", "a node without GPUs is fit for CPU work")
    shown = f"0, of {gpus} GPUs on the bus" if gpus else "0"
    row = "gpu.count/none_of_expected" if asked else "gpu.count/none"
    return node.judge(row, False, shown, wanted=asked or "at least one", value=0)


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
    yield node.judge("gpu.model", len(models) == 1, format_names(models))
    for device in node.facts.devices:
        if device.model is None:
            name = f"{device.name or 'no name'} (device id {device.device_id:#x})" if device.device_id else device.name
            yield node.judge("gpu.profile", False, name, About(_name_device(device)))


def check_memory(node: PreflightNode) -> Iterator[CheckFinding]:
    """The devices have the memory of their model."""
    for device, profile in node.list_profiles:
        if not profile.memory_bytes:
            continue
        about, expected = About(_name_device(device)), f"about {table.format_size(profile.memory_bytes)}"
        held = device.memory_bytes
        if held is None:
            yield report_info("gpu.memory", "not reported by the driver", expected, about)
            continue
        is_whole = held >= profile.memory_bytes * (1 - MEMORY_TOLERANCE)
        words = {"wanted": expected, "model": profile.model, "value": held}
        yield node.judge("gpu.memory", is_whole, table.format_size(held), about, **words)


def check_partitions(node: PreflightNode) -> Iterator[CheckFinding]:
    """All GPUs with a driver use the same partition mode, and no partition is missing."""
    devices = [device for device in node.facts.devices if device.partitions]
    if not devices:
        return
    modes = Counter(f"{device.partition_mode or '-'}/{device.memory_mode or '-'}" for device in devices)
    if any(device.partition_mode for device in devices):
        yield node.judge("gpu.partition_mode", len(modes) == 1, format_names(sorted(modes)))
    usual = Counter(len(device.partitions) for device in devices).most_common(1)[0][0]
    profiles = {device.index: profile for device, profile in node.list_profiles}
    for device in devices:
        wanted = _count_wanted_partitions(device, profiles.get(device.index), usual)
        there, mode = len(device.partitions), device.partition_mode or "as the other GPUs"
        if not there == wanted == 1:
            words = {"wanted": wanted, "mode": mode, "value": there}
            yield node.judge(
                "gpu.partitions", there >= wanted, f"{there} of {wanted}", About(_name_device(device)), **words
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
        yield _judge_pcie_link(node, device, known.get(device.index))


def _judge_pcie_link(node: PreflightNode, device: Device, profile: Profile | None) -> CheckFinding:
    link, about = device.pcie, About(_name_device(device))
    if link.speed_gts is None or link.width is None:
        return node.judge("gpu.pcie_link/unknown", False, "not reported by the kernel", about)
    speed, width = profile.pcie_gts if profile else None, profile.pcie_width if profile else None
    allowed_speed, allowed_width = link.max_speed_gts or speed, link.max_width or width
    shown = format_pcie(link)
    if allowed_speed is None or allowed_width is None:
        return node.judge("gpu.pcie_link/unknown", False, shown, about)
    is_wide, is_fast = link.width >= allowed_width, link.speed_gts >= allowed_speed
    if not (is_wide and is_fast):
        saves_power = is_wide and device.vendor == "nvidia" and link.port is None
        row = "gpu.pcie_link/idle" if saves_power else "gpu.pcie_link"
        return node.judge(row, False, shown, about, wanted=f"{allowed_speed:g} GT/s x{allowed_width}")
    is_right = allowed_speed >= (speed or 0) and allowed_width >= (width or 0)
    wanted = f"{speed or allowed_speed:g} GT/s x{width or allowed_width}"
    return node.judge("gpu.pcie_link/slot", is_right, shown, about, wanted=wanted)


def check_links(node: PreflightNode) -> Iterator[CheckFinding]:
    """The GPUs of a hive are linked as their model specifies."""
    gpus = [device for device, profile in node.list_profiles if (profile.hive_size or 1) > 1 and device.partitions]
    if len(gpus) < 2:
        return
    size = max(profile.hive_size or 1 for _, profile in node.list_profiles)
    kind = "NVLink" if gpus[0].vendor == "nvidia" else "xGMI"
    layout, words = relations.describe_link_layout(gpus[0]), {"kind": kind, "size": size}
    direct = relations.list_direct_links(node.facts)
    if not direct and layout == "bridge" and not any(device.hive for device in gpus):
        reason = "a bridge is optional on this model"
        yield report_info("gpu.links", f"no {kind} link: GPUs without a bridge", reason)
        return
    if not direct:
        tools = "`nvidia-smi topo -m` and `nvidia-smi nvlink -s`" if kind == "NVLink" else "`amd-smi topology`"
        yield node.judge("gpu.links/none", False, tools=tools, **words)
        return
    hives: dict[str, list[int]] = {}
    for device in gpus:
        hives.setdefault(device.hive or f"{kind} node", []).append(device.index)
    problem = _find_lacking_pairs(hives, direct) if layout == "mesh" else _find_lacking_gpus(node, hives)
    row, usual = ("gpu.links/mesh", "every pair by") if layout == "mesh" else ("gpu.links", "every GPU linked alike by")
    yield node.judge(row, not problem, problem or f"{usual} {kind}", value=len(direct), **words)
    weak = relations.find_weak_links(node.facts)
    if weak:
        shown = format_names(f"{first}-{second}" for first, second in weak)
        yield node.judge("gpu.link_width", False, shown, value=len(weak), **words)
    wanted = -(-len(gpus) // size)
    is_right, shown = len(hives) <= wanted or layout == "bridge", format_names(map(len, hives.values()))
    yield node.judge("gpu.hives", is_right, shown, wanted=wanted, value=len(hives), **words)


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
    if not node.has_rdma or not node.has_devices:
        return
    near = {nic.numa_node for nic in node.facts.rdma if any(port.is_active for port in nic.ports)}
    apart = [device for device in node.facts.devices if device.numa_node is not None and device.numa_node not in near]
    yield node.judge("gpu.nic_affinity", not apart, format_names(map(_name_device, apart)))


def check_readings(node: PreflightNode) -> Iterator[CheckFinding]:
    """Values that could not be read, or that differ between two sources."""
    for problem in node.facts.problems:
        if problem.where.startswith(("GPU", "/sys/class/kfd", "/sys/class/drm", "/proc/driver/nvidia")):
            yield node.judge("gpu.reading", False, problem.problem, About(problem.where))


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
