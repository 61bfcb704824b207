"""Node 0 hears every node that comes, misses the others within its limit, and answers all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import msgspec
import pytest

from primus.errors import PrimusError
from primus.launch.nodes import report_collection
from primus.launch.nodes.message_stream import Deadline
from primus.launch.nodes.report_collection import CollectedReport, NodeArrival, Peer, ReportCollector


def arrival(rank: int, clock_ahead_s: float = 0.0) -> NodeArrival:
    return NodeArrival(node_rank=rank, host=f"n{rank}", time=time.time() + clock_ahead_s)


def node(port: int, rank: int, limit_s: float = 10, **changes: float) -> Callable[[], bytes | None]:
    """A node that delivers its rank; gives the answer it got."""
    answers: list[bytes | None] = []
    report = msgspec.json.encode({"rank": rank})

    def work() -> None:
        answers.append(report_collection.deliver_report("localhost", port, arrival(rank, **changes), report, limit_s))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def answer() -> bytes | None:
        thread.join(20)
        return answers[0]

    return answer


def met(port: int, nnodes: int, limit_s: float = 10) -> list[CollectedReport]:
    with ReportCollector(port, nnodes, limit_s) as meeting:
        found = meeting.collect_reports("n0")
        meeting.send_answer(b'"decided"')
    return found


@pytest.mark.parametrize("nnodes", [2, 3, 6])
def test_all_nodes_report_and_get_the_answer(port: int, nnodes: int) -> None:
    answers = [node(port, rank) for rank in range(nnodes - 1, 0, -1)]
    found = met(port, nnodes)
    assert [(one.node_rank, json.loads(one.report or b""), one.unreached) for one in found] == [
        (rank, {"rank": rank}, ()) for rank in range(1, nnodes)
    ]
    assert [answer() for answer in answers] == [b'"decided"'] * (nnodes - 1)


def test_a_missing_node_costs_the_limit_and_no_more(port: int) -> None:
    answer = node(port, 2)
    began = time.monotonic()
    found = met(port, 3, limit_s=1.0)
    assert time.monotonic() - began < 3
    assert [one.node_rank for one in found] == [2]
    assert answer() == b'"decided"'


def test_a_node_that_dies_after_its_arrival_has_no_report(port: int) -> None:
    def come_and_go() -> None:
        with closing(report_collection.connect_to_head("localhost", port, 5)) as stream:
            stream.send(arrival(1), 5)
            stream.receive(tuple[Peer, ...], Deadline(5))

    threading.Thread(target=come_and_go, daemon=True).start()
    (found,) = met(port, 2, limit_s=5)
    assert (found.host, found.report) == ("n1", None)


def test_other_programs_and_duplicate_nodes_are_ignored(port: int) -> None:
    with ReportCollector(port, 2, 10) as meeting:
        silent = socket.create_connection(("localhost", port))
        loud = socket.create_connection(("localhost", port))
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        answer = node(port, 1)
        found = meeting.collect_reports("n0")
        meeting.send_answer(b'"decided"')
        silent.close()
        loud.close()
    assert [one.node_rank for one in found] == [1]
    assert answer() == b'"decided"'


def test_clocks_are_compared_with_that_of_node_0(port: int) -> None:
    node(port, 1, clock_ahead_s=60.0)
    (found,) = met(port, 2)
    assert 55 < found.offset_s < 65


def test_peers_that_cannot_be_reached_are_named(port: int) -> None:
    with report_collection.open_probe_port() as open_port:
        peers = [
            Peer(node_rank=rank, host="x", address="localhost", port=at) for rank, at in ((1, open_port), (2, port))
        ]
        assert report_collection.find_unreachable_peers(tuple(peers), 0) == (2,)


def test_node_0_that_does_not_listen_is_an_error_within_the_limit(port: int) -> None:
    began = time.monotonic()
    with pytest.raises(PrimusError, match=f"node 0 at localhost:{port} was not reached"):
        report_collection.deliver_report("localhost", port, arrival(1), b"{}", 0.5)
    assert time.monotonic() - began < 3


def test_another_program_on_the_port_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_collection, "GREETING_LIMIT_S", 0.1)
    with closing(socket.create_server(("", port))) as stranger:
        answer = node(port, 1)
        stranger.accept()[0].close()
        silent = stranger.accept()[0]
    with closing(silent):
        assert [one.node_rank for one in met(port, 2)] == [1]
    assert answer() == b'"decided"'


def test_a_port_in_use_is_an_error() -> None:
    with closing(socket.create_server(("", 0))) as taken, pytest.raises(PrimusError, match="cannot be used"):
        ReportCollector(taken.getsockname()[1], 2, 1)
