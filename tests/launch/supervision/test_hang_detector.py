"""Hangs are found from heartbeats alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.launch.supervision.hang_detector import HangDetector, RankStatus, find_culprit
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.launch.supervision.stacks import WAITS, find_main_frames


def beat(step: int, phase: str = "train", at: float = 0.0, compute_time_s: float | None = None) -> RankHeartbeat:
    return RankHeartbeat(
        pid=1, host="a", phase=phase, step=step, progress_time=at or step, compute_time_s=compute_time_s
    )


def test_a_rank_without_progress_within_the_timeout_hangs() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(1), 1: beat(1)})
    hangs.observe_heartbeats(2, {0: beat(2), 1: beat(2)})
    assert not hangs.is_hanging(12)
    assert hangs.is_hanging(12.1)
    assert [each.rank for each in hangs.make_rank_statuses(12.1, "a")] == [0, 1]


def test_a_rank_that_waits_for_one_within_its_limit_does_not_hang() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(5), 1: beat(5)})
    hangs.observe_heartbeats(2, {0: beat(5, "checkpoint"), 1: beat(5)})
    assert not hangs.is_hanging(20), "rank 0 writes a checkpoint, and rank 1 waits for it"
    assert hangs.is_hanging(33), "not for ever"


def test_a_rank_behind_the_others_hangs_while_they_make_progress() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(5), 1: beat(5)})
    hangs.observe_heartbeats(15, {0: beat(50), 1: beat(5)})
    assert hangs.is_hanging(15)


def test_progress_within_a_step_is_progress() -> None:
    hangs = HangDetector(10, (0,), now=0)
    for now in range(1, 60, 8):
        hangs.observe_heartbeats(now, {0: beat(5, at=now)})
        assert not hangs.is_hanging(now + 9)
    assert hangs.is_hanging(now + 10.1)


def test_a_rank_of_another_node_waits_for_one_of_the_same_step_that_is_not_late() -> None:
    hangs = HangDetector(10, (0,), now=0)
    hangs.observe_heartbeats(1, {0: beat(5)})
    assert hangs.is_blocking(2, step=5) and hangs.is_blocking(2, step=6) and not hangs.is_blocking(2, step=4)
    assert not hangs.is_blocking(12, step=5), "it is late itself"


@pytest.mark.parametrize(
    ("phase", "times"), [("init", 3), ("compile", 6), ("checkpoint", 3), ("eval", 3), ("train", 1)]
)
def test_each_phase_has_its_own_limit(phase: str, times: int) -> None:
    hangs = HangDetector(10, (0,), now=0)
    hangs.observe_heartbeats(0, {0: beat(0, phase, at=1)})
    assert not hangs.is_hanging(10 * times)
    assert hangs.is_hanging(10 * times + 0.1)


def test_long_steps_extend_the_limit() -> None:
    hangs = HangDetector(10, (0,), now=0)
    for step in range(4):
        hangs.observe_heartbeats(8 * step, {0: beat(step)})
    assert not hangs.is_hanging(24 + 39)
    assert hangs.is_hanging(24 + 41)


def test_a_rank_that_never_starts_is_blamed() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(0, "init", at=1)})
    assert hangs.is_hanging(32)
    assert find_culprit(hangs.make_rank_statuses(32, "a")).rank == 1


def test_without_a_timeout_or_after_its_end_no_rank_hangs() -> None:
    assert not HangDetector(0, (0,), now=0).is_hanging(1e9)
    hangs = HangDetector(1, (0,), now=0)
    hangs.end_rank(0)
    assert not hangs.is_hanging(1e9)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 5)), max_size=30), st.floats(1, 100))
def test_ranks_that_make_progress_never_hang(moves: list[tuple[int, float]], timeout_s: float) -> None:
    hangs, now = HangDetector(timeout_s, range(4), now=0), 0.0
    for number, (_, pause_s) in enumerate(moves):
        now += min(pause_s, timeout_s / 2)
        hangs.observe_heartbeats(now, {rank: beat(number) for rank in range(4)})
        assert not hangs.is_hanging(now)


def make_status(rank: int, step: int = 5, idle_s: float = 60, **more: object) -> RankStatus:
    return RankStatus(rank=rank, host="a", phase="train", step=step, idle_s=idle_s, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranks",
    [
        [make_status(0, waits=True), make_status(1, waits=True), make_status(2, waits=False)],
        [make_status(0), make_status(1), make_status(2, state="T", step=9)],
        [make_status(0), make_status(1), make_status(2, step=4)],
        [make_status(0, waits=True), make_status(1, waits=True), make_status(2, waits=True, idle_s=61)],
        [
            make_status(0, waits=False, frame="f"),
            make_status(1, waits=False, frame="f"),
            make_status(2, waits=False, frame="g"),
        ],
        [make_status(0, waits=None), make_status(1, waits=True), make_status(2, waits=False)],
    ],
)
def test_the_rank_that_the_others_wait_for_is_blamed(ranks: list[RankStatus]) -> None:
    assert find_culprit(ranks).rank == 2


PY_SPY = """Process 7: python worker
Python v3.11.7 (/usr/bin/python3)

Thread 9 (idle): "heartbeat"
    wait (threading.py:331)
Thread 7 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2906)
    step (native/step.py:80)
"""
FAULTHANDLER = """Thread 0x01 (most recent call first):
  File "/usr/threading.py", line 331 in wait

Current thread 0x02 (most recent call first):
  File "/here/loader.py", line 12 in read
  File "/here/trainer.py", line 90 in run
"""


def test_the_main_thread_is_read_from_both_kinds_of_stacks() -> None:
    frames = find_main_frames(PY_SPY)
    assert frames == ["all_reduce (torch/distributed/distributed_c10d.py)", "step (native/step.py)"]
    assert WAITS.search(frames[0])
    assert find_main_frames(FAULTHANDLER) == ["read (/here/loader.py)", "run (/here/trainer.py)"]
    assert not any(WAITS.search(frame) for frame in find_main_frames(FAULTHANDLER))
    assert find_main_frames("") == []
