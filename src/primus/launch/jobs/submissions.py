"""Records of the jobs that were submitted to a scheduler: one in the run folder, one in the user's index.

The record in the run folder says which job the run belongs to. The index, a folder of the user, is what `jobs list`
reads, so that a job is found from any working folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from primus.errors import PrimusError, UsageError, find_nearest
from primus.runs.files import find_state_folder, read_json, write_json
from primus.runs.store import Run
from primus.runtime import Submission

RECORD = "submission.json"


def remember_submission(submission: Submission, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Write both records; a failure to write is only reported, because the job is already submitted."""
    by_folder = f"; `jobs list` does not list it: name it by its run folder, jobs show {submission.directory}"
    index = find_index_folder(environ) / format_file_name(submission)
    for path, consequence in ((Path(submission.directory) / RECORD, ""), (index, by_folder)):
        # Independent of each other: a full disk or a missing home directory must not cost both records.
        try:
            write_json(path, submission)
        except PrimusError as error:
            say(f"job {submission.id} is submitted, but its record cannot be written: {error.problem}{consequence}")


def read_holder(directory: Path) -> Submission | None:
    """The job that a run folder belongs to; None if it was never submitted.

    Raises:
        PrimusError: The record is damaged.
    """
    path = directory / RECORD
    return read_json(path, Submission) if path.is_file() else None


def list_submissions(environ: Mapping[str, str]) -> list[Submission]:
    """All submissions in the user's index, oldest first."""
    found = []
    folder = find_index_folder(environ)
    for path in folder.glob("*.json") if os.path.isdir(folder) else ():
        try:
            found.append(read_json(path, Submission))
        except PrimusError:  # damaged, or of another version of primus; the other records are still valid
            continue
    return sorted(found, key=lambda each: (each.submitted, each.id))


def find_submission(name: str, environ: Mapping[str, str]) -> Submission:
    """The submission that `name` means: a job id, a run folder, a run id, or a job name (its newest job).

    Raises:
        UsageError: There is none.
    """
    holder = read_holder(Path(name))
    if holder:
        return holder
    everything = list_submissions(environ)
    for field in ("id", "directory", "name"):
        matching = [each for each in everything if name in _list_names(each, field)]
        if matching:
            return matching[-1]
    close = find_nearest(name, [each.id for each in everything] + [each.name for each in everything])
    hint = f"did you mean '{close}'?" if close else "list the jobs: primus-cli direct -- jobs list --all"
    raise UsageError(f"no job '{name}' was submitted from here", hint if everything else "")


def format_file_name(submission: Submission) -> str:
    """Name of a job's files in the index."""
    return f"{submission.runtime}-{submission.id.replace('/', '_')}.json"


def find_index_folder(environ: Mapping[str, str]) -> Path:
    """Folder of the index."""
    return find_state_folder(environ) / "jobs"


def _list_names(submission: Submission, field: str) -> tuple[str, ...]:
    value: str = getattr(submission, field)
    if field == "id":
        return (value, *submission.place.get("chain", "").split(","))
    return (value, Run(Path(value)).id) if field == "directory" else (value,)
