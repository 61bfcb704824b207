"""Nodes take steps together over TCP; a node that does not come ends them within the limit."""

from __future__ import annotations

import threading
import time

from fakes import cli
from primus.machine.cluster import ClusterLayout
from primus.preflight.nodes import steps


def layout(rank: int, port: int, nodes: int = 3) -> ClusterLayout:
    return ClusterLayout(nproc=1, nnodes=nodes, node_rank=rank, master_addr="127.0.0.1", master_port=port)


def square(number: int) -> int:
    return number * number


def test_every_node_performs_its_own_order_and_node_0_hears_all() -> None:
    port = cli.find_free_port()
    followers = [
        threading.Thread(target=steps.follow_steps, args=(layout(rank, port), f"n{rank}", square, int, 20.0))
        for rank in (1, 2)
    ]
    for follower in followers:
        follower.start()
    with steps.StepLeader(layout(0, port), "n0", square, int, 20.0) as leader:
        assert leader.request_step({0: 2, 1: 3, 2: 4}) == {0: 4, 1: 9, 2: 16}
        assert leader.request_step({2: 5}) == {2: 25}
        assert leader.lost == ()
    for follower in followers:
        follower.join(20)
        assert not follower.is_alive()


def test_a_node_that_never_comes_is_lost_and_the_others_are_let_go() -> None:
    port = cli.find_free_port()
    follower = threading.Thread(target=steps.follow_steps, args=(layout(1, port), "n1", square, int, 20.0))
    follower.start()
    with steps.StepLeader(layout(0, port), "n0", square, int, 2.0) as leader:
        assert leader.lost == (2,)
        assert leader.request_step({0: 2, 1: 3}) == {}
    follower.join(20)
    assert not follower.is_alive()


def test_a_follower_whose_leader_is_gone_ends() -> None:
    performed: list[int] = []
    started = time.monotonic()
    steps.follow_steps(layout(1, cli.find_free_port()), "n1", performed.append, int, 60.0, 0.5)
    assert 0.5 <= time.monotonic() - started < 30, "it waits as long as the leader may take to come, and no longer"
    assert performed == []
