"""Query Slurm for jobs and nodes: one command for many jobs, in output formats that are stable between versions."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import PrimusError, UsageError, find_nearest
from primus.launch.run_remote import SubmissionRejected
from primus.runs.store import Run
from primus.runtime import JobState, SchedulerState, Submission
from primus.runtimes.slurm import chain
from primus.runtimes.slurm.options import KNOWN
from primus.runtimes.slurm.script import limit_s as parse_duration
from primus.runtimes.slurm.waiting import count_gpus_per_node, explain_reason, parse_time

LIMIT_S = 30.0
OPTION_ERROR = 255
"""Exit code of srun and sbatch for an option that they cannot read; 1 for a request that the controller rejects
(observed with 22.05)."""
PREFIXES = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_")
"""Prefixes of variables with which users filter and format the output of these commands."""

STATES: dict[str, SchedulerState] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "CONFIGURING"), "queued"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "STAGE_OUT", "RESIZING", "SIGNALING"), "running"),
    "COMPLETED": "done",
    **dict.fromkeys(("CANCELLED", "REVOKED"), "cancelled"),
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "LAUNCH_FAILED"),
        "failed",
    ),
}
"""States of squeue(1) and sacct(1)."""

OPERATOR_ACTIONS = {
    "JobHeldUser": "scontrol release {id}",
    "JobHeldAdmin": "ask an administrator to release it",
    "launch_failed_requeued_held": "a node could not start it: fix the node, then scontrol release {id}",
    "BadConstraints": "no node matches the options: cancel the job, and change them",
    "PartitionTimeLimit": "its time limit exceeds the partition's: scontrol update JobId={id} TimeLimit=...",
    "PartitionConfig": "it requests more than the partition has: cancel the job, and change its options",
    "PartitionNodeLimit": "it requests more nodes than the partition allows: cancel the job, and change its options",
    "InvalidAccount": "the account is not valid: submit with another --account",
    "InvalidQOS": "the quality of service is not valid: submit with another --qos",
    "DependencyNeverSatisfied": "a job that it depends on has failed: cancel it",
}
"""Reasons that waiting does not resolve (squeue(1), JOB REASON CODES), and what to do; {id} is the job."""


MEANINGS = {
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "OUT_OF_MEMORY": "the job exceeded its memory limit (--mem)",
    "TIMEOUT": "the job exceeded its time limit (--time)",
    "DEADLINE": "the job reached its deadline (--deadline)",
    "PREEMPTED": "another job preempted it",
}
"""Meaning of the states of failed jobs (squeue(1), JOB STATE CODES)."""

HEADLESS = "its first node is lost, and its script with it; needs operator action: cancel it, and submit its run again"
"""With --no-kill, which spare nodes need, Slurm keeps such a job until its time limit (observed with 22.05)."""


class CommandAnswer(Struct, frozen=True):
    """Result of a command of Slurm."""

    code: int | None
    """Exit code; None after a timeout."""
    out: str
    err: str


def run_query(argv: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> CommandAnswer:
    """Run a command of Slurm, at most for `limit_s`.

    Raises:
        PrimusError: The command is not installed.
    """
    # Format and filter variables of the user would change the output that is parsed here.
    env = {name: value for name, value in (environ or os.environ).items() if not name.startswith(PREFIXES)}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return CommandAnswer(None, "", f"{argv[0]} did not respond within {limit_s:g} s")
    except OSError as error:
        raise PrimusError(
            f"{argv[0]} cannot be started: {error.strerror}", "run it on a node of a Slurm cluster"
        ) from None
    return CommandAnswer(done.returncode, done.stdout, done.stderr.strip())


def make_rejection(what: str, problem: str, code: int | None) -> SubmissionRejected:
    """The error for a request that Slurm rejects with the message `problem` and the exit code `code` of its command."""
    error: type[PrimusError] = UsageError if code == OPTION_ERROR else PrimusError
    return SubmissionRejected.from_error(error(f"Slurm rejected the {what}: {problem}", _suggest_option(problem)))


def _suggest_option(problem: str) -> str:
    """The nearest option of primus or Slurm, if Slurm does not recognize one."""
    match = re.search(r"unrecognized option '--([^'=]+)", problem)
    if match and match[1].startswith("container-"):
        return "this cluster has no pyxis: use container --engine docker, podman or apptainer"
    option = find_nearest(match[1], KNOWN) if match else None
    return f"did you mean '--{option}'?" if option else ""


def query_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """State of each of `submissions`, by id: from squeue; for ended jobs from sacct or scontrol, else from the run.

    Raises:
        PrimusError: Slurm does not respond.
    """
    found: dict[str, JobState] = {}
    for cluster in sorted({each.place.get("cluster", "") for each in submissions}):
        of_cluster = [each for each in submissions if each.place.get("cluster", "") == cluster]
        jobs = [link for each in of_cluster for link in chain.split_links(each)]
        states = _query_states_in_cluster(jobs, [f"--clusters={cluster}"] if cluster else [])
        found |= {each.id: chain.combine_link_states(each, states) for each in of_cluster}
    return found


def _query_states_in_cluster(submissions: Sequence[Submission], where: list[str]) -> dict[str, JobState]:
    ids = [each.id for each in submissions]
    found = _query_squeue(ids, where)
    # In the order of cost: one squeue and one sacct for all jobs, then one scontrol for each job without an exit code.
    if missing := [each for each in ids if each not in found or found[each].raw == ENDED_ARRAY]:
        found |= _query_sacct(missing, where)
    for each in submissions:
        state = found.get(each.id)
        if state is None or (state.state in ("done", "failed") and state.exit_code is None):
            found[each.id] = _query_scontrol(each.id, where) or state or _read_state_of_run(each)
    return found


def _query_squeue(ids: Sequence[str], where: list[str]) -> dict[str, JobState]:
    """States of jobs that are queued, running or have ended within MinJobAge (slurm.conf(5)), from squeue."""
    fields = "--format=%i|%T|%r|%N|%B|%D|%b|%L|%S"
    answer = run_query(["squeue", *where, "--noheader", "--states=all", f"--jobs={','.join(ids)}", fields])
    if answer.code and "Invalid job id" in answer.err:  # a single job that Slurm has forgotten
        return {}
    if answer.code != 0:
        raise PrimusError(f"squeue does not respond: {answer.err or answer.code}", "jobs are not affected; try later")
    lines = [line for line in answer.out.splitlines() if line.strip() and not line.startswith("CLUSTER: ")]
    if lines and not any("|" in line for line in lines):  # of a wrapper: no answer is not an ended job
        raise PrimusError(f"unexpected output of squeue: {lines[0][:80]!r}", "jobs are not affected; try later")
    found: list[tuple[str, JobState]] = []
    for line in lines:
        identity, _, rest = line.partition("|")
        if rest.count("|") > 1 and _strip_array_index(identity) in ids:
            found.append((identity, _parse_squeue_line(_strip_array_index(identity), rest.split("|"))))
    return _merge_array_states(found)


def _parse_squeue_line(number: str, fields: Sequence[str]) -> JobState:
    raw, reason, nodes, first, size, resources, left, start, *_ = [*fields, *[""] * 6]
    state = _build_job_state(number, raw, reason=reason, nodes=nodes)
    if state.state not in ("queued", "running"):
        return state
    num_nodes = int(size) if size.isdecimal() else None
    per_node = count_gpus_per_node(resources)
    state = structs.replace(
        state, num_nodes=num_nodes, gpus=None if per_node is None or num_nodes is None else per_node * num_nodes
    )
    if state.state == "queued":
        advice = "" if "operator action" in state.reason else explain_reason(number, reason)
        return structs.replace(state, advice=advice, starts=parse_time(start))
    # The batch script runs on the first node. A job that has lost it has nobody to supervise its steps.
    is_headless = state.raw == "RUNNING" and state.nodes and first not in ("", "n/a", *state.nodes)
    return structs.replace(state, time_left_s=parse_duration(left), reason=HEADLESS if is_headless else state.reason)


def _strip_array_index(number: str) -> str:
    """Job id without the index of an array task: 11 for ``11_3`` and ``11_[4-7]``."""
    return number.partition("_")[0]


ENDED_ARRAY = "ENDED"
"""State (not Slurm's) of an array without unfinished tasks in squeue, which may have forgotten some ended ones."""


def _merge_array_states(found: Iterable[tuple[str, JobState]]) -> dict[str, JobState]:
    """States by job id, those of an array's tasks combined."""
    parts: dict[str, list[JobState]] = {}
    for number, state in found:
        parts.setdefault(_strip_array_index(number), []).append(state)
    arrays = {_strip_array_index(number) for number, _ in found if "_" in number}
    return {base: _combine_array_states(states) if base in arrays else states[-1] for base, states in parts.items()}


def _combine_array_states(states: Sequence[JobState]) -> JobState:
    """State of an array: unfinished while a task is, else failed if a task has failed."""
    # An unfinished task decides first, because waiting must not end while one is left.
    order: tuple[SchedulerState, ...] = ("running", "queued", "unknown", "failed", "cancelled", "done")
    first = min(states, key=lambda each: order.index(each.state))
    codes = [each.exit_code for each in states if each.exit_code is not None]
    counts = [(name, sum(each.state == name for each in states)) for name in order]
    summary = ", ".join(f"{count} {name}" for name, count in counts if count)
    return JobState(
        state=first.state,
        raw=first.raw if first.state in ("running", "queued") else ENDED_ARRAY,
        reason=f"array: {summary}{f'; {first.reason}' if first.reason else ''}",
        nodes=tuple(dict.fromkeys(node for each in states for node in each.nodes)),
        exit_code=max(codes, default=None),
        restarts=max(each.restarts for each in states),
    )


def _query_sacct(ids: Sequence[str], where: list[str]) -> dict[str, JobState]:
    """States from the accounting database; empty on a cluster without accounting."""
    fields = "--format=JobID,SchedulerState,ExitCode,NodeList"
    answer = run_query(
        ["sacct", *where, "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}", fields]
    )
    found: list[tuple[str, JobState]] = []
    for line in answer.out.splitlines() if answer.code == 0 else []:
        values = line.split("|")
        if len(values) == 4 and _strip_array_index(values[0]) in ids:
            nodes = "" if values[3] == "None assigned" else values[3]
            state = _build_job_state(
                _strip_array_index(values[0]), values[1], exit_code=_exit_code(values[2]), nodes=nodes
            )
            found.append((values[0], state))
    return _merge_array_states(found)


def _query_scontrol(number: str, where: list[str]) -> JobState | None:
    """State of one job from the controller, with its exit code."""
    answer = run_query(["scontrol", *where, "--oneliner", "show", "job", number])
    found = [_parse_scontrol_line(number, line) for line in answer.out.splitlines()] if answer.code == 0 else []
    states = [state for state in found if state]
    return _combine_array_states(states) if "ArrayTaskId=" in answer.out and states else next(iter(states), None)


def _parse_scontrol_line(number: str, line: str) -> JobState | None:
    """State of a job from a line of scontrol."""
    values = dict(re.findall(r"(?:^| )(JobState|Reason|Restarts|ExitCode|NodeList)=(\S*)", line))
    if "JobState" not in values:
        return None
    return _build_job_state(
        number,
        values["JobState"],
        reason=values.get("Reason", ""),
        nodes=values.get("NodeList", "").replace("(null)", ""),
        exit_code=_exit_code(values.get("ExitCode", "")),
        restarts=int(values.get("Restarts", "0")),
    )


def _read_state_of_run(submission: Submission) -> JobState:
    """State of a job that Slurm has forgotten, from its run folder."""
    try:
        outcome = Run(Path(submission.directory)).read_metadata().outcome
    except PrimusError:
        return JobState(state="gone", reason="Slurm has no record of it, and its run folder does not exist")
    known: dict[str, SchedulerState] = {"done": "done", "failed": "failed", "interrupted": "cancelled"}
    state = known.get(outcome.state, "gone")
    reason = outcome.reason or ("Slurm has no record of it" if state == "gone" else "")
    return JobState(state=state, raw=outcome.state, reason=reason, exit_code=outcome.exit_code)


def _build_job_state(
    number: str, raw: str, *, reason: str = "", nodes: str = "", exit_code: int | None = None, restarts: int = 0
) -> JobState:
    name = raw.split(" ")[0].rstrip("+")  # such as `CANCELLED by 1000`
    state = STATES.get(name, "unknown")
    is_outdated = state in ("done", "cancelled")  # the reason why the job was queued earlier
    text = MEANINGS.get(name) or ("" if is_outdated or reason in ("None", "(null)") else reason)
    if state == "queued" and OPERATOR_ACTIONS.get(text):
        text = f"{text}, needs operator action: {OPERATOR_ACTIONS[text].format(id=number)}"
    code = 124 if name == "TIMEOUT" else exit_code  # as timeout(1)
    return JobState(
        state=state, raw=name, reason=text, nodes=tuple(expand_node_list(nodes)), exit_code=code, restarts=restarts
    )


def _exit_code(text: str) -> int | None:
    """Exit code from `code:signal`; 128 + signal if a signal ended the job."""
    code, _, number = text.partition(":")
    if not code.isdecimal():
        return None
    return 128 + int(number) if number.isdecimal() and int(number) and not int(code) else int(code)


def expand_node_list(nodes: str) -> list[str]:
    """Names of the nodes in a list such as ``gpu[07-08,11],cpu1``, in order."""
    found: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            names = [
                name + plain + number
                for name in names
                for number in (_expand_number_ranges(ranges) if ranges else [""])
            ]
        found += names
    return found


def _expand_number_ranges(ranges: str) -> Iterable[str]:
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not dash or not (first.isdecimal() and last.isdecimal()):
            yield each
            continue
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def cancel_job(submission: Submission) -> None:
    """Cancel a job; its processes receive SIGTERM, and save.

    Raises:
        PrimusError: Slurm rejects the request, or does not respond.
    """
    cluster = submission.place.get("cluster")
    where = [f"--clusters={cluster}"] if cluster else []
    links = chain.list_links(submission)
    if len(links) > 1:  # scancel fails for those that have ended
        states = _query_squeue(links, where)
        links = [link for link in links if link in states and states[link].state in ("queued", "running")]
    answer = run_query(["scancel", *where, *(links or [submission.id])])
    if answer.code != 0 or "error" in answer.err:
        raise PrimusError(f"scancel {submission.id}: {answer.err or answer.code}")


def find_job_id(name: str, comment: str, environ: Mapping[str, str]) -> str | None:
    """Id of this user's job with this name and comment; None if there is none.

    Raises:
        PrimusError: Slurm does not respond.
    """
    answer = run_query(["squeue", "--noheader", "--me", "--states=all", "--format=%i|%j|%k"], environ)
    if answer.code != 0:
        raise PrimusError(f"squeue does not respond: {answer.err or answer.code}")
    lines = [line.partition("|") for line in answer.out.splitlines()]
    wanted = f"{name}|{comment}"  # behind it, the comment of a job that runs already has its progress
    ids = [_strip_array_index(number) for number, _, described in lines if f"{described} ".startswith(f"{wanted} ")]
    return ids[-1] if ids else None


def find_responding_nodes(nodes: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Those of this job's `nodes` on which a step starts within the time limit."""
    number = len(nodes)
    options = ["--overlap", "--no-kill", "--kill-on-bad-exit=0", "--input=none", "--ntasks-per-node=1"]
    where = [f"--nodes={number}", f"--ntasks={number}", f"--nodelist={','.join(nodes)}"]
    command = ["sh", "-c", 'echo "primus:$SLURMD_NODENAME"']
    output = _read_partial_output(["srun", *where, *options, *command], environ, LIMIT_S)
    return {line.removeprefix("primus:") for line in output.splitlines() if line.startswith("primus:")}


def _read_partial_output(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str:
    """Standard output of a command until it ends or the limit is reached: srun waits for nodes that do not respond."""
    with subprocess.Popen(
        argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # The output before the limit is complete for the nodes that responded.
            child.kill()
            out, _ = child.communicate()
    return out.decode(errors="replace")


def find_down_nodes(nodes: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Those of `nodes` that Slurm lists as down or not responding; none if it gives no answer."""
    answer = run_query(["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"], environ)
    lines = [line.partition("|") for line in answer.out.splitlines()] if answer.code == 0 else []
    return {name for name, _, state in lines if state.endswith("*") or state.rstrip("*$~#!%@^-") in ("down", "fail")}
