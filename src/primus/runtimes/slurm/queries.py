"""What Slurm says of jobs and nodes: one question for many jobs, in the forms that do not change between versions."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus.errors import PrimusError
from primus.launch.jobs.scheduler_jobs import JobState, State, Submission
from primus.runs.store import Run

LIMIT_S = 30.0
PREFIXES = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_")
"""Variables by which users filter and shape what the commands print."""

STATES: dict[str, State] = {
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

NEEDS_PERSON = {
    "JobHeldUser": "scontrol release {id}",
    "JobHeldAdmin": "an administrator holds it",
    "launch_failed_requeued_held": "a node could not start it: see what is wrong there, then scontrol release {id}",
    "BadConstraints": "no node has what was asked for: cancel it, and change the options",
    "PartitionTimeLimit": "its time limit is over the partition's: scontrol update JobId={id} TimeLimit=...",
    "PartitionConfig": "it asks for more than the partition has: cancel it, and change the options",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "InvalidAccount": "the account cannot be used",
    "InvalidQOS": "the quality of service cannot be used",
    "DependencyNeverSatisfied": "what it depends on has failed: cancel it",
}
"""Reasons that waiting does not mend (squeue(1), JOB REASON CODES), and what to do; {id} is the job."""


MEANINGS = {
    "NODE_FAIL": "a node of the job failed",
    "BOOT_FAIL": "a node of the job did not boot",
    "OUT_OF_MEMORY": "the job used more memory than it has (--mem)",
    "TIMEOUT": "the time limit of the job (--time) was over",
    "DEADLINE": "the job's deadline was over",
    "PREEMPTED": "another job has preempted it",
}
"""What states of failed jobs mean (squeue(1), JOB STATE CODES)."""

HEADLESS = "its first node is lost, and its script with it; needs a person: cancel it, and submit its run again"
"""With --no-kill, which spare nodes take, Slurm goes on with such a job until its time limit (tried with 22.05)."""


class CommandAnswer(Struct, frozen=True):
    """How a command of Slurm ended."""

    code: int | None
    """None where it gave no answer in time."""
    out: str
    err: str


def run_query(argv: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> CommandAnswer:
    """Run a command of Slurm.

    Raises:
        PrimusError: It is not installed.
    """
    env = {name: value for name, value in (environ or os.environ).items() if not name.startswith(PREFIXES)}
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return CommandAnswer(None, "", f"{argv[0]} gave no answer in {limit_s:g} s")
    except OSError as error:
        raise PrimusError(
            f"{argv[0]}: cannot be started: {error.strerror}", "is this a node of a Slurm cluster?"
        ) from None
    return CommandAnswer(done.returncode, done.stdout, done.stderr.strip())


def query_states(submissions: Sequence[Submission]) -> dict[str, JobState]:
    """How each of `submissions` stands, by id: of squeue, of sacct or scontrol where it has ended, else of its run.

    Raises:
        PrimusError: Slurm does not answer.
    """
    found: dict[str, JobState] = {}
    for cluster in sorted({each.place.get("cluster", "") for each in submissions}):
        of_cluster = [each for each in submissions if each.place.get("cluster", "") == cluster]
        found |= _query_states_in_cluster(of_cluster, [f"--clusters={cluster}"] if cluster else [])
    return found


def _query_states_in_cluster(submissions: Sequence[Submission], where: list[str]) -> dict[str, JobState]:
    ids = [each.id for each in submissions]
    found = _query_squeue(ids, where)
    if missing := [each for each in ids if each not in found or found[each].raw == ENDED_ARRAY]:
        found |= _query_sacct(missing, where)
    for each in submissions:
        state = found.get(each.id)
        if state is None or (state.state in ("done", "failed") and state.exit_code is None):
            found[each.id] = _query_scontrol(each.id, where) or state or _read_state_of_run(each)
    return found


def _query_squeue(ids: Sequence[str], where: list[str]) -> dict[str, JobState]:
    """What squeue says: jobs that wait, run or have ended a short time ago."""
    said = run_query(
        ["squeue", *where, "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r|%N|%B"]
    )
    if said.code and "Invalid job id" in said.err:  # the only one, and long gone
        return {}
    if said.code != 0:
        raise PrimusError(f"squeue does not answer: {said.err or said.code}", "the jobs go on; ask again later")
    found: list[tuple[str, JobState]] = []
    for line in said.out.splitlines():
        fields = [*line.split("|"), ""]
        if len(fields) > 4 and _strip_array_index(fields[0]) in ids:
            state = _build_job_state(_strip_array_index(fields[0]), fields[1], reason=fields[2], nodes=fields[3])
            is_headless = state.raw == "RUNNING" and state.nodes and fields[4] not in ("", "n/a", *state.nodes)
            found.append((fields[0], structs.replace(state, reason=HEADLESS) if is_headless else state))
    return _merge_array_states(found)


def _strip_array_index(number: str) -> str:
    """Number of the array of a job such as ``11_3`` or ``11_[4-7]``; that of another job is its own."""
    return number.partition("_")[0]


ENDED_ARRAY = "ENDED"
"""Our word for an array of which Slurm remembers no job that goes on, maybe not all that have ended."""


def _merge_array_states(found: Iterable[tuple[str, JobState]]) -> dict[str, JobState]:
    """States by number, those of an array's jobs as one."""
    parts: dict[str, list[JobState]] = {}
    for number, state in found:
        parts.setdefault(_strip_array_index(number), []).append(state)
    arrays = {_strip_array_index(number) for number, _ in found if "_" in number}
    return {base: _combine_array_states(states) if base in arrays else states[-1] for base, states in parts.items()}


def _combine_array_states(states: Sequence[JobState]) -> JobState:
    """How an array stands: it goes on while one of its jobs does, and has failed where one of them has."""
    order: tuple[State, ...] = ("running", "queued", "unknown", "failed", "cancelled", "done")
    first = min(states, key=lambda each: order.index(each.state))
    codes = [each.exit_code for each in states if each.exit_code is not None]
    counts = [(name, sum(each.state == name for each in states)) for name in order]
    said = ", ".join(f"{count} {name}" for name, count in counts if count)
    return JobState(
        state=first.state,
        raw=first.raw if first.state in ("running", "queued") else ENDED_ARRAY,
        reason=f"array: {said}{f'; {first.reason}' if first.reason else ''}",
        nodes=tuple(dict.fromkeys(node for each in states for node in each.nodes)),
        exit_code=max(codes, default=None),
        restarts=max(each.restarts for each in states),
    )


def _query_sacct(ids: Sequence[str], where: list[str]) -> dict[str, JobState]:
    """What the accounting says; nothing where a cluster keeps none."""
    fields = "--format=JobID,State,ExitCode,NodeList"
    said = run_query(["sacct", *where, "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}", fields])
    found: list[tuple[str, JobState]] = []
    for line in said.out.splitlines() if said.code == 0 else []:
        values = line.split("|")
        if len(values) == 4 and _strip_array_index(values[0]) in ids:
            nodes = "" if values[3] == "None assigned" else values[3]
            state = _build_job_state(
                _strip_array_index(values[0]), values[1], exit_code=_exit_code(values[2]), nodes=nodes
            )
            found.append((values[0], state))
    return _merge_array_states(found)


def _query_scontrol(number: str, where: list[str]) -> JobState | None:
    """What the controller remembers of one job, its exit code too."""
    said = run_query(["scontrol", *where, "--oneliner", "show", "job", number])
    found = [_parse_scontrol_line(number, line) for line in said.out.splitlines()] if said.code == 0 else []
    states = [state for state in found if state]
    return _combine_array_states(states) if "ArrayTaskId=" in said.out and states else next(iter(states), None)


def _parse_scontrol_line(number: str, line: str) -> JobState | None:
    """What a line of scontrol says of a job."""
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
    """What the job's run says of its end, where Slurm has forgotten the job."""
    try:
        outcome = Run(Path(submission.directory)).read_metadata().outcome
    except PrimusError:
        return JobState(state="gone", reason="Slurm has forgotten it, and its run folder is gone")
    known: dict[str, State] = {"done": "done", "failed": "failed", "interrupted": "cancelled"}
    state = known.get(outcome.state, "gone")
    reason = outcome.reason or ("Slurm has forgotten it" if state == "gone" else "")
    return JobState(state=state, raw=outcome.state, reason=reason, exit_code=outcome.exit_code)


def _build_job_state(
    number: str, raw: str, *, reason: str = "", nodes: str = "", exit_code: int | None = None, restarts: int = 0
) -> JobState:
    word = raw.split(" ")[0].rstrip("+")  # such as `CANCELLED by 1000`
    state = STATES.get(word, "unknown")
    is_left_over = state in ("done", "cancelled")  # of the time when it waited
    said = MEANINGS.get(word) or ("" if is_left_over or reason in ("None", "(null)") else reason)
    if state == "queued" and NEEDS_PERSON.get(said):
        said = f"{said}, needs a person: {NEEDS_PERSON[said].format(id=number)}"
    code = 124 if word == "TIMEOUT" else exit_code  # as timeout(1) has it
    return JobState(
        state=state, raw=word, reason=said, nodes=tuple(expand_node_list(nodes)), exit_code=code, restarts=restarts
    )


def _exit_code(text: str) -> int | None:
    """Of `code:signal`."""
    code, _, number = text.partition(":")
    if not code.isdecimal():
        return None
    return 128 + int(number) if number.isdecimal() and int(number) and not int(code) else int(code)


def expand_node_list(nodes: str) -> list[str]:
    """Names of the nodes of a list such as ``gpu[07-08,11],cpu1``, in its order."""
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
    """End a job; its processes are told first, and save.

    Raises:
        PrimusError: Slurm does not do it.
    """
    cluster = submission.place.get("cluster")
    said = run_query(["scancel", *([f"--clusters={cluster}"] if cluster else []), submission.id])
    if said.code != 0 or "error" in said.err:
        raise PrimusError(f"scancel {submission.id}: {said.err or said.code}")


def find_job_id(name: str, comment: str, environ: Mapping[str, str]) -> str | None:
    """Id of this user's job of this name and comment, None where there is none.

    Raises:
        PrimusError: Slurm does not answer.
    """
    said = run_query(["squeue", "--noheader", "--me", "--states=all", "--format=%i|%j|%k"], environ)
    if said.code != 0:
        raise PrimusError(f"squeue does not answer: {said.err or said.code}")
    lines = [line.partition("|") for line in said.out.splitlines()]
    ids = [_strip_array_index(number) for number, _, described in lines if described == f"{name}|{comment}"]
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
            child.kill()
            out, _ = child.communicate()
    return out.decode(errors="replace")


def find_down_nodes(nodes: Sequence[str], environ: Mapping[str, str]) -> set[str]:
    """Those of `nodes` that Slurm lists as down or not responding; none where it gives no answer."""
    answer = run_query(["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"], environ)
    lines = [line.partition("|") for line in answer.out.splitlines()] if answer.code == 0 else []
    return {name for name, _, state in lines if state.endswith("*") or state.rstrip("*$~#!%@^-") in ("down", "fail")}
