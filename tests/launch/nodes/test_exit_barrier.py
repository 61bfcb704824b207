"""The nodes of a job exit together; a lost node delays no other, and one that does not finish only up to a limit."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fakes import cli
from primus.launch.nodes import exit_barrier
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.message_stream import MessageStream
from primus.launch.signals import StopSignals


@pytest.fixture(autouse=True)
def restored_signal_handlers() -> Iterator[None]:
    """A node that exits ignores signals; this process runs other tests afterwards."""
    before = {number: signal.getsignal(number) for number in StopSignals.HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


Three = tuple[ControlChannel, ControlChannel, ControlChannel]


@pytest.fixture
def three() -> Iterator[Three]:
    """The connections of node 0, 1 and 2."""
    pairs = [socket.socketpair() for _ in range(2)]
    head = ControlChannel({rank: MessageStream(pair[0]) for rank, pair in enumerate(pairs, start=1)}, {})
    others = [ControlChannel({0: MessageStream(pair[1])}, {}) for pair in pairs]
    yield head, others[0], others[1]
    for each in (head, *others):
        each.close()


def leaving(channel: ControlChannel, rank: int, limit_s: float = 20.0) -> threading.Thread:
    thread = threading.Thread(target=exit_barrier.wait_for_all_nodes, args=(channel, rank, limit_s))
    thread.start()
    return thread


def is_over(thread: threading.Thread) -> bool:
    return not thread.is_alive()


def assert_ended(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(5)
        assert is_over(thread)


def test_no_node_exits_before_all_have_finished(three: Three) -> None:
    head, first, second = three
    early = leaving(first, 1)
    leader = leaving(head, 0)
    cli.wait_for(lambda: head.finished == {1}, "the first has finished")
    assert early.is_alive() and leader.is_alive()
    late = leaving(second, 2)
    assert_ended(early, late, leader)


def test_other_nodes_wait_for_node_0(three: Three) -> None:
    head, first, second = three
    threads = [leaving(first, 1), leaving(second, 2)]
    cli.wait_for(lambda: head.finished == {1, 2}, "both have finished")
    assert not any(map(is_over, threads))
    exit_barrier.wait_for_all_nodes(head, 0, 20.0)
    assert_ended(*threads)


def test_a_disconnected_node_delays_no_other_node(three: Three) -> None:
    head, first, second = three
    second.close()
    threads = [leaving(first, 1), leaving(head, 0)]
    assert_ended(*threads)


def test_other_nodes_exit_when_node_0_disconnects(three: Three) -> None:
    head, first, second = three
    threads = [leaving(first, 1), leaving(second, 2)]
    cli.wait_for(lambda: head.finished == {1, 2}, "both have finished")
    head.close()
    assert_ended(*threads)


def test_a_failed_node_that_is_connected_is_waited_for(three: Three) -> None:
    """It runs its hooks, as others do."""
    head, first, second = three
    first.send_message(ControlMessage(kind="lost", text="no disk"))
    cli.wait_for(lambda: head.lost == {1: "no disk"}, "that it has given up")
    assert head.ranks == {2}
    assert head.connected_ranks == {1, 2}
    leader, other = leaving(head, 0), leaving(second, 2)
    cli.wait_for(lambda: head.finished == {2}, "the second has finished")
    assert leader.is_alive() and other.is_alive()
    last = leaving(first, 1)
    assert_ended(leader, other, last)
    assert head.lost[1] == "no disk"


def test_a_node_that_does_not_finish_delays_the_others_up_to_the_limit(three: Three) -> None:
    head, first, _ = three
    began = time.monotonic()
    thread = leaving(first, 1)
    exit_barrier.wait_for_all_nodes(head, 0, 0.5)
    assert_ended(thread)
    assert 0.5 <= time.monotonic() - began < 5
