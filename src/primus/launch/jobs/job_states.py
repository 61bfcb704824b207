"""States of submitted jobs: ask their scheduler, wait for the end, record it.

A runtime whose plans return before the work is done may define

    def find_states(submissions: Sequence[Submission]) -> dict[str, JobState]     by id; one query for all of them
    def cancel(submission: Submission) -> None
    def print_logs(submission: Submission, follow: bool, tail: int | None) -> None     where logs are not files

Transitions: queued -> running -> done, failed or cancelled. "gone" means that the scheduler does not know the job:
either it has forgotten a job that ended, or it has not registered a new one yet. A failing query raises; it never
changes a job or its record.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from primus import registry
from primus.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TIMED_OUT, PrimusError
from primus.launch.jobs.submissions import RECORD, find_index_folder, format_file_name
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.runs.files import read_json, write_json
from primus.runs.store import Run, RunOutcome
from primus.runtime import JOB_RUNTIMES, JobState, SchedulerState, Submission

ENDED: frozenset[SchedulerState] = frozenset(("done", "failed", "cancelled"))
CANCELLED_RUN = 128 + signal.SIGTERM
"""Exit code of a run whose job is cancelled after it has started, as its ranks report the signal."""
NUM_GONE = 5
"""Consecutive answers "gone" before it is believed: some servers register a job seconds after they accept it."""
GONE_AFTER_S = 120.0
"""Age of a job from which "gone" means that it existed and was deleted, rather than that it is not registered yet."""
NEW_ESTIMATE_S = 900.0
"""Change of the expected start that is worth a line: schedulers compute it again every minute."""
FIRST_POLL_S, LONGEST_POLL_S = 1.0, 15.0
"""Time between two queries: it grows while the state stays the same, because many users share a scheduler."""


def query_states(submissions: Sequence[Submission], environ: Mapping[str, str]) -> dict[tuple[str, str], JobState]:
    """State of each of `submissions`, by runtime and id; one query for each runtime, none for jobs known to have ended.

    Raises:
        PrimusError: A scheduler does not answer.
    """
    found: dict[tuple[str, str], JobState] = {}
    for runtime in sorted({each.runtime for each in submissions}):
        asked = []
        for each in (each for each in submissions if each.runtime == runtime):
            # An end is final, so that it needs no query. This also works after the scheduler has forgotten the job.
            known_end = _read_known_end(each, environ)
            if known_end:
                found[runtime, each.id] = known_end
            else:
                asked.append(each)
        answers = registry.load_plug_in(JOB_RUNTIMES, runtime).find_states(asked) if asked else {}
        for each in asked:
            state = answers.get(each.id, JobState(state="gone", reason=f"{runtime} does not know it"))
            found[runtime, each.id] = state
            _record_answer(each, state, environ)
    return found


def query_state(submission: Submission, environ: Mapping[str, str]) -> JobState:
    """State of one job.

    Raises:
        PrimusError: Its scheduler does not answer.
    """
    return query_states([submission], environ)[submission.runtime, submission.id]


def _record_answer(submission: Submission, state: JobState, environ: Mapping[str, str]) -> None:
    """Write down that a job has ended. If that fails, the next query asks the scheduler again."""
    if state.state in ENDED:
        with contextlib.suppress(PrimusError):
            write_json(_end_file(submission, environ), state)  # schedulers forget their jobs
    # A young job that is gone may not be registered yet, so nothing is recorded for it.
    is_deleted = state.is_deleted and time.time() - submission.submitted > GONE_AFTER_S
    if state.state in ENDED or is_deleted:
        with contextlib.suppress(PrimusError):
            record_end(submission, state)


def wait_for_job(
    submission: Submission, environ: Mapping[str, str], say: Callable[[str], None], timeout_s: float | None = None
) -> JobState:
    """Wait until the job has ended, at most `timeout_s`; gives its state. A failing query is reported and repeated."""
    watch = JobWatch(submission, environ, say)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not watch.poll_state() and (deadline is None or time.monotonic() < deadline):
        pause_s = watch.pause_s if deadline is None else min(watch.pause_s, max(0.0, deadline - time.monotonic()))
        time.sleep(pause_s)
    return watch.state


class JobWatch:
    """Polls a job, less often while its state stays the same."""

    def __init__(self, submission: Submission, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.state = JobState(state="unknown")
        self.pause_s = FIRST_POLL_S
        self._submission, self._environ, self._say = submission, environ, say
        self._problem = ""
        self._num_gone = 0

    def poll_state(self) -> bool:
        """Query once; whether the job is over. Without an answer the last known state stays."""
        try:
            state = query_state(self._submission, self._environ)
        except PrimusError as error:
            # Each problem is printed once, not at every retry.
            if error.problem != self._problem:
                self._say(f"{error.problem}; retrying")
            self._problem = error.problem
        else:
            self._problem = ""
            if (state.state, state.reason, state.advice) != (self.state.state, self.state.reason, self.state.advice):
                self.pause_s = FIRST_POLL_S
                self._say(f"job {self._submission.id} is {explain_state(state)}")
            elif _is_new_estimate(self.state.starts, state.starts):
                self._say(f"job {self._submission.id} is {_format_start(state)}")
            else:  # the estimate that was said stays the one to compare with
                state = structs.replace(state, starts=self.state.starts or state.starts)
            self.state = state
            # Reset by any other answer: only consecutive ones show that the job is really gone.
            self._num_gone = self._num_gone + 1 if state.state == "gone" else 0
        # Grows by 20 percent, so that short jobs are reported quickly and the longest pause is reached after about 15
        # queries.
        self.pause_s = min(self.pause_s * 1.2, LONGEST_POLL_S)
        return self.state.state in ENDED or self._num_gone >= NUM_GONE


def format_state(state: JobState) -> str:
    """`state` in words."""
    return state.state + (f" ({state.reason})" if state.reason else "")


def explain_state(state: JobState) -> str:
    """`state` in words, with the meaning of its reason and the expected start of a queued job."""
    more = [text for text in (state.advice, _format_start(state)) if text]
    return format_state(state) + (f": {'; '.join(more)}" if more else "")


def _format_start(state: JobState) -> str:
    if state.state != "queued" or state.starts is None:
        return ""
    return f"expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(state.starts))}"


def _is_new_estimate(before: float | None, now: float | None) -> bool:
    return now is not None and (before is None or abs(now - before) > NEW_ESTIMATE_S)


class JobWait(Struct):
    """A wait for a job that a signal may end early."""

    exit_code: int = EXIT_INTERRUPTED
    """128 + the signal."""


@contextlib.contextmanager
def detach_on_signal(name: str, cancel: str, say: Callable[[str], None]) -> Iterator[JobWait]:
    """While open, Ctrl-C, SIGTERM and SIGHUP end the wait; the job keeps running, and `say` reports that.

    Args:
        name: Name of the job in the message.
        cancel: Arguments of `primus-cli` that cancel the job.
        say: Prints the message.
    """
    wait = JobWait()
    with raise_on_signals():
        try:
            yield wait
        except KeyboardInterrupt as error:
            wait.exit_code = find_exit_code(error)
            say(f"job {name} keeps running; cancel it: primus-cli {cancel}")


def report_end(submission: Submission, state: JobState, say: Callable[[str], None]) -> int:
    """Report the end of a job; gives the exit code, which is that of its run if the run recorded one.

    A job that its scheduler stopped at the time limit has exit code 124, regardless of the record of its run.
    """
    outcome = _read_outcome(submission)
    if outcome is not None and outcome.state == "failed" and state.state == "cancelled":
        # Cancelled while it waited for a restart after the failure, which the cancellation did not cause.
        say(f"primus-cli: run interrupted: {_describe_end(submission, state)}; before that: {outcome.reason}")
        return CANCELLED_RUN
    # A job that is not over may still write its outcome, so the recorded one may be old.
    if outcome is None or state.state in ("queued", "running", "unknown"):
        return find_exit_code_of_job(state)
    if outcome.state != "done":
        say(f"primus-cli: run {outcome.state}: {outcome.reason}")
    if state.exit_code == EXIT_TIMED_OUT:
        return EXIT_TIMED_OUT
    return EXIT_OK if outcome.state == "done" else outcome.exit_code or EXIT_FAILED


def _read_outcome(submission: Submission) -> RunOutcome | None:
    """Outcome in the run folder; None if there is none, or a later job has taken over the run."""
    if "array" in submission.place:
        return None
    try:
        holder = read_json(Path(submission.directory) / RECORD, Submission)
        metadata = Run(Path(submission.directory)).read_metadata()
    except PrimusError:  # the run folder was removed
        return None
    # The end of an earlier job of the same run is older than this submission.
    is_new = metadata.ended is not None and metadata.ended >= submission.submitted
    is_ours = (holder.runtime, holder.id) == (submission.runtime, submission.id)
    return metadata.outcome if is_ours and is_new and metadata.outcome.state not in ("planned", "running") else None


def find_exit_code_of_job(state: JobState) -> int:
    """Exit code of a command that waited for a job, from the scheduler's answer alone."""
    if state.state == "done":
        return EXIT_OK
    if state.state == "cancelled":
        return EXIT_INTERRUPTED
    if state.state in ("failed", "gone"):
        return state.exit_code or EXIT_FAILED
    return EXIT_TIMED_OUT


def record_end(submission: Submission, state: JobState) -> None:
    """Record the end of a run whose nodes recorded none.

    This happens when the job is cancelled in the queue, when its nodes are killed, and when they write to another
    file system. A run that another job has taken over is left alone.
    """
    run = Run(Path(submission.directory))
    try:
        before = run.read_metadata().outcome.state
        holder = read_json(run.directory / RECORD, Submission)
    except PrimusError:  # the run folder was removed
        return
    # Nodes record their own end, which knows more than the scheduler. It is never overwritten.
    if before not in ("planned", "running") or holder.id != submission.id:
        return
    if state.state == "done":
        if before == "planned":  # its nodes do not share the folder, or it is an array, whose jobs record nothing
            run.update_metadata(ended=time.time(), outcome=RunOutcome(state="done", exit_code=EXIT_OK))
        return
    run_state: Literal["interrupted", "failed"] = "failed" if state.state == "failed" else "interrupted"
    # As when its nodes have recorded the cancellation: they had no time to while they started again.
    is_stopped = state.state == "cancelled" and run.read_metadata().attempts > 0
    code = CANCELLED_RUN if is_stopped else find_exit_code_of_job(state)
    outcome = RunOutcome(state=run_state, exit_code=code, reason=_describe_end(submission, state))
    run.update_metadata(ended=time.time(), outcome=outcome)


def _describe_end(submission: Submission, state: JobState) -> str:
    verb = {"failed": "failed", "cancelled": "was cancelled"}.get(state.state, "is gone")
    details = "; ".join(filter(None, (state.reason, state.raw if state.raw not in state.reason else "")))
    return f"job {submission.id} of {submission.runtime} {verb}" + (f": {details}" if details else "")


def _end_file(submission: Submission, environ: Mapping[str, str]) -> Path:
    return find_index_folder(environ) / "ended" / format_file_name(submission)


def _read_known_end(submission: Submission, environ: Mapping[str, str]) -> JobState | None:
    """The recorded end of a job; schedulers reuse ids, so a record older than the submission is of another job."""
    path = _end_file(submission, environ)
    try:
        is_ours = path.stat().st_mtime >= submission.submitted
        return read_json(path, JobState) if is_ours else None
    except (OSError, PrimusError):
        return None
