"""Connections between the GPUs and NICs of a machine: the link type of each pair, and warnings.

The link types are those of `nvidia-smi topo -m`, and XGMI for a direct link of two AMD GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Literal

from msgspec import Struct

from primus.machine import profile
from primus.machine.facts import Device, Link, MachineFacts, MachineProblem, RdmaDevice
from primus.machine.profile import LinkLayout

WORDS = {
    "X": "the device itself",
    "XGMI#": "# direct xGMI links (XGMI if their number is unknown)",
    "NV#": "# direct NVLinks (NV if their number is unknown)",
    "HOP#": "# xGMI hops, through other GPUs",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge (the CPU)",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
    "?": "unknown",
}
"""Meaning of each link type, from near to far."""

FILES = ("/sys/class/", "/sys/bus/", "/proc/driver/")
"""Paths of the kernel's files about devices, links and NICs."""

EVEN_LAYOUTS = ("partial", "bridge")
"""Layouts without a link between every two GPUs, but with equally many links per GPU."""

NEAR = ("PIX", "PXB", "PHB")
"""Link types of two devices below one PCIe host bridge."""


class TopologyEnd(Struct, frozen=True, kw_only=True):
    """A GPU or a NIC."""

    name: str
    """``GPU0``, ``mlx5_0``."""
    kind: Literal["gpu", "nic"]
    bdf: str | None = None
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    is_up: bool = True
    detail: str = ""
    """Details of a NIC: its rate and kind, or why it is down."""


class Topology(Struct, frozen=True, kw_only=True):
    """The link types between all ends."""

    ends: tuple[TopologyEnd, ...] = ()
    """GPUs in their order, then NICs."""
    matrix: tuple[tuple[str, ...], ...] = ()
    """Link type of each pair of `ends`."""
    islands: tuple[tuple[int, ...], ...] = ()
    """GPUs that reach each other over direct links, by index."""
    warnings: tuple[str, ...] = ()
    """Warnings about the relations; those about devices are the problems of the facts."""

    def find_relation_word(self, first: str, second: str) -> str:
        """Link type of two ends by name."""
        names = [end.name for end in self.ends]
        return self.matrix[names.index(first)][names.index(second)]


def build_topology(facts: MachineFacts) -> Topology:
    """Relations of the devices of `facts`; by NUMA node if PCI paths are unknown."""
    ends = (*map(_build_gpu_end, facts.devices), *_build_nic_ends(facts))
    linked = {frozenset((f"GPU{link.first}", f"GPU{link.second}")): link for link in list_device_links(facts)}
    matrix = tuple(tuple(_find_relation(a, b, linked) for b in ends) for a in ends)
    return Topology(ends=ends, matrix=matrix, islands=_find_islands(facts), warnings=tuple(_find_warnings(facts, ends)))


def list_device_links(facts: MachineFacts) -> list[Link]:
    """The xGMI and NVLink connections, direct or through other GPUs, one for each pair of GPUs."""
    links = {
        tuple(sorted((link.first, link.second))): link
        for link in facts.links
        if link.kind != "pcie" and link.first != link.second
    }
    return [links[pair] for pair in sorted(links)]


def list_direct_links(facts: MachineFacts) -> list[Link]:
    """The direct xGMI and NVLink connections, one for each pair of GPUs."""
    return [link for link in list_device_links(facts) if link.hops == 1]


def find_missing_links(facts: MachineFacts) -> list[tuple[int, int]]:
    """Pairs of GPUs of one hive without a direct link, on boards that link every two GPUs."""
    linked = {frozenset((link.first, link.second)) for link in list_direct_links(facts)}
    pairs = combinations(
        (device for device in facts.devices if device.hive and describe_link_layout(device) == "mesh"), 2
    )
    alike = ((a.index, b.index) for a, b in pairs if a.hive == b.hive)
    return [pair for pair in alike if frozenset(pair) not in linked]


def find_weak_links(facts: MachineFacts) -> list[tuple[int, int]]:
    """Pairs of GPUs with fewer physical links than other pairs, on boards that link every two GPUs equally."""
    gpus = {device.index for device in facts.devices if describe_link_layout(device) == "mesh"}
    counted = [link for link in list_direct_links(facts) if link.num_links and {link.first, link.second} <= gpus]
    usual = max((link.num_links or 0 for link in counted), default=0)
    return [(link.first, link.second) for link in counted if (link.num_links or 0) < usual]


def find_weakly_linked_gpus(facts: MachineFacts) -> list[tuple[int, int, int]]:
    """GPUs with fewer links than the others of their hive, on boards that do not link every two GPUs: index, links,
    links of the others. Empty if the kernel does not count the links."""
    links = list_direct_links(facts)
    found = []
    for hive in dict.fromkeys(device.hive for device in facts.devices):
        gpus = [gpu for gpu in facts.devices if gpu.hive == hive and hive and describe_link_layout(gpu) in EVEN_LAYOUTS]
        own = {gpu.index: [link for link in links if gpu.index in (link.first, link.second)] for gpu in gpus}
        is_counted = all(link.num_links for some in own.values() for link in some)
        if not is_counted and any(describe_link_layout(gpu) == "partial" for gpu in gpus):
            continue
        totals = {index: sum(link.num_links or 1 for link in some) for index, some in own.items()}
        usual = max(totals.values(), default=0)
        found += [(index, total, usual) for index, total in totals.items() if total < usual]
    return found


def describe_link_layout(device: Device) -> LinkLayout | None:
    """The layout of links between GPUs of this model; None for an unknown model."""
    known = profile.find_profile_by_name(device.model) if device.model else None
    return known.link_layout if known else None


def find_device_problems(facts: MachineFacts) -> list[MachineProblem]:
    """Problems of devices, links and NICs; a problem without a file is about a device or a tool."""
    return [problem for problem in facts.problems if problem.where.startswith(FILES) or problem.where[:1] != "/"]


def find_word(link: Link) -> str:
    """Link type of a link: ``XGMI``, ``XGMI3``, ``HOP2``, ``NV18``."""
    if link.hops > 1:
        return f"HOP{link.hops}"
    return f"{'XGMI' if link.kind == 'xgmi' else 'NV'}{link.num_links or ''}"


def format_legend_word(word: str) -> str:
    """The key of `WORDS` that explains a link type of the matrix: ``NV#`` for ``NV18``."""
    stem = word.rstrip("0123456789")
    return stem if stem in WORDS else f"{stem}#"


def count_expected_partitions(facts: MachineFacts, device: Device) -> int:
    """Expected number of partitions of `device`: the maximum among GPUs of its model and mode."""
    kind = (device.model, device.device_id, device.partition_mode)
    return max(len(d.partitions) for d in facts.devices if (d.model, d.device_id, d.partition_mode) == kind)


def format_degraded_link(device: Device) -> str:
    """Degradation of a GPU's PCIe link: ``x8 of x16``, ``16 of 32 GT/s``; empty if there is none."""
    link = device.pcie
    lacks = []
    if link.width and link.max_width and link.width < link.max_width:
        lacks.append(f"x{link.width} of x{link.max_width}")
    if link.speed_gts and link.max_speed_gts and link.speed_gts < link.max_speed_gts:
        lacks.append(f"{link.speed_gts:g} of {link.max_speed_gts:g} GT/s")
    return ", ".join(lacks)


def _build_gpu_end(device: Device) -> TopologyEnd:
    return TopologyEnd(
        name=f"GPU{device.index}",
        kind="gpu",
        bdf=device.bdf,
        numa_node=_normalize_numa_node(device.numa_node),
        pci_path=device.pci_path,
    )


def _build_nic_ends(facts: MachineFacts) -> Iterator[TopologyEnd]:
    """RDMA devices, then network interfaces of other devices."""
    for rdma in facts.rdma:
        is_up = any(port.is_active for port in rdma.ports)
        yield TopologyEnd(
            name=rdma.name,
            kind="nic",
            bdf=rdma.bdf,
            numa_node=_normalize_numa_node(rdma.numa_node),
            pci_path=rdma.pci_path,
            is_up=is_up,
            detail=_format_rate(rdma) if is_up else _explain_down_port(rdma),
        )
    known = {rdma.interface for rdma in facts.rdma} | {rdma.bdf for rdma in facts.rdma}
    for interface in facts.interfaces:
        if (
            interface.bdf
            and interface.kind in ("ethernet", "infiniband")
            and not known & {interface.name, interface.bdf}
        ):
            speed = f"{interface.speed_mbps / 1000:g} Gb/s " if interface.speed_mbps else ""
            is_up = interface.state != "down"
            yield TopologyEnd(
                name=interface.name,
                kind="nic",
                bdf=interface.bdf,
                numa_node=_normalize_numa_node(interface.numa_node),
                is_up=is_up,
                detail=f"{speed}{interface.kind}" if is_up else "down",
            )


def _format_rate(rdma: RdmaDevice) -> str:
    port = next(port for port in rdma.ports if port.is_active)
    layer = "RoCE" if port.link_layer == "Ethernet" else port.link_layer
    return f"{port.rate_gbps:g} Gb/s {layer}" if port.rate_gbps else layer


def _explain_down_port(rdma: RdmaDevice) -> str:
    states = {p.physical_state if p.state == "DOWN" else f"{p.state.lower()}, {p.physical_state}" for p in rdma.ports}
    return "; ".join(sorted(states)) or "no port"


def _normalize_numa_node(number: int | None) -> int | None:
    """A NUMA node; None for the kernel's -1."""
    return None if number is None or number < 0 else number


def _find_relation(first: TopologyEnd, second: TopologyEnd, linked: dict[frozenset[str], Link]) -> str:
    if first is second:
        return "X"
    link = linked.get(frozenset((first.name, second.name)))
    if link:
        return find_word(link)
    shared = _count_shared_bridges(first.pci_path, second.pci_path)
    if shared == 1:
        return "PHB"
    if shared > 1:
        # Below one switch each path has two own parts: a downstream port and the device.
        below = max(len(first.pci_path), len(second.pci_path)) - shared
        return "PIX" if below <= 2 else "PXB"
    if first.numa_node is None or second.numa_node is None:
        return "?"
    return "NODE" if first.numa_node == second.numa_node else "SYS"


def _count_shared_bridges(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """Number of parts that two PCI paths share from the host bridge on."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))


def _find_islands(facts: MachineFacts) -> tuple[tuple[int, ...], ...]:
    groups: list[set[int]] = []
    for link in list_direct_links(facts):
        pair = {link.first, link.second}
        touched = [group for group in groups if group & pair]
        groups = [group for group in groups if not group & pair] + [pair.union(*touched)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _find_warnings(facts: MachineFacts, ends: tuple[TopologyEnd, ...]) -> Iterator[str]:
    missing = find_missing_links(facts)
    if missing:
        yield f"missing xGMI links within a hive: {_format_pairs(missing)}"
    if find_weak_links(facts):
        usual = max(link.num_links or 0 for link in list_direct_links(facts))
        kind = "NVLinks" if facts.devices[0].vendor == "nvidia" else "xGMI links"
        yield f"fewer than {usual} {kind}: {_format_pairs(find_weak_links(facts))}"
    for index, number, usual in find_weakly_linked_gpus(facts):
        yield f"GPU{index} has {number} xGMI links to other GPUs, other GPUs have {usual}"
    yield from _find_unknown_links(facts)
    for device in facts.devices:
        if format_degraded_link(device):
            yield f"GPU{device.index} has a degraded PCIe link: {format_degraded_link(device)}"
    yield from _find_numa_gaps(ends)
    for end in ends:
        if not end.is_up:
            yield f"{end.name} is down" + (f" ({end.detail})" if end.detail != "down" else "")


def _find_unknown_links(facts: MachineFacts) -> Iterator[str]:
    """Warning for GPU models with NVLink of which no link is known; only the driver's library lists NVLinks."""
    models = [profile.find_profile_by_name(gpu.model) for gpu in facts.devices if gpu.vendor == "nvidia" and gpu.model]
    num_linked = sum((model.hive_size or 1) > 1 for model in models if model)
    if num_linked > 1 and not list_direct_links(facts):
        yield "NVLink connections are unknown: the driver's library was not queried or lists none"


def _find_numa_gaps(ends: tuple[TopologyEnd, ...]) -> Iterator[str]:
    gpus = [end for end in ends if end.kind == "gpu"]
    places = {end.numa_node for end in ends if end.kind == "nic"} - {None}
    lost = [end.name for end in ends if end.numa_node is None]
    if lost and len(lost) < len(ends):
        yield f"unknown NUMA node: {', '.join(lost)}"
    without = Counter(end.numa_node for end in gpus if end.numa_node is not None and end.numa_node not in places)
    if places:
        for node, number in sorted(without.items(), key=str):
            yield f"NUMA node {node} has {number} GPU{'s' * (number > 1)} and no NIC"


def _format_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"GPU{a}-GPU{b}" for a, b in pairs)
