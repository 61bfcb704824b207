"""How the attempts of a run ended, kept among its events; restarts are decided on them."""

from __future__ import annotations

import msgspec
from msgspec import structs

from primus.launch.supervision.restart_policy import AttemptResult
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run

KIND = "attempt_ended"


def record_attempt_result(run: Run, end: AttemptResult) -> None:
    """Append how an attempt has ended."""
    values = structs.asdict(end)
    log = EventLog(run.events)
    log.append(KIND, end=values.pop("kind"), **values)
    log.close()


def find_newest_checkpoint(run: Run) -> int | None:
    """Step of the newest checkpoint that the run's trainer has told of."""
    saved = [event.get("step") for event in events.read_events(run.events) if event["kind"] == "checkpoint_saved"]
    return next((step for step in reversed(saved) if isinstance(step, int)), None)


def read_attempt_results(run: Run) -> list[AttemptResult]:
    """The ends of the attempts so far, in order; of an attempt that is told of twice, the last word counts."""
    found = {}
    for event in events.read_events(run.events):
        if event["kind"] == KIND:
            end = msgspec.convert({**event, "kind": event.get("end")}, AttemptResult)
            found[end.attempt] = end
    return [found[attempt] for attempt in sorted(found)]
