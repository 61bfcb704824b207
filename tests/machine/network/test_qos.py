"""Traffic classes are read from what nicctl prints of each adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.machine.network import qos
from primus.machine.tree import FileTree

BLOCK = """
NIC  : 1111111-4c32-3533-3330-12345000000  (0000:{bus}:00.0)

Port : 0490814a-6c40-4242-4242-000011010000

  Classification type         : DSCP

  DSCP-to-priority :
    DSCP bitmap               : 0x0000000000000400 ==> priority : 0
    DSCP bitmap               : 0xffffbffffffffbff ==> priority : 1
    DSCP bitmap               : 0x0000400000000000 ==> priority : 6
    DSCP                      : {data} ==> priority : 0
    DSCP                      : 0-9, 11-45, 47-63 ==> priority : 1
    DSCP                      : 46 ==> priority : 6

  PFC :
    PFC priority bitmap       : 0x1
    PFC no-drop priorities    : {lossless}

  Scheduling :
    --------------------------------------------
    Priority  Scheduling  Bandwidth Rate-limit
              Type        (in %age) (in Gbps)
    --------------------------------------------
    0         DWRR        99        N/A
    1         DWRR        1         N/A
    6         strict      N/A       10
"""


def block(bus: str = "06", data: str = "10", lossless: str = "0") -> str:
    return BLOCK.format(bus=bus, data=data, lossless=lossless)


def test_data_goes_to_the_lossless_queue_and_control_to_the_strict_one() -> None:
    assert qos.parse_traffic_classes(block() + block("26")) == {(40, 184)}


def test_of_several_lossless_queues_the_one_with_most_bandwidth_has_the_data() -> None:
    assert qos.parse_traffic_classes(block(lossless="1,0")) == {(40, 184)}


@pytest.mark.parametrize("text", ["", "nicctl: permission denied", block(lossless=""), block(data="8-15")])
def test_what_does_not_name_one_class_names_none(text: str) -> None:
    assert qos.parse_traffic_classes(text) == set()


@pytest.mark.parametrize(
    ("text", "found", "problem"),
    [
        (block() + block("26"), (40, 184), ""),
        (block() + block("26", data="26"), None, "the NICs have different settings"),
        (block(lossless=""), None, "reports no lossless queue with a single DSCP"),
    ],
)
def test_the_tool_is_asked_and_adapters_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: tuple[int, int] | None, problem: str
) -> None:
    (tmp_path / "qos.txt").write_text(text)
    tool = tmp_path / "nicctl"
    tool.write_text(f'#!/bin/sh\n[ "$1 $2" = "show qos" ] && cat {tmp_path}/qos.txt\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tree = FileTree(tmp_path)
    assert qos.read_traffic_classes(tree) == found
    assert [one.problem for one in tree.problems] == ([problem] if problem else [])
