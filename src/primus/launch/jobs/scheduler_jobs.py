"""Jobs that were given to a scheduler: what is remembered of them, and what their runtime can say.

A runtime whose plans return before the work is done remembers each submission, and may define

    def states(submissions: Sequence[Submission]) -> dict[str, JobState]     by id; asks once for all of them
    def cancel(submission: Submission) -> None
    def logs(submission: Submission, follow: bool, tail: int | None) -> None     where they are no files

A query that fails raises; it never changes a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from primus import registry
from primus.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TIMED_OUT, PrimusError, UsageError, find_nearest
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.runs.files import read_json, write_json
from primus.runs.store import Run, RunOutcome
from primus.runtime import JOB_RUNTIMES

RECORD = "submission.json"
State = Literal["queued", "running", "done", "failed", "cancelled", "gone", "unknown"]
"""A job that is gone is one that its scheduler answers not to know."""
ENDED: frozenset[State] = frozenset(("done", "failed", "cancelled"))
NUM_GONE = 5
"""Looks in a row at which a job is gone before that is believed: some servers hear of a job seconds later."""
GONE_AFTER_S = 120.0
"""Age from which a job that is gone was there before: its run can wait for nothing any more."""
FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
"""Time between two questions for a job's state: it grows, since a scheduler serves many."""


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
    """What the runtime needs to find the job again, such as its cluster, namespace or URL; no secrets.

    ``array`` says that it is several jobs, none of which keeps the run's record.
    """
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
    is_deleted: bool = False
    """Of a job that is gone, whether its scheduler keeps jobs until somebody, or their age, removes them."""


def remember_submission(submission: Submission, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Keep a submission, beside its run and for `jobs list`; what cannot be written is said, as the job is there."""
    for path in (Path(submission.directory) / RECORD, _find_index_folder(environ) / _file_name(submission)):
        try:
            write_json(path, submission)
        except PrimusError as error:
            say(f"job {submission.id} is submitted, but not remembered: {error.problem}")


def list_submissions(environ: Mapping[str, str]) -> list[Submission]:
    """All submissions of this user from this home, oldest first."""
    found = []
    for path in _find_index_folder(environ).glob("*.json"):
        try:
            found.append(read_json(path, Submission))
        except PrimusError:  # written by another version, or damaged: the others count
            continue
    return sorted(found, key=lambda each: (each.submitted, each.id))


def find_submission(name: str, environ: Mapping[str, str]) -> Submission:
    """The submission that `name` means: an id, a run folder, a run's id, or the newest of a name.

    Raises:
        UsageError: There is none.
    """
    if (Path(name) / RECORD).is_file():
        return read_json(Path(name) / RECORD, Submission)
    everything = list_submissions(environ)
    for field in ("id", "directory", "name"):
        matching = [each for each in everything if name in _list_names(each, field)]
        if matching:
            return matching[-1]
    close = find_nearest(name, [each.id for each in everything] + [each.name for each in everything])
    hint = f"did you mean '{close}'?" if close else "primus-cli direct -- jobs list --all shows them"
    raise UsageError(f"no job '{name}' was submitted from here", hint if everything else "")


def query_states(submissions: Sequence[Submission], environ: Mapping[str, str]) -> dict[tuple[str, str], JobState]:
    """How each of `submissions` stands, by runtime and id; a runtime is asked once, and not for what it said has ended.

    Raises:
        PrimusError: A scheduler does not answer.
    """
    found: dict[tuple[str, str], JobState] = {}
    for runtime in sorted({each.runtime for each in submissions}):
        asked = []
        for each in (each for each in submissions if each.runtime == runtime):
            known_end = _known_end(each, environ)
            if known_end:
                found[runtime, each.id] = known_end
            else:
                asked.append(each)
        answers = registry.load_plug_in(JOB_RUNTIMES, runtime).states(asked) if asked else {}
        for each in asked:
            state = answers.get(each.id, JobState(state="gone", reason=f"{runtime} does not know it"))
            found[runtime, each.id] = state
            if state.state in ENDED:
                with contextlib.suppress(PrimusError):  # it cannot be written: it is asked for again
                    _keep_end(each, state, environ)
                with contextlib.suppress(PrimusError):
                    record_end(each, state)
            elif state.is_deleted and time.time() - each.submitted > GONE_AFTER_S:
                with contextlib.suppress(PrimusError):
                    record_end(each, state)
    return found


def query_state(submission: Submission, environ: Mapping[str, str]) -> JobState:
    """How one job stands.

    Raises:
        PrimusError: Its scheduler does not answer.
    """
    return query_states([submission], environ)[submission.runtime, submission.id]


def check_free(run: Run, environ: Mapping[str, str]) -> None:
    """Raises PrimusError where a job that waits or runs has this run, or where that cannot be known."""
    if not (run.directory / RECORD).is_file():
        return
    holder = read_json(run.directory / RECORD, Submission)
    state = query_state(holder, environ)
    if state.state in ("queued", "running"):
        raise PrimusError(
            f"{run.directory} belongs to job {holder.id} of {holder.runtime}, which is {state.state}",
            f"wait for its end, or end it: primus-cli direct -- jobs cancel {holder.id}",
        )


@contextlib.contextmanager
def hold_for_submission(run: Run, environ: Mapping[str, str]) -> Iterator[None]:
    """Hold `run` while it is given to a scheduler.

    Raises:
        PrimusError: A job that waits or runs has it, another command is about to give it one, or neither can be known.
    """
    with (run.directory / ".submission.lock").open("w") as file:
        is_ours = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        check_free(run, environ)
        if not is_ours:
            problem = f"{run.directory} is being submitted, or waited for, by another command"
            raise PrimusError(problem, "primus-cli direct -- jobs list shows its job")
        yield


def is_held(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether a job that waits or runs has this run, as far as can be known."""
    try:
        check_free(run, environ)
    except PrimusError:
        return True
    return False


def wait_for_job(
    submission: Submission, environ: Mapping[str, str], say: Callable[[str], None], timeout_s: float | None = None
) -> JobState:
    """How the job stands at its end, or after `timeout_s`; a question that fails is said, and asked again."""
    watch = JobWatch(submission, environ, say)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not watch.poll_state() and (deadline is None or time.monotonic() < deadline):
        pause_s = watch.pause_s if deadline is None else min(watch.pause_s, max(0.0, deadline - time.monotonic()))
        time.sleep(pause_s)
    return watch.state


class JobWatch:
    """A job that is looked at again and again, ever less often while nothing changes."""

    def __init__(self, submission: Submission, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.state = JobState(state="unknown")
        self.pause_s = FIRST_POLL_S
        self._submission, self._environ, self._say = submission, environ, say
        self._problem = ""
        self._num_gone = 0

    def poll_state(self) -> bool:
        """Ask once, and give whether the job is over; what was known stays where there is no answer."""
        try:
            state = query_state(self._submission, self._environ)
        except PrimusError as error:
            if error.problem != self._problem:
                self._say(f"{error.problem}; asking again")
            self._problem = error.problem
        else:
            self._problem = ""
            if (state.state, state.reason) != (self.state.state, self.state.reason):
                self.pause_s = FIRST_POLL_S
                self._say(f"job {self._submission.id} is {format_state(state)}")
            self.state = state
            self._num_gone = self._num_gone + 1 if state.state == "gone" else 0
        self.pause_s = min(self.pause_s * 1.2, LONGEST_POLL_S)
        return self.state.state in ENDED or self._num_gone >= NUM_GONE


def format_state(state: JobState) -> str:
    """`state` in words."""
    return state.state + (f" ({state.reason})" if state.reason else "")


class Waiting(Struct):
    """Waiting for a job, which a signal may have ended."""

    exit_code: int = EXIT_INTERRUPTED
    """128 + the signal."""


@contextlib.contextmanager
def detach_on_signal(name: str, cancel: str, say: Callable[[str], None]) -> Iterator[Waiting]:
    """While open, Ctrl-C, SIGTERM and SIGHUP end the waiting and not the job, which is said.

    Args:
        name: How the job is called.
        cancel: Words of `primus-cli` that end it.
        say: For people.
    """
    waiting = Waiting()
    with raise_on_signals():
        try:
            yield waiting
        except KeyboardInterrupt as error:
            waiting.exit_code = find_exit_code(error)
            say(f"job {name} goes on; primus-cli {cancel} ends it")


def find_end(submission: Submission) -> RunOutcome | None:
    """How the job's run has ended as the run itself says; None where it does not, or a later job has it."""
    if "array" in submission.place:
        return None
    try:
        holder = read_json(Path(submission.directory) / RECORD, Submission)
        metadata = Run(Path(submission.directory)).read_metadata()
    except PrimusError:  # the run folder is gone
        return None
    is_new = metadata.ended is not None and metadata.ended >= submission.submitted
    is_ours = (holder.runtime, holder.id) == (submission.runtime, submission.id)
    return metadata.outcome if is_ours and is_new and metadata.outcome.state not in ("planned", "running") else None


def report_end(submission: Submission, state: JobState, say: Callable[[str], None]) -> int:
    """Say how a job that was waited for has ended, and give the exit code: those of its run, where that says so.

    A job that its scheduler ended at the time limit has the exit code 124 whatever its run could still say.
    """
    outcome = find_end(submission)
    if outcome is None or state.state in ("queued", "running", "unknown"):
        return exit_code(state)
    if outcome.state != "done":
        say(f"primus-cli: run {outcome.state}: {outcome.reason}")
    if state.exit_code == EXIT_TIMED_OUT:
        return EXIT_TIMED_OUT
    return EXIT_OK if outcome.state == "done" else outcome.exit_code or EXIT_FAILED


def exit_code(state: JobState) -> int:
    """Exit code of a command that has waited for a job of which no run says more."""
    if state.state == "done":
        return EXIT_OK
    if state.state == "cancelled":
        return EXIT_INTERRUPTED
    if state.state in ("failed", "gone"):
        return state.exit_code or EXIT_FAILED
    return EXIT_TIMED_OUT


def _end_file(submission: Submission, environ: Mapping[str, str]) -> Path:
    return _find_index_folder(environ) / "ended" / _file_name(submission)


def _known_end(submission: Submission, environ: Mapping[str, str]) -> JobState | None:
    """What was said of the job's end; a job of the same id that was submitted later is another one."""
    path = _end_file(submission, environ)
    try:
        is_ours = path.stat().st_mtime >= submission.submitted
        return read_json(path, JobState) if is_ours else None
    except (OSError, PrimusError):
        return None


def _keep_end(submission: Submission, state: JobState, environ: Mapping[str, str]) -> None:
    """Remember that a job has ended; its scheduler forgets it."""
    write_json(_end_file(submission, environ), state)


def record_end(submission: Submission, state: JobState) -> None:
    """Record the end of a run whose nodes could not.

    It was cancelled in the queue, they were killed, or they write another folder than this one. A run that goes on in
    another job is left alone.
    """
    run = Run(Path(submission.directory))
    try:
        before = run.read_metadata().outcome.state
        holder = read_json(run.directory / RECORD, Submission)
    except PrimusError:  # the run folder is gone
        return
    if before not in ("planned", "running") or holder.id != submission.id:
        return
    if state.state == "done":
        if before == "planned":  # its nodes do not share the folder, or no job of an array keeps the record
            run.update_metadata(ended=time.time(), outcome=RunOutcome(state="done", exit_code=EXIT_OK))
        return
    how: Literal["interrupted", "failed"] = "failed" if state.state == "failed" else "interrupted"
    run.update_metadata(
        ended=time.time(),
        outcome=RunOutcome(state=how, exit_code=exit_code(state), reason=_describe_end(submission, state)),
    )


def _describe_end(submission: Submission, state: JobState) -> str:
    """What the scheduler says of the end, in its own word as well."""
    verb = {"failed": "failed", "cancelled": "was cancelled"}.get(state.state, "is gone")
    said = "; ".join(filter(None, (state.reason, state.raw if state.raw not in state.reason else "")))
    return f"job {submission.id} of {submission.runtime} {verb}" + (f": {said}" if said else "")


def _file_name(submission: Submission) -> str:
    return f"{submission.runtime}-{submission.id.replace('/', '_')}.json"


def _list_names(submission: Submission, field: str) -> tuple[str, ...]:
    value: str = getattr(submission, field)
    return (value, Run(Path(value)).id) if field == "directory" else (value,)


def _find_index_folder(environ: Mapping[str, str]) -> Path:
    """Folder of the records, below $XDG_STATE_HOME (XDG Base Directory Specification)."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return Path(home) / "primus" / "jobs"
