"""Post the progress of a run where its platform shows it, such as the comment of a Slurm job; never fails the run.

A thread follows the events of the run. It posts at most every `INTERVAL_S`, and once more at the end. A platform that
refuses for good (`PostRefused`) is reported once and left alone; other problems are reported once and tried again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from primus import registry
from primus.errors import PrimusError
from primus.messages import Say
from primus.runs.events import EventFollower
from primus.runs.run_progress import ProgressTracker, RunProgress
from primus.runs.store import Run
from primus.runtime import PROGRESS_RUNTIMES, PROGRESS_VARIABLE, PostRefused

INTERVAL_S = 60.0
"""One request a minute: Slurm's controller and an API server serve thousands of jobs."""
LAST_POST_S = 15.0
"""Longest wait at the end of a run for its last post."""

Post = Callable[[RunProgress], None]


@contextlib.contextmanager
def post_by_variable(run: Run, environ: Mapping[str, str], say: Say) -> Iterator[None]:
    """While open, post the progress of `run` to the platform that PROGRESS_VARIABLE names; does nothing without it."""
    name, _, target = environ.get(PROGRESS_VARIABLE, "").partition(":")
    if not target:
        yield
        return
    with post_progress(run, lambda progress: _load(name)(progress, target, environ), say):
        yield


def _load(name: str) -> Callable[[RunProgress, str, Mapping[str, str]], None]:
    return registry.load_plug_in(PROGRESS_RUNTIMES, name).post_progress


@contextlib.contextmanager
def post_progress(run: Run, post: Post, say: Say, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """While open, call `post` with the progress of `run`."""
    stop = threading.Event()
    poster = _ProgressPoster(run, post, say)

    def follow() -> None:
        while not stop.wait(interval_s) and not poster.is_refused:
            poster.post_once()
        poster.post_once()

    # A daemon, because a platform that does not answer must not keep a run from ending.
    thread = threading.Thread(target=follow, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LAST_POST_S)


class _ProgressPoster:
    """Posts progress that is new. Used by one thread."""

    def __init__(self, run: Run, post: Post, say: Say) -> None:
        self.is_refused = False
        self._follower = EventFollower(run.events)
        self._tracker = ProgressTracker()
        self._post, self._say = post, say
        self._posted: RunProgress | None = None
        self._problem = ""

    def post_once(self) -> None:
        if self.is_refused:
            return
        try:
            for event in self._follower.read_new_events():
                self._tracker.observe_event(event)
            progress = self._tracker.progress
            if progress is None or progress == self._posted:
                return
            self._post(progress)
        except (PrimusError, OSError) as error:
            self.is_refused = isinstance(error, PostRefused)
            if str(error) != self._problem:
                self._say(f"progress is not posted: {error}" + ("" if self.is_refused else "; trying again"))
            self._problem = str(error)
        else:
            self._posted, self._problem = progress, ""
