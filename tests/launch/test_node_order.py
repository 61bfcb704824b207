"""The order of node ranks that node 0 chooses, over restarts and spares, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from machine.placement.test_measured_places import write_results
from primus.launch.node_order import find_own_place, locate_nodes, measure_places, order_nodes
from primus.launch.prepare import Launch
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import Device, MachineFacts
from primus.plan import LaunchJob, LaunchPlan, PlanContext, RankOrderPolicy
from primus.runs.node_record import NodesRecord, RunNode
from primus.runtime import LaunchRequest

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


def plan_pod(num_nodes: int, file: str | None = None, **environ: str) -> Launch:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PRIMUS_NODE_NAME": "n1", **environ}
    gpus = MachineFacts(devices=(Device(index=0, vendor="nvidia", fabric="7b.3"),))
    layout = ClusterLayout(nproc=1, nnodes=num_nodes, master_addr="n0", master_port=1)
    return Launch(
        job=LaunchJob(name="x", workspace="."),
        request=LaunchRequest(task="train", words=(), runtimes=()),
        command=(),
        directory=".",
        attempt=0,
        context=PlanContext(environ=pod, python="python", gpu_facts=lambda: gpus),
        plan=LaunchPlan(argv=(), layout=layout, rank_order=RankOrderPolicy(topology_file=file)),
    )


def test_the_nvlink_domain_is_the_innermost_level_of_a_nodes_place() -> None:
    assert find_own_place(plan_pod(3, PRIMUS_NODE_PLACE="spine.leaf")) == ("spine", "leaf", "nvlink-7b.3")
    assert find_own_place(plan_pod(2, PRIMUS_NODE_PLACE="spine.leaf")) == (), "of two nodes none can be moved"


def test_labels_that_a_pod_may_not_read_are_one_line() -> None:
    said: list[str] = []
    assert find_own_place(plan_pod(3), said.append) == ("nvlink-7b.3",)
    assert len(said) == 1
    assert said[0].startswith("labels of the nodes do not order the ranks, since the pods cannot read them: ")
    find_own_place(plan_pod(3))
    find_own_place(plan_pod(3, file="site.yaml"), said.append)
    assert len(said) == 1, "other nodes say nothing, and a file needs no labels"


def test_bandwidths_of_a_preflight_are_the_last_resort(tmp_path: Path) -> None:
    write_results(tmp_path, "20260102_000000-aaaa", ["a1", "b1", "a2", "b2"])
    said: list[str] = []
    given = [RunNode(host=host, scheduler_rank=rank) for rank, host in enumerate(("a1", "b1", "a2", "b2"))]
    assert hosts(order_nodes(measure_places(given, tmp_path, said.append), (), 8)) == ["a1", "a2", "b1", "b2"]
    file = tmp_path / "preflight/20260102_000000-aaaa/report/performance.json"
    assert said == [f"where nodes stand is taken from the bandwidths in {file}"]
    assert measure_places([*given, RunNode(host="c1", scheduler_rank=4)], tmp_path, said.append)[0].place == ()
