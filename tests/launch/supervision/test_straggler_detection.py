"""Stragglers are found by comparing the computing times of all ranks."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from primus.launch.nodes.control_channel import ControlChannel
from primus.launch.nodes.message_stream import MessageStream
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.launch.supervision.straggler_detection import (
    STRAGGLER_WINDOWS,
    WINDOW_S,
    ComputeTimeSample,
    ComputeTimeWindow,
    StragglerDetector,
    StragglerFinding,
    StragglerMonitor,
)


def beat(step: int, phase: str = "train", at: float = 0.0, compute_time_s: float | None = None) -> RankHeartbeat:
    return RankHeartbeat(
        pid=1, host="a", phase=phase, step=step, progress_time=at or step, compute_time_s=compute_time_s
    )


def samples(*times: float) -> list[ComputeTimeSample]:
    return [ComputeTimeSample(rank=n, host="a", local_rank=n, compute_time_s=time) for n, time in enumerate(times)]


def test_three_slow_windows_in_a_row_make_a_straggler_and_three_fast_ones_end_it() -> None:
    stragglers = StragglerDetector()
    slow, even = samples(1, 1, 1, 1.2), samples(1, 1, 1, 1.1)
    found = [stragglers.compare_samples(window) for window in [slow, slow, even, slow, slow, slow, slow]]
    finding = StragglerFinding(kind="straggler", rank=3, host="a", local_rank=3, ratio=1.2)
    assert found == [[], [], [], [], [], [finding], []]
    found = [stragglers.compare_samples(window) for window in [even, slow, even, even, even]]
    assert found[-1][0].kind == "straggler_over"
    assert not any(found[:-1])


def test_a_single_rank_is_never_a_straggler() -> None:
    stragglers = StragglerDetector()
    assert not any(stragglers.compare_samples(samples(9)) for _ in range(2 * STRAGGLER_WINDOWS))


def test_of_two_ranks_the_slower_one_is_a_straggler() -> None:
    stragglers = StragglerDetector()
    found = [stragglers.compare_samples(samples(1, 2)) for _ in range(STRAGGLER_WINDOWS)]
    assert [finding.rank for finding in found[-1]] == [1]


def test_a_window_counts_each_step_once_and_starts_empty() -> None:
    window = ComputeTimeWindow()
    for step, time in [(1, 1.0), (1, 1.0), (2, 3.0), (3, 2.0)]:
        window.observe_heartbeats({0: beat(step, compute_time_s=time), 1: beat(step)})
    assert [(each.rank, each.compute_time_s) for each in window.take_samples()] == [(0, 2.0)]
    assert window.take_samples() == ()


@pytest.mark.parametrize(("slow_steps", "is_found"), [(STRAGGLER_WINDOWS - 1, False), (STRAGGLER_WINDOWS, True)])
def test_of_steps_that_last_longer_than_a_window_each_counts_once(slow_steps: int, is_found: bool) -> None:
    events: list[str] = []
    ours, theirs = socket.socketpair()
    with contextlib.closing(theirs), contextlib.closing(ControlChannel({1: MessageStream(ours)}, {1: "b"})) as channel:
        monitor = StragglerMonitor(
            channel, 0.0, is_head=True, say=events.append, record=lambda kind, **fields: events.append(kind)
        )
        for second in range(1, 400):
            step = second // 30  # the time of a step is reported when it has ended
            times_s = (20.0, 20.0, 30.0 if 2 <= step < 2 + slow_steps else 20.0)
            beats = {rank: beat(step, compute_time_s=time_s) for rank, time_s in enumerate(times_s)}
            monitor.observe_heartbeats(float(second), beats if step else {})
    said = [
        "straggler",
        "straggler: rank 2 (local rank 0 on a) computes 1.50 times as long as the median rank",
        "straggler_over",
        "straggler recovered: rank 2 (local rank 0 on a) computes as fast as the other ranks again",
    ]
    assert events == (said if is_found else [])


def test_node_0_compares_its_ranks_with_those_of_other_nodes_at_the_end_of_each_window() -> None:
    events: list[dict[str, Any]] = []
    lines: list[str] = []
    ours, theirs = socket.socketpair()
    channels = [
        ControlChannel({1: MessageStream(ours)}, {1: "b"}),
        ControlChannel({0: MessageStream(theirs)}, {0: "a"}),
    ]
    with contextlib.closing(channels[0]), contextlib.closing(channels[1]):
        head, other = (
            StragglerMonitor(
                channel, 0.0, is_head=channel is channels[0], say=lines.append,
                record=lambda kind, **fields: events.append({"kind": kind, **fields}),
            )
            for channel in channels
        )  # fmt: skip
        for number in range(1, STRAGGLER_WINDOWS + 1):
            beats = {rank: beat(number, compute_time_s=time_s) for rank, time_s in enumerate((1.0, 1.0, 1.5))}
            other.observe_heartbeats(number * (WINDOW_S + 1.0), {1: beats[1], 2: beats[2]})
            ((_, message),) = channels[0].receive_messages(10.0)
            assert message.kind == "times" and events == []
            head.take_samples(message.read_body(tuple[ComputeTimeSample, ...]) or ())
            head.observe_heartbeats(number * (WINDOW_S + 1.0), {0: beats[0]})
    assert events == [{"kind": "straggler", "rank": 2, "host": "a", "local_rank": 0, "ratio": 1.5}]
    assert lines == ["straggler: rank 2 (local rank 0 on a) computes 1.50 times as long as the median rank"]
