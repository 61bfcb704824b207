"""Hangs and stragglers are found from heartbeats alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primus.launch.supervision.hang_detector import HangDetector, RankStatus, find_culprit
from primus.launch.supervision.heartbeats import RankHeartbeat
from primus.launch.supervision.stacks import WAITS, find_main_frames
from primus.launch.supervision.straggler_detection import (
    STRAGGLER_WINDOWS,
    ComputeTimeSample,
    ComputeTimeWindow,
    StragglerDetector,
    StragglerFinding,
)


def beat(step: int, phase: str = "train", at: float = 0.0, compute_time_s: float | None = None) -> RankHeartbeat:
    return RankHeartbeat(
        pid=1, host="a", phase=phase, step=step, progress_time=at or step, compute_time_s=compute_time_s
    )


def test_a_rank_that_does_not_get_on_within_its_time_hangs() -> None:
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


def test_a_rank_behind_the_others_hangs_though_they_get_on() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(5), 1: beat(5)})
    hangs.observe_heartbeats(15, {0: beat(50), 1: beat(5)})
    assert hangs.is_hanging(15)


@pytest.mark.parametrize(
    ("phase", "times"), [("init", 3), ("compile", 6), ("checkpoint", 3), ("eval", 3), ("train", 1)]
)
def test_each_phase_has_its_own_limit(phase: str, times: int) -> None:
    hangs = HangDetector(10, (0,), now=0)
    hangs.observe_heartbeats(0, {0: beat(0, phase, at=1)})
    assert not hangs.is_hanging(10 * times)
    assert hangs.is_hanging(10 * times + 0.1)


def test_long_steps_are_given_longer() -> None:
    hangs = HangDetector(10, (0,), now=0)
    for step in range(4):
        hangs.observe_heartbeats(8 * step, {0: beat(step)})
    assert not hangs.is_hanging(24 + 39)
    assert hangs.is_hanging(24 + 41)


def test_a_rank_that_never_comes_is_the_one_that_hangs() -> None:
    hangs = HangDetector(10, (0, 1), now=0)
    hangs.observe_heartbeats(1, {0: beat(0, "init", at=1)})
    assert hangs.is_hanging(32)
    assert find_culprit(hangs.make_rank_statuses(32, "a")).rank == 1


def test_no_limit_is_none_and_who_has_ended_is_not_waited_for() -> None:
    assert not HangDetector(0, (0,), now=0).is_hanging(1e9)
    hangs = HangDetector(1, (0,), now=0)
    hangs.end_rank(0)
    assert not hangs.is_hanging(1e9)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 5)), max_size=30), st.floats(1, 100))
def test_who_gets_on_all_the_time_never_hangs(moves: list[tuple[int, float]], timeout_s: float) -> None:
    hangs, now = HangDetector(timeout_s, range(4), now=0), 0.0
    for number, (_, pause_s) in enumerate(moves):
        now += min(pause_s, timeout_s / 2)
        hangs.observe_heartbeats(now, {rank: beat(number) for rank in range(4)})
        assert not hangs.is_hanging(now)


def standing(rank: int, step: int = 5, idle_s: float = 60, **more: object) -> RankStatus:
    return RankStatus(rank=rank, host="a", phase="train", step=step, idle_s=idle_s, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ranks",
    [
        [standing(0, waits=True), standing(1, waits=True), standing(2, waits=False)],
        [standing(0), standing(1), standing(2, state="T", step=9)],
        [standing(0), standing(1), standing(2, step=4)],
        [standing(0, waits=True), standing(1, waits=True), standing(2, waits=True, idle_s=61)],
        [standing(0, waits=False, frame="f"), standing(1, waits=False, frame="f"), standing(2, waits=False, frame="g")],
        [standing(0, waits=None), standing(1, waits=True), standing(2, waits=False)],
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(ranks: list[RankStatus]) -> None:
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


def samples(*times: float) -> list[ComputeTimeSample]:
    return [ComputeTimeSample(rank=n, host="a", local_rank=n, compute_time_s=time) for n, time in enumerate(times)]


def test_a_rank_that_is_slow_in_three_windows_in_a_row_is_a_straggler_until_it_is_not() -> None:
    stragglers = StragglerDetector()
    slow, even = samples(1, 1, 1, 1.2), samples(1, 1, 1, 1.1)
    found = [stragglers.compare_samples(window) for window in [slow, slow, even, slow, slow, slow, slow]]
    told = StragglerFinding(kind="straggler", rank=3, host="a", local_rank=3, ratio=1.2)
    assert found == [[], [], [], [], [], [told], []]
    found = [stragglers.compare_samples(window) for window in [even, slow, even, even, even]]
    assert found[-1][0].kind == "straggler_over"
    assert not any(found[:-1])


def test_a_lone_rank_is_compared_with_nobody() -> None:
    stragglers = StragglerDetector()
    assert not any(stragglers.compare_samples(samples(9)) for _ in range(2 * STRAGGLER_WINDOWS))


def test_a_window_keeps_each_step_once_and_begins_anew() -> None:
    window = ComputeTimeWindow()
    for step, time in [(1, 1.0), (1, 1.0), (2, 3.0), (3, 2.0)]:
        window.observe_heartbeats({0: beat(step, compute_time_s=time), 1: beat(step)})
    assert [(each.rank, each.compute_time_s) for each in window.take_samples()] == [(0, 2.0)]
    assert window.take_samples() == ()
