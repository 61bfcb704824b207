"""Nodes exchange JSON values, one a line, within time limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from primus.errors import PrimusError
from primus.launch.nodes.control_channel import ControlChannel, ControlMessage
from primus.launch.nodes.message_stream import Deadline, MessageStream, converse_with_head, open_listener


@pytest.fixture
def pair() -> Iterator[tuple[MessageStream, MessageStream]]:
    """Both ends of a connection."""
    ends = [MessageStream(each) for each in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def test_large_messages_arrive_whole_and_in_order(pair: tuple[MessageStream, MessageStream]) -> None:
    sent = ["x" * size for size in (0, 1, 70_000, 3_000_000)]
    sender = threading.Thread(target=lambda: [pair[0].send(each, 10) for each in sent])
    sender.start()
    assert [pair[1].receive(str, Deadline(10)) for _ in sent] == sent
    sender.join(10)


def test_silence_costs_the_time_limit_and_no_more(pair: tuple[MessageStream, MessageStream]) -> None:
    began = time.monotonic()
    assert pair[1].receive(str, Deadline(0.3)) is None
    assert 0.3 <= time.monotonic() - began < 3


def test_a_program_that_sends_bytes_slowly_does_not_extend_the_time_limit() -> None:
    ours, theirs = socket.socketpair()
    is_over = threading.Event()

    def dribble() -> None:
        while not is_over.wait(0.05):
            theirs.sendall(b"x")

    sender = threading.Thread(target=dribble)
    with closing(theirs), closing(MessageStream(ours)) as stream:
        sender.start()
        began = time.monotonic()
        assert stream.receive(str, Deadline(0.5)) is None
        assert time.monotonic() - began < 3
        is_over.set()
        sender.join(5)


def test_the_end_of_a_connection_and_a_message_of_another_kind_are_none(
    pair: tuple[MessageStream, MessageStream],
) -> None:
    pair[0].send({"not": "a number"}, 1)
    assert pair[1].receive(int, Deadline(5)) is None
    assert pair[1].is_open()
    pair[0].close()
    assert pair[1].receive(int, Deadline(5)) is None
    assert not pair[1].is_open()


def test_messages_received_with_an_earlier_one_reach_the_control_channel(
    pair: tuple[MessageStream, MessageStream],
) -> None:
    for each in ("the reply of the rendezvous", ControlMessage(kind="end", text="at once")):
        pair[0].send(each, 1)
    pair[0].send(ControlMessage(kind="second"), 1)
    assert pair[1].receive(str, Deadline(5)) == "the reply of the rendezvous"
    channel = ControlChannel({0: pair[1]}, {})
    found = [*channel.receive_messages(5.0)]
    while len(found) < 2:
        found += channel.receive_messages(5.0)
    assert [message.kind for _, message in found] == ["end", "second"]
    channel.close()


def test_a_conversation_is_retried_until_node_0_answers() -> None:
    with closing(open_listener(0)) as listener:
        port = listener.getsockname()[1]
        attempts = []

        def converse(stream: MessageStream, deadline: Deadline) -> str | None:
            attempts.append(deadline.remaining_s)
            return "done" if len(attempts) == 3 else None

        stream, answer = converse_with_head("localhost", port, 20, converse)
        stream.close()
        assert (answer, len(attempts)) == ("done", 3)


def test_node_0_that_does_not_answer_is_one_message_with_the_reason() -> None:
    with closing(open_listener(0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            PrimusError, match=f"node 0 at localhost:{port} was not reached in 0.5 s: the program"
        ) as caught:
            converse_with_head("localhost", port, 0.5, lambda stream, deadline: None)
    assert "open this port" in caught.value.hint
    with pytest.raises(PrimusError, match="Connection refused"):
        converse_with_head("localhost", port, 0.3, lambda stream, deadline: None)
