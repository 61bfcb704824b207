"""How the cards and network adapters of a machine are connected: a word for each pair, and what is odd about it.

The words are those that users of `nvidia-smi topo -m` know, and XGMI for a direct link of two AMD cards.
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
    "XGMI#": "# direct xGMI links (XGMI where their number is not known)",
    "NV#": "# direct NVLinks (NV where their number is not known)",
    "HOP#": "# xGMI links in a row, through other GPUs",
    "PIX": "at most one PCIe switch between",
    "PXB": "several PCIe switches between",
    "PHB": "a PCIe host bridge between, which is the processor",
    "NODE": "host bridges of one NUMA node between",
    "SYS": "the interconnect of NUMA nodes between",
    "?": "not known",
}
"""Meaning of each word, from near to far."""

FILES = ("/sys/class/", "/sys/bus/", "/proc/driver/")
"""Where the kernel tells of devices, links and adapters."""

EVEN_LAYOUTS = ("partial", "bridge")
"""Layouts in which not every two cards are linked, but every card as often as the others."""

NEAR = ("PIX", "PXB", "PHB")
"""Words for two devices below one PCIe host bridge."""


class TopologyEnd(Struct, frozen=True, kw_only=True):
    """A card or a network adapter."""

    name: str
    """``GPU0``, ``mlx5_0``."""
    kind: Literal["gpu", "nic"]
    bdf: str | None = None
    numa_node: int | None = None
    pci_path: tuple[str, ...] = ()
    is_up: bool = True
    detail: str = ""
    """Of an adapter: its rate and kind, or why it is down."""


class Topology(Struct, frozen=True, kw_only=True):
    """The relation of every two ends."""

    ends: tuple[TopologyEnd, ...] = ()
    """Cards in their order, then adapters."""
    matrix: tuple[tuple[str, ...], ...] = ()
    """A word for each pair of `ends`."""
    islands: tuple[tuple[int, ...], ...] = ()
    """Cards that reach each other over direct links, by index."""
    warnings: tuple[str, ...] = ()
    """What is odd about the relations; what is odd about the devices are the problems of the facts."""

    def find_relation_word(self, first: str, second: str) -> str:
        """Relation of two ends by name."""
        names = [end.name for end in self.ends]
        return self.matrix[names.index(first)][names.index(second)]


def build_topology(facts: MachineFacts) -> Topology:
    """Relations of the devices of `facts`; by NUMA node where their PCI paths are not known."""
    ends = (*map(_build_gpu_end, facts.devices), *_build_nic_ends(facts))
    linked = {frozenset((f"GPU{link.first}", f"GPU{link.second}")): link for link in list_device_links(facts)}
    matrix = tuple(tuple(_find_relation(a, b, linked) for b in ends) for a in ends)
    return Topology(ends=ends, matrix=matrix, islands=_find_islands(facts), warnings=tuple(_find_warnings(facts, ends)))


def list_device_links(facts: MachineFacts) -> list[Link]:
    """The xGMI and NVLink connections, direct or through other GPUs, one for each pair of cards."""
    links = {
        tuple(sorted((link.first, link.second))): link
        for link in facts.links
        if link.kind != "pcie" and link.first != link.second
    }
    return [links[pair] for pair in sorted(links)]


def list_direct_links(facts: MachineFacts) -> list[Link]:
    """The direct xGMI and NVLink connections, one for each pair of cards."""
    return [link for link in list_device_links(facts) if link.hops == 1]


def find_missing_links(facts: MachineFacts) -> list[tuple[int, int]]:
    """Pairs of cards of one hive without a direct link, where the board links every two."""
    linked = {frozenset((link.first, link.second)) for link in list_direct_links(facts)}
    pairs = combinations(
        (device for device in facts.devices if device.hive and describe_link_layout(device) == "mesh"), 2
    )
    alike = ((a.index, b.index) for a, b in pairs if a.hive == b.hive)
    return [pair for pair in alike if frozenset(pair) not in linked]


def find_weak_links(facts: MachineFacts) -> list[tuple[int, int]]:
    """Pairs of cards with fewer physical links than other pairs have, where the board links every two alike."""
    cards = {device.index for device in facts.devices if describe_link_layout(device) == "mesh"}
    counted = [link for link in list_direct_links(facts) if link.num_links and {link.first, link.second} <= cards]
    usual = max((link.num_links or 0 for link in counted), default=0)
    return [(link.first, link.second) for link in counted if (link.num_links or 0) < usual]


def find_weakly_linked_gpus(facts: MachineFacts) -> list[tuple[int, int, int]]:
    """Cards with fewer links than the others of their hive, where the board does not link every two: index, links,
    links of the others. Nothing where a kernel does not count the links of a board."""
    links = list_direct_links(facts)
    found = []
    for hive in dict.fromkeys(device.hive for device in facts.devices):
        cards = [
            card for card in facts.devices if card.hive == hive and hive and describe_link_layout(card) in EVEN_LAYOUTS
        ]
        own = {card.index: [link for link in links if card.index in (link.first, link.second)] for card in cards}
        is_counted = all(link.num_links for some in own.values() for link in some)
        if not is_counted and any(describe_link_layout(card) == "partial" for card in cards):
            continue
        totals = {index: sum(link.num_links or 1 for link in some) for index, some in own.items()}
        usual = max(totals.values(), default=0)
        found += [(index, total, usual) for index, total in totals.items() if total < usual]
    return found


def describe_link_layout(device: Device) -> LinkLayout | None:
    """How the cards of this model are linked; None where the model is not known."""
    known = profile.find_profile_by_name(device.model) if device.model else None
    return known.link_layout if known else None


def find_device_problems(facts: MachineFacts) -> list[MachineProblem]:
    """Those that are about devices, links and adapters; a problem that names no file is about a device or a tool."""
    return [problem for problem in facts.problems if problem.where.startswith(FILES) or problem.where[:1] != "/"]


def find_word(link: Link) -> str:
    """The word for a link: ``XGMI``, ``XGMI3``, ``HOP2``, ``NV18``."""
    if link.hops > 1:
        return f"HOP{link.hops}"
    return f"{'XGMI' if link.kind == 'xgmi' else 'NV'}{link.num_links or ''}"


def format_legend_word(word: str) -> str:
    """The key of `WORDS` that explains a word of the matrix: ``NV#`` for ``NV18``."""
    stem = word.rstrip("0123456789")
    return stem if stem in WORDS else f"{stem}#"


def count_expected_partitions(facts: MachineFacts, device: Device) -> int:
    """How many partitions `device` should have: as many as any card of its model and mode."""
    kind = (device.model, device.device_id, device.partition_mode)
    return max(len(d.partitions) for d in facts.devices if (d.model, d.device_id, d.partition_mode) == kind)


def format_degraded_link(device: Device) -> str:
    """What the PCIe link of a card lacks now: ``x8 of x16``, ``16 of 32 GT/s``; empty where it lacks nothing."""
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
    """RDMA devices, then network interfaces with a device of their own that is none of those."""
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
    """A NUMA node; the kernel's -1 is none."""
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
        # Two ports of one switch: a downstream port and the device remain of each path.
        below = max(len(first.pci_path), len(second.pci_path)) - shared
        return "PIX" if below <= 2 else "PXB"
    if first.numa_node is None or second.numa_node is None:
        return "?"
    return "NODE" if first.numa_node == second.numa_node else "SYS"


def _count_shared_bridges(first: tuple[str, ...], second: tuple[str, ...]) -> int:
    """How many parts two PCI paths have in common from the host bridge on."""
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
        yield f"no xGMI link within one hive: {_format_pairs(missing)}"
    if find_weak_links(facts):
        usual = max(link.num_links or 0 for link in list_direct_links(facts))
        kind = "NVLinks" if facts.devices[0].vendor == "nvidia" else "xGMI links"
        yield f"fewer than {usual} {kind}: {_format_pairs(find_weak_links(facts))}"
    for index, number, usual in find_weakly_linked_gpus(facts):
        yield f"GPU{index} has {number} xGMI links to other GPUs, where others have {usual}"
    yield from _find_unknown_links(facts)
    for device in facts.devices:
        if format_degraded_link(device):
            yield f"GPU{device.index} has a PCIe link below its best: {format_degraded_link(device)}"
    yield from _find_numa_gaps(ends)
    for end in ends:
        if not end.is_up:
            yield f"{end.name} is down" + (f" ({end.detail})" if end.detail != "down" else "")


def _find_unknown_links(facts: MachineFacts) -> Iterator[str]:
    """Cards that come with NVLink, and of which none is told: only the driver's library knows them."""
    models = [
        profile.find_profile_by_name(card.model) for card in facts.devices if card.vendor == "nvidia" and card.model
    ]
    num_linked = sum((model.hive_size or 1) > 1 for model in models if model)
    if num_linked > 1 and not list_direct_links(facts):
        yield "NVLink connections are not known: the driver's library was not asked, or shows none"


def _find_numa_gaps(ends: tuple[TopologyEnd, ...]) -> Iterator[str]:
    cards = [end for end in ends if end.kind == "gpu"]
    places = {end.numa_node for end in ends if end.kind == "nic"} - {None}
    lost = [end.name for end in ends if end.numa_node is None]
    if lost and len(lost) < len(ends):
        yield f"NUMA node not known: {', '.join(lost)}"
    without = Counter(end.numa_node for end in cards if end.numa_node is not None and end.numa_node not in places)
    if places:
        for node, number in sorted(without.items(), key=str):
            yield f"NUMA node {node} has {number} GPU{'s' * (number > 1)} and no network adapter"


def _format_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"GPU{a}-GPU{b}" for a, b in pairs)
