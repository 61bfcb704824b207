"""Relations of devices: the words, the islands, and what is reported as odd."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from fakes.nodes import node
from primus.machine.facts import Interface, Link, MachineFacts, PcieLink, RdmaPort
from primus.machine.topology import TopologyEnd, build_topology, count_expected_partitions

DOWN = RdmaPort(state="DOWN", physical_state="Polling")


def words(facts: MachineFacts) -> Counter[str]:
    """How often each word stands between two cards, each pair counted once."""
    found = build_topology(facts)
    number = len(facts.devices)
    return Counter(found.matrix[a][b] for a in range(number) for b in range(a + 1, number))


def test_cards_of_one_hive_are_linked_and_of_two_are_not() -> None:
    assert words(node()) == {"XGMI": 28}
    assert words(node(num_hives=2)) == {"XGMI": 12, "SYS": 16}
    assert build_topology(node(num_hives=2)).islands == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_nvlinks_are_counted() -> None:
    assert words(node(num_links=18)) == {"NV18": 28}


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (("pci0", "port", "up", "down-1", "gpu"), ("pci0", "port", "up", "down-2", "nic"), "PIX"),
        (("pci0", "port", "gpu"), ("pci0", "port", "nic"), "PIX"),
        (("pci0", "port", "up", "d1", "up-1", "d", "gpu"), ("pci0", "port", "up", "d2", "nic"), "PXB"),
        (("pci0", "port-1", "gpu"), ("pci0", "port-2", "nic"), "PHB"),
        (("pci0", "port", "gpu"), ("pci1", "port", "nic"), "NODE"),
        ((), ("pci1", "port", "nic"), "NODE"),
    ],
)
def test_pci_paths_decide_and_then_the_numa_node(first: tuple[str, ...], second: tuple[str, ...], word: str) -> None:
    facts = node(1, num_adapters=1)
    facts = replace(
        facts,
        devices=(replace(facts.devices[0], pci_path=first),),
        rdma=(replace(facts.rdma[0], pci_path=second),),
    )
    assert build_topology(facts).find_relation_word("GPU0", "mlx5_0") == word
    assert build_topology(facts).find_relation_word("mlx5_0", "GPU0") == word


def test_without_path_and_numa_node_the_relation_is_not_known() -> None:
    facts = node(2, num_adapters=0, num_hives=2, numa_of=lambda i: -1, has_paths=False)
    assert build_topology(replace(facts, links=())).find_relation_word("GPU0", "GPU1") == "?"


def test_a_link_seen_from_both_ends_is_one_link() -> None:
    facts = node(2)
    back = Link(kind="xgmi", first=1, second=0)
    assert words(replace(facts, links=(*facts.links, back))) == {"XGMI": 1}


def test_a_healthy_node_has_no_warning() -> None:
    assert build_topology(node()).warnings == ()
    assert build_topology(node(num_links=18)).warnings == ()


def test_a_missing_link_within_a_hive_is_named() -> None:
    facts = node()
    facts = replace(facts, links=tuple(link for link in facts.links if (link.first, link.second) != (2, 5)))
    assert build_topology(facts).warnings == ("missing xGMI links within a hive: GPU2-GPU5",)


def test_a_pair_with_fewer_nvlinks_is_named() -> None:
    facts = node(num_links=18)
    facts = replace(facts, links=(replace(facts.links[0], num_links=12), *facts.links[1:]))
    assert build_topology(facts).warnings == ("fewer than 18 NVLinks: GPU0-GPU1",)


def test_the_fullest_card_of_a_kind_says_how_many_partitions_there_should_be() -> None:
    facts = node(num_partitions=8)
    short = replace(facts.devices[7], partitions=facts.devices[7].partitions[:7])
    other = replace(short, model="MI308X")
    assert count_expected_partitions(replace(facts, devices=(*facts.devices[:7], short)), short) == 8
    assert count_expected_partitions(replace(facts, devices=(*facts.devices[:7], other)), other) == 7


def test_slow_pcie_a_dead_port_and_numa_gaps_are_named() -> None:
    facts = node(num_adapters=4)
    slow = PcieLink(speed_gts=16, width=8, max_speed_gts=32, max_width=16)
    lost = replace(facts.devices[1], numa_node=-1)
    facts = replace(
        facts,
        devices=(replace(facts.devices[0], pcie=slow), lost, *facts.devices[2:]),
        rdma=(*facts.rdma[:3], replace(facts.rdma[3], ports=(DOWN,))),
    )
    assert build_topology(facts).warnings == (
        "GPU0 has a degraded PCIe link: x8 of x16, 16 of 32 GT/s",
        "unknown NUMA node: GPU1",
        "NUMA node 1 has 4 GPUs and no NIC",
        "mlx5_3 is down (Polling)",
    )


def test_an_interface_with_its_own_device_is_an_adapter_once() -> None:
    facts = replace(
        node(1, num_adapters=1),
        interfaces=(
            Interface(name="ib0", bdf="0000:06:00.0", kind="infiniband", state="up"),
            Interface(name="eno1", bdf="0000:c0:00.0", numa_node=0, state="up", speed_mbps=25000),
            Interface(name="docker0", kind="virtual", state="up"),
        ),
    )
    adapters = [end for end in build_topology(facts).ends if end.kind == "nic"]
    assert [end.name for end in adapters] == ["mlx5_0", "eno1"]
    assert adapters[1] == TopologyEnd(
        name="eno1", kind="nic", bdf="0000:c0:00.0", numa_node=0, detail="25 Gb/s ethernet"
    )


def test_cards_with_nvlink_of_which_none_is_told_are_odd() -> None:
    assert any(
        "NVLink" in warning for warning in build_topology(replace(node(8, "H100", num_links=18), links=())).warnings
    )
    assert not any(
        "NVLink" in warning for warning in build_topology(replace(node(1, "H100", num_links=18), links=())).warnings
    )
    assert not any(
        "NVLink" in warning for warning in build_topology(replace(node(4, "L40S", num_links=18), links=())).warnings
    )
    assert not build_topology(node(8, "H100", num_links=18)).warnings
