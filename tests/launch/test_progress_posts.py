"""Progress is posted at a slow pace and once at the end; a platform that refuses is asked no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fakes.cli import wait_for
from primus.errors import PrimusError
from primus.launch.progress_posts import post_by_variable, post_progress
from primus.runs.events import EventLog
from primus.runs.run_progress import RunProgress
from primus.runs.store import Run, RunMetadata, create_run
from primus.runtime import PostRefused


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(tmp_path / "run", RunMetadata(id="r", name="n", task="t", created=1))


def take_steps(run: Run, *steps: int) -> None:
    log = EventLog(run.events)
    log.append("run_started", train_iters=10, step=0)
    for step in steps:
        log.append("step", step=step, loss=1.0)
    log.close()


def test_the_last_step_is_posted_and_nothing_twice(run: Run) -> None:
    posted: list[int] = []
    with post_progress(run, lambda progress: posted.append(progress.step), print, interval_s=0.01):
        take_steps(run, 1, 2)
        wait_for(lambda: posted == [2], "the first post")
        take_steps(run, 7)
        wait_for(lambda: posted == [2, 7], "the second")
    assert posted == [2, 7]


def test_a_run_shorter_than_the_interval_is_posted_at_its_end(run: Run) -> None:
    posted: list[int] = []
    with post_progress(run, lambda progress: posted.append(progress.step), print):
        take_steps(run, 1)
        assert posted == []
    assert posted == [1]
    with post_progress(run, lambda progress: posted.append(progress.step), print):
        pass
    assert posted == [1], "steps of before are no news"


@pytest.mark.parametrize("is_final", [True, False])
def test_a_refusal_ends_the_posts_and_an_outage_does_not(is_final: bool, run: Run) -> None:
    said: list[str] = []
    calls = threading.Semaphore(0)

    def fail(progress: RunProgress) -> None:
        calls.release()
        raise PostRefused("403 forbidden") if is_final else PrimusError("no response")

    with post_progress(run, fail, said.append, interval_s=0.01):
        take_steps(run, 1)
        assert calls.acquire(timeout=10)
        if not is_final:
            assert calls.acquire(timeout=10), "it is tried again"
    reason = "403 forbidden" if is_final else "no response; trying again"
    assert said == [f"progress is not posted: {reason}"], "said once"
    assert not (is_final and calls.acquire(blocking=False))


def test_without_the_variable_nothing_is_posted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Callable[..., None], **kwargs: object) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading, "Thread", refuse)
    for environ in ({}, {"PRIMUS_POST_PROGRESS": ""}):
        with post_by_variable(run, environ, print):
            take_steps(run, 1)
