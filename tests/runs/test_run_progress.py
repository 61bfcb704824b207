"""How far a run is, from its events."""

from __future__ import annotations

from typing import Any

from primus.runs.run_progress import ProgressTracker, RunProgress, format_progress


def track(*events: tuple[str, dict[str, Any]]) -> RunProgress | None:
    tracker = ProgressTracker()
    for kind, fields in events:
        tracker.observe_event({"kind": kind, "time": 0.0, **fields})
    return tracker.progress


STARTED = ("run_started", {"train_iters": 100, "step": 0})


def step(number: int, at: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "step", {"step": number, "time": at, **fields}


def test_the_time_that_is_left_follows_the_recent_steps() -> None:
    assert track(STARTED) is None
    assert track(STARTED, step(1, 5.0)) == RunProgress(step=1, total=100)
    found = track(STARTED, step(10, 100.0, loss=2.5), step(20, 120.0, loss=2.25), ("eval", {"loss": 9.0}))
    assert found == RunProgress(step=20, total=100, loss=2.25, remaining_s=160.0)
    assert found.percentage == 20
    assert format_progress(found) == "step 20/100 (20 %), loss 2.25, 0:02:40 left"


def test_the_pause_between_two_attempts_is_no_time_of_a_step() -> None:
    found = track(STARTED, step(1, 0.0), step(2, 1.0), STARTED, step(2, 1000.0), step(3, 1001.0))
    assert found is not None and found.remaining_s == 97.0


def test_a_step_behind_the_end_leaves_no_time() -> None:
    found = track(STARTED, step(99, 0.0), step(120, 1.0, loss="broken"))
    assert found == RunProgress(step=120, total=100, remaining_s=0.0)
    assert found.percentage == 100
