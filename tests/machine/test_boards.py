"""Machines that RCCL's topology files describe are read as what they are, and healthy ones are fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from machines.boards import BOARDS, MI250_8, MI250X_4, MI300X_8, Board, grow
from primus.machine.facts import MachineFacts
from primus.machine.probe import probe
from primus.machine.topology import build_topology
from primus.machine.tree import FileTree
from primus.preflight.checks import gpu, ports
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.report.topology_layout import PictureLayout


def checked(root: Path) -> tuple[MachineFacts, list[CheckFinding]]:
    facts = probe(root)
    node = PreflightNode(facts=facts, tree=FileTree(root))
    return facts, [finding for check in (*gpu.CHECKS, *ports.CHECKS) for finding in check(node)]


def failing(root: Path) -> dict[str, str]:
    return {one.check: one.measured for one in checked(root)[1] if one.status in ("fail", "unknown")}


EXPECTED = {
    "mi250-8": ("MI250", 8, 16, None),
    "mi250x-4": ("MI250X", 4, 8, None),
    "mi300a-4": ("MI300A", 4, 4, "SPX"),
    "mi300x-8": ("MI300X", 8, 8, "SPX"),
    "mi100-8": ("MI100", 8, 8, None),
    "mi210-3": ("MI210", 3, 3, None),
}
"""Model, cards, devices and compute partition mode."""


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_is_read_as_it_is_built(tmp_path: Path, name: str) -> None:
    facts = probe(grow(BOARDS[name], tmp_path))
    (mode,) = {device.partition_mode for device in facts.devices}
    assert (facts.model, len(facts.devices), len(facts.partitions), mode) == EXPECTED[name]
    assert not [problem for problem in facts.problems if "kfd" in problem.where]
    assert len(facts.rdma) == len(BOARDS[name].adapters.split("\n")[1:-1])


@pytest.mark.parametrize("name", BOARDS)
def test_a_healthy_board_is_fit_and_drawn_without_faults(tmp_path: Path, name: str) -> None:
    root = grow(BOARDS[name], tmp_path)
    assert failing(root) == {}
    assert not [one for one in build_topology(probe(root)).warnings if "NUMA" not in one]


@pytest.mark.parametrize("name", BOARDS)
def test_the_picture_says_of_each_group_what_the_matrix_says(tmp_path: Path, name: str) -> None:
    facts = probe(grow(BOARDS[name], tmp_path))
    found = build_topology(facts)
    for frame in PictureLayout(facts, found).frames:
        for group in frame.groups:
            pairs = {
                found.find_relation_word(f"GPU{card.index}", nic.name) for card in group.gpus for nic in group.nics
            }
            assert set(group.words) == pairs


def test_links_between_two_cards_are_those_of_their_dies_together(tmp_path: Path) -> None:
    found = build_topology(probe(grow(MI250_8, tmp_path)))
    assert found.find_relation_word("GPU0", "GPU1") == "XGMI3"
    assert found.find_relation_word("GPU0", "mlx5_0") == "PIX" and found.find_relation_word("GPU0", "mlx5_1") == "PXB"
    indirect = Counter(word for row in found.matrix[:8] for word in row[:8])
    assert indirect["HOP2"] > 0 and found.islands == (tuple(range(8)),)


def test_a_die_that_the_driver_lost_leaves_its_twin_alone(tmp_path: Path) -> None:
    root = grow(MI250_8, tmp_path)
    (root / "sys/class/kfd/kfd/topology/nodes/3/properties").write_text("simd_count 0\n")
    facts = probe(root)
    assert [len(device.partitions) for device in facts.devices] == [1, 2, 2, 2, 2, 2, 2, 2]
    assert "gpu.partitions" in failing(root)


@pytest.mark.parametrize("board", [MI250_8, MI250X_4, MI300X_8], ids=lambda one: one.source)
def test_a_board_without_its_driver_is_not_a_machine_without_devices(tmp_path: Path, board: Board) -> None:
    root = grow(board, tmp_path)
    (root / "sys/class/kfd").rename(root / "sys/class/gone")
    assert failing(root)["gpu.count"] == f"0, of {8 if board is not MI250X_4 else 4} GPUs on the bus"


@pytest.mark.parametrize(
    ("board", "lost"), [(MI300X_8, ("0c", "df")), (MI250_8, ("4e", "0e")), (MI250X_4, ("c1", "d9"))]
)
def test_a_lost_link_fails_on_each_kind_of_board(tmp_path: Path, board: Board, lost: tuple[str, str]) -> None:
    assert "gpu.links" in failing(grow(board, tmp_path, lost=(lost,)))


@pytest.mark.parametrize(("board", "bus"), [(MI300X_8, "0a"), (MI300X_8, "05"), (MI250_8, "4c")])
def test_a_slot_that_trained_down_is_seen_above_the_package(tmp_path: Path, board: Board, bus: str) -> None:
    root = grow(replace(board, slots={bus: (8.0, 4)}), tmp_path)
    assert failing(root)["gpu.pcie_link"] == f"8 GT/s x4 at 0000:{bus}:00.0"
    warnings = build_topology(probe(root)).warnings
    assert any("GPU0 has a degraded PCIe link: x4 of" in warning for warning in warnings)


def test_the_slot_of_an_adapter_is_checked_too(tmp_path: Path) -> None:
    root = grow(replace(MI300X_8, slots={"07": (16.0, 16)}), tmp_path)
    assert failing(root) == {"network.pcie_link": "16 GT/s x16"}


def test_a_port_that_a_hypervisor_made_up_does_not_count(tmp_path: Path) -> None:
    root = grow(replace(MI300X_8, package_port=None, slot=(32.0, 16)), tmp_path)
    for port in root.glob("sys/bus/pci/devices/*:0[bc].0"):
        (port / "current_link_speed").write_text("2.5 GT/s PCIe\n")
        (port / "current_link_width").write_text("1\n")
    assert failing(root) == {}
