"""`analyze topology`: the matrix, the picture, and the page around it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from msgspec.structs import replace

import browser
from fakes.nodes import node
from machines.tree import grow
from primus.errors import PrimusError, UsageError
from primus.machine.facts import MachineFacts, MachineProblem, PcieLink, RdmaPort
from primus.machine.topology import build_topology
from primus.report import topology_picture
from primus.task import TaskContext
from primus.tasks.analyze.topology import Options, run

MI300X = Path(__file__).parents[1] / "machines/mi300x-8"

NODES = {
    "mi300x": node(),
    "mi300x-numa-only": node(has_paths=False),
    "mi210-two-hives": node(8, "MI210", num_hives=2, num_adapters=2),
    "mi308x-cpx": node(8, "MI308X", num_partitions=4),
    "mi300x-cpx": node(8, "MI300X", num_partitions=8, num_adapters=0),
    "mi300a": node(4, "MI300A", num_adapters=4, numa_of=lambda i: i),
    "h100": node(8, "H100", num_links=18, num_adapters=12, has_paths=False),
    "one-numa": node(8, "MI355X", numa_of=lambda i: None, num_adapters=0, has_paths=False),
    "one-gpu": node(1, "H100", num_links=18, num_adapters=1),
    "cpu": node(0, num_adapters=0),
}


def sick_node() -> MachineFacts:
    facts = node(num_partitions=2)
    cards, adapters = list(facts.devices), list(facts.rdma)
    cards[3] = replace(cards[3], pcie=PcieLink(speed_gts=16, width=8, max_speed_gts=32, max_width=16))
    cards[6] = replace(cards[6], partitions=cards[6].partitions[:1])
    adapters[5] = replace(adapters[5], ports=(RdmaPort(state="DOWN", physical_state="Polling"),))
    return replace(
        facts,
        devices=tuple(cards),
        rdma=tuple(adapters),
        links=tuple(link for link in facts.links if (link.first, link.second) != (2, 5)),
        problems=(
            MachineProblem("/sys/class/kfd/kfd/topology/nodes/9/properties", "cannot be read: Permission denied"),
        ),
    )


def picture(facts: MachineFacts) -> ElementTree.Element:
    return ElementTree.fromstring(topology_picture.draw_topology_svg(facts, build_topology(facts)))


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name in element.get("class", "").split()]


def context(facts: MachineFacts, *, as_json: bool = False) -> TaskContext:
    return TaskContext(environ={}, json=as_json, facts=lambda: facts)


@pytest.mark.parametrize("name", NODES)
def test_matrix_of_a_node(name: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    run(Options(), context(NODES[name]))
    golden(f"topology/{name}.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["mi300x:8", "mi250x:4", "h100:2", "cpu"])
def test_matrix_of_an_assumed_machine(
    name: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run(Options(assume=name), context(MachineFacts()))
    golden(f"topology/assumed-{name.replace(':', '-')}.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["mi210-two-hives", "mi308x-cpx", "mi300x-cpx", "mi355x-8", "h100-8", "mi300x-8"])
def test_matrix_of_a_recorded_machine(
    name: str, golden: Callable[[str, str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = MI300X if name == MI300X.name else grow(name, tmp_path)
    run(Options(root=str(root)), context(MachineFacts()))
    golden(f"topology/recorded-{name}.txt", without_problems(capsys.readouterr().out))


def test_adapters_are_compared_with_each_other_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    run(Options(root=str(MI300X), full=True), context(MachineFacts()))
    header, first = capsys.readouterr().out.split("\n\n")[2].splitlines()[:2]
    assert header.split()[-3:] == ["ens14f1np1", "eth0", "NUMA"]
    assert first.split()[-3:] == ["SYS", "NODE", "0"]


def test_only_problems_of_devices_links_and_adapters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    told = (
        "/sys/class/infiniband/mlx5_0/fw_ver",
        "/sys/bus/pci/devices/0000:05:00.0",
        "GPU 6 (0000:75:00.0)",
        "amd-smi",
    )
    untold = ("/dev/shm", "/proc/self/limits", "/etc/hosts", "/sys/fs/cgroup/memory.max")
    run(Options(), context(MachineFacts(problems=tuple(MachineProblem(where, "odd") for where in (*told, *untold)))))
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert shown == [f"problem: {where}: odd" for where in told]


def without_problems(text: str) -> str:
    """What the probe could not read in a recording is its own tests' matter."""
    return text.partition("\nproblem: ")[0]


def test_matrix_of_a_sick_node(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    run(Options(), context(sick_node()))
    golden("topology/sick.txt", capsys.readouterr().out)


@pytest.mark.parametrize("name", NODES)
def test_the_picture_has_each_card_adapter_partition_and_link_once(name: str) -> None:
    facts = NODES[name]
    svg = picture(facts)
    assert len(of_class(svg, "device")) == len(facts.devices)
    assert len(of_class(svg, "adapter")) == len(facts.rdma)
    is_divided = len(facts.partitions) > len(facts.devices)
    assert len(of_class(svg, "cell")) == (len(facts.partitions) if is_divided else 0)
    samples = len({link.kind for link in facts.links})
    assert len(of_class(svg, "link")) == len(facts.links) + samples


@pytest.mark.parametrize("name", NODES)
def test_no_two_texts_overlap_and_none_leaves_the_picture(name: str) -> None:
    svg = picture(NODES[name])
    boxes = [box(text) for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    width, height = float(svg.get("width", 0)), float(svg.get("height", 0))
    assert all(left > 0 and right < width and top > 0 and bottom < height for left, top, right, bottom in boxes)
    assert not [(a, b) for a, b in combinations(boxes, 2) if overlap(a, b)]


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    style = text.get("class", "").split()
    size = topology_picture.SIZES.get(style[0], 11)
    if style[0] == "cell-text":
        size = int(style[1].removeprefix("size-"))
    length = len(text.text or "") * size * 0.58
    start = {"end": 1.0, "word": 0.5, "cell-text": 0.5}
    left = float(text.get("x", 0)) - length * max(start.get(name, 0.0) for name in style)
    bottom = float(text.get("y", 0))
    return left, bottom - size * 0.8, left + length, bottom


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_cards_stand_on_two_sides_even_when_one_numa_node_has_them_all() -> None:
    for name in ("mi300x", "one-numa", "h100", "mi300a"):
        lefts = [card.find("{*}rect").get("x") for card in of_class(picture(NODES[name]), "device")]  # type: ignore[union-attr]
        assert sorted(map(lefts.count, set(lefts))) == [len(lefts) // 2] * 2, name


def test_what_is_wrong_is_told_in_words_beside_its_color() -> None:
    svg = picture(sick_node())
    texts = "\n".join(element.text or "" for element in svg.iter())
    for said in ("PCIe x8 of x16, 16 of 32 GT/s", "DOWN", "none", "xGMI link missing", "degraded PCIe link"):
        assert said in texts
    assert len(of_class(svg, "missing")) == 2  # the link, and its sample in the legend


def test_kinds_of_links_differ_in_dash_too() -> None:
    assert re.search(r"\.nvlink \{[^}]*stroke-dasharray", topology_picture.STYLE)
    assert not re.search(r"\.xgmi \{[^}]*stroke-dasharray", topology_picture.STYLE)


def test_a_picture_is_the_same_every_time_and_escapes_names() -> None:
    facts = replace(node(), host="<b>&")
    assert topology_picture.draw_topology_svg(facts, build_topology(facts)) == topology_picture.draw_topology_svg(
        facts, build_topology(facts)
    )
    assert "<b>&" in "".join(element.text or "" for element in picture(facts).iter())


def test_the_page_opens_in_a_browser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "node.html"
    run(Options(output=str(file)), context(sick_node()))
    assert f"picture: {file}" in capsys.readouterr().out
    shown = browser.dom(file)
    assert "<title>Topology of node-17</title>" in shown
    assert ">GPU 7</text>" in shown
    assert "Permission denied" in shown
    assert len(browser.screenshot(file, tmp_path / "node.png").read_bytes()) > 40_000


def test_visualize_writes_beside_the_caller_and_svg_is_the_picture_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(Options(visualize=True), context(node()))
    run(Options(output="out.svg"), context(node()))
    assert (tmp_path / "topology.html").read_text().startswith("<!doctype html>")
    assert ElementTree.parse(tmp_path / "out.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_json_carries_the_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    run(Options(), context(node(), as_json=True))
    value = json.loads(capsys.readouterr().out)
    assert value["topology"]["matrix"][0][:3] == ["X", "XGMI", "XGMI"]
    assert len(value["devices"]) == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Options(output="x.png"), "neither .html nor .svg"),
        (Options(root="/does/not/exist"), "not a recorded machine"),
        (Options(root=".", assume="mi300x:8"), "mutually exclusive"),
    ],
)
def test_what_cannot_be_done_is_said(options: Options, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run(options, context(MachineFacts()))


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrimusError, match="cannot be written"):
        run(Options(output=str(tmp_path / "file" / "x.svg")), context(MachineFacts()))
