"""Follow a run by the observers that its experiment names; a failing one never fails the run.

Each observer has a thread with its own place in the events, so that a server that does not answer delays no other one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from primus.errors import PrimusError, format_error_place
from primus.machine.cluster import find_node_name
from primus.messages import Say
from primus.observer import ObservedRun, Observer, ObserverPlugIn
from primus.plug_in_choice import PlugInChoice
from primus.runs.events import EventFollower, EventLog
from primus.runs.run_metrics import RunMetrics
from primus.runs.store import Run

INTERVAL_S = 1.0
"""Between two looks at the events: an observer that is asked sees a step at most this late."""
CLOSE_LIMIT_S = 15.0
"""Longest wait at the end of a run for what an observer still has to send."""


@contextlib.contextmanager
def observe_run(
    choices: Sequence[PlugInChoice[ObserverPlugIn]], run: Run, environ: Mapping[str, str], say: Say
) -> Iterator[None]:
    """While open, the chosen observers follow `run`.

    Raises:
        PrimusError: An observer cannot be opened.
    """

    def append_event(kind: str, **fields: object) -> None:
        log = EventLog(run.events)
        log.append(kind, **fields)
        log.close()

    observed = ObservedRun(
        run=run,
        name=run.read_metadata().name,
        host=find_node_name(),
        environ=environ,
        say=say,
        append_event=append_event,
    )
    with ExitStack() as threads:
        for choice in choices:
            # Before the observer is opened, so that it sees what it appends itself.
            follower = EventFollower(run.events)
            observer = choice.plug_in.open_observer(choice.options, observed)
            threads.callback(_ObserverThread(choice.name, observer, follower, say).stop)
        yield


class _ObserverThread:
    """Gives the events of a run to an observer, until it is stopped."""

    def __init__(self, name: str, observer: Observer, follower: EventFollower, say: Say) -> None:
        self._name, self._observer, self._follower, self._say = name, observer, follower, say
        self._metrics = RunMetrics()
        self._problem = ""
        self._is_left_out = False
        self._is_over = threading.Event()
        # A daemon, because a server that does not answer must not keep a run from ending.
        self._thread = threading.Thread(target=self._follow, name=f"observer {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Have the observer see the last events and close, and wait for that for a limited time."""
        self._is_over.set()
        self._thread.join(CLOSE_LIMIT_S)
        if self._thread.is_alive():
            self._say(f"observer {self._name}: not finished within {CLOSE_LIMIT_S:.0f} s; the run ends without it")

    def _follow(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._look()
        self._look()
        with self._report_problems():
            self._observer.close()

    def _look(self) -> None:
        events = self._follower.read_new_events()
        for event in events:
            self._metrics.observe_event(event)
        if events and not self._is_left_out:
            with self._report_problems():
                self._observer.observe(events, self._metrics)
                self._problem = ""

    @contextlib.contextmanager
    def _report_problems(self) -> Iterator[None]:
        try:
            yield
        except (PrimusError, OSError) as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - the run goes on whatever a plug-in does
            self._is_left_out = True
            problem = f"{format_error_place(error)}: {type(error).__name__}: {error}; it is left out from here on"
        else:
            return
        if problem != self._problem:
            self._say(f"observer {self._name}: {problem}")
        self._problem = problem
