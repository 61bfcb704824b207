"""AMD cards from the kernel's KFD topology, the PCI bus and the graphics driver's files.

Formats: Linux drivers/gpu/drm/amd/amdkfd/kfd_topology.c; genuine trees in ROCm/k8s-device-plugin testdata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from primus.machine import pci, profile
from primus.machine.facts import Device, Link, Partition, Problem
from primus.machine.profile import Profile
from primus.machine.sourced import Sourced, device
from primus.machine.tree import LARGEST, Tree

KFD = "sys/class/kfd/kfd/topology"
NODES = f"{KFD}/nodes"
PCIE, XGMI = 2, 11
"""Types of a link (Linux kfd_crat.h)."""
DEVICE_HEAPS = (1, 2)
"""Heap types of a device's own memory, visible to the host or not (Linux kfd_crat.h)."""
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}
"""Compute partition mode by the number of partitions; as many as there are dies is CPX."""
COUNTS = {mode: count for count, mode in MODES.items()}


class Node(Struct, frozen=True, kw_only=True):
    """A node of the topology that computes: a card, a die of one or a partition of one."""

    number: int
    values: dict[str, int]
    memory_bytes: int | None

    @property
    def bdf(self) -> str:
        """Address as the driver numbers it: the function counts partitions and may not exist on the bus."""
        return pci.located(self.values.get("location_id", 0), self.values.get("domain", 0))

    @property
    def unique_id(self) -> int:
        return self.values.get("unique_id", 0)

    @property
    def compute_units(self) -> int | None:
        """SIMDs by SIMDs per compute unit: `array_count` counts units that are switched off, too."""
        per_unit = self.values.get("simd_per_cu", 0)
        return self.values["simd_count"] // per_unit if per_unit else None


def cards(tree: Tree, functions: Iterable[pci.Function]) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The cards in the order of the driver, then those that only the bus knows; and the links between them."""
    nodes = _nodes(tree)
    groups = _grouped(tree, nodes)
    indexes = {node.number: index for index, node in enumerate(nodes)}
    devices = [_card(tree, number, group, indexes) for number, group in enumerate(groups)]
    _note_doubles(tree, nodes)
    _note_missing_partitions(tree, devices, groups)
    known = {pci.slot(node.bdf) for node in nodes}
    for function in functions:
        if function.vendor == pci.AMD and pci.slot(function.bdf) not in known:
            devices.append(_card_without_driver(tree, len(devices), function, has_driver=bool(nodes)))
    return tuple(devices), _links(tree, groups)


def _nodes(tree: Tree) -> list[Node]:
    """Nodes that compute, by number; the others are processors, or cannot be read."""
    found = []
    for name in tree.names(NODES):
        values = _sane(tree, f"{NODES}/{name}/properties") if name.isdecimal() else {}
        if values.get("simd_count", 0) > 0:
            found.append(Node(number=int(name), values=values, memory_bytes=_memory(tree, name, values)))
    return found


def _sane(tree: Tree, path: str) -> dict[str, int]:
    """The numbers of a file that can be true; the others are problems, an empty file too."""
    noted = len(tree.problems)
    values = tree.properties(path)
    if not values and len(tree.problems) == noted:
        tree.note(path, "is missing or empty")
    for key, value in values.items():
        if not 0 <= value < LARGEST:
            tree.note(path, f"{key} {value} is not possible"[:80])
    return {key: value for key, value in values.items() if 0 <= value < LARGEST}


def _memory(tree: Tree, name: str, values: dict[str, int]) -> int | None:
    """Bytes of a node's own memory: new kernels state them only bank by bank."""
    folder = f"{NODES}/{name}/mem_banks"
    banks = [_sane(tree, f"{folder}/{bank}/properties") for bank in tree.names(folder)]
    own = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in DEVICE_HEAPS)
    return own or values.get("local_mem_size") or None


def _grouped(tree: Tree, nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes by card: partitions share the card's unique id; the dies of an MI250X, which have their own, follow each
    other."""
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.unique_id or pci.slot(node.bdf), []).append(node)
    paired: list[list[Node]] = []
    for group in groups.values():
        dies = _devices_per_card(group)
        is_second = dies > 1 and paired and len(paired[-1]) < dies and _model(paired[-1]) == _model(group)
        if is_second and len(group) == 1:
            paired[-1] += group
        else:
            paired.append(group)
    for group in paired:
        if len(group) < _devices_per_card(group):
            tree.note(
                f"{NODES}/{group[0].number}", f"one die of a card with {_devices_per_card(group)}, others missing"
            )
    return paired


def _profile(device_id: int | None) -> Profile | None:
    return None if device_id is None else profile.by_id("amd", device_id)


def _model(group: Sequence[Node]) -> int | None:
    return group[0].values.get("device_id")


def _devices_per_card(group: Sequence[Node]) -> int:
    known = _profile(_model(group))
    return known.devices_per_card if known else 1


def _card(tree: Tree, index: int, group: Sequence[Node], indexes: dict[int, int]) -> Device:
    first = group[0]
    known = _profile(_model(group))
    files = _Files(tree, first)
    units = [node.compute_units for node in group]
    memory, memory_source = _card_memory(tree, group)
    mode = files.text("current_compute_partition") or _mode(group, known)
    found: Sourced = {
        "model": (known.model if known else None, "kfd"),
        "name": (files.text("product_name") or "", "drm"),
        "device_id": (_model(group), "kfd"),
        "bdf": (first.bdf, "kfd"),
        "uuid": (f"{first.unique_id:016x}" if first.unique_id else None, "kfd"),
        "architecture": _architecture(first, known),
        "compute_units": (sum(unit for unit in units if unit) or None, "kfd"),
        "memory_bytes": (memory, memory_source),
        "partition_mode": (mode, "drm" if files.text("current_compute_partition") else "kfd"),
        "memory_mode": (files.text("current_memory_partition"), "drm"),
        "hive": (f"{first.values['hive_id']:016x}" if first.values.get("hive_id") else None, "kfd"),
        "numa_node": (pci.numa_node(tree, first.bdf), "pci"),
        "pci_path": (pci.path(tree, first.bdf), "pci"),
        "pcie": (pci.link(tree, first.bdf), "pci"),
        "firmware": (_firmware(first, files), "kfd"),
    }
    return device(index, "amd", found, tuple(_partition(node, indexes[node.number]) for node in group))


def _partition(node: Node, index: int) -> Partition:
    return Partition(
        index=index,
        node=node.number,
        bdf=node.bdf,
        compute_units=node.compute_units,
        memory_bytes=node.memory_bytes,
        render_minor=node.values.get("drm_render_minor"),
        uuid=f"{node.unique_id:016x}" if node.unique_id else None,
    )


class _Files:
    """Files of the graphics driver about a card."""

    def __init__(self, tree: Tree, node: Node) -> None:
        minor = node.values.get("drm_render_minor")
        self.tree = tree
        self.folders = [f"{pci.DEVICES}/{node.bdf}"] + ([f"sys/class/drm/renderD{minor}/device"] if minor else [])

    def text(self, name: str) -> str | None:
        return next((text for folder in self.folders if (text := self.tree.text(f"{folder}/{name}"))), None)

    def number(self, name: str) -> int | None:
        return next((n for folder in self.folders if (n := self.tree.number(f"{folder}/{name}")) is not None), None)


def _card_memory(tree: Tree, group: Sequence[Node]) -> tuple[int | None, str]:
    """Memory of the card by KFD's banks; by the graphics driver, die by die, where they say nothing of a node."""
    by_die = [_Files(tree, die).number("mem_info_vram_total") for die in _dies(group)]
    stated = sum(count or 0 for count in by_die) if all(by_die) else None
    if any(node.memory_bytes is None for node in group):
        return stated, "drm"
    counted = sum(node.memory_bytes or 0 for node in group)
    if stated and len(group) == 1 and abs(stated - counted) > counted // 100:
        tree.note(f"{NODES}/{group[0].number}", f"memory is {counted} B by kfd, {stated} B by drm")
    return counted, "kfd"


def _architecture(node: Node, known: Profile | None) -> tuple[str | None, str]:
    """90010 is gfx90a: major, minor and a hexadecimal step."""
    version = node.values.get("gfx_target_version", 0)
    if not version:
        return (known.architecture if known else None), "profile"
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}", "kfd"


def _firmware(node: Node, files: _Files) -> dict[str, str]:
    found = {
        "vbios": files.text("vbios_version"),
        "mec": str(node.values["fw_version"]) if node.values.get("fw_version") else None,
        "sdma": str(node.values["sdma_fw_version"]) if node.values.get("sdma_fw_version") else None,
    }
    return {name: version for name, version in found.items() if version}


def _mode(group: Sequence[Node], known: Profile | None) -> str | None:
    """Compute partition mode by the dies in each partition, else by the number of partitions."""
    if not known or known.xcds == 1:
        return None
    count = _expected(group, known) or len(group)
    return "CPX" if count == known.xcds else MODES.get(count)


def _expected(group: Sequence[Node], known: Profile) -> int | None:
    """Partitions of a whole card, by the dies in its first one; None where the kernel does not state them."""
    dies = group[0].values.get("num_xcc", 0)
    return known.xcds // dies if dies and known.xcds % dies == 0 else None


def _note_missing_partitions(tree: Tree, devices: Sequence[Device], groups: Sequence[Sequence[Node]]) -> None:
    usual = Counter(len(group) for group in groups).most_common(1)[0][0] if groups else 0
    for card, group in zip(devices, groups, strict=False):
        known = _profile(card.device_id)
        if not known or known.xcds == 1:
            continue
        mode = card.partition_mode or ""
        stated = known.xcds if mode == "CPX" else COUNTS.get(mode)
        expected = stated or _expected(group, known) or max(usual, len(group))
        if len(group) != expected:
            problem = f"{len(group)} of {expected} partitions ({mode or 'mode unknown'})"
            tree.problems.append(Problem(f"GPU {card.index} ({card.bdf})", problem))


def _note_doubles(tree: Tree, nodes: Sequence[Node]) -> None:
    ids = {node.number: tree.number(f"{NODES}/{node.number}/gpu_id") for node in nodes}
    for what, values in (("address", {node.number: node.bdf for node in nodes}), ("gpu_id", ids)):
        for value, count in Counter(values.values()).items():
            if count > 1 and value:
                twins = [str(number) for number in values if values[number] == value]
                tree.note(NODES, f"nodes {', '.join(twins)} have the same {what} {value}")


def _card_without_driver(tree: Tree, index: int, function: pci.Function, *, has_driver: bool) -> Device:
    known = _profile(function.device)
    why = (
        "its driver shows none there: it failed, fell off or may not be read" if has_driver else "amdgpu is not loaded"
    )
    tree.note(f"{pci.DEVICES}/{function.bdf}", f"an AMD device on the bus, but {why}")
    found: Sourced = {
        "model": (known.model if known else None, "pci"),
        "device_id": (function.device, "pci"),
        "bdf": (pci.address(function.bdf), "pci"),
        "architecture": (known.architecture if known else None, "profile"),
        "numa_node": (pci.numa_node(tree, function.bdf), "pci"),
        "pci_path": (pci.path(tree, function.bdf), "pci"),
        "pcie": (pci.link(tree, function.bdf), "pci"),
    }
    return device(index, "amd", found)


def _links(tree: Tree, groups: Sequence[Sequence[Node]]) -> tuple[Link, ...]:
    """Links between cards. Partitions of a card share its links, so those of the first partition are read; dies with
    an id of their own have links of their own."""
    card_of = {node.number: index for index, group in enumerate(groups) for node in group}
    best: dict[tuple[int, int], Link] = {}
    seen: set[tuple[int, int]] = set()
    for node in (die for group in groups for die in _dies(group)):
        for values in _link_values(tree, node.number):
            here, there = card_of[node.number], card_of.get(values.get("node_to", -1))
            if there is None or there == here:
                continue
            link = _link(values, min(here, there), max(here, there))
            best[link.first, link.second] = _nearer(best.get((link.first, link.second)), link)
            seen.add((here, there))
    for link in best.values():
        sides = {(link.first, link.second), (link.second, link.first)}
        if link.kind == "xgmi" and not sides <= seen:
            tree.note(NODES, f"the link of GPU {link.first} and GPU {link.second} is known to one of them only")
    return tuple(best[pair] for pair in sorted(best))


def _dies(group: Sequence[Node]) -> list[Node]:
    """Nodes with an id of their own: the first partition of a divided card, both dies of an MI250X."""
    return list({node.unique_id: node for node in reversed(group)}.values())


def _link_values(tree: Tree, node: int) -> Iterable[dict[str, int]]:
    for kind in ("io_links", "p2p_links"):
        folder = f"{NODES}/{node}/{kind}"
        for name in tree.names(folder):
            values = _sane(tree, f"{folder}/{name}/properties")
            if values.get("type") in (XGMI, PCIE):
                yield values


def _link(values: dict[str, int], first: int, second: int) -> Link:
    return Link(
        kind="xgmi" if values["type"] == XGMI else "pcie",
        first=first,
        second=second,
        weight=values.get("weight"),
        bandwidth_mb_per_s=values.get("max_bandwidth") or None,
    )


def _nearer(one: Link | None, other: Link) -> Link:
    """Of two links between the same cards the one of less weight, with the larger bandwidth of both."""
    if one is None:
        return other
    near = min(one, other, key=lambda link: (link.kind != "xgmi", link.weight if link.weight is not None else 1 << 30))
    bandwidths = [link.bandwidth_mb_per_s or 0 for link in (one, other) if link.kind == near.kind]
    return structs.replace(near, bandwidth_mb_per_s=max(bandwidths) or None)
