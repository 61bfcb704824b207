"""List the jobs that were submitted from this home folder."""

from __future__ import annotations

from msgspec import Struct, structs

from primus.errors import EXIT_FAILED, PrimusError
from primus.launch.jobs import job_states, submissions
from primus.report import table
from primus.runtime import JobState, Submission
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `jobs list`."""

    all: bool = False
    """Include ended jobs, and jobs that the scheduler no longer knows."""


def run(options: Options, context: TaskContext) -> int:
    """Print one line per job, oldest first; jobs of a scheduler that does not respond are `unknown`."""
    found, problems = [], []
    known = submissions.list_submissions(context.environ)
    for runtime in sorted({each.runtime for each in known}):
        ours = [each for each in known if each.runtime == runtime]
        try:
            states = job_states.query_states(ours, context.environ)
        except PrimusError as error:
            problems.append(f"{runtime}: {error}")
            states = {}
        found += [(each, states.get((runtime, each.id), JobState(state="unknown"))) for each in ours]
    found.sort(key=lambda pair: pair[0].submitted)
    listed = [pair for pair in found if options.all or pair[1].state not in (*job_states.ENDED, "gone")]
    values = [structs.asdict(each) | {"state": state} for each, state in listed]
    context.result(values, _format_job_table(listed) if listed else _explain_empty_list(len(known)))
    for problem in problems:
        context.say(problem)
    return EXIT_FAILED if problems else 0


def _format_job_table(listed: list[tuple[Submission, JobState]]) -> str:
    header = ["job", "runtime", "name", "state", "submitted", "nodes", "GPUs", "time", "run"]
    rows = [
        [
            each.id,
            each.runtime,
            each.name,
            job_states.format_state(state),
            table.format_time(each.submitted),
            str(state.num_nodes or len(state.nodes) or "-"),
            "-" if state.gpus is None else str(state.gpus),
            _format_job_time(state),
            each.directory,
        ]
        for each, state in listed
    ]
    return table.format_table(header, rows, right=[5, 6])


def _format_job_time(state: JobState) -> str:
    if state.starts is not None:
        return f"starts {table.format_time(state.starts)}"
    return "-" if state.time_left_s is None else f"{table.format_duration(state.time_left_s)} left"


def _explain_empty_list(num_known: int) -> str:
    if num_known:
        return f"no queued or running jobs; to list the {num_known} ended ones: jobs list --all"
    return "no jobs were submitted from this home folder"
