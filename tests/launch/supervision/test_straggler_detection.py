"""Stragglers are found by comparing the computing times of all ranks."""

from __future__ import annotations

from primus.launch.supervision.heartbeats import RankHeartbeat
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


def test_a_window_counts_each_step_once_and_starts_empty() -> None:
    window = ComputeTimeWindow()
    for step, time in [(1, 1.0), (1, 1.0), (2, 3.0), (3, 2.0)]:
        window.observe_heartbeats({0: beat(step, compute_time_s=time), 1: beat(step)})
    assert [(each.rank, each.compute_time_s) for each in window.take_samples()] == [(0, 2.0)]
    assert window.take_samples() == ()
