"""AMD GPUs from the kernel's KFD topology, the PCI bus and the graphics driver's files.

Formats: Linux drivers/gpu/drm/amd/amdkfd/kfd_topology.c; genuine trees in ROCm/k8s-device-plugin testdata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from primus.machine import pci, profile
from primus.machine.device_sources import Sourced, build_device
from primus.machine.facts import Device, Link, MachineProblem, Partition
from primus.machine.profile import Profile
from primus.machine.tree import LARGEST, FileTree

KFD = "sys/class/kfd/kfd/topology"
NODES = f"{KFD}/nodes"
PCIE, XGMI = 2, 11
"""Types of a link (Linux kfd_crat.h)."""
DEVICE_HEAPS = (1, 2)
"""Heap types of a device's own memory, visible to the host or not (Linux kfd_crat.h)."""
HOP = 15
"""Weight of one xGMI link between two GPUs; each further hop adds as much. Other weights (13 inside a package,
41 between partitions) are direct links (Linux kfd_crat.c; RCCL archinfo)."""
DIE_LINKS = 4
"""xGMI links between the two dies of an MI250 or MI250X (AMD CDNA 2 white paper; RCCL tools/topo_expl/models); two dies
of different GPUs have at most two."""
MODES = {1: "SPX", 2: "DPX", 3: "TPX", 4: "QPX"}
"""Compute partition mode by the number of partitions; as many as there are dies is CPX."""
COUNTS = {mode: count for count, mode in MODES.items()}


class KfdNode(Struct, frozen=True, kw_only=True):
    """A node of the topology that computes: a GPU, or a die or partition of one."""

    number: int
    values: dict[str, int]
    memory_bytes: int | None

    @property
    def bdf(self) -> str:
        """Address as the driver numbers it: its function number counts partitions and may not exist on the bus."""
        return pci.decode_location(self.values.get("location_id", 0), self.values.get("domain", 0))

    @property
    def unique_id(self) -> int:
        return self.values.get("unique_id", 0)

    @property
    def compute_units(self) -> int | None:
        """SIMDs by SIMDs per compute unit: `array_count` includes disabled units."""
        per_unit = self.values.get("simd_per_cu", 0)
        return self.values["simd_count"] // per_unit if per_unit else None


def read_gpus(tree: FileTree, functions: Iterable[pci.PciFunction]) -> tuple[tuple[Device, ...], tuple[Link, ...]]:
    """The GPUs in the driver's order, then those found only on the PCI bus; and the links between them."""
    nodes = _read_nodes(tree)
    groups = _group_nodes(tree, nodes)
    indexes = {node.number: index for index, node in enumerate(nodes)}
    devices = [_read_gpu(tree, number, group, indexes) for number, group in enumerate(groups)]
    _note_duplicate_nodes(tree, nodes)
    _note_missing_partitions(tree, devices, groups)
    known = {pci.strip_function(node.bdf) for node in nodes}
    others = [f for f in functions if f.vendor == pci.AMD and pci.strip_function(f.bdf) not in known]
    for function in _list_first_dies(others, groups):
        devices.append(_build_gpu_without_driver(tree, len(devices), function, has_driver=bool(nodes)))
    return tuple(devices), _read_links(tree, groups)


def _list_first_dies(
    functions: Sequence[pci.PciFunction], groups: Sequence[Sequence[KfdNode]]
) -> Iterable[pci.PciFunction]:
    """One function of each GPU found only on the PCI bus: not the missing dies of GPUs that the driver lists, nor the
    second die of a GPU."""
    missing = Counter(
        _find_device_id(group) for group in groups for _ in range(_count_devices_per_gpu(group) - len(group))
    )
    seen: Counter[int | None] = Counter()
    for function in functions:
        if missing[function.device] > 0:
            missing[function.device] -= 1
            continue
        known = _find_profile(function.device)
        if seen[function.device] % (known.devices_per_gpu if known else 1) == 0:
            yield function
        seen[function.device] += 1


def _read_nodes(tree: FileTree) -> list[KfdNode]:
    """Compute nodes by number; the others are CPUs or cannot be read."""
    found = []
    for name in tree.list_names(NODES):
        values = _read_plausible_values(tree, f"{NODES}/{name}/properties") if name.isdecimal() else {}
        if values.get("simd_count", 0) > 0:
            found.append(KfdNode(number=int(name), values=values, memory_bytes=_read_node_memory(tree, name, values)))
    return found


def _read_plausible_values(tree: FileTree, path: str) -> dict[str, int]:
    """The plausible numbers of a file; others, and an empty file, are recorded as problems."""
    noted = len(tree.problems)
    values = tree.read_properties(path)
    if not values and len(tree.problems) == noted:
        tree.note_problem(path, "is missing or empty")
    for key, value in values.items():
        if not 0 <= value < LARGEST:
            tree.note_problem(path, f"{key} {value} is out of range"[:80])
    return {key: value for key, value in values.items() if 0 <= value < LARGEST}


def _read_node_memory(tree: FileTree, name: str, values: dict[str, int]) -> int | None:
    """Bytes of a node's own memory; new kernels report them only per bank."""
    folder = f"{NODES}/{name}/mem_banks"
    banks = [_read_plausible_values(tree, f"{folder}/{bank}/properties") for bank in tree.list_names(folder)]
    own = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in DEVICE_HEAPS)
    return own or values.get("local_mem_size") or None


def _group_nodes(tree: FileTree, nodes: Sequence[KfdNode]) -> list[list[KfdNode]]:
    """Nodes by GPU: partitions share the GPU's unique id; each die of an MI250X has its own."""
    groups: dict[object, list[KfdNode]] = {}
    for node in nodes:
        groups.setdefault(node.unique_id or pci.strip_function(node.bdf), []).append(node)
    partners = _find_partner_dies(tree, [group[0] for group in groups.values() if _is_die(group)])
    found: list[list[KfdNode]] = []
    for group in groups.values():
        other = _find_other_die(found, group, partners)
        if other is None:
            found.append(group)
        else:
            other += group
    for group in found:
        if len(group) < _count_devices_per_gpu(group):
            tree.note_problem(
                f"{NODES}/{group[0].number}", f"one die of a GPU with {_count_devices_per_gpu(group)}, others missing"
            )
    return found


def _is_die(group: Sequence[KfdNode]) -> bool:
    return len(group) == 1 and _count_devices_per_gpu(group) > 1


def _find_partner_dies(tree: FileTree, dies: Sequence[KfdNode]) -> dict[int, int]:
    """Node of the other die of the same GPU, by the links inside the package; empty if the kernel does not count
    them."""
    counts = {
        (die.number, values.get("node_to", -1)): _count_links(values)
        for die in dies
        for values in _read_link_values(tree, die.number)
    }
    return {
        one: other
        for (one, other), count in counts.items()
        if count == DIE_LINKS and counts.get((other, one)) == DIE_LINKS
    }


def _find_other_die(
    found: Sequence[list[KfdNode]], group: Sequence[KfdNode], partners: dict[int, int]
) -> list[KfdNode] | None:
    """The GPU among `found` whose other die `group` is: by the links, otherwise the previous one."""
    if not _is_die(group):
        return None
    if partners:
        return next((gpu for gpu in found if partners.get(group[0].number) == gpu[0].number), None)
    return found[-1] if found and _is_die(found[-1]) and _find_device_id(found[-1]) == _find_device_id(group) else None


def _find_profile(device_id: int | None) -> Profile | None:
    return None if device_id is None else profile.find_profile_by_id("amd", device_id)


def _find_device_id(group: Sequence[KfdNode]) -> int | None:
    return group[0].values.get("device_id")


def _count_devices_per_gpu(group: Sequence[KfdNode]) -> int:
    known = _find_profile(_find_device_id(group))
    return known.devices_per_gpu if known else 1


def _read_gpu(tree: FileTree, index: int, group: Sequence[KfdNode], indexes: dict[int, int]) -> Device:
    first = group[0]
    known = _find_profile(_find_device_id(group))
    files = _DriverFiles(tree, first)
    units = [node.compute_units for node in group]
    memory, memory_source = _read_gpu_memory(tree, group)
    mode = files.read_text("current_compute_partition") or _find_partition_mode(group, known)
    found: Sourced = {
        "model": (known.model if known else None, "kfd"),
        "name": (files.read_text("product_name") or "", "drm"),
        "device_id": (_find_device_id(group), "kfd"),
        "bdf": (first.bdf, "kfd"),
        "uuid": (f"{first.unique_id:016x}" if first.unique_id else None, "kfd"),
        "architecture": _find_architecture(first, known),
        "compute_units": (sum(unit for unit in units if unit) or None, "kfd"),
        "memory_bytes": (memory, memory_source),
        "partition_mode": (mode, "drm" if files.read_text("current_compute_partition") else "kfd"),
        "memory_mode": (files.read_text("current_memory_partition"), "drm"),
        "hive": (f"{first.values['hive_id']:016x}" if first.values.get("hive_id") else None, "kfd"),
        "numa_node": (pci.read_numa_node(tree, first.bdf), "pci"),
        "pci_path": (pci.find_pci_path(tree, first.bdf), "pci"),
        "pcie": (pci.read_slowest_link(tree, first.bdf), "pci"),
        "firmware": (_read_firmware(first, files), "kfd"),
    }
    return build_device(index, "amd", found, tuple(_build_partition(node, indexes[node.number]) for node in group))


def _build_partition(node: KfdNode, index: int) -> Partition:
    return Partition(
        index=index,
        node=node.number,
        bdf=node.bdf,
        compute_units=node.compute_units,
        memory_bytes=node.memory_bytes,
        render_minor=node.values.get("drm_render_minor"),
        uuid=f"{node.unique_id:016x}" if node.unique_id else None,
    )


class _DriverFiles:
    """Files of the graphics driver about a GPU."""

    def __init__(self, tree: FileTree, node: KfdNode) -> None:
        minor = node.values.get("drm_render_minor")
        self.tree = tree
        self.folders = [f"{pci.DEVICES}/{node.bdf}"] + ([f"sys/class/drm/renderD{minor}/device"] if minor else [])

    def read_text(self, name: str) -> str | None:
        return next((text for folder in self.folders if (text := self.tree.read_text(f"{folder}/{name}"))), None)

    def read_number(self, name: str) -> int | None:
        return next(
            (n for folder in self.folders if (n := self.tree.read_number(f"{folder}/{name}")) is not None), None
        )


def _read_gpu_memory(tree: FileTree, group: Sequence[KfdNode]) -> tuple[int | None, str]:
    """Memory of the GPU from KFD's banks; per die from the graphics driver if KFD has no value."""
    by_die = [_DriverFiles(tree, die).read_number("mem_info_vram_total") for die in _list_dies(group)]
    stated = sum(count or 0 for count in by_die) if all(by_die) else None
    if any(node.memory_bytes is None for node in group):
        return stated, "drm"
    counted = sum(node.memory_bytes or 0 for node in group)
    if stated and len(group) == 1 and abs(stated - counted) > counted // 100:
        tree.note_problem(f"{NODES}/{group[0].number}", f"memory is {counted} B by kfd, {stated} B by drm")
    return counted, "kfd"


def _find_architecture(node: KfdNode, known: Profile | None) -> tuple[str | None, str]:
    """90010 is gfx90a: major, minor and a hexadecimal step."""
    version = node.values.get("gfx_target_version", 0)
    if not version:
        return (known.architecture if known else None), "profile"
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}", "kfd"


def _read_firmware(node: KfdNode, files: _DriverFiles) -> dict[str, str]:
    found = {
        "vbios": files.read_text("vbios_version"),
        "mec": str(node.values["fw_version"]) if node.values.get("fw_version") else None,
        "sdma": str(node.values["sdma_fw_version"]) if node.values.get("sdma_fw_version") else None,
    }
    return {name: version for name, version in found.items() if version}


def _find_partition_mode(group: Sequence[KfdNode], known: Profile | None) -> str | None:
    """Compute partition mode from the dies in each partition, otherwise from the number of partitions."""
    if not known or known.xcds <= known.devices_per_gpu:
        return None
    count = _count_expected_partitions(group, known) or len(group)
    return "CPX" if count == known.xcds else MODES.get(count)


def _count_expected_partitions(group: Sequence[KfdNode], known: Profile) -> int | None:
    """Partitions of a whole GPU, from the dies in its first partition; None if the kernel does not report them."""
    dies = group[0].values.get("num_xcc", 0)
    return known.xcds // dies if dies and known.xcds % dies == 0 else None


def _note_missing_partitions(tree: FileTree, devices: Sequence[Device], groups: Sequence[Sequence[KfdNode]]) -> None:
    usual = Counter(len(group) for group in groups).most_common(1)[0][0] if groups else 0
    for gpu, group in zip(devices, groups, strict=False):
        known = _find_profile(gpu.device_id)
        if not known or known.xcds <= known.devices_per_gpu:
            continue
        mode = gpu.partition_mode or ""
        stated = known.xcds if mode == "CPX" else COUNTS.get(mode)
        expected = stated or _count_expected_partitions(group, known) or max(usual, len(group))
        if len(group) != expected:
            problem = f"{len(group)} of {expected} partitions ({mode or 'mode unknown'})"
            tree.problems.append(MachineProblem(f"GPU {gpu.index} ({gpu.bdf})", problem))


def _note_duplicate_nodes(tree: FileTree, nodes: Sequence[KfdNode]) -> None:
    ids = {node.number: tree.read_number(f"{NODES}/{node.number}/gpu_id") for node in nodes}
    for what, values in (("address", {node.number: node.bdf for node in nodes}), ("gpu_id", ids)):
        for value, count in Counter(values.values()).items():
            if count > 1 and value:
                twins = [str(number) for number in values if values[number] == value]
                tree.note_problem(NODES, f"nodes {', '.join(twins)} have the same {what} {value}")


def _build_gpu_without_driver(tree: FileTree, index: int, function: pci.PciFunction, *, has_driver: bool) -> Device:
    known = _find_profile(function.device)
    why = (
        "its driver does not list it: the GPU failed, fell off the bus or is not accessible"
        if has_driver
        else "the amdgpu driver is not loaded"
    )
    tree.note_problem(f"{pci.DEVICES}/{function.bdf}", f"an AMD device on the bus, but {why}")
    found: Sourced = {
        "model": (known.model if known else None, "pci"),
        "device_id": (function.device, "pci"),
        "bdf": (pci.normalize_address(function.bdf), "pci"),
        "architecture": (known.architecture if known else None, "profile"),
        "numa_node": (pci.read_numa_node(tree, function.bdf), "pci"),
        "pci_path": (pci.find_pci_path(tree, function.bdf), "pci"),
        "pcie": (pci.read_slowest_link(tree, function.bdf), "pci"),
    }
    return build_device(index, "amd", found)


def _read_links(tree: FileTree, groups: Sequence[Sequence[KfdNode]]) -> tuple[Link, ...]:
    """Connections of GPUs. Partitions of a GPU share its links, so those of the first partition are read; dies with
    their own id have their own links, which add up."""
    gpu_of = {node.number: index for index, group in enumerate(groups) for node in group}
    die_of = {node.number: node.unique_id or node.number for group in groups for node in group}
    between: dict[tuple[int, int], dict[frozenset[int], Link]] = {}
    seen: set[tuple[int, int]] = set()
    for node in (die for group in groups for die in _list_dies(group)):
        for values in _read_link_values(tree, node.number):
            here, there = gpu_of[node.number], gpu_of.get(values.get("node_to", -1))
            if there is None or there == here:
                continue
            link = _build_link(values, min(here, there), max(here, there))
            found = between.setdefault((link.first, link.second), {})
            dies = frozenset((die_of[node.number], die_of[values["node_to"]]))
            found[dies] = min(link, found.get(dies, link), key=_rank_link)
            seen.add((here, there))
    links = {gpus: _join_links(list(found.values())) for gpus, found in between.items()}
    for link in links.values():
        sides = {(link.first, link.second), (link.second, link.first)}
        if link.kind == "xgmi" and not sides <= seen:
            tree.note_problem(NODES, f"only one end reports the link of GPU {link.first} and GPU {link.second}")
    return tuple(links[pair] for pair in sorted(links))


def _list_dies(group: Sequence[KfdNode]) -> list[KfdNode]:
    """Nodes with their own id: the first partition of a partitioned GPU, both dies of an MI250X."""
    return list({node.unique_id: node for node in reversed(group)}.values())


def _read_link_values(tree: FileTree, node: int) -> Iterable[dict[str, int]]:
    for kind in ("io_links", "p2p_links"):
        folder = f"{NODES}/{node}/{kind}"
        for name in tree.list_names(folder):
            values = _read_plausible_values(tree, f"{folder}/{name}/properties")
            if values.get("type") in (XGMI, PCIE):
                yield values


def _build_link(values: dict[str, int], first: int, second: int) -> Link:
    return Link(
        kind="xgmi" if values["type"] == XGMI else "pcie",
        first=first,
        second=second,
        weight=values.get("weight"),
        bandwidth_mb_per_s=values.get("max_bandwidth") or None,
        num_links=_count_links(values),
        hops=_count_hops(values) if values["type"] == XGMI else 1,
    )


def _count_hops(values: dict[str, int]) -> int:
    """Number of hops. The kernel lists every pair of GPUs of a hive, also pairs without a direct link."""
    hops, rest = divmod(values.get("weight", 0), HOP)
    return hops if hops > 1 and not rest else 1


def _count_links(values: dict[str, int]) -> int | None:
    """Number of links of a direct xGMI connection: total bandwidth divided by that of one link."""
    one, every = values.get("min_bandwidth", 0), values.get("max_bandwidth", 0)
    is_counted = values.get("type") == XGMI and _count_hops(values) == 1 and one > 0 and every > 0
    return every // one if is_counted else None


def _rank_link(link: Link) -> tuple[bool, int, int, int]:
    weight = link.weight if link.weight is not None else 1 << 30
    return link.kind != "xgmi", link.hops, weight, -(link.bandwidth_mb_per_s or 0)


def _join_links(links: Sequence[Link]) -> Link:
    """The connection of two GPUs from those of their dies: the shortest, with the links of all equally short ones."""
    near = min(links, key=_rank_link)
    alike = [link for link in links if (link.kind, link.hops) == (near.kind, near.hops)]
    return structs.replace(
        near,
        bandwidth_mb_per_s=sum(link.bandwidth_mb_per_s or 0 for link in alike) or None,
        num_links=sum(link.num_links or 0 for link in alike) or None,
    )
