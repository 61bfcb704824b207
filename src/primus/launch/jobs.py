"""Jobs that were given to a scheduler: what is remembered of them, and what their runtime can say.

A runtime whose plans return before the work is done remembers each submission, and may define

    def states(submissions: Sequence[Submission]) -> dict[str, JobState]     by id; asks once for all of them
    def cancel(submission: Submission) -> None
    def logs(submission: Submission, follow: bool, tail: int | None) -> None     where they are no files

A query that fails raises; it never changes a job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus.errors import PrimusError, UsageError, did_you_mean
from primus.runs.files import read_json, write_json
from primus.runs.store import Run

RECORD = "submission.json"
State = Literal["queued", "running", "done", "failed", "cancelled", "unknown"]
ENDED: frozenset[State] = frozenset(("done", "failed", "cancelled"))


class Submission(Struct, frozen=True, kw_only=True):
    """A job of a scheduler."""

    runtime: str
    id: str
    """As the scheduler calls it."""
    name: str
    directory: str
    """Run folder."""
    submitted: float
    """Seconds since the epoch."""
    host: str = ""
    user: str = ""
    command: tuple[str, ...] = ()
    """Words that were typed, secrets masked."""
    place: dict[str, str] = {}
    """What the runtime needs to find the job again, such as its cluster, namespace or URL; no secrets."""
    logs: tuple[str, ...] = ("logs/**/*.log",)
    """Where its logs are: patterns below the run folder, or absolute ones."""


class JobState(Struct, frozen=True, kw_only=True):
    """How a job stands."""

    state: State
    raw: str = ""
    """The scheduler's own word."""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    restarts: int = 0
    """As the scheduler counts them."""


def remember(submission: Submission, environ: Mapping[str, str]) -> None:
    """Keep a submission, beside its run and for `jobs list`."""
    write_json(Path(submission.directory) / RECORD, submission)
    index = _index(environ)
    index.mkdir(parents=True, exist_ok=True)
    write_json(index / f"{submission.runtime}-{submission.id.replace('/', '_')}.json", submission)


def known(environ: Mapping[str, str]) -> list[Submission]:
    """All submissions of this user from this home, oldest first."""
    found = []
    for path in _index(environ).glob("*.json"):
        try:
            found.append(read_json(path, Submission))
        except PrimusError:  # written by another version, or damaged: the others count
            continue
    return sorted(found, key=lambda each: (each.submitted, each.id))


def find(name: str, environ: Mapping[str, str]) -> Submission:
    """The submission that `name` means: an id, a run folder, a run's id, or the newest of a name.

    Raises:
        UsageError: There is none.
    """
    if (Path(name) / RECORD).is_file():
        return read_json(Path(name) / RECORD, Submission)
    everything = known(environ)
    for field in ("id", "directory", "name"):
        matching = [each for each in everything if name in _called(each, field)]
        if matching:
            return matching[-1]
    raise UsageError(
        f"no job '{name}' was submitted from here",
        did_you_mean(name, [each.id for each in everything] + [each.name for each in everything]),
    )


def _called(submission: Submission, field: str) -> tuple[str, ...]:
    value: str = getattr(submission, field)
    return (value, Run(Path(value)).id) if field == "directory" else (value,)


def _index(environ: Mapping[str, str]) -> Path:
    """Folder of the records, below $XDG_STATE_HOME (XDG Base Directory Specification)."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "primus" / "jobs"
