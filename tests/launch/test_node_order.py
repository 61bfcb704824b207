"""The order of node ranks that node 0 chooses, over restarts and spares, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from primus.launch.node_order import locate_nodes, order_nodes
from primus.runs.node_record import NodesRecord, RunNode

TWO_LEAVES = {"a1": ("a",), "b1": ("b",), "a2": ("a",), "b2": ("b",), "a3": ("a",), "b3": ("b",)}


def nodes(*hosts: str) -> list[RunNode]:
    return [RunNode(host=host, scheduler_rank=rank, place=TWO_LEAVES.get(host, ())) for rank, host in enumerate(hosts)]


def hosts(record: NodesRecord) -> list[str]:
    return [node.host for node in record.nodes]


def test_a_spare_takes_the_rank_of_the_lost_node_and_the_others_keep_theirs() -> None:
    first = order_nodes(nodes("a1", "b1", "a2", "b2"), (), 8)
    assert hosts(first) == ["a1", "a2", "b1", "b2"]
    assert first.summary.endswith("2 links of 1 data-parallel group cross a leaf; in the scheduler's order 4")
    assert hosts(order_nodes(nodes("a1", "b1", "b2", "b3"), (), 8, first)) == ["a1", "b3", "b1", "b2"]
    without_places = [RunNode(host=host, scheduler_rank=i) for i, host in enumerate(("a1", "b1", "b2", "x"))]
    assert hosts(order_nodes(without_places, (), 8, first)) == ["a1", "x", "b1", "b2"]


def test_a_lost_node_0_is_replaced_by_the_node_where_the_workers_meet_now() -> None:
    first = order_nodes(nodes("a1", "b1", "a2", "b2"), (), 8)
    again = order_nodes(nodes("a2", "b1", "b2", "b3"), (), 8, first)
    assert hosts(again)[0] == "a2"
    assert hosts(again)[2:] == ["b1", "b2"]


def test_a_start_with_another_number_of_nodes_is_ordered_anew() -> None:
    first = order_nodes(nodes("a1", "b1", "a2", "b2"), (), 8)
    fewer = order_nodes(nodes("a1", "b1", "b2", "a3", "a2", "b3"), (), 8, first)
    assert [host[0] for host in hosts(fewer)] == ["a", "a", "a", "b", "b", "b"]


def test_nodes_of_one_host_name_are_not_told_apart_by_it() -> None:
    same = [RunNode(host="h", scheduler_rank=i, place=(leaf,)) for i, leaf in enumerate("abab")]
    earlier = NodesRecord(nodes=tuple(same))
    assert [node.scheduler_rank for node in order_nodes(same, (), 1, earlier).nodes] == [0, 2, 1, 3]


def test_nodes_whose_place_is_unknown_are_named() -> None:
    record = order_nodes(nodes("a1", "x1", "a2", "x2", "x3", "x4", "b1"), (), 8)
    assert hosts(record) == ["a1", "x1", "a2", "x2", "x3", "x4", "b1"]
    assert record.summary == "nodes are not ordered by the network: where 4 of 7 stand is unknown (x1, x2, x3, ...)"
    assert order_nodes(nodes("x1", "x2", "x3"), (), 8).summary == ""  # no source at all
    assert "3 of 3" in order_nodes(nodes("x1", "x2", "x3"), (), 8, must_know=True).summary


@pytest.mark.parametrize("written", ["n[1-2]", "n1.cluster.example,n2.cluster.example"])
def test_hosts_are_found_in_a_file_with_and_without_their_domain(tmp_path: Path, written: str) -> None:
    (tmp_path / "t.yaml").write_text(f"leaf1: {written}\n")
    given = [RunNode(host="n1", scheduler_rank=0, place=("slurm",)), RunNode(host="n2.other", scheduler_rank=1)]
    located = locate_nodes([*given, RunNode(host="n3", scheduler_rank=2, place=("x",))], str(tmp_path / "t.yaml"))
    assert [node.place for node in located] == [("leaf1",), ("leaf1",), ()]
    assert locate_nodes(given, None) == given
