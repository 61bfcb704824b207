"""The topology of a machine as an SVG picture, alone or inside a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from primus.machine.facts import Device, Link, MachineFacts
from primus.machine.topology import (
    Topology,
    TopologyEnd,
    count_expected_partitions,
    find_missing_links,
    find_weak_links,
    find_word,
    format_degraded_link,
    list_direct_links,
)
from primus.report.charts import shift_down
from primus.report.page import Html, join_fragments, make_element
from primus.report.topology_layout import (
    CELL_HEIGHT,
    GPU_GAP,
    NARROW,
    NIC_GAP,
    NIC_HEIGHT,
    WIDE,
    DeviceGroup,
    NumaFrame,
    PictureLayout,
    PictureSize,
    spread_items,
)

CHARACTER = 0.62
"""Width of a character relative to the font size; common sans-serif fonts are narrower on average."""
LINE = 18
"""Height of a line below the title."""
WIDEST = 4
"""Number of xGMI links of the widest line."""


def draw_topology_svg(facts: MachineFacts, topology: Topology) -> Html:
    """The wide picture; deterministic, with a tooltip on every device and link."""
    return _TopologyPicture(facts, topology, WIDE).draw_svg()


def draw_topology_for_page(facts: MachineFacts, topology: Topology) -> Html:
    """The picture for wide and for narrow screens, of which a page shows one."""
    return join_fragments(*(_TopologyPicture(facts, topology, size).draw_svg() for size in (WIDE, NARROW)))


class _TopologyPicture:
    """Draws each part at its place in the layout."""

    def __init__(self, facts: MachineFacts, topology: Topology, size: PictureSize) -> None:
        self.facts = facts
        self.topology = topology
        self.size = size
        self.layout = PictureLayout(facts, topology, size)
        self.width = self.layout.width

    def draw_svg(self) -> Html:
        heading, extra = self._draw_heading()
        top = self.size.top + self.layout.mesh_height
        bottom = max((frame.top + frame.height for frame in self.layout.frames), default=top)
        legend, legend_height = self._draw_legend(bottom + 30)
        height = bottom + legend_height + self.size.margin + extra
        parts = [
            *(part for frame in self.layout.frames for part in self._draw_numa_frame(frame)),
            *self._draw_mesh(),
            *legend,
        ]
        parts = [*heading, *(shift_down(parts, extra) if extra else parts)]
        # The style of a page applies to both of its pictures. Without a size, the narrow one fills its screen.
        style = [] if self.size.is_narrow else [make_element("style", Html(STYLE))]
        fixed = {} if self.size.is_narrow else {"width": f"{self.width:g}", "height": f"{height:g}"}
        return make_element(
            "svg",
            Html("\n".join(["", *style, _draw_rect(0, 0, self.width, height, "ground"), *parts, ""])),
            xmlns="http://www.w3.org/2000/svg",
            class_=f"topology {self.size.name}",
            viewBox=f"0 0 {self.width:g} {height:g}",
            **fixed,
            role="img",
        )

    def _draw_heading(self) -> tuple[list[Html], float]:
        """Models and facts, and the height of the lines of facts after the first one."""
        facts = self.facts
        models = [device.model or device.name or "unknown GPU" for device in facts.devices]
        counted = ", ".join(f"{models.count(model)}x {model}" for model in dict.fromkeys(models))
        numa = facts.cpu.numa_nodes or 0
        words = [
            facts.host,
            "assumed machine" if facts.assumed else "",
            "" if facts.devices else "this node has no GPU, or no driver lists one",
            _format_islands(self.topology, facts),
            f"{numa} NUMA node{'s' * (numa != 1)}" if numa else "",
            facts.cpu.model if facts.cpu.model != "unknown" else "",
        ]
        left, width, text = self.size.margin, self.width - 2 * self.size.margin, "; ".join(filter(None, words))
        top, lines = 34, [text]
        if self.size.is_narrow:
            top, lines = 22, textwrap.wrap(text, int(width / (SIZES["soft"] * CHARACTER)))
        parts = [_draw_text(left, top, counted or "No GPU", "title", width)]
        parts += [_draw_text(left, top + 23 + LINE * row, line, "soft", width) for row, line in enumerate(lines)]
        return parts, LINE * (len(lines) - 1)

    def _draw_numa_frame(self, frame: NumaFrame) -> Iterator[Html]:
        yield _draw_rect(frame.left, frame.top, frame.width, frame.height, "frame", 10)
        yield _draw_text(frame.left + self.size.padding, frame.top + 23, frame.title, "numa")
        for group in frame.groups:
            gpus = list(spread_items(group, group.gpus, self.layout.gpu_height, GPU_GAP))
            nics = list(spread_items(group, group.nics, NIC_HEIGHT, NIC_GAP))
            yield from _draw_bus(frame, group, gpus, nics)
            for device, middle in gpus:
                yield self._draw_gpu(device, frame.gpu_left, middle - self.layout.gpu_height / 2)
            for nic, middle in nics:
                yield _draw_nic(nic, frame.nic_left, middle - NIC_HEIGHT / 2, self.size.nic_width)

    def _draw_gpu(self, device: Device, left: float, top: float) -> Html:
        width = self.size.gpu_width
        inner, right = left + 10, left + width - 10
        lack = format_degraded_link(device)
        parts = [
            make_element("title", _format_gpu_tooltip(device)),
            _draw_rect(left, top, width, self.layout.gpu_height, "card lack" if lack else "card", 7),
            _draw_text(inner, top + 20, f"GPU {device.index}", "name"),
            _draw_text(right, top + 20, device.model or device.name or "unknown", "value end", width - 94),
            _draw_text(inner, top + 37, device.bdf or "", "small"),
            _draw_text(right, top + 37, _format_gib(device.memory_bytes), "small end"),
            _draw_text(
                inner,
                top + 53,
                f"PCIe {lack}" if lack else _format_pcie_speed(device),
                "small bad" if lack else "small",
                width - 20,
            ),
        ]
        if self.layout.is_partitioned:
            parts += self._draw_partitions(device, inner, top + 62)
        return make_element("g", Html("".join(parts)), class_="device")

    def _draw_partitions(self, device: Device, left: float, top: float) -> Iterator[Html]:
        number = max(count_expected_partitions(self.facts, device), 1)
        width = (self.size.gpu_width - 20) / number
        for i in range(number):
            is_there = i < len(device.partitions)
            yield _draw_rect(left + i * width + 1, top, width - 2, CELL_HEIGHT, "cell" if is_there else "cell gone", 3)
            label = str(device.partitions[i].index) if is_there else "none"
            size = next((size for size in (10, 7) if len(label) * size * CHARACTER <= width - 2), None)
            if size:
                yield _draw_text(left + (i + 0.5) * width, top + 12, label, f"cell-text size-{size}")

    def _draw_mesh(self) -> Iterator[Html]:
        points = self.layout.compute_mesh_points()
        for inner, (x, y) in points.values():
            if inner is not None:
                yield _draw_line(inner, y, x, y, "leader")
        for link in list_direct_links(self.facts):
            title = f"GPU {link.first} - GPU {link.second}: {find_word(link)}{self._format_weight(link.weight)}"
            yield _draw_line(*points[link.first][1], *points[link.second][1], self._choose_link_style(link), title)
        for first, second in find_missing_links(self.facts):
            yield _draw_line(
                *points[first][1], *points[second][1], "missing", f"GPU {first} - GPU {second}: no xGMI link"
            )
        for index, (inner, (x, y)) in points.items():
            if inner is None:
                yield make_element("circle", "", cx=f"{x:.1f}", cy=f"{y:.1f}", r="11", class_="disc")
                yield _draw_text(x, y + 4, str(index), "word")
            else:
                yield make_element("circle", "", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4.5", class_="point")

    def _format_weight(self, weight: int | None) -> str:
        return "" if weight is None else f", weight {weight}"

    def _choose_link_style(self, link: Link) -> str:
        """Style of a direct link: dashed with fewer physical links than expected, wider with more links."""
        low = " low" if (link.first, link.second) in find_weak_links(self.facts) else ""
        num_links = min(link.num_links or 1, WIDEST) if link.kind == "xgmi" else 1
        return f"link {link.kind}{low}" + (f" wide-{num_links}" if num_links > 1 else "")

    def _draw_legend(self, y: float) -> tuple[list[Html], float]:
        """What the lines mean, and the height of the rows."""
        parts, x, first = list[Html](), float(self.size.margin), y
        for style, label in self._list_line_meanings():
            width = 38 + len(label) * 11 * CHARACTER
            if x > self.size.margin and x + width > self.width:
                x, y = float(self.size.margin), y + 20
            parts += [_draw_line(x, y - 4, x + 30, y - 4, style), _draw_text(x + 38, y, label, "small")]
            x += width + 12
        return parts, 54 + y - first if parts else 0.0

    def _list_line_meanings(self) -> Iterator[tuple[str, str]]:
        """Style and meaning of the lines in the picture."""
        for style, word in sorted(
            {(self._choose_link_style(link), find_word(link)) for link in list_direct_links(self.facts)}
        ):
            yield style, f"{word}, direct link"
        if find_missing_links(self.facts):
            yield "missing", "xGMI link missing"
        words = {word for frame in self.layout.frames for group in frame.groups for word in group.words}
        if words:
            yield "wire", "PCIe"
        if any(map(format_degraded_link, self.facts.devices)):
            yield "wire lack", "degraded PCIe link"
        if any(not end.is_up for end in self.topology.ends):
            yield "wire off", "NIC down"
        for word, meaning in NEARNESS.items():
            if word in words:
                yield "bus", f"{word}: {meaning}"


NEARNESS = {"PIX": "one PCIe switch", "PXB": "several switches", "PHB": "one host bridge", "NODE": "same NUMA node"}
"""Short meaning of the line between GPUs and NICs."""


def _draw_bus(
    frame: NumaFrame, group: DeviceGroup, gpus: list[tuple[Device, float]], nics: list[tuple[TopologyEnd, float]]
) -> Iterator[Html]:
    """A line from each device to the bus of its group, the bus and its link type, if there are both kinds."""
    if not gpus or not nics:
        return
    heights = [middle for _, middle in (*gpus, *nics)]
    for device, middle in gpus:
        yield _draw_line(
            frame.card_outer, middle, frame.bus_x, middle, "wire lack" if format_degraded_link(device) else "wire"
        )
    for nic, middle in nics:
        yield _draw_line(frame.nic_inner, middle, frame.bus_x, middle, "wire" if nic.is_up else "wire off")
    yield _draw_line(frame.bus_x, min(heights), frame.bus_x, max(heights), "bus")
    for row, word in enumerate(group.words):
        middle = group.middle_y + (row - (len(group.words) - 1) / 2) * 20
        yield _draw_rect(frame.bus_x - 20, middle - 9, 40, 18, "pill", 9)
        yield _draw_text(frame.bus_x, middle + 4, word, "word")


def _draw_nic(end: TopologyEnd, left: float, top: float, width: float) -> Html:
    state = "" if end.is_up else " off"
    parts = [
        make_element("title", f"{end.name} {end.bdf or ''}: {end.detail}"),
        _draw_rect(left, top, width, NIC_HEIGHT, f"nic{state}", 7),
        _draw_text(left + 10, top + 16, end.name, f"nic-name{state}", width - 20 - (0 if end.is_up else 44)),
        _draw_text(left + 10, top + 30, end.detail, f"small{state}", width - 20),
    ]
    if not end.is_up:
        parts.append(_draw_text(left + width - 10, top + 16, "DOWN", "down end"))
        parts.append(_draw_line(left + 4, top + 4, left + width - 4, top + NIC_HEIGHT - 4, "cross"))
        parts.append(_draw_line(left + 4, top + NIC_HEIGHT - 4, left + width - 4, top + 4, "cross"))
    return make_element("g", Html("".join(parts)), class_="adapter")


def _format_islands(topology: Topology, facts: MachineFacts) -> str:
    """``2 islands of 4 linked GPUs``."""
    sizes = sorted({len(island) for island in topology.islands})
    return ", ".join(
        f"{number} island{'s' * (number > 1)} of {size} linked GPUs"
        for size in sizes
        for number in [sum(len(island) == size for island in topology.islands)]
    )


def _format_gpu_tooltip(device: Device) -> str:
    """Details of a GPU that do not fit into its box."""
    modes = " ".join(filter(None, (device.partition_mode, device.memory_mode)))
    numbers = ", ".join(str(partition.index) for partition in device.partitions)
    details = (
        f"GPU {device.index} {device.bdf or ''}".rstrip(),
        device.name,
        device.architecture or "",
        f"{device.compute_units} compute units" if device.compute_units else "",
        modes,
        f"hive {device.hive}" if device.hive else "",
        f"devices {numbers}" if len(device.partitions) > 1 else "",
    )
    return "; ".join(filter(None, details))


def _format_gib(count: int | None) -> str:
    return f"{count / 2**30:.0f} GiB" if count else ""


def _format_pcie_speed(device: Device) -> str:
    link = device.pcie
    speed = f" {link.speed_gts:g} GT/s" if link.speed_gts else ""
    width = f" x{link.width}" if link.width else ""
    return f"PCIe{speed}{width}" if speed or width else ""


def _draw_rect(x: float, y: float, width: float, height: float, style: str, radius: float = 0) -> Html:
    place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return make_element("rect", "", **place, rx=f"{radius:g}", class_=style)


def _draw_line(x1: float, y1: float, x2: float, y2: float, style: str, title: str = "") -> Html:
    place = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    return make_element("line", make_element("title", title) if title else "", **place, class_=style)


def _draw_text(x: float, y: float, text: str, style: str, width: float = 0) -> Html:
    """Text starting at `x`, truncated to `width`."""
    longest = int(width / (SIZES.get(style.split()[0], 11) * CHARACTER)) if width else len(text)
    shown = text if len(text) <= longest else text[: max(longest - 3, 1)] + "..."
    return make_element("text", shown, x=f"{x:g}", y=f"{y:g}", class_=style) if shown else Html("")


SIZES = {"title": 19, "soft": 13, "numa": 12, "name": 13, "value": 13, "nic-name": 12}
"""Font sizes by style; any other is 11."""

STYLE = """
.topology { --ground: #fff; --frame: #f5f6f8; --box: #fff; --ink: #1d1f24; --soft: #5d636f; --edge: #c4c8d0;
  --wire: #8b919d; --xgmi: #0b62c4; --nvlink: #2f7d32; --bad: #b3261e; --cell: #dfe9f7;
  --nic: #fdf6e7; --nic-edge: #d9bd7d;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .topology { --ground: #1c1f25; --frame: #24282f; --box: #2f343d; --ink: #e6e7ea;
  --soft: #a9afbb; --edge: #4a505c; --wire: #7d8492; --xgmi: #6cb2ff; --nvlink: #7fcf83; --bad: #ff8a80;
  --cell: #3c4c63; --nic: #3a3425; --nic-edge: #7a6737; } }
.topology text { font-size: 11px; fill: var(--ink); }
.topology .title { font-size: 19px; font-weight: 650; }
.topology .soft { font-size: 13px; } .topology .soft, .topology .small { fill: var(--soft); }
.topology .numa { font-size: 12px; font-weight: 600; fill: var(--soft); }
.topology .name { font-size: 13px; font-weight: 650; } .topology .value { font-size: 13px; }
.topology .nic-name { font-size: 12px; font-weight: 600; }
.topology .end { text-anchor: end; } .topology .word, .topology .cell-text { text-anchor: middle; }
.topology .size-10 { font-size: 10px; } .topology .size-7 { font-size: 7px; }
.topology .bad, .topology .down { fill: var(--bad); } .topology .down { font-weight: 650; }
.topology .ground { fill: var(--ground); } .topology .frame { fill: var(--frame); stroke: var(--edge); }
.topology .card { fill: var(--box); stroke: var(--edge); stroke-width: 1.2; }
.topology .card.lack { stroke: var(--bad); stroke-width: 1.8; stroke-dasharray: 5 3; }
.topology .nic { fill: var(--nic); stroke: var(--nic-edge); }
.topology .nic.off { fill: var(--frame); stroke: var(--edge); stroke-dasharray: 3 3; }
.topology text.off { fill: var(--soft); } .topology .cross { stroke: var(--edge); stroke-width: 1.2; }
.topology .pill { fill: var(--frame); stroke: var(--wire); }
.topology .cell { fill: var(--cell); } .topology .cell.gone { fill: none; stroke: var(--bad); stroke-dasharray: 3 2; }
.topology line { fill: none; } .topology .wire, .topology .bus { stroke: var(--wire); stroke-width: 1.6; }
.topology .wire.off { stroke-dasharray: 2 4; } .topology .bus { stroke-width: 3.2; stroke-linecap: round; }
.topology .wire.lack, .topology .missing { stroke: var(--bad); stroke-width: 2.4; stroke-dasharray: 5 3; }
.topology .leader { stroke: var(--edge); stroke-width: 1.2; } .topology .point { fill: var(--ink); }
.topology .link { stroke-width: 1.7; } .topology .link:hover { stroke-width: 5; }
.topology .xgmi { stroke: var(--xgmi); } .topology .nvlink { stroke: var(--nvlink); stroke-dasharray: 9 2; }
.topology .link.low { stroke-dasharray: 2 3; }
.topology .disc { fill: var(--box); stroke: var(--edge); stroke-width: 1.2; }
.topology.one-column { display: none; width: 100%; max-width: 28rem; }
@media screen and (max-width: 76rem) {
  .topology.two-columns { display: none; } .topology.one-column { display: block; } }
.topology .wide-2 { stroke-width: 2.8; } .topology .wide-3 { stroke-width: 3.9; } .topology .wide-4 { stroke-width: 5; }
"""
