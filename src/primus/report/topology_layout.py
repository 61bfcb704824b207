"""Layout of a topology's picture, in its units of length.

NUMA nodes are frames in two columns. GPUs are on the inner sides and face each other, their NICs on the outer
sides; direct links are chords of an ellipse between the columns, on which each GPU has a point at its height.
On narrow screens the frames are one column, and the direct links chords of circles above them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, takewhile
from typing import NamedTuple, TypeVar

from msgspec import Struct

from primus.machine.facts import Device, MachineFacts
from primus.machine.topology import NEAR, Topology, TopologyEnd, count_expected_partitions, find_missing_links

T = TypeVar("T")
NumaNode = tuple[str, list[TopologyEnd]]
"""Title and members of a NUMA node."""

GPU_GAP = 12
CELL_HEIGHT = 16
NIC_HEIGHT, NIC_GAP = 38, 8
HEAD = 34


class PictureSize(NamedTuple):
    """Widths of the parts of a picture, in pixels of the screen for which it is made."""

    name: str
    """Its style."""
    margin: int
    top: int
    """Above the picture's first frame or circle."""
    padding: int
    gpu_width: int
    nic_width: int
    bus: int
    """Distance between a NIC and its GPU; the line that joins them is in the middle."""
    mesh: int
    """Width for direct links of GPUs: the distance between the columns, or of the circles."""
    least: int
    """Least width of the picture."""

    @property
    def is_narrow(self) -> bool:
        return self is NARROW


WIDE = PictureSize("two-columns", 16, 78, 14, 224, 152, 60, 206, 800)
"""1166 pixels, with NICs and links: the width of a page."""
NARROW = PictureSize("one-column", 5, 60, 8, 150, 118, 40, 324, 334)
"""334 pixels: the width of a page on a screen of 360."""


class DeviceGroup(Struct, frozen=True, kw_only=True):
    """GPUs and NICs joined by one line: those below one bridge, or the rest of a NUMA node."""

    top: float
    height: float
    gpus: tuple[Device, ...]
    nics: tuple[TopologyEnd, ...]
    words: tuple[str, ...]
    """Link types between its GPUs and NICs, from near to far; empty without either."""

    @property
    def middle_y(self) -> float:
        return self.top + self.height / 2


class NumaFrame(Struct, frozen=True, kw_only=True):
    """A NUMA node, or one half of it."""

    title: str
    left: float
    top: float
    width: float
    height: float
    groups: tuple[DeviceGroup, ...]
    is_mirrored: bool
    """Whether GPUs are left of their NICs."""
    size: PictureSize

    @property
    def gpu_left(self) -> float:
        size = self.size
        return self.left + (size.padding if self.is_mirrored else self.width - size.padding - size.gpu_width)

    @property
    def nic_left(self) -> float:
        size = self.size
        return self.left + (self.width - size.padding - size.nic_width if self.is_mirrored else size.padding)

    @property
    def bus_x(self) -> float:
        return self.card_outer + (self.size.bus / 2 if self.is_mirrored else -self.size.bus / 2)

    @property
    def card_inner(self) -> float:
        return self.gpu_left + (0 if self.is_mirrored else self.size.gpu_width)

    @property
    def card_outer(self) -> float:
        return self.gpu_left + (self.size.gpu_width if self.is_mirrored else 0)

    @property
    def nic_inner(self) -> float:
        return self.nic_left + (0 if self.is_mirrored else self.size.nic_width)


class PictureLayout:
    """The frames of a machine, and their common sizes."""

    def __init__(self, facts: MachineFacts, topology: Topology, size: PictureSize = WIDE) -> None:
        self.facts = facts
        self.topology = topology
        self.size = size
        self.is_partitioned = any(count_expected_partitions(facts, device) > 1 for device in facts.devices)
        self.gpu_height = 62 + (CELL_HEIGHT + 8 if self.is_partitioned else 0)
        missing = {index for pair in find_missing_links(facts) for index in pair}
        lost = missing - set(chain(*topology.islands))
        self.islands = [tuple(island) for island in (*topology.islands, tuple(sorted(lost))) if island]
        has_nics = any(end.kind == "nic" for end in topology.ends)
        self.column = size.padding * 2 + size.gpu_width + (size.nic_width + size.bus if has_nics else 0)
        parts = self._divide_into_columns()
        self.gap = size.mesh if self.islands else 24
        self.width = max(size.margin * 2 + self.column * len(parts) + self.gap * (len(parts) - 1), size.least)
        self.mesh_height = 0.0
        if size.is_narrow:
            self.mesh_height = (
                math.ceil(len(self.islands) / self._count_circles_of_row()) * self._compute_circle_width()
            )
        self.frames = [frame for side, part in enumerate(parts) for frame in self._place_column(part, side)]

    def compute_mesh_points(self) -> dict[int, tuple[float | None, tuple[float, float]]]:
        """The point of each linked GPU, and the inner edge of the GPU, which a line joins to it.

        The points of an island are on one ellipse, at the heights of the GPUs; on narrow screens on a circle, without
        such lines.
        """
        if self.size.is_narrow:
            return {index: (None, point) for index, point in self._list_circle_points()}
        places = {
            device.index: (frame, middle)
            for frame in self.frames
            for group in frame.groups
            for device, middle in spread_items(group, group.gpus, self.gpu_height, GPU_GAP)
        }
        points: dict[int, tuple[float | None, tuple[float, float]]] = {}
        for island in self.islands:
            heights = [places[index][1] for index in island]
            centre_x, centre_y = self.size.margin + self.column + self.gap / 2, (min(heights) + max(heights)) / 2
            radius_x, radius_y = self.gap / 2 - 22, max((max(heights) - min(heights)) / 2, 1) * 1.2
            for index in island:
                frame, y = places[index]
                out = radius_x * math.sqrt(1 - ((y - centre_y) / radius_y) ** 2)
                points[index] = frame.card_inner, (centre_x + (out if frame.is_mirrored else -out), y)
        return points

    def _list_circle_points(self) -> Iterator[tuple[int, tuple[float, float]]]:
        width = self._compute_circle_width()
        for number, island in enumerate(self.islands):
            row, place = divmod(number, self._count_circles_of_row())
            centre_x = self.size.margin + width * (place + 0.5)
            centre_y = self.size.top + width * (row + 0.5)
            for order, index in enumerate(island):
                angle = 2 * math.pi * (order + 0.5) / len(island) - math.pi / 2
                radius = width / 2 - 26  # the number of a GPU is outside of its point
                yield index, (centre_x + radius * math.cos(angle), centre_y + radius * math.sin(angle))

    def _count_circles_of_row(self) -> int:
        return 1 if len(self.islands) == 1 else 2

    def _compute_circle_width(self) -> float:
        return self.size.mesh / self._count_circles_of_row()

    def _divide_into_columns(self) -> list[list[NumaNode]]:
        """NUMA nodes of each column, with equally many GPUs on both sides; a node with all GPUs is split."""
        ends = sorted(self.topology.ends, key=lambda end: (end.numa_node is None, end.numa_node or 0))
        nodes = [
            ("unknown NUMA node" if node is None else f"NUMA node {node}", list(members))
            for node, members in groupby(ends, key=lambda end: end.numa_node)
        ]
        if self.size.is_narrow:
            return [nodes] if nodes else []
        with_gpus = [node for node in nodes if _count_gpus(node)]
        if len(with_gpus) == 1 and len(self.facts.devices) > 1:
            ((title, members),) = with_gpus
            others = [node for node in nodes if node not in with_gpus]
            return [
                [(title, _take_half(members, True)), *others[::2]],
                [(title, _take_half(members, False)), *others[1::2]],
            ]
        split = min(
            range(1, len(nodes) + 1),
            key=lambda i: abs(_compute_column_load(nodes[:i]) - _compute_column_load(nodes[i:])),
            default=0,
        )
        return [part for part in (nodes[:split], nodes[split:]) if part]

    def _place_column(self, nodes: list[NumaNode], side: int) -> Iterator[NumaFrame]:
        top = self.size.top + self.mesh_height
        for title, ends in nodes:
            groups = self._group_devices(ends, top + HEAD)
            height = groups[-1].top + groups[-1].height + self.size.padding - top
            yield NumaFrame(
                title=title,
                left=self.size.margin + side * (self.column + self.gap),
                top=top,
                width=self.column,
                height=height,
                groups=groups,
                is_mirrored=side == 1 or self.size.is_narrow,
                size=self.size,
            )
            top += height + self.size.margin

    def _group_devices(self, ends: list[TopologyEnd], top: float) -> tuple[DeviceGroup, ...]:
        """The devices below each switch or port with both GPUs and NICs, then the others."""
        switches = _find_mixed_switches(ends)
        below: dict[tuple[str, ...], list[TopologyEnd]] = {}
        for end in ends:
            above = [switch for switch in switches if _is_below(end, switch)]
            below.setdefault(max(above, key=len, default=()), []).append(end)
        rest = below.pop((), [])
        for switch, members in list(below.items()):
            if len({end.kind for end in members}) < 2:
                rest += below.pop(switch)
        groups = []
        for members in sorted(below.values(), key=self._find_first_position) + ([rest] if rest else []):
            group = self._build_group(sorted(members, key=self.topology.ends.index), top)
            groups.append(group)
            top += group.height + GPU_GAP
        return tuple(groups)

    def _find_first_position(self, members: list[TopologyEnd]) -> int:
        return min(self.topology.ends.index(end) for end in members)

    def _build_group(self, members: list[TopologyEnd], top: float) -> DeviceGroup:
        devices = {f"GPU{device.index}": device for device in self.facts.devices}
        gpus = [end for end in members if end.kind == "gpu"]
        nics = [end for end in members if end.kind == "nic"]
        words = {self.topology.find_relation_word(gpu.name, nic.name) for gpu in gpus for nic in nics}
        return DeviceGroup(
            top=top,
            height=max(
                _compute_stack_height(len(gpus), self.gpu_height, GPU_GAP),
                _compute_stack_height(len(nics), NIC_HEIGHT, NIC_GAP),
            ),
            gpus=tuple(devices[gpu.name] for gpu in gpus),
            nics=tuple(nics),
            words=tuple(word for word in (*NEAR, "NODE") if word in words),
        )


def _count_gpus(node: NumaNode) -> int:
    return sum(end.kind == "gpu" for end in node[1])


def _compute_column_load(nodes: list[NumaNode]) -> int:
    """Sort key that balances the columns: GPUs, then NICs."""
    return sum(100 * _count_gpus(node) + len(node[1]) for node in nodes)


def _find_mixed_switches(ends: Sequence[TopologyEnd]) -> set[tuple[str, ...]]:
    """Paths to the ports and switches shared by a GPU and a NIC, from the port of the host bridge on: for each GPU the
    deepest one."""
    found = set()
    for gpu in (end for end in ends if end.kind == "gpu"):
        shared = [_find_common_prefix(gpu.pci_path, end.pci_path) for end in ends if end.kind == "nic"]
        deepest = max(shared, key=len, default=())
        if len(deepest) > 1:
            found.add(deepest)
    return found


def _find_common_prefix(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _is_below(end: TopologyEnd, switch: tuple[str, ...]) -> bool:
    return end.pci_path[: len(switch)] == switch


def _take_half(members: list[TopologyEnd], is_first: bool) -> list[TopologyEnd]:
    """The first or second half of the GPUs, and of the NICs."""
    halves = []
    for kind in ("gpu", "nic"):
        ends = [end for end in members if end.kind == kind]
        middle = (len(ends) + 1) // 2
        halves += ends[:middle] if is_first else ends[middle:]
    return halves


def _compute_stack_height(number: int, height: float, gap: float) -> float:
    return max(number * (height + gap) - gap, 0)


def spread_items(group: DeviceGroup, items: Sequence[T], height: float, gap: float) -> Iterator[tuple[T, float]]:
    """Each item with the height of its middle; the stack is centred in its group."""
    top = group.middle_y - _compute_stack_height(len(items), height, gap) / 2
    for i, item in enumerate(items):
        yield item, top + i * (height + gap) + height / 2
