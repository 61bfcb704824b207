"""How the attempts of a run ended, kept among its events; restarts are decided on them."""

from __future__ import annotations

import msgspec
from msgspec import structs

from primus.launch.policy import End
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run

KIND = "attempt_ended"


def note(run: Run, end: End) -> None:
    """Append how an attempt has ended."""
    values = structs.asdict(end)
    log = EventLog(run.events)
    log.append(KIND, end=values.pop("kind"), **values)
    log.close()


def ends_of(run: Run) -> list[End]:
    """The ends of the attempts so far, in order; of an attempt that is told of twice, the last word counts."""
    found = {}
    for event in events.read(run.events):
        if event["kind"] == KIND:
            end = msgspec.convert({**event, "kind": event.get("end")}, End)
            found[end.attempt] = end
    return [found[attempt] for attempt in sorted(found)]
