"""Run a task in a container, or on the nodes of a cluster.

This process starts the outermost level of the plan. Inside it `primus-cli` starts with the rest of the chain, down
to `primus-cli direct -- <task>` on each node. A job with a run folder is planned here; the nodes run it by `--run DIR`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from primus import registry
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError
from primus.launch import prepare, run_folder
from primus.launch.prepare import Invocation
from primus.launch.signals import raise_on_signals
from primus.messages import Say
from primus.plan import LaunchJob, Variable, redact_plan
from primus.redaction import HIDDEN_VARIABLE, holds_secret, is_secret_name, learn, redact, redact_args, redact_value
from primus.runs import store
from primus.runs.files import write_json, write_text
from primus.runs.store import Run, RunMetadata, RunOutcome, State, create_run_id
from primus.runtime import LOG_FORMAT_VARIABLE, RUNTIMES, LaunchRequest, RemoteLaunch, RequestSegment

RANKS = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID")
"""Variables with the rank of a node."""
ENV_FLAGS = ("--env", "-e")
"""Options of runtimes whose values are NAME=VALUE."""
SECRET_OPTIONS = {"--hf_token": "HF_TOKEN", "--hf-token": "HF_TOKEN"}
"""Options that give the value of a secret variable."""
WORKSPACE = "output"
"""Folder of run folders for tasks without an experiment."""


def prepare_remote(invocation: Invocation) -> RemoteLaunch:
    """Plan a task for another place without touching anything.

    Raises:
        UsageError: An option of a runtime is wrong, or a secret would be an argument of another program.
    """
    job, request, given = invocation.job, invocation.request, invocation.command.options
    is_planned = job is not None and job.elsewhere is not None
    ours = job if job and is_planned else LaunchJob(name=request.task.replace(" ", "-"), workspace=WORKSPACE)
    ours.check_start()
    directory, attempt = _choose_run_folder(ours)
    words = ("--run", str(directory), *(ours.elsewhere or ())) if is_planned else request.words
    runtimes, typed = _name_secrets(request.runtimes, invocation.plan_context.environ)
    secrets = _mask_folder_secrets(ours) | typed
    learn({name: variable.value for name, variable in secrets.items()})
    hidden = sorted(name for name, each in secrets.items() if each.holds_secret(name) and not is_secret_name(name))
    if hidden:
        secrets[HIDDEN_VARIABLE] = Variable(",".join(hidden), "redaction")
    choices = {LOG_FORMAT_VARIABLE: Variable("long", "log_format")} if job and job.log_format == "long" else {}
    going = LaunchRequest(runtimes=runtimes, task=request.task, words=_check_no_secrets(words))
    context = invocation.plan_context
    context = structs.replace(context, directory=str(directory), attempt=attempt, name=ours.name)
    plan = prepare.compose_outer_plan(going, context, secrets | choices, given)
    return RemoteLaunch(
        job=ours,
        request=request,
        command=invocation.words,
        directory=str(directory),
        plan=structs.replace(plan, notes=(*plan.notes, *ours.notes)),
        context=context,
        needs_folder=is_planned or bool(plan.files),
        is_json=given.json,
    )


def _choose_run_folder(job: LaunchJob) -> tuple[Path, int]:
    """Run folder of `job`, and the number of its attempt."""
    if job.resume:
        run = Run(Path(job.resume).resolve())
        return run.directory, run.read_metadata().attempts
    return Path(job.workspace).absolute() / job.name / create_run_id(), 0


def _name_secrets(
    runtimes: tuple[RequestSegment, ...], environ: Mapping[str, str]
) -> tuple[tuple[RequestSegment, ...], dict[str, Variable]]:
    """The runtimes without secrets in their words, and as variables the secrets and those that the last one names."""
    kept: list[RequestSegment] = []
    found: dict[str, Variable] = {}
    for segment in runtimes:
        words, secrets = pass_secrets_by_name(segment.words)
        references = registry.load_plug_in(RUNTIMES, segment.name).REFERENCES
        kept.append(RequestSegment(segment.name, _check_no_secrets(words, references)))
        found |= {name: Variable(value, "--env", is_secret=True) for name, value in secrets.items()}
        if registry.load_plug_in(RUNTIMES, segment.name).LEVEL == "node":  # the others pass their own variables on
            names = _list_named_variables(words, environ)
            named = {name: Variable(environ[name], "--env", is_inherited=True) for name in names}
            found = named | found
    return tuple(kept), found


def pass_secrets_by_name(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Replace each secret `--env NAME=VALUE` in `words` by `--env NAME`; also gives the values by name.

    An option of SECRET_OPTIONS becomes `--env NAME`.

    The words are then safe in the command line of another program, which gets the values in its environment.
    """
    found: dict[str, str] = {}
    kept: list[str] = []
    after_env = False
    rest = iter(words)
    for word in rest:
        flag, equals, assignment = word.partition("=")
        if flag in SECRET_OPTIONS:
            found[SECRET_OPTIONS[flag]] = assignment if equals else next(rest, "")
            kept.append(f"--env={SECRET_OPTIONS[flag]}")
            continue
        text = assignment if flag in ENV_FLAGS and equals else word if after_env else ""
        name, has_value, value = text.partition("=")
        if has_value and redact_value(name, value) != value:
            found[name] = value
            kept.append(word[: len(word) - len(value) - 1])
        else:
            kept.append(word)
        after_env = word in ENV_FLAGS or (after_env and not word.startswith("-"))
    return tuple(kept), found


def _list_named_variables(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Names in `environ` that `words` of a runtime pass on by `--env NAME`."""
    found: list[str] = []
    after_env = False
    for word in words:
        flag, equals, value = word.partition("=")
        text = value if flag in ENV_FLAGS and equals else word if after_env else ""
        if text in environ:
            found.append(text)
        after_env = word in ENV_FLAGS or (after_env and not word.startswith("-"))
    return found


def _mask_folder_secrets(job: LaunchJob) -> dict[str, Variable]:
    """Secrets that the experiment sets; the configuration in the run folder holds only their names."""
    return {name: variable for name, variable in job.env.items() if variable.holds_secret(name)}


def _check_no_secrets(words: tuple[str, ...], references: Collection[str] = ()) -> tuple[str, ...]:
    """Check that `words`, which become the command line of another program, contain no secret.

    Args:
        words: Words of a runtime or task.
        references: Options whose values only name a secret, such as one of a cluster.

    Raises:
        UsageError: One of them is a secret.
    """
    for before, word, safe in zip(("", *words), words, redact_args(words), strict=False):
        if word != safe and before not in references and word.partition("=")[0] not in references:
            raise UsageError(
                f"refusing to put a secret on the command line of another program: {safe}",
                "set it as an environment variable, and pass it by name: --env NAME",
            )
    return words


def run_remote(remote: RemoteLaunch, say: Say) -> int:
    """Make the run folder, start the outermost level here, and record how it ended; gives the exit code.

    Raises:
        PrimusError: It cannot be started, or the run belongs to another job.
    """
    with raise_on_signals():
        return _run_in_folder(remote, say)


def _run_in_folder(remote: RemoteLaunch, say: Say) -> int:
    # Read before the new run replaces it, to restore it if the scheduler rejects the job.
    latest = _read_latest(remote)
    run = _open_run(remote) if remote.needs_folder else None
    try:
        # Nodes, and a container on each, resume the run that the command holds which started their step.
        if run is None or (remote.job.resume and not remote.plan.files):
            return _run_outermost(remote, run, say)
        return _run_claimed(remote, run, say)
    except SubmissionRejected:
        _remove_run(remote, run, latest)
        raise
    except QueryOnly as asked:
        _remove_run(remote, run, latest)
        return asked.exit_code


def _run_claimed(remote: RemoteLaunch, run: Run, say: Say) -> int:
    from primus.launch.jobs import run_claims

    with run_claims.hold_for_submission(run, remote.context.environ):  # it may belong to another job by now
        return _run_outermost(remote, run, say)


def _run_outermost(remote: RemoteLaunch, run: Run | None, say: Say) -> int:
    if run:
        _note_plan(remote, run)
    for path, text in remote.plan.files.items():
        # Checked although secrets are passed by name: a script stays on disk, and users of a cluster share folders.
        if holds_secret(text):
            line = redact(_find_first_secret_line(text))
            raise UsageError(
                f"{Path(path).name}: refusing to write a secret into this script: {line}",
                "set it as an environment variable, and pass it by name: --env NAME",
            )
        write_text(Path(path), text)
    if run:
        say(f"run {run.directory}")
    runtime = registry.load_plug_in(RUNTIMES, remote.request.runtimes[0].name)
    if runtime.start:
        return runtime.start(remote, run, say)
    # Compared after the tool has ended: nodes may have recorded an outcome, which counts more than its exit code.
    before = run.read_metadata() if run else None
    from primus.launch import foreground  # a dry run starts nothing

    code = foreground.run_in_foreground(remote.plan.argv, remote.make_environ)
    return conclude_remote(run, before, code, f"{remote.plan.argv[0]} exited with code {code}")


class SubmissionRejected(PrimusError):
    """A scheduler rejected a job; its new run folder is removed."""

    @classmethod
    def from_error(cls, error: PrimusError) -> SubmissionRejected:
        """A rejection with the message and exit code of `error`."""
        found = cls(error.problem, error.hint)
        found.exit_code = error.exit_code
        return found


class QueryOnly(Exception):
    """A scheduler was queried and nothing was submitted; the new run folder is removed."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _read_latest(remote: RemoteLaunch) -> str:
    """Target of `latest` before the new run replaces it."""
    try:
        return os.readlink(Path(remote.directory).parent / store.LATEST)
    except OSError:
        return ""


def _remove_run(remote: RemoteLaunch, run: Run | None, latest: str) -> None:
    """Remove a new run folder and restore `latest`, unless another run has replaced it in the meantime."""
    if run is None or remote.job.resume:
        return
    experiment = run.directory.parent
    import shutil

    shutil.rmtree(run.directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Another command may have started a newer run meanwhile, whose link stays.
        if _read_latest(remote) == run.id:
            store.point_links(experiment, latest)
        experiment.rmdir()  # fails if it has other runs


def _find_first_secret_line(text: str) -> str:
    return next((line for line in text.splitlines() if holds_secret(line)), "").strip()


def _open_run(remote: RemoteLaunch) -> Run:
    directory = Path(remote.directory)
    if remote.job.resume:
        return Run(directory)
    run = run_folder.make_run_folder(directory, remote.job, remote.request, remote.command)
    run_folder.record_revision(run)
    return run


def _note_plan(remote: RemoteLaunch, run: Run) -> None:
    rank = node_rank(remote.context.environ)
    name = f"launch.{remote.request.runtimes[0].name}"  # plan.json is the plan of a node
    write_json(run.directory / f"{name}{f'.node_{rank}' if rank else ''}.json", redact_plan(remote.plan))


def node_rank(environ: Mapping[str, str]) -> int:
    """Rank of this node, as set by an outer runtime; 0 without one."""
    return next((int(environ[name]) for name in RANKS if environ.get(name, "").isdecimal()), 0)


def conclude_remote(
    run: Run | None,
    before: RunMetadata | None,
    code: int,
    reason: str,
    *,
    state: State | None = None,
    is_said: bool = False,
) -> int:
    """Determine the exit code of a run on other machines: that of the run, not of the tool that started it.

    Usually node 0 records and reports the outcome. If no node started, or all launchers were killed, the outcome is
    recorded and reported here.

    Args:
        run: The run; None without a run folder.
        before: Its metadata before the start; an outcome that is unchanged belongs to an earlier attempt.
        code: Exit code of the tool.
        reason: How the tool ended.
        state: State of the run, if the exit code does not determine it.
        is_said: Whether the reason was printed already.
    """
    if run is None or before is None:
        return code
    reported = read_reported_outcome(run, before)
    if reported is not None:
        return EXIT_OK if reported.state == "done" else reported.exit_code or code or EXIT_FAILED
    # Success is what the nodes have recorded, in the folder that they share with this machine: an exit code alone is
    # that of a tool, such as a container whose image runs another program.
    if code == EXIT_OK:
        code, reason = EXIT_FAILED, f"{reason}, but nothing was run: see its output above"
    nodes = (
        "before any node started"
        if run.read_metadata().attempts == before.attempts
        else "and no node recorded a reason"
    )
    # 128 + N is a signal to the tool, which interrupts the run. 137 is excluded: SIGKILL is usually out of memory.
    how: State = state or ("interrupted" if code > 128 and code != 128 + signal.SIGKILL else "failed")
    outcome = RunOutcome(state=how, exit_code=code, reason=reason if is_said else f"{reason}, {nodes}")
    run.update_metadata(ended=time.time(), outcome=outcome)
    if not is_said:
        format_end(outcome)
    return code


def read_reported_outcome(run: Run, before: RunMetadata) -> RunOutcome | None:
    """Outcome that the nodes recorded since `before`; None if they recorded none."""
    now = run.read_metadata()
    is_new = (now.ended, now.outcome) != (before.ended, before.outcome)
    return now.outcome if is_new and now.outcome.state not in ("planned", "running") else None


def format_end(outcome: RunOutcome) -> None:
    """Print the outcome of a run, in the format of its nodes."""
    if outcome.state != "done":
        print(f"primus-cli: run {outcome.state}: {outcome.reason}", file=sys.stderr, flush=True)
