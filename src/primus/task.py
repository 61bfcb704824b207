"""The contract of tasks, and what a task is given."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from primus.contract import PlugInKind, optional, optional_value
from primus.errors import EXIT_OK, PrimusError
from primus.machine.cluster import ClusterLayout, JobSize
from primus.machine.facts import MachineFacts
from primus.plan import LaunchJob
from primus.runs.files import to_json
from primus.runs.store import Run, RunOutcome

if TYPE_CHECKING:
    from primus.machine.environment.variable_choice import Assignment
    from primus.runs.attempt import Attempt


class Task(Protocol):
    """What is run: `tasks/NAME.py`, typed as `primus-cli <runtime> -- NAME`, or `tasks/GROUP/NAME.py`, typed as
    `GROUP NAME`.

    A task has `run`, or `prepare` and `work`, or all three. The file is imported on the control plane, and in every
    worker if it has `work`: import tensor libraries inside `work`.
    """

    @property
    def Options(self) -> type[Struct]:
        """A frozen `msgspec.Struct`. Its fields are the flags, their docstrings the help."""
        ...

    @optional
    def run(self, options: Any, context: TaskContext, /) -> int | None:
        """Do the task in this process; the result is the exit code, None means 0.

        Called on the control plane, on every node of the launch, never by a dry run. Print results with
        `context.result`, which prints JSON under `--json`, and lines with `context.say`. With `prepare`, start the
        workers by `context.launch()`. Raise `primus.errors.UsageError` (exit code 2), `PrimusError` (1) or `UnfitError`
        (3) with the problem and the fix. Default: start the workers and report how the run ended.
        """
        return launch_and_report(context)

    @property
    @optional_value(None)
    def prepare(self) -> Callable[[Any, TaskContext], LaunchJob | None] | None:
        """Function `prepare(options, context)` that describes the job whose worker processes are started, or returns
        None where the task needs none this time. Called on the control plane, by a dry run too: it must not change
        anything. Default: None; the task needs no workers."""
        ...

    @optional
    def work(self, attempt: Attempt, /) -> None:
        """Do the task as one rank. Called in every worker process. Required with `prepare`."""
        raise NotImplementedError

    @optional
    def choose_options(self, words: Sequence[str], /) -> type[Struct]:
        """Options of the task for the `words` after its name, where they depend on the first word. Default:
        `Options`."""
        return self.Options

    @property
    @optional_value(False)
    def OVERRIDES(self) -> bool:
        """Whether words that are not flags change the experiment; they arrive in `context.overrides`. Default: False;
        such words are refused."""
        ...

    @property
    @optional_value(False)
    def PASSES_WORDS(self) -> bool:
        """Whether words that are not flags are the task's own; they arrive in `context.overrides` as typed. Default:
        False; such words are refused."""
        ...

    @property
    @optional_value(None)
    def plan_notes(self) -> Callable[[Any, TaskContext], Sequence[str]] | None:
        """Function `plan_notes(options, context)` that returns lines about what `run` would do, for a dry run of a task
        without workers. It must not change anything. Default: None; a dry run shows only the command."""
        ...

    @property
    @optional_value(False)
    def PLANS_ELSEWHERE(self) -> bool:
        """Whether `plan_notes` is also called where the task runs in another place: `context.runs_elsewhere` is True
        then, and files and devices of this machine say nothing. Default: False."""
        ...

    @property
    @optional_value(False)
    def SHOWS_PATCHES(self) -> bool:
        """Whether files of `--patch` are shown by the task, which finds them in `context.patches`, instead of run.
        Default: False."""
        ...


TASKS = PlugInKind[Task]("tasks", Task, one_of=("run", "prepare"), implies={"prepare": "work"})


class TaskContext(Struct, frozen=True, kw_only=True):
    """What a task may know of the command that runs it."""

    environ: Mapping[str, str]
    """Environment variables; `direct --env` is included in `run`."""
    json: bool = False
    """Whether results are printed as JSON."""
    runs_elsewhere: bool = False
    """Whether a runtime starts the task on another machine or in an image, which may have other files than this one."""
    dry_run: bool = False
    """Whether the command must not change anything; `run` is not called then."""
    overrides: tuple[str, ...] = ()
    """Words of the command that are not flags, if the task has `OVERRIDES` or `PASSES_WORDS`."""
    facts: Callable[[], MachineFacts] = MachineFacts
    """Function that returns the facts of this machine; they are read on the first call."""
    layout: ClusterLayout | None = None
    """Nodes of the launch, processes on each, and the rank of this node; set in `run`."""
    variables: Mapping[str, Assignment] = {}
    """Variables of `direct --env`; set in `run`."""
    shell: Mapping[str, str] | None = None
    """The environment without the variables of `direct --env`; None if it equals `environ`."""
    patches: tuple[str, ...] = ()
    """Files of `direct --patch`."""
    runtime_words: tuple[str, ...] = ()
    """Options of the runtime of this node, as typed, for a task that launches others."""
    find_size: Callable[[], JobSize] = JobSize
    """Function that returns the nodes and devices that the runtimes of the command ask for."""
    launch: Callable[[], tuple[Run, RunOutcome]] | None = None
    """Function that starts the workers of the job that `prepare` returned, and waits for their end; set in `run` if
    there is a job."""

    def say(self, text: str) -> None:
        """Print a line for users; to standard error under `--json`, since standard output carries JSON."""
        print(text, file=sys.stderr if self.json else sys.stdout, flush=True)

    def result(self, value: Any, text: str) -> None:
        """Print the result of the task: `value` as JSON under `--json`, else `text`.

        Raises:
            PrimusError: JSON cannot express the value.
        """
        try:
            print(to_json(value) if self.json else text, flush=True)
        except (TypeError, ValueError) as error:
            hint = "give context.result() numbers, texts, lists, mappings or Structs"
            raise PrimusError(f"the result of the task cannot be printed as JSON: {error}", hint) from None


def launch_and_report(context: TaskContext) -> int:
    """Start the workers of a task without `run`; gives the exit code."""
    if context.launch is None:
        raise PrimusError("the task needs no workers this time, and has no run()", "define run(options, context)")
    run, outcome = context.launch()
    layout = context.layout
    # The nodes of a Slurm step share one terminal and would repeat the same lines.
    if layout is None or layout.node_rank == 0 or "SLURM_STEP_ID" not in context.environ:
        _report_outcome(run, outcome, context)
    return outcome.exit_code or EXIT_OK


def _report_outcome(run: Run, outcome: RunOutcome, context: TaskContext) -> None:
    """Print how the run ended: text on standard error, JSON on standard output."""
    if context.json:
        print(to_json({"run": str(run.directory), "outcome": outcome}))
    if outcome.state == "done":
        return
    print(f"primus-cli: run {outcome.state}: {outcome.reason}", file=sys.stderr)
    failure = outcome.first_failure
    if failure is None:
        return
    hint = f"  {failure.hint}\n" if failure.hint else ""
    print(f"{hint}  first: rank {failure.rank} on {failure.host}; log: {run.directory}/{failure.log}", file=sys.stderr)
