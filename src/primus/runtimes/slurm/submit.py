"""Start a planned task with srun or sbatch."""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from primus.errors import EXIT_FAILED, EXIT_INTERRUPTED, PrimusError, UsageError
from primus.launch import inherited_variables
from primus.launch.jobs import job_states, submissions
from primus.launch.jobs import logs as job_logs
from primus.launch.nodes.avoided_nodes import report_avoided_nodes
from primus.launch.run_remote import QueryOnly, SubmissionRejected
from primus.machine.cluster import RANK_VARIABLES
from primus.messages import Say
from primus.redaction import redact_args
from primus.runs.events import EventLog
from primus.runs.files import to_json
from primus.runs.store import Run, RunOutcome
from primus.runtime import RemoteLaunch, Submission
from primus.runtimes.slurm import chain, leaf_switches, queries, script, step, unfit_nodes
from primus.runtimes.slurm.options import Options, SlurmOption, find_option_value, parse

SUBMIT_LIMIT_S = 120.0
"""Time for sbatch to respond; it retries a busy controller itself (slurm.conf(5), MessageTimeout, 10 s by default)."""
JOB_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "PMI", "OMPI", "PRTE_", "PALS_")
"""Prefixes of variables of the enclosing job: Slurm rejects a job that inherits them, or reads its options there."""
LAUNCHER_VARIABLES = ("NNODES", "NODE_RANK", *RANK_VARIABLES)
"""Variables with a node's rank; on the cluster Slurm sets it."""
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


def start_step_or_job(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    """Run the step, or submit the job; gives the exit code.

    Raises:
        PrimusError: srun or sbatch cannot be started, or rejects the job.
    """
    options = parse(remote.request.runtimes[0].words)
    program = remote.plan.argv[0]
    environ = build_command_environment(remote.make_environ, options.command, {*remote.plan.env})
    if remote.plan.inner and remote.plan.inner.step_options:  # srun passes all of its variables into the container
        environ = {name: value for name, value in environ.items() if name not in inherited_variables.HIDDEN}
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        raise SubmissionRejected.from_error(
            UsageError(f"{program} is not installed", "run this on a login node of a Slurm cluster")
        )
    remote = _avoid_unfit_nodes(remote, options, run, environ, say)
    argv = leaf_switches.fit_to_cluster(remote.plan.argv, options.placement, options.num_placed_nodes, environ, say)
    remote = structs.replace(remote, plan=structs.replace(remote.plan, argv=argv))
    if options.test_only:
        _ask_only(remote, environ)
    if options.command == "srun":
        return step.run_step(remote, run, environ, say)
    assert run is not None, "a batch script is a file of a run folder"
    submission = _submit_job(remote, run, options, environ, say)
    _print_submission(remote, submission, say)
    if not options.wait and not options.follow:
        return 0
    return _wait_for_job(submission, options, remote, say)


def _avoid_unfit_nodes(
    remote: RemoteLaunch, options: Options, run: Run | None, environ: Mapping[str, str], say: Say
) -> RemoteLaunch:
    """`remote` with those of its unfit nodes excluded that the cluster has and that the job can do without."""
    listed = remote.context.find_unfit_nodes(options.unfit_nodes)
    if listed is None:
        return remote
    found = unfit_nodes.plan_excluded_nodes(options, listed, remote.context.environ)
    planned = unfit_nodes.format_exclude(options, found.avoided)
    is_inside = options.command == "srun" and "SLURM_JOB_ID" in environ
    if found.avoided and not is_inside:
        found = unfit_nodes.choose_cluster_nodes(found, options, environ)
    report_avoided_nodes(found, run, say)
    chosen = unfit_nodes.format_exclude(options, found.avoided)
    argv = [other for word in remote.plan.argv for other in (chosen if (word,) == planned else (word,))]
    return structs.replace(remote, plan=structs.replace(remote.plan, argv=tuple(argv), avoided=found.avoided))


def build_command_environment(environ: Mapping[str, str], command: str, planned: set[str]) -> dict[str, str]:
    """Variables for a command of Slurm, without those of an enclosing job or launcher; a step keeps its job's.

    Args:
        environ: Variables of this process and of the plan.
        command: srun or sbatch.
        planned: Names that the plan sets, which are kept.
    """
    is_inside = "SLURM_JOB_ID" in environ

    def is_dropped(name: str) -> bool:
        if name in planned or name in KEPT:
            return False
        if name in LAUNCHER_VARIABLES or name.startswith("PET_"):
            return True
        if not is_inside:  # outside of a job they are settings of the user, such as SBATCH_ACCOUNT
            return name.startswith(("PMI", "OMPI"))
        return name.startswith(JOB_PREFIXES[4:] if command == "srun" else JOB_PREFIXES)

    return {name: value for name, value in environ.items() if not is_dropped(name)}


def _ask_only(remote: RemoteLaunch, environ: Mapping[str, str]) -> NoReturn:
    """Ask Slurm whether and when the job could start."""
    answer = queries.run_query(remote.plan.argv, environ, SUBMIT_LIMIT_S)
    sys.stdout.write(answer.out)
    print(answer.err, file=sys.stderr)
    raise QueryOnly(EXIT_FAILED if answer.code is None else answer.code)


def _submit_job(remote: RemoteLaunch, run: Run, options: Options, environ: Mapping[str, str], say: Say) -> Submission:
    typed = options.slurm_options
    try:
        logs = _make_log_folders(options, run)
    except PrimusError as error:
        raise SubmissionRejected.from_error(error) from None
    # Name and comment identify the job if sbatch is killed before it prints the id; the comment contains the run
    # folder.
    name = find_option_value(typed, "job-name") or remote.context.name
    comment = find_option_value(typed, "comment") or script.format_job_comment(str(run.directory))
    try:
        answer = queries.run_query(remote.plan.argv, environ, SUBMIT_LIMIT_S)
    except KeyboardInterrupt:
        # The signal may arrive after Slurm has accepted the job. Its record is then written before the command ends.
        accepted = _find_job_after_interrupt(name, comment, environ, run, say)
        if accepted:
            _remember_submission(remote, run, options, (accepted, ""), logs, say)
        raise
    number, _, cluster = answer.out.strip().rpartition("\n")[2].partition(";")
    if answer.code != 0 or not number.isdecimal():
        # sbatch may time out although the controller has accepted the job, so a failure is not final yet.
        number = _find_job_after_timeout(answer, name, comment, environ, run)
    elif answer.err:
        say(answer.err)
    jobs = [number]
    try:
        _submit_links(remote.plan.argv, options.chain, jobs, environ, say)
    finally:  # also after Ctrl-C: the jobs that Slurm has accepted are recorded
        submission = _remember_submission(remote, run, options, (",".join(jobs), cluster), logs, say)
    return submission


def _submit_links(argv: Sequence[str], num_jobs: int, jobs: list[str], environ: Mapping[str, str], say: Say) -> None:
    """Submit further jobs behind those in `jobs` until there are `num_jobs`, and add their ids."""
    while len(jobs) < num_jobs:
        # Behind `sbatch`, an option overrides the script's own --dependency, which is that of the first job.
        words = [argv[0], f"--dependency=afterany:{jobs[-1]}", *argv[1:]]
        answer = queries.run_query(words, environ, SUBMIT_LIMIT_S)
        number = answer.out.strip().rpartition("\n")[2].partition(";")[0]
        if answer.code != 0 or not number.isdecimal():
            problem = answer.err or answer.out.strip() or f"exit code {answer.code}"
            say(f"the chain has {len(jobs)} of {num_jobs} jobs: Slurm rejected the next one: {problem}")
            return
        jobs.append(number)


def _remember_submission(
    remote: RemoteLaunch, run: Run, options: Options, job: tuple[str, str], logs: list[str], say: Say
) -> Submission:
    """Record the submission of a job that Slurm has accepted; a record that cannot be written is reported.

    Args:
        job: Id of the job, or ids of those of a chain, and the cluster.
    """
    numbers, cluster = job
    number = numbers.partition(",")[0]
    submission = Submission(
        runtime="slurm",
        id=number,
        name=find_option_value(options.slurm_options, "job-name") or remote.context.name,
        directory=str(run.directory),
        submitted=time.time(),
        host=socket.gethostname(),
        user=getpass.getuser(),
        command=tuple(redact_args(remote.command)),
        place=({"cluster": cluster} if cluster else {})
        | _get_array_place(options.slurm_options)
        | ({chain.PLACE: numbers} if numbers != number else {}),
        logs=tuple(_fill_job_number(each, job, options) for each in logs for job in numbers.split(",")),
    )
    # Before the event, because `jobs list` and a resume read the record.
    submissions.remember_submission(submission, remote.make_environ, say)
    with contextlib.suppress(OSError):
        log = EventLog(run.events)
        log.append("submitted", runtime="slurm", id=number, name=submission.name)
        log.close()
    return submission


def _find_job_after_interrupt(name: str, comment: str, environ: Mapping[str, str], run: Run, say: Say) -> str | None:
    """Id of a job whose submission was interrupted; None if Slurm does not have it."""
    number = None
    with contextlib.suppress(PrimusError):
        number = queries.find_job_id(name, comment, environ)
    if number is None:
        reason = "interrupted before Slurm responded to the submission"
        say(f"{reason}; check whether it was accepted: squeue --me --name={name}")
        outcome = RunOutcome(state="interrupted", exit_code=EXIT_INTERRUPTED, reason=reason)
        run.update_metadata(ended=time.time(), outcome=outcome)
        return None
    say(f"job {number} is already queued; to cancel it: primus-cli direct -- jobs cancel {number}")
    return number


def _find_job_after_timeout(
    answer: queries.CommandAnswer, name: str, comment: str, environ: Mapping[str, str], run: Run
) -> str:
    """Id of a job that Slurm has accepted although sbatch failed or timed out.

    Raises:
        SubmissionRejected: Slurm has not accepted it.
        PrimusError: Slurm does not respond.
    """
    problem = answer.err or answer.out.strip() or f"exit code {answer.code}"
    try:
        number = queries.find_job_id(name, comment, environ)
    except PrimusError as error:
        unknown = f"sbatch failed, and the job may have been accepted: {problem}; {error.problem}"
        run.update_metadata(outcome=RunOutcome(state="failed", exit_code=EXIT_FAILED, reason=unknown))
        raise PrimusError(unknown, f"before you submit it again, check: squeue --me --name={name}") from None
    if number is not None:
        return number
    raise queries.make_rejection("job", problem, answer.code)


def _get_array_place(typed: tuple[SlurmOption, ...]) -> dict[str, str]:
    numbers = find_option_value(typed, "array")
    return {"array": numbers} if numbers is not None else {}


def _fill_job_number(pattern: str, number: str, options: Options) -> str:
    """`pattern` with the job's number; each task of an array also has its own number (%j)."""
    return re.sub("%j", "*", pattern).replace("%A", number) if options.is_array else re.sub("%[jA]", number, pattern)


def _make_log_folders(options: Options, run: Run) -> list[str]:
    """Create the folders of the job's logs, which Slurm does not create; gives the logs as patterns that keep ``%j``.

    Raises:
        UsageError: A folder's name contains the number of the job.
    """
    typed = options.slurm_options
    place = find_option_value(typed, "chdir") or ""
    given = [value for name in ("output", "error") if (value := find_option_value(typed, name))]
    if find_option_value(typed, "output") is None:
        given.append(script.build_output_pattern(str(run.directory), options))
    patterns = []
    for text in given:
        file = os.path.abspath(os.path.join(place, _fill_job_name(text, typed)))
        folder = os.path.dirname(file)
        if "%" in folder.replace("%%", ""):
            raise UsageError(
                f"slurm: -o {text}: the folder's name contains the number of the job, which is not known yet",
                "use %j in the file's name only",
            )
        plain = folder.replace("%%", "%")
        try:
            Path(plain).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"the folder of the job's log cannot be created: {plain}: {error.strerror}"
            raise PrimusError(problem, "choose another one: --output=FOLDER/slurm-%j.out") from None
        patterns.append(f"{glob.escape(plain)}/{_convert_to_glob(os.path.basename(file))}")
    return patterns


def _fill_job_name(text: str, typed: tuple[SlurmOption, ...]) -> str:
    """`text` with the job's name and user filled in, which are known before the job has a number."""
    known = {"%x": find_option_value(typed, "job-name"), "%u": getpass.getuser()}
    for pattern, value in known.items():
        if value is not None and "%%" not in text:
            text = text.replace(pattern, value)
    return text


def _convert_to_glob(name: str) -> str:
    """A filename pattern of sbatch(1) as a glob; ``%j`` and ``%A`` are kept."""
    parts = re.split(r"(%\d*[A-Za-z]|%%)", name)
    return "".join(_convert_part_to_glob(part) for part in parts)


def _convert_part_to_glob(part: str) -> str:
    if part == "%%":
        return "%"
    if part in ("%j", "%A"):
        return part
    return "*" if re.fullmatch(r"%\d*[A-Za-z]", part) else glob.escape(part)


def _print_submission(remote: RemoteLaunch, submission: Submission, say: Say) -> None:
    first, *others = chain.list_links(submission)
    more = f", and {', '.join(others)} after it" if others else ""
    say(f"job {first} is queued{more}; to see its log: primus-cli direct -- jobs logs {first} --follow")
    if remote.is_json:
        values = {"runtime": "slurm", "id": submission.id, "name": submission.name, "run": submission.directory}
        values |= {chain.PLACE: submission.place[chain.PLACE]} if others else {}
        print(to_json(values), flush=True)


def _wait_for_job(submission: Submission, options: Options, remote: RemoteLaunch, say: Say) -> int:
    """Wait until the job ends, printing its log with --follow; gives the exit code of its run."""
    cancel = f"direct -- jobs cancel {submission.id}"
    with job_states.detach_on_signal(submission.id, cancel, say) as waiting:
        if options.follow:
            out = sys.stderr if remote.is_json else sys.stdout
            state = job_logs.follow_logs(submission, remote.context.environ, out, say)
        else:
            state = job_states.wait_for_job(submission, remote.context.environ, say)
        waiting.exit_code = job_states.report_end(submission, state, say)
    return waiting.exit_code
