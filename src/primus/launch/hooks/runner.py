"""Run the hooks and patches of a launch sequentially, and collect their settings.

Order of a launch on each node: hooks of the stage `before`, patches, the workers or the task, then the hooks of `after`
or `failure`. A failing `before` hook ends the launch; a failing hook of the other stages is only reported, because the
outcome of the run is decided by then.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from primus import interpreter
from primus.errors import PrimusError, UsageError
from primus.hook import RESULT_VARIABLE, HookReply, Stage
from primus.launch.hooks import discovery, scripts
from primus.launch.hooks.patch_record import PatchRecorder
from primus.launch.hooks.scripts import ScriptResult
from primus.launch.signals import StopSignals
from primus.machine.cluster import RANK_VARIABLES, ClusterLayout
from primus.plan import Action, Variable
from primus.redaction import holds_secret, is_secret_name, learn, learn_args, learn_value, redact_args, redact_log_text
from primus.runs.store import Run, RunOutcome, State

SKIPPED = 2
"""Exit code of a patch that does not apply, as in AMD-AGI/Primus (runner/helpers/execute_patches.sh)."""
LOCK_POLL_S = 0.1


class Interrupted(PrimusError):
    """A signal ended a hook or patch, and with it the launch."""

    def __init__(self, problem: str, number: int) -> None:
        super().__init__(problem)
        self.exit_code = 128 + number


def build_failure_outcome(error: PrimusError) -> RunOutcome:
    """Outcome of a launch that raised `error`."""
    state: State = "interrupted" if isinstance(error, Interrupted) else "failed"
    return RunOutcome(state=state, exit_code=error.exit_code, reason=error.problem)


class HookResult(Struct, frozen=True, kw_only=True):
    """Settings of one hook or patch."""

    action: Action
    env: dict[str, Variable]
    extra: tuple[str, ...]
    """Overrides of the experiment."""


class HookContextFacts(Struct, frozen=True, kw_only=True):
    """Variables, arguments and output folder of every hook and patch of a launch."""

    task: str
    words: tuple[str, ...]
    layout: ClusterLayout
    python: str
    logs: Path
    """Folder of the logs."""
    records: Path | None = None
    """The run folder, or its stand-in until the rendezvous; None if nothing is kept, not even logs."""
    run: Run | None = None
    """None until the run folder is known."""
    config: Path | None = None
    """The resolved experiment."""
    say: Callable[[str], None] = lambda text: None


def run_before_hooks(
    actions: Sequence[Action],
    context: HookContextFacts,
    environ: Callable[[], Mapping[str, str]],
    accept: Callable[[HookResult], Sequence[str]],
) -> None:
    """Run the hooks of the stage `before`, and the patches.

    Args:
        actions: All planned hooks and patches.
        context: Their variables and arguments.
        environ: Returns the current variables, including what earlier hooks have set.
        accept: Applies the settings of a hook; returns remarks for its log.

    Raises:
        PrimusError: A hook fails, or sets something invalid; the message names the hook.
        Interrupted: A signal arrived.
    """
    # A run killed during a patch leaves a record of its start: the node may be half-patched.
    recorder = PatchRecorder(context.records, context.layout.node_rank)
    with StopSignals() as signals:
        for action in _select_stage(actions, "before", context.layout):
            context.say(f"{action.kind} {action.file}")
            if action.kind == "patch":
                learn(environ())
                recorder.record_start(action)
            ended, reply = _run_action(action, context, signals, environ())
            is_skipped = action.kind == "patch" and ended.exit_code == SKIPPED
            if action.kind == "patch":
                recorder.record_end(
                    "skipped" if is_skipped else "failed" if ended.problem else "applied", ended.exit_code
                )
            if is_skipped:
                context.say(f"patch {action.file} does not apply")
            elif ended.problem:
                raise _make_failure(action, context, ended)
            else:
                _accept_result(_read_result(action, reply), context, accept)
        if signals.first_signal is not None:  # it arrived between two hooks, when no script was running
            raise Interrupted(f"interrupted by {signal.Signals(signals.first_signal).name}", signals.first_signal)


def run_after_hooks(
    actions: Sequence[Action], context: HookContextFacts, environ: Mapping[str, str], outcome: RunOutcome
) -> list[str]:
    """Run the hooks of `after/` if the task succeeded, else those of `failure/`; gives the failures."""
    stage: Stage = "after" if outcome.state == "done" else "failure"
    variables = {
        "PRIMUS_OUTCOME": outcome.state,
        "PRIMUS_EXIT_CODE": str(outcome.exit_code if outcome.exit_code is not None else ""),
        "PRIMUS_REASON": outcome.reason,
    }
    problems = []
    with StopSignals() as signals:
        for action in _select_stage(actions, stage, context.layout):
            context.say(f"{stage} hook {action.file}")
            # A failure is only reported: the outcome is decided, and the remaining hooks still release their resources.
            ended, _ = _run_action(action, context, signals, {**environ, **variables})
            if ended.problem:
                problems.append(str(_make_failure(action, context, ended)))
                print(f"primus-cli: {problems[-1]}", file=sys.stderr, flush=True)
    return problems


def _select_stage(actions: Sequence[Action], stage: Stage, layout: ClusterLayout) -> list[Action]:
    """Scripts of a stage that run on this node."""
    scripts = [each for each in actions if each.kind != "environment" and each.stage == stage]
    return [each for each in scripts if layout.node_rank == 0 or not each.once]


def _accept_result(given: HookResult, context: HookContextFacts, accept: Callable[[HookResult], Sequence[str]]) -> None:
    action = given.action
    try:
        for remark in accept(given):
            context.say(f"{action.kind} {action.file}: {remark}")
            with (context.logs / _log_name(action, context.layout)).open("a", encoding="utf-8") as log:
                log.write(f"[{remark}]\n")
    except UsageError as error:
        raise UsageError(f"{action.kind} {action.file}: {error.problem}", error.hint) from None


def _run_action(
    action: Action, context: HookContextFacts, signals: StopSignals, environ: Mapping[str, str]
) -> tuple[ScriptResult, HookReply]:
    """Run one action; gives its result and its settings."""
    learn(environ)
    # Secrets of the environment, the command line and the script itself are learned before the script can print them.
    learn_args(context.words)
    with contextlib.suppress(OSError):  # an unreadable file cannot be run either, and running it gives the message
        learn_value(Path(action.file).read_text(encoding="utf-8", errors="replace"), is_secret=False)
    log = context.logs / _log_name(action, context.layout)
    with _hold_node_lock(action, signals) as refused, tempfile.TemporaryDirectory(prefix="primus-hook-") as private:
        result = Path(private) / "result.json"
        own = discovery.build_primus_variables(Path(action.file), environ) if action.kind == "hook" else {}
        env = {**environ, **_make_hook_variables(action, context), **own, RESULT_VARIABLE: str(result)}
        # Later hooks cannot set anything: the workers have ended. Decorated functions reply in a file instead.
        reads_settings = action.stage == "before" and not action.functions
        ended = refused or scripts.run(
            _make_argv(action, context),
            env,
            action.timeout_s,
            log,
            reads_settings=reads_settings,
            interrupted=lambda: signals.first_signal,
        )
        reply = _read_reply(result) if action.functions else HookReply(env=ended.env, extra=ended.extra)
    if reply is None:
        ended = structs.replace(ended, problem=ended.problem or "it exited before its functions returned")
        return ended, HookReply()
    learn(reply.env)
    if reply.stop:
        hint = (redact_log_text(reply.hint, assigned_only=True),) if reply.hint else ()
        problem = redact_log_text(f"it stopped the launch: {reply.stop}", assigned_only=True)
        ended = structs.replace(ended, problem=problem, tail=hint)
    return ended, reply


def _read_result(action: Action, reply: HookReply) -> HookResult:
    """The reply as variables and words.

    Raises:
        PrimusError: It sets an invalid variable, or a setting that holds a secret.
    """
    what = f"{action.kind} {action.file}"
    decided = [name for name in reply.env if name in RANK_VARIABLES]
    if decided:
        raise PrimusError(
            f"{what}: {decided[0]} is set by the launcher for each rank",
            "set the numbers of processes and nodes by --nproc and --nnodes",
        )
    wrong = [name for name, value in reply.env.items() if not (name.isidentifier() and name.isascii()) or "\0" in value]
    if wrong:
        raise PrimusError(f"{what}: {wrong[0]!r} is not a valid environment variable")
    source = f"{action.kind}:{action.file}"
    env = {name: Variable(value, source, is_secret=holds_secret(value)) for name, value in reply.env.items()}
    secrets = [name for name, value in reply.extra.items() if is_secret_name(name) or holds_secret(value)]
    if secrets:
        raise PrimusError(
            f"{what}: extra.{secrets[0]} holds a secret, which the run folder would expose",
            "pass secrets as variables: env.NAME=VALUE",
        )
    return HookResult(action=action, env=env, extra=tuple(f"--{name}={value}" for name, value in reply.extra.items()))


def _read_reply(file: Path) -> HookReply | None:
    """Reply of decorated functions; None if the process exited before it wrote one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=HookReply)
    except FileNotFoundError:
        return None


FUNCTIONS = Path(__file__).with_name("hook_functions.sh")
"""Runs a command whose shells have the functions that hooks of AMD-AGI/Primus use."""


def _make_argv(action: Action, context: HookContextFacts) -> tuple[str, ...]:
    """Command line of an action.

    A script gets the name of the task first, as in AMD-AGI/Primus. Hooks of a Primus checkout look for
    the experiment file in their checkout, so that they get its path as an absolute one. Secrets of the command line are
    masked: every user of the machine can read the arguments of a process.
    """
    given = tuple(redact_args(context.words))
    if action.functions:
        return interpreter.build_module_command(
            context.python, "primus.hook", action.file, ",".join(action.functions), *given
        )
    words = (*context.task.split(), *given) if action.kind == "hook" else given
    if action.kind == "hook" and discovery.is_primus_hook(Path(action.file)):
        words = tuple(
            os.path.abspath(word) if before == "--config" else word
            for before, word in zip(("", *words), words, strict=False)
        )
    bash = shutil.which("bash")
    program = context.python if action.file.endswith(".py") else bash or "sh"
    return (*((bash, str(FUNCTIONS)) if bash else ()), program, action.file, *words)


def _make_hook_variables(action: Action, context: HookContextFacts) -> dict[str, str]:
    shape = context.layout
    known = {
        "PRIMUS_RUN_DIR": str(context.run.directory) if context.run else "",
        "PRIMUS_CONFIG": str(context.config) if context.config and context.config.is_file() else "",
    }
    return {
        "PRIMUS_TASK": context.task,
        "PRIMUS_HOOK_STAGE": action.stage,
        "PRIMUS_NODE_RANK": str(shape.node_rank),
        "PRIMUS_NNODES": str(shape.nnodes),
        "PRIMUS_NPROC": str(shape.nproc),
        "NODE_RANK": str(shape.node_rank),  # these as AMD-AGI/Primus names them, whose hooks read them
        "NNODES": str(shape.nnodes),
        "GPUS_PER_NODE": str(shape.nproc),
        "MASTER_ADDR": shape.master_addr,
        **({"MASTER_PORT": str(shape.master_port)} if shape.master_port is not None else {}),
    } | known


def _log_name(action: Action, layout: ClusterLayout) -> str:
    first = "patch" if action.kind == "patch" else action.stage
    return f"{first}_{Path(action.file).stem}.node_{layout.node_rank}.log"


def _make_failure(action: Action, context: HookContextFacts, ended: ScriptResult) -> PrimusError:
    """The error for a failed hook or patch."""
    problem = f"{action.kind} {action.file} failed: {ended.problem}"
    if ended.signal is not None:
        return Interrupted(problem, ended.signal)
    log = context.logs / _log_name(action, context.layout)
    where = (f"log: {log}",) if context.records else ()
    return PrimusError(problem, "\n  ".join([*(f"| {line}" for line in ended.tail), *where]))


@contextlib.contextmanager
def _hold_node_lock(action: Action, signals: StopSignals) -> Iterator[ScriptResult | None]:
    """Hold the lock of this node while an action with `lock` runs; gives the failure if the lock stays taken.

    flock(2) is released when its holder dies, so that a killed launch never blocks the next one. It is polled because a
    blocking flock could not be ended by a time limit or a signal.
    """
    if not action.locked:
        yield None
        return
    # The wait has its own time limit, as long as that of the action.
    deadline = time.monotonic() + action.timeout_s
    with _lock_file().open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if signals.first_signal is None and time.monotonic() < deadline:
                    time.sleep(LOCK_POLL_S)
                    continue
                yield ScriptResult(
                    problem="timed out waiting for the lock of this node, which a hook of another launch holds",
                    signal=signals.first_signal,
                )
                return
            yield None
            return


def _lock_file() -> Path:
    """Lock file of the user on this node; not in the home directory, which nodes may share.

    Raises:
        PrimusError: The folder belongs to another user, who could delete or replace the lock.
    """
    folder = Path(tempfile.gettempdir()) / f"primus-{os.getuid()}"
    # 0700: another user must not be able to hold the lock.
    folder.mkdir(mode=0o700, exist_ok=True)
    # Checked after mkdir, which also succeeds if another user has created the folder or a link.
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PrimusError(f"{folder} belongs to another user", "set TMPDIR to a folder that you own")
    return folder / "hooks.lock"
