"""Results of the attempts of a run, kept among its events; restarts are decided on them."""

from __future__ import annotations

import msgspec
from msgspec import structs

from primus.launch.supervision.restart_policy import AttemptResult
from primus.runs import events
from primus.runs.events import EventLog
from primus.runs.store import Run

KIND = "attempt_ended"


def record_attempt_result(run: Run, result: AttemptResult) -> None:
    """Append the result of an attempt; its `kind` is the field `end`, since `kind` is that of the event."""
    values = structs.asdict(result)
    log = EventLog(run.events)
    log.append(KIND, end=values.pop("kind"), **values)
    log.close()


def find_newest_checkpoint(run: Run) -> int | None:
    """Step of the newest checkpoint that the run's trainer has recorded."""
    saved = [event.get("step") for event in events.read_events(run.events) if event["kind"] == "checkpoint_saved"]
    return next((step for step in reversed(saved) if isinstance(step, int)), None)


def read_attempt_results(run: Run) -> list[AttemptResult]:
    """Results of the attempts so far, in order; the last one of an attempt that is recorded twice."""
    found = {}
    for event in events.read_events(run.events):
        # An attempt is recorded twice where a node is lost during the back-off: the second result is the newer.
        if event["kind"] == KIND:
            result = msgspec.convert({**event, "kind": event.get("end")}, AttemptResult)
            found[result.attempt] = result
    return [found[attempt] for attempt in sorted(found)]
