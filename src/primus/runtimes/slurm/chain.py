"""Chains: jobs of one run that follow each other, so that it trains beyond the time limit of a single job.

All jobs of a chain are submitted at once, each with `--dependency=afterany:<the one before>`, so that Slurm continues
also after a job that it has killed. The run is resumed by each job from its newest checkpoint. A job that ends the run,
or that finds it ended, cancels the jobs behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus.errors import PrimusError
from primus.launch.jobs.submissions import read_holder
from primus.runs.store import Run
from primus.runtime import JobState, Submission

PLACE = "chain"
"""Key of `Submission.place` with the ids of the jobs, in order."""


def list_links(submission: Submission) -> list[str]:
    """Ids of the jobs of a submission, in order."""
    return submission.place.get(PLACE, submission.id).split(",")


def split_links(submission: Submission) -> list[Submission]:
    """A submission for each job of `submission`."""
    return [structs.replace(submission, id=link) for link in list_links(submission)]


def find_next_links(run: Run, job: str) -> list[str]:
    """Ids of the jobs behind `job` in the chain of the run; none if there is no chain.

    The record is written when all jobs are submitted, which the first one may not wait for: ask when the job ends.
    """
    links = _read_links(run)
    return links[links.index(job) + 1 :] if job in links else []


def is_ended_before(run: Run, job: str) -> bool:
    """Whether the run is done, by a job that is ahead of `job` in its chain."""
    return job in _read_links(run)[1:] and is_run_done(run)


def is_run_done(run: Run) -> bool:
    """Whether the run is done; False if its folder was removed."""
    try:
        return run.read_metadata().outcome.state == "done"
    except PrimusError:
        return False


def _read_links(run: Run) -> list[str]:
    try:
        holder = read_holder(run.directory)
    except PrimusError:  # a damaged record: the job ends as one without a chain
        return []
    return list_links(holder) if holder else []


def combine_link_states(submission: Submission, found: Mapping[str, JobState]) -> JobState:
    """State of a chain, from the states of its jobs by id."""
    links = list_links(submission)
    states = [found[link] for link in links]
    if len(states) == 1:
        return states[0]
    index = _find_current(states)
    last, number = states[index], f"job {links[index]}, {index + 1} of {len(links)}"
    # Each job that ends at its time limit is done; the chain is done only if the run is.
    run = Run(Path(submission.directory))
    is_cut = last.state == "done" and states[-1].state == "cancelled" and not is_run_done(run)
    return structs.replace(
        states[-1] if is_cut else last,
        reason=f"{number}; {last.reason}" if last.reason else number,
        nodes=last.nodes,
        restarts=sum(each.restarts for each in states),
    )


def _find_current(states: Sequence[JobState]) -> int:
    """Index of the job that runs, else of the first that is queued, else of the last that has run."""
    for name in ("running", "queued"):
        if found := [index for index, each in enumerate(states) if each.state == name]:
            return found[0]
    # A job that was cancelled in the queue has no nodes.
    started = [
        index for index, each in enumerate(states) if each.state != "gone" and (each.state != "cancelled" or each.nodes)
    ]
    return started[-1] if started else len(states) - 1
