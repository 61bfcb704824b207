"""The contract of observers: what follows a run from its launcher, such as an endpoint of metrics or a notification.

An experiment names them, with options where they have some::

    overrides:
      observers: [{prometheus: {port: 9464}}, {notify: {slack: true}}]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from primus.contract import PlugInKind, optional_value
from primus.messages import Say
from primus.plug_in_choice import NoOptions

if TYPE_CHECKING:
    from primus.runs.events import Event
    from primus.runs.run_metrics import RunMetrics
    from primus.runs.store import Run


class ObservedRun(Struct, frozen=True, kw_only=True):
    """What an observer knows of the run that it follows."""

    run: Run
    """The run folder."""
    name: str
    """Name of the experiment."""
    host: str
    """Host of the launcher, which is that of node 0."""
    environ: Mapping[str, str]
    """Environment variables of the launcher."""
    say: Say
    """Prints a line on the terminal of the launcher."""
    append_event: Callable[..., None]
    """Appends an event to `events.jsonl`: `append_event(kind, **fields)`."""


class Observer:
    """Follows a run. Subclass it and override what you need."""

    def observe(self, events: Sequence[Event], metrics: RunMetrics) -> None:
        """Called about once a second with the new events of the run, in order, if there are some.

        Each observer has a thread of its own, so it may wait for a server. A `PrimusError` or `OSError` is reported in
        one line, once until it changes, and the run goes on; after any other exception the observer is left out.

        Args:
            events: New events, as `docs/run-folder.md` lists them.
            metrics: The numbers of the run after these events.
        """

    def close(self) -> None:
        """Called at the end of the run, after its last events, also if an exception has left the observer out."""


class ObserverPlugIn(Protocol):
    """An observer: `observers/NAME.py`, named in an experiment.

    It runs in the launcher of node 0, from before the hooks until after the last attempt, and costs the workers
    nothing. The file is imported where an experiment is checked, too: import packages inside the functions.
    """

    def open_observer(self, options: Any, observed: ObservedRun, /) -> Observer:
        """Start to observe.

        Called once, before the first attempt. `options` is an instance of `Options`. Raise `UsageError` or
        `UnfitError` of `primus.errors` to end the run before it starts: an observer that was asked for is not
        ignored.
        """
        ...

    @property
    @optional_value(NoOptions)
    def Options(self) -> type[Struct]:
        """A msgspec Struct whose fields are the options. Secrets do not belong there: read them from variables."""
        ...


OBSERVERS = PlugInKind[ObserverPlugIn]("observers", ObserverPlugIn)
