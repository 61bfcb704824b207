"""Do a task in another place than this process: in a container, on the nodes of a cluster.

The outermost level of the plan is performed here. Inside it `primus-cli` is started again with the rest of the chain,
which ends in `primus-cli direct -- <task>` on each node. A job with a run folder is planned here and done there by
`--run DIR`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, structs

from primus import registry
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError
from primus.launch import chain, folder, foreground, jobs
from primus.launch.plan import Context, Job, LaunchPlan, Variable, shown
from primus.launch.request import Request, Segment, by_name, named_variables
from primus.launch.signals import raising
from primus.redaction import HIDDEN_VARIABLE, holds_secret, is_secret_name, learn, redact, redact_args
from primus.runs.files import write_json, write_text
from primus.runs.store import Metadata, Outcome, Run, State, new_id

RANKS = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID")
"""Variables that tell a node its place among the others."""
WORKSPACE = "output"
"""Folder of run folders for tasks that are in no experiment."""
Say = Callable[[str], None]


class Remote(Struct, frozen=True, kw_only=True):
    """A task in another place, planned."""

    job: Job
    request: Request
    """As it was typed."""
    command: tuple[str, ...]
    """Words that were typed."""
    directory: str
    """Run folder."""
    plan: LaunchPlan
    context: Context
    needs_folder: bool
    """Whether there is a run folder: for a job with workers, and for a plan with files."""
    is_json: bool

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the outermost level's processes."""
        return dict(self.context.environ) | {name: variable.value for name, variable in self.plan.env.items()}


def prepare(
    job: Job | None, request: Request, command: tuple[str, ...], given: chain.Globals, context: Context
) -> Remote:
    """Plan a task for another place without touching anything.

    Args:
        job: What the task wants of workers; None where it wants none.
        request: What was asked.
        command: Words that were typed.
        given: Global options.
        context: What this machine is.

    Raises:
        UsageError: An option of a runtime is wrong, or a secret would stand in the command line of another program.
    """
    is_planned = job is not None and job.elsewhere is not None
    ours = job if job and is_planned else Job(name=request.task.replace(" ", "-"), workspace=WORKSPACE)
    ours.check_start()
    directory, attempt = _place(ours)
    words = ("--run", str(directory), *(ours.elsewhere or ())) if is_planned else request.words
    runtimes, typed = _by_name(request.runtimes, context.environ)
    secrets = _masked_in_folder(ours) | typed
    learn({name: variable.value for name, variable in secrets.items()})
    hidden = sorted(
        name for name, each in secrets.items() if each.shown(name) != each.value and not is_secret_name(name)
    )
    if hidden:
        secrets[HIDDEN_VARIABLE] = Variable(",".join(hidden), "redaction")
    going = Request(runtimes=runtimes, task=request.task, words=_without_secrets(words))
    context = structs.replace(context, directory=str(directory), attempt=attempt, name=ours.name)
    plan = chain.fold_outer(going, context, secrets, given)
    return Remote(
        job=ours,
        request=request,
        command=command,
        directory=str(directory),
        plan=structs.replace(plan, notes=(*plan.notes, *ours.notes)),
        context=context,
        needs_folder=is_planned or bool(plan.files),
        is_json=given.json,
    )


def _place(job: Job) -> tuple[Path, int]:
    """Run folder of `job`, and the number of its attempt."""
    if job.resume:
        run = Run(Path(job.resume).resolve())
        return run.directory, run.metadata().attempts
    return Path(job.workspace).absolute() / job.name / new_id(), 0


def _by_name(
    runtimes: tuple[Segment, ...], environ: Mapping[str, str]
) -> tuple[tuple[Segment, ...], dict[str, Variable]]:
    """The runtimes without secrets in their words, and as variables these, and what the innermost one names."""
    kept: list[Segment] = []
    found: dict[str, Variable] = {}
    for segment in runtimes:
        words, secrets = by_name(segment.words)
        references = getattr(registry.load("runtimes", segment.name), "REFERENCES", ())
        kept.append(Segment(segment.name, _without_secrets(words, references)))
        found |= {name: Variable(value, "--env", is_secret=True) for name, value in secrets.items()}
        if registry.load("runtimes", segment.name).LEVEL == "node":  # the others pass on themselves what they name
            named = {name: Variable(environ[name], "--env") for name in named_variables(words, environ)}
            found = named | found
    return tuple(kept), found


def _masked_in_folder(job: Job) -> dict[str, Variable]:
    """Secrets that the experiment sets: the configuration in the run folder holds their names alone."""
    return {name: variable for name, variable in job.env.items() if variable.shown(name) != variable.value}


def _without_secrets(words: tuple[str, ...], references: Sequence[str] = ()) -> tuple[str, ...]:
    """`words`, which become the command line of another program.

    Args:
        words: They.
        references: Options whose values name secrets that are kept elsewhere.

    Raises:
        UsageError: One of them is a secret.
    """
    for before, word, safe in zip(("", *words), words, redact_args(words), strict=False):
        if word != safe and before not in references and word.partition("=")[0] not in references:
            raise UsageError(
                f"a secret must not stand in the command line of another program: {safe}",
                "set it as a variable of your shell, and pass it on by its name: --env NAME",
            )
    return words


def perform(remote: Remote, say: Say) -> int:
    """Make the run folder, start the outermost level here, and record how it ended; gives the exit code.

    Raises:
        PrimusError: It cannot be started, or the run belongs to another job.
    """
    with raising():
        return _performed_in_folder(remote, say)


def _performed_in_folder(remote: Remote, say: Say) -> int:
    latest = _latest(remote)
    run = _opened(remote) if remote.needs_folder else None
    try:
        if run is None or not remote.plan.files:
            return _performed(remote, run, say)
        return _claimed(remote, run, say)
    except NotAccepted:
        _forget(remote, run, latest)
        raise
    except OnlyAsked as asked:
        _forget(remote, run, latest)
        return asked.exit_code


def _claimed(remote: Remote, run: Run, say: Say) -> int:
    with jobs.claimed(run, remote.context.environ):  # the files are for a scheduler, and may be another job's already
        return _performed(remote, run, say)


def _performed(remote: Remote, run: Run | None, say: Say) -> int:
    if run:
        _note_plan(remote, run)
    for path, text in remote.plan.files.items():
        if holds_secret(text):
            raise UsageError(
                f"{Path(path).name}: a secret would stand in this script: {redact(_first_secret_line(text))}",
                "set it as a variable of your shell, and pass it on by its name: --env NAME",
            )
        write_text(Path(path), text)
    if run:
        say(f"run {run.directory}")
    runtime = registry.load("runtimes", remote.request.runtimes[0].name)
    if hasattr(runtime, "start"):
        code: int = runtime.start(remote, run, say)
        return code
    before = run.metadata() if run else None
    code = foreground.call(remote.plan.argv, remote.environ)
    return conclude(run, before, code, f"{remote.plan.argv[0]} ended with exit code {code}")


class NotAccepted(PrimusError):
    """A scheduler has refused a job: the run folder that was made for it is removed."""

    @classmethod
    def from_error(cls, error: PrimusError) -> NotAccepted:
        """The same, with its exit code."""
        found = cls(error.problem, error.hint)
        found.exit_code = error.exit_code
        return found


class OnlyAsked(Exception):
    """A scheduler was asked and nothing was submitted: the run folder that was made for it is removed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _latest(remote: Remote) -> str:
    """Which run of the experiment `latest` names before there is another one."""
    try:
        return os.readlink(Path(remote.directory).parent / "latest")
    except OSError:
        return ""


def _forget(remote: Remote, run: Run | None, latest: str) -> None:
    """Remove the run folder, where it was made for this; `latest` is what it was, unless another run has it by now."""
    if run is None or remote.job.resume:
        return
    beside = run.directory.parent
    shutil.rmtree(run.directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        if _latest(remote) == run.id:
            (beside / "latest").unlink()
            if latest:
                (beside / "latest").symlink_to(latest)
        beside.rmdir()  # where nothing else is in it


def _first_secret_line(text: str) -> str:
    return next((line for line in text.splitlines() if holds_secret(line)), "").strip()


def _opened(remote: Remote) -> Run:
    directory = Path(remote.directory)
    is_new = not remote.job.resume
    return folder.make(directory, remote.job, remote.request, remote.command) if is_new else Run(directory)


def _note_plan(remote: Remote, run: Run) -> None:
    rank = node_rank(remote.context.environ)
    name = f"launch.{remote.request.runtimes[0].name}"  # plan.json is what a node does
    write_json(run.directory / f"{name}{f'.node_{rank}' if rank else ''}.json", shown(remote.plan))


def node_rank(environ: Mapping[str, str]) -> int:
    """Number of this node among those that a runtime outside has started; 0 where there is none."""
    return next((int(environ[name]) for name in RANKS if environ.get(name, "").isdecimal()), 0)


def conclude(
    run: Run | None,
    before: Metadata | None,
    code: int,
    reason: str,
    *,
    state: State | None = None,
    is_said: bool = False,
) -> int:
    """Give the exit code of what was started elsewhere: that of the run, not of the tool that carried it.

    A node that records how the run has ended says so as well. Where none could, because none had begun or their
    launchers died, that is recorded and said here.

    Args:
        run: The run; None where there is no run folder.
        before: Its metadata before the start: what has not changed since is of an earlier start.
        code: Exit code of the tool.
        reason: What the tool says of the end.
        state: How it has ended, where its exit code does not tell.
        is_said: Whether people know the reason already.
    """
    if run is None or before is None:
        return code
    told = told_outcome(run, before)
    if told is not None:
        return EXIT_OK if told.state == "done" else told.exit_code or code or EXIT_FAILED
    if code == EXIT_OK:
        return code
    nodes = "before any node had begun" if run.metadata().attempts == before.attempts else "and no node said why"
    how: State = state or ("interrupted" if code > 128 and code != 128 + signal.SIGKILL else "failed")
    outcome = Outcome(state=how, exit_code=code, reason=reason if is_said else f"{reason}, {nodes}")
    run.update(ended=time.time(), outcome=outcome)
    if not is_said:
        say_end(outcome)
    return code


def told_outcome(run: Run, before: Metadata) -> Outcome | None:
    """How the run has ended as its nodes have recorded since `before`; None where they have not."""
    now = run.metadata()
    is_new = (now.ended, now.outcome) != (before.ended, before.outcome)
    return now.outcome if is_new and now.outcome.state not in ("planned", "running") else None


def say_end(outcome: Outcome) -> None:
    """Say how a run has ended, in the line that its nodes use."""
    if outcome.state != "done":
        print(f"primus-cli: run {outcome.state}: {outcome.reason}", file=sys.stderr, flush=True)
