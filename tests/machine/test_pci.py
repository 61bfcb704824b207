"""Addresses and links are read as the kernel and the tools write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines.tree import HERE, grow
from primus.machine import pci
from primus.machine.facts import PcieLink
from primus.machine.tree import FileTree


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:05:00.0", "0000:05:00.0"),
        ("00000000:0A:00.0", "0000:0a:00.0"),
        ("00010000:0A:00.0", "10000:0a:00.0"),
        ("e5:00.6", "0000:e5:00.6"),
        ("0001:0b:00.0 ", "0001:0b:00.0"),
        ("N/A", None),
        ("", None),
        ("0000:05:00.8", None),
    ],
)
def test_an_address_has_one_spelling(text: str, expected: str | None) -> None:
    assert pci.normalize_address(text) == expected


def test_an_instinct_is_an_accelerator_and_an_nvswitch_is_none(tmp_path: Path) -> None:
    assert len(pci.list_accelerators(FileTree(HERE / "mi300x-8"))) == 8
    found = pci.list_accelerators(FileTree(grow("h100-8", tmp_path)))
    assert len(found) == 8 and {function.device for function in found} == {0x2330}


@pytest.mark.parametrize(("device", "is_listed"), [(0x740F, True), (0x744C, False)], ids=["MI210", "RX 7900 XTX"])
def test_of_the_display_controllers_of_amd_only_an_instinct_is_an_accelerator(
    tmp_path: Path, device: int, is_listed: bool
) -> None:
    folder = tmp_path / pci.DEVICES / "0000:05:00.0"
    folder.mkdir(parents=True)
    for name, value in {"vendor": pci.AMD, "class": pci.DISPLAY << 8, "device": device}.items():
        (folder / name).write_text(f"{value:#x}\n")
    assert bool(pci.list_accelerators(FileTree(tmp_path))) == is_listed


def test_what_the_kernel_does_not_know_is_none(tmp_path: Path) -> None:
    folder = tmp_path / pci.DEVICES / "0000:05:00.0"
    folder.mkdir(parents=True)
    values = {"current_link_speed": "Unknown", "max_link_speed": "2.5 GT/s PCIe", "current_link_width": "0"}
    for name, value in (values | {"numa_node": "-1"}).items():
        (folder / name).write_text(value + "\n")
    assert pci.read_slowest_link(FileTree(tmp_path), "0000:05:00.0") == PcieLink(max_speed_gts=2.5)
    assert pci.read_numa_node(FileTree(tmp_path), "0000:05:00.0") is None


@pytest.mark.parametrize(("written", "node"), [("0", 0), ("1", 1), ("-1", None)])
def test_the_first_numa_node_is_a_node(tmp_path: Path, written: str, node: int | None) -> None:
    folder = tmp_path / pci.DEVICES / "0000:05:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{written}\n")
    assert pci.read_numa_node(FileTree(tmp_path), "0000:05:00.0") == node


@pytest.mark.parametrize(("written", "width"), [("1", 1), ("16", 16), ("255", None), ("0", None)])
def test_a_width_that_the_kernel_does_not_know_is_none(tmp_path: Path, written: str, width: int | None) -> None:
    folder = tmp_path / pci.DEVICES / "0000:05:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_width").write_text(f"{written}\n")
    assert pci.read_slowest_link(FileTree(tmp_path), "0000:05:00.0") == PcieLink(width=width)


def test_a_pci_path_is_read_from_the_link_of_the_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices"
    folder.mkdir(parents=True)
    (folder / "0000:05:00.0").symlink_to("../../../devices/pci0000:00/0000:00:01.1/0000:05:00.0")
    (folder / "0000:06:00.0").mkdir()
    assert pci.find_pci_path(FileTree(tmp_path), "0000:05:00.0") == ("pci0000:00", "0000:00:01.1", "0000:05:00.0")
    assert pci.find_pci_path(FileTree(tmp_path), "0000:06:00.0") == ()
    assert pci.find_pci_path(FileTree(tmp_path), "0000:07:00.0") == ()


def test_a_port_of_equal_speed_but_another_width_limits_no_link(tmp_path: Path) -> None:
    path = "pci0000:00/0000:00:01.0/0000:05:00.0"
    (tmp_path / pci.DEVICES).mkdir(parents=True)
    (tmp_path / "sys/devices" / path).mkdir(parents=True)
    for name, place, width in (("0000:00:01.0", path.rpartition("/")[0], "1"), ("0000:05:00.0", path, "16")):
        (tmp_path / pci.DEVICES / name).symlink_to(f"../../../devices/{place}")
        for file in ("current_link_speed", "max_link_speed"):
            (tmp_path / "sys/devices" / place / file).write_text("32.0 GT/s PCIe\n")
        for file in ("current_link_width", "max_link_width"):
            (tmp_path / "sys/devices" / place / file).write_text(f"{width}\n")
    found = pci.read_slowest_link(FileTree(tmp_path), "0000:05:00.0")
    assert (found.width, found.max_width) == (16, 16)
