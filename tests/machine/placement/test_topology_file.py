"""The switches above nodes, as files of a site and variables name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.errors import UsageError
from primus.machine.facts import Device
from primus.machine.placement.node_place import find_fabric, read_place_variables
from primus.machine.placement.topology_file import read_topology_file


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_switches_nest_around_host_lists(tmp_path: Path) -> None:
    file = write(
        tmp_path, "t.yaml", "spine1:\n  leaf1: gpu[01-02]\n  leaf2: [gpu03, gpu10]\nspine2:\n  leaf1: gpu04,gpu05\n"
    )
    assert read_topology_file(file) == {
        "gpu01": ("spine1", "leaf1"),
        "gpu02": ("spine1", "leaf1"),
        "gpu03": ("spine1", "leaf2"),
        "gpu10": ("spine1", "leaf2"),
        "gpu04": ("spine2", "leaf1"),
        "gpu05": ("spine2", "leaf1"),
    }


def test_a_table_has_a_line_for_each_node(tmp_path: Path) -> None:
    file = write(tmp_path, "t.csv", "# node, spine, leaf\nn1, s1, l1\nn2,s1,l2\n\n")
    assert read_topology_file(file) == {"n1": ("s1", "l1"), "n2": ("s1", "l2")}


def test_the_file_of_slurm_is_read(tmp_path: Path) -> None:
    tree = "SwitchName=l1 Nodes=n[1-2] LinkSpeed=100\nSwitchName=l2 Nodes=n3\n# SwitchName=l9 Nodes=n9\n"
    tree += "SwitchName=s Switches=l[1-2]\n"
    assert read_topology_file(write(tmp_path, "topology.conf", tree)) == {
        "n1": ("s", "l1"),
        "n2": ("s", "l1"),
        "n3": ("s", "l2"),
    }
    blocks = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n3\nBlockSizes=2\n"
    assert read_topology_file(write(tmp_path, "blocks.conf", blocks))["n3"] == ("b2",)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.yaml", "s1:\n  l1: n[1-2]\ns2:\n  l1: n2\n", r"t.yaml:4: n2 is below s2/l1, and also below s1/l1"),
        ("t.yaml", "s1:\n  l1: 7\n", r"t.yaml:2: 7 below s1/l1 is not a host list"),
        ("t.yaml", "s1:\n  l1: n[1-\n", "a bracket is not closed|t.yaml"),
        ("t.csv", "# nothing\n", "names no node"),
        ("t.csv", "n1,s1\nn1,s2\n", "t.csv:2: n1 is below s2, and also below s1"),
    ],
)
def test_a_file_that_says_nothing_or_two_things_is_refused(tmp_path: Path, name: str, text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_topology_file(write(tmp_path, name, text))


def test_a_node_reads_its_place_from_slurm_or_from_its_site() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "core.leaf1.n1.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert read_place_variables(slurm) == ("core", "leaf1")
    assert read_place_variables({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ()
    assert read_place_variables({**slurm, "PRIMUS_NODE_PLACE": "rail.rack7"}) == ("rail", "rack7")
    assert read_place_variables({}) == ()


def test_an_nvlink_domain_is_a_level_where_all_gpus_share_it() -> None:
    gpus = [Device(index=index, vendor="nvidia", fabric="7b.3") for index in range(4)]
    assert find_fabric(gpus) == ("nvlink-7b.3",)
    assert find_fabric([*gpus, Device(index=4, vendor="nvidia")]) == ()
    assert find_fabric([Device(index=0, vendor="amd", hive="1")]) == find_fabric([]) == ()
