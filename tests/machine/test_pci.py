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


def test_what_the_kernel_does_not_know_is_none(tmp_path: Path) -> None:
    folder = tmp_path / pci.DEVICES / "0000:05:00.0"
    folder.mkdir(parents=True)
    values = {"current_link_speed": "Unknown", "max_link_speed": "2.5 GT/s PCIe", "current_link_width": "0"}
    for name, value in (values | {"numa_node": "-1"}).items():
        (folder / name).write_text(value + "\n")
    assert pci.read_slowest_link(FileTree(tmp_path), "0000:05:00.0") == PcieLink(max_speed_gts=2.5)
    assert pci.read_numa_node(FileTree(tmp_path), "0000:05:00.0") is None


def test_a_pci_path_is_read_from_the_link_of_the_device(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices"
    folder.mkdir(parents=True)
    (folder / "0000:05:00.0").symlink_to("../../../devices/pci0000:00/0000:00:01.1/0000:05:00.0")
    (folder / "0000:06:00.0").mkdir()
    assert pci.find_pci_path(FileTree(tmp_path), "0000:05:00.0") == ("pci0000:00", "0000:00:01.1", "0000:05:00.0")
    assert pci.find_pci_path(FileTree(tmp_path), "0000:06:00.0") == ()
    assert pci.find_pci_path(FileTree(tmp_path), "0000:07:00.0") == ()
