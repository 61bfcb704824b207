"""Connections between nodes show at once which node is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from fakes import cli
from primus.launch.nodes import control_channel, rendezvous
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.message_stream import MessageStream
from primus.launch.supervision.restart_policy import RestartDecision


@pytest.fixture
def pair() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    """Node 0's bond and node 1's."""
    ours, theirs = socket.socketpair()
    head, other = (
        ControlChannel({1: MessageStream(ours)}, {1: "b"}),
        ControlChannel({0: MessageStream(theirs)}, {0: "a"}),
    )
    yield head, other
    for each in (head, other):
        each.close()


def head(port: int) -> rendezvous.HeadAddress:
    return rendezvous.HeadAddress("localhost", port)


def test_messages_arrive_whole_and_in_order(pair: tuple[ControlChannel, ControlChannel]) -> None:
    head, other = pair
    sent = [
        ControlMessage(kind="end", text="x" * size, body=RestartDecision(action="stop")) for size in (0, 5, 300_000, 1)
    ]
    for message in sent:
        head.send_message(message)
    found: list[ControlMessage] = []
    cli.wait_for(lambda: found.extend(m for _, m in other.receive_messages(0.1)) or len(found) == 4, "all messages")
    assert [message.text for message in found] == [message.text for message in sent]
    assert found[0].read_body(RestartDecision) == RestartDecision(action="stop")
    assert found[0].read_body(int) is None, "a body of another kind is nothing"
    assert other.receive_messages() == []


def test_a_node_whose_process_ends_is_lost_at_once(pair: tuple[ControlChannel, ControlChannel]) -> None:
    head, other = pair
    began = time.monotonic()
    other.close()
    cli.wait_for(lambda: head.lost, "the loss")
    assert time.monotonic() - began < 1
    assert head.lost == {1: "its launcher has died"}
    assert head.ranks == frozenset()
    assert [(rank, message.kind) for rank, message in head.receive_messages(1.0)] == [(1, "lost")]
    head.send_message(ControlMessage(kind="end"))  # to nobody


def test_a_silent_node_is_lost_after_the_heartbeat_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "HEARTBEAT_TIMEOUT_S", 0.5)
    ours, theirs = socket.socketpair()
    with closing(theirs):
        head = ControlChannel({1: MessageStream(ours)}, {1: "b"})
        cli.wait_for(lambda: head.lost, "the loss", timeout_s=5)
        assert head.lost[1].startswith("no message for")
        head.close()


def test_nodes_that_send_heartbeats_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[ControlChannel, ControlChannel]
) -> None:
    monkeypatch.setattr(control_channel, "HEARTBEAT_TIMEOUT_S", 1.5)
    time.sleep(2.5)  # nothing happens: that is what is shown here
    assert not pair[0].lost and not pair[1].lost


def test_a_failing_node_sends_its_reason(pair: tuple[ControlChannel, ControlChannel]) -> None:
    head, other = pair
    other.send_message(ControlMessage(kind="lost", text="no space left"))
    cli.wait_for(lambda: head.lost, "the loss")
    assert head.lost == {1: "no space left"}


def test_invalid_lines_are_skipped() -> None:
    ours, theirs = socket.socketpair()
    with closing(theirs):
        head = ControlChannel({1: MessageStream(ours)}, {1: "b"})
        theirs.sendall(b'nonsense\n{"kind":7}\n{"kind":"signal","number":10}\n')
        found: list[ControlMessage] = []
        cli.wait_for(lambda: found.extend(m for _, m in head.receive_messages(0.1)) or found, "the message")
        assert found == [ControlMessage(kind="signal", number=10)]
        head.close()


def test_the_rendezvous_port_is_free_while_its_connections_stay_open() -> None:
    with closing(socket.create_server(("", 0))) as probe:
        port = probe.getsockname()[1]
    kept: dict[int, rendezvous.RendezvousPeer] = {}
    theirs: dict[int, rendezvous.RendezvousPeer] = {}

    reply = rendezvous.JoinReply("run", 0, host="a")
    node = threading.Thread(target=lambda: rendezvous.join_rendezvous(head(port), 1, "same", 10, theirs))
    node.start()
    rendezvous.lead_rendezvous(port, 2, reply, "same", 10, kept)
    node.join(10)
    rendezvous.check_port_free(port)
    assert (kept[1].host, theirs[0].host) == (socket.gethostname(), "a")
    for peer in (kept[1], theirs[0]):
        peer.stream.close()
