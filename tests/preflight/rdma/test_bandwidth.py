"""Slow RDMA ports are named by a tournament and bisection, over real processes that stand for ib_write_bw."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from fakes import ib_write_bw, tools
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import MachineFacts, RdmaDevice, RdmaPort
from primus.machine.tree import FileTree
from primus.preflight.findings.finding import CheckFinding
from primus.preflight.findings.node import PreflightNode
from primus.preflight.rdma import bandwidth as rdma_bandwidth
from primus.preflight.rdma import perftest
from primus.preflight.rdma import session as rdma_session
from primus.preflight.rdma.bandwidth import Member, RdmaInventory, Tournament, TournamentResult, Transfer
from primus.preflight.rdma.perftest import PerftestServer, Rail, TransferReading

RATE, GOOD = 400.0, 390.0
Gbps = Callable[[Transfer, Sequence[Transfer]], float]


def play(nodes: int, rails: int, gbps: Gbps) -> tuple[TournamentResult, int]:
    """A tournament whose transfers reach what `gbps` says of each among those that run at once; and their number."""
    inventories = {
        node: RdmaInventory(rails=tuple(Rail(index=i, hca=f"mlx5_{i}", port=1, rate_gbps=RATE) for i in range(rails)))
        for node in range(nodes)
    }
    count = 0

    def transfer(some: Sequence[Transfer]) -> Mapping[Transfer, TransferReading]:
        nonlocal count
        count += 1
        used = [member for one in some for member in one]
        assert nodes == 1 or len(used) == len(set(used)), "a port has one transfer at a time"
        return {one: TransferReading(gbps=gbps(one, some)) for one in some}

    return Tournament(inventories, transfer).run_tournament(), count


def slow(*members: Member, to: float = 150.0) -> Gbps:
    return lambda one, _: to if {*one} & {*members} else GOOD


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 9, 16])
def test_sound_ports_are_measured_in_few_steps_and_nobody_is_blamed(nodes: int) -> None:
    outcome, steps = play(nodes, 8, slow())
    assert (outcome.guilty, outcome.doubtful, outcome.cleared) == ([], [], [])
    assert steps <= 2 * rdma_bandwidth.MOST_ROUNDS
    assert {member for pair in outcome.readings for member in pair} == {
        Member(n, r) for n in range(nodes) for r in range(8)
    }


@pytest.mark.parametrize("nodes", [3, 4, 7, 16])
@pytest.mark.parametrize("culprits", [[Member(2, 5)], [Member(0, 0), Member(2, 5)], [Member(2, 5), Member(2, 6)]])
def test_slow_ports_are_named_and_no_others(nodes: int, culprits: list[Member]) -> None:
    outcome, _ = play(nodes, 8, slow(*culprits))
    assert sorted(outcome.guilty) == [(culprit,) for culprit in culprits]
    assert (outcome.doubtful, outcome.cleared) == ([], [])


def test_a_port_that_is_slow_in_one_direction_is_named() -> None:
    outcome, _ = play(4, 2, lambda one, _: 100.0 if one.sender == Member(3, 1) else GOOD)
    assert outcome.guilty == [(Member(3, 1),)]


def test_a_port_that_never_works_is_named() -> None:
    outcome, _ = play(4, 2, slow(Member(1, 0), to=0.0))
    assert outcome.guilty == [(Member(1, 0),)]


def test_ports_that_are_slow_only_together_are_named_as_a_group() -> None:
    pair = {Member(1, 0), Member(2, 0)}  # two nodes behind one oversubscribed link

    def gbps(one: Transfer, some: Sequence[Transfer]) -> float:
        active = {member for other in some for member in other}
        return 200.0 if pair <= active and {*one} & pair and not pair <= {*one} else GOOD

    outcome, _ = play(6, 1, gbps)
    assert [{*group} for group in outcome.guilty] == [pair]
    hosts = {node: f"node{node}" for node in range(6)}
    inventories = {n: RdmaInventory(rails=(Rail(index=0, hca="mlx5_0", port=1, rate_gbps=RATE),)) for n in range(6)}
    told = [one for one in rdma_bandwidth.report_tournament(outcome, inventories, hosts) if one.status == "fail"]
    assert {one.host for one in told} == {"node1", "node2"}
    assert "only while mlx5_0 port 1 of node2 send as well" in told[0].measured


def test_of_two_nodes_either_may_be_at_fault() -> None:
    outcome, _ = play(2, 4, slow(Member(1, 3)))
    assert outcome.doubtful == [Member(0, 3), Member(1, 3)]


def test_a_slow_way_between_two_sound_ports_blames_neither_port() -> None:
    outcome, _ = play(6, 1, lambda one, _: 100.0 if {m.node for m in one} == {1, 4} else GOOD)
    assert outcome.guilty == []
    assert outcome.cleared == [Member(1, 0), Member(4, 0)]


def test_a_single_node_names_the_port_whose_loopback_is_slow() -> None:
    outcome, _ = play(1, 4, slow(Member(0, 2)))
    assert outcome.guilty == [(Member(0, 2),)]


OLD_TABLE = """\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      5000             11648.25            11647.96\t\t   0.186367
"""
TABLE = ib_write_bw.TABLE.format(hca="mlx5_0", gbps=391.12)


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        (TABLE, 391.12),
        (TABLE.replace("Gb/sec", "MiB/sec").replace("391.12", "46625.14"), 391.12),
        (TABLE.partition("8388608")[0], None),  # a header without a row (AMD-AGI/Primus-SaFE#728)
        (TABLE.replace("391.12", "inf"), None),
        ("Couldn't connect to node1:18515\n", None),
        ("", None),
        (OLD_TABLE, 97.709),
    ],
)
def test_the_table_of_perftest_is_read_below_its_header(text: str, gbps: float | None) -> None:
    found = perftest.parse_bandwidth(text)
    assert found is None if gbps is None else found == pytest.approx(gbps, rel=1e-4)


def environment(folder: Path, node: int) -> dict[str, str]:
    """PATH with the program that stands for ib_write_bw, of which `folder` says what each port reaches."""
    (folder / "faults").mkdir(parents=True, exist_ok=True)
    program = f'exec {sys.executable} {ib_write_bw.__file__} "$@"'
    tools.tool(folder / "bin", "ib_write_bw", program)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NODE": str(node), "FAULTS": str(folder / "faults")}


def node(folder: Path, rank: int, nodes: int, port: int, rails: int = 2) -> PreflightNode:
    rdma_port = RdmaPort(state="ACTIVE", physical_state="LinkUp", rate_gbps=RATE, link_layer="InfiniBand")
    facts = MachineFacts(rdma=tuple(RdmaDevice(name=f"mlx5_{i}", ports=(rdma_port,)) for i in range(rails)))
    layout = ClusterLayout(nproc=1, nnodes=nodes, node_rank=rank, master_addr="127.0.0.1", master_port=port)
    return PreflightNode(facts=facts, tree=FileTree(), environ=environment(folder, rank), layout=layout)


def measure(folder: Path, nodes: int, absent: Sequence[int] = ()) -> dict[tuple[str, str], CheckFinding]:
    """Findings by host and subject, of nodes that are threads of this process."""
    with closing(socket.create_server(("", 0))) as free:
        port = int(free.getsockname()[1])
    hosts = {rank: f"n{rank}" for rank in range(nodes)}
    followers = [
        threading.Thread(
            target=rdma_session.follow_measurements,
            args=(node(folder, rank, nodes, port), f"n{rank}"),
            kwargs={"is_quick": True},
        )
        for rank in range(1, nodes)
        if rank not in absent
    ]
    for follower in followers:
        follower.start()
    said: list[str] = []
    found = rdma_session.lead_measurements(node(folder, 0, nodes, port), "n0", hosts, said.append, is_quick=True)
    for follower in followers:
        follower.join(20)
        assert not follower.is_alive(), "every node is let go"
    return {(one.host, one.subject): one for one in found}


def test_three_nodes_measure_each_other_and_the_slow_port_is_named(tmp_path: Path) -> None:
    environment(tmp_path, 0)
    (tmp_path / "faults/2-mlx5_1").write_text("190.0")
    found = measure(tmp_path, 3)
    assert {name: one.status for name, one in found.items()} == {
        ("n2", "mlx5_1 port 1 (rail 1)"): "fail", ("n0", ""): "ok", ("n1", ""): "ok", ("n2", ""): "ok",
    }  # fmt: skip
    assert found["n2", "mlx5_1 port 1 (rail 1)"].expected == ">= 280 Gb/s"
    assert "391.1" in found["n0", ""].measured


def test_a_port_that_cannot_be_opened_fails_with_what_the_program_says(tmp_path: Path) -> None:
    environment(tmp_path, 0)
    (tmp_path / "faults/0-mlx5_0").write_text("0")
    found = measure(tmp_path, 1)
    broken = found["n0", "mlx5_0 port 1 (rail 0)"]
    assert broken.status == "fail"
    assert "IB device mlx5_0 not found" in broken.measured
    assert found["n0", ""].status == "ok", "the other port of the node"


def test_nodes_without_the_program_are_not_measured(tmp_path: Path) -> None:
    lone = node(tmp_path, 0, 1, 0)
    without = PreflightNode(facts=lone.facts, tree=lone.tree, environ={"PATH": "/nowhere"}, layout=lone.layout)
    (one,) = rdma_session.lead_measurements(without, "n0", {0: "n0"}, print)
    assert (one.status, "ib_write_bw is not installed" in one.measured) == ("info", True)


def test_a_server_that_nobody_calls_is_ended_by_its_pid(tmp_path: Path) -> None:
    server = PerftestServer(Rail(index=0, hca="mlx5_0", port=1), 1, environment(tmp_path, 0))
    assert server.problem == ""
    assert perftest.is_listening(server.tcp_port)
    assert server._child is not None
    pid = server._child.pid
    server.stop()
    assert tools.is_gone(pid)
    assert not perftest.is_listening(server.tcp_port)


class FirstPortIsReserved(frozenset[int]):
    """Reserves the port that is asked for first."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def __contains__(self, port: object) -> bool:
        self.asked.append(port)
        return len(self.asked) == 1


def test_a_server_leaves_the_port_of_the_launch_free() -> None:
    reserved = FirstPortIsReserved()
    port = perftest.find_free_port(reserved)
    assert [port] == reserved.asked[1:]
    assert port != reserved.asked[0]


def test_a_client_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    environ = environment(tmp_path, 0)
    (tmp_path / "faults/hang-0-mlx5_0").write_text("")
    reading = perftest.send_data(Rail(index=0, hca="mlx5_0", port=1), "127.0.0.1", 1, 1, environ, limit_s=0.5)
    assert reading.gbps is None
    assert "gave no response in 0.5 s" in reading.problem


def test_roce_names_its_gid_and_infiniband_does_not() -> None:
    rail = Rail(index=0, hca="mlx5_0", port=1, gid_index=3)
    assert perftest.build_argv(rail, 18515, 5, "n1")[-5:] == ["-x", "3", "-F", "--report_gbits", "n1"]
    assert "-x" not in perftest.build_argv(Rail(index=0, hca="mlx5_0", port=1), 18515, 5)
