"""The contracts of runtimes, and of runtimes whose jobs outlive the command, with the values that they are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from msgspec import Struct

from primus.contract import PlugInKind, optional, optional_value
from primus.errors import PrimusError
from primus.machine.cluster import JobSize

if TYPE_CHECKING:
    from primus.messages import Say
    from primus.plan import LaunchJob, LaunchPlan, PlanContext
    from primus.runs.run_progress import RunProgress
    from primus.runs.store import Run
    from primus.task import TaskContext


class RequestSegment(Struct, frozen=True):
    """A runtime or a task with its words."""

    name: str
    words: tuple[str, ...] = ()


class LaunchRequest(Struct, frozen=True, kw_only=True):
    """The request.json of a run."""

    runtimes: tuple[RequestSegment, ...]
    """Outermost first."""
    task: str
    """Name of the task: ``train pretrain``."""
    words: tuple[str, ...] = ()
    """Words after the task's name."""


class RemoteLaunch(Struct, frozen=True, kw_only=True):
    """The plan of a task that runs elsewhere."""

    job: LaunchJob
    request: LaunchRequest
    """The typed request."""
    command: tuple[str, ...]
    """Typed words."""
    directory: str
    """Run folder."""
    plan: LaunchPlan
    context: PlanContext
    needs_folder: bool
    """Whether there is a run folder: for a job with workers, and for a plan with files."""
    is_json: bool

    @property
    def make_environ(self) -> dict[str, str]:
        """Variables of the outermost level's processes."""
        return dict(self.context.environ) | {name: variable.value for name, variable in self.plan.env.items()}


class Runtime(Protocol):
    """A place to run tasks: `runtimes/NAME.py`, typed as `primus-cli NAME [options] -- <task>`.

    All functions are called in the `primus-cli` process that the user started; none is called in a worker. Import
    nothing heavy at module level: `primus-cli --help` reads the docstring without importing the file, everything else
    imports it.
    """

    @property
    def LEVEL(self) -> str:
        """`cluster`, `container` or `node`. Runtimes nest in this order."""
        ...

    @property
    def Options(self) -> type[Struct]:
        """A frozen `msgspec.Struct`. Its fields are the flags, their docstrings the help."""
        ...

    def wrap(self, plan: LaunchPlan, options: Any, context: PlanContext, /) -> LaunchPlan:
        """Turn the plan of the inner level into the plan of this level.

        Pure: it must not read or change anything outside its arguments, because `--dry-run` calls it too. `options` is
        an `Options`, or what `parse` returns. `plan.argv` is the command that the level starts; a cluster starts
        `context.there` instead, which is `primus-cli` with the rest of the chain and plans again where it runs. Keep
        the variables of `plan.env` in the `env` of the result and pass them to the inner command by name, never in
        `argv`. Files go below `context.directory`, the run folder. Raise `primus.errors.UsageError` for an option that
        is wrong.
        """
        ...

    @property
    @optional_value(None)
    def parse(self) -> Callable[[Sequence[str]], Struct] | None:
        """Function `parse(words)` that returns the options of a runtime that passes unknown options on. Default:
        None; the words are parsed as fields of `Options`."""
        ...

    @property
    @optional_value(None)
    def start(self) -> Callable[[RemoteLaunch, Run | None, Say], int] | None:
        """Function `start(remote, run, say)` that starts the outermost level and returns the exit code; `run` is None
        where the plan needs no run folder. Raise `primus.errors.PrimusError` where it cannot be started, and
        `primus.launch.run_remote.SubmissionRejected` to remove the new run folder as well. Default: None;
        `plan.argv` runs in the foreground."""
        ...

    @property
    @optional_value(None)
    def format_plan(self) -> Callable[[RemoteLaunch], str] | None:
        """Function `format_plan(remote)` that returns what a dry run prints. Default: None; the plan is printed."""
        ...

    @property
    @optional_value(())
    def COMMANDS(self) -> Collection[str]:
        """Words that the runtime handles by itself, without a task: the first word (`list`), or an option (`--shell`).
        A mapping holds their help texts. `run` handles them. Default: none."""
        ...

    @optional
    def run(self, options: Any, context: TaskContext, /) -> int | None:
        """Handle one of `COMMANDS`; the result is the exit code, None means 0. Required with `COMMANDS`."""
        raise NotImplementedError

    @optional
    def split_words(self, words: tuple[str, ...], /) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split `words` into those of the runtime and those of a task that they name. Default: they name none."""
        return words, ()

    @property
    @optional_value(False)
    def STARTS_CONTAINERS(self) -> bool:
        """Whether `wrap` passes `plan.step_options`, with which srun starts a container, on to srun. Default: False."""
        ...

    @property
    @optional_value(None)
    def split_container_words(self) -> Callable[[tuple[str, ...]], tuple[tuple[str, ...], tuple[str, ...]]] | None:
        """Function `split_container_words(words)` that splits words into those of the runtime and those of a
        `container` inside of it. Default: None; no word is of one."""
        ...

    @property
    @optional_value(())
    def REFERENCES(self) -> Collection[str]:
        """Options whose values name a secret but are not secrets. Default: none."""
        ...

    @property
    @optional_value(None)
    def SPELLINGS(self) -> Mapping[str, str] | None:
        """Long name of each spelling of the options that `parse` accepts in addition to `Options`;
        [launcher files](launcher-file.md) are checked against it. Default: None."""
        ...

    @optional
    def accepts_option(self, words: tuple[str, ...], name: str, /) -> bool:
        """Whether the command in `words` accepts the option `name` of a launcher file. Default: True."""
        return True

    @optional
    def find_size(self, options: Any, /) -> JobSize:
        """How many nodes and devices the options ask for, as far as they tell. Default: nothing is known."""
        return JobSize()

    @optional
    def list_patch_files(self, options: Any, /) -> tuple[str, ...]:
        """Patch files that the options name, for tasks that only show them. Default: none."""
        return ()


class Submission(Struct, frozen=True, kw_only=True):
    """A job of a scheduler."""

    runtime: str
    id: str
    """Id given by the scheduler."""
    name: str
    directory: str
    """Run folder."""
    submitted: float
    """Seconds since the epoch."""
    host: str = ""
    user: str = ""
    command: tuple[str, ...] = ()
    """The command line, secrets masked."""
    place: dict[str, str] = {}
    """Location by which the runtime finds the job again, such as its cluster, namespace or URL; no secrets.

    ``array`` marks several jobs, none of which writes the run's outcome; ``chain`` holds the ids of jobs that continue
    the run one after the other.
    """
    logs: tuple[str, ...] = ("logs/**/*.log",)
    """Log files: patterns below the run folder, or absolute ones."""


SchedulerState = Literal["queued", "running", "done", "failed", "cancelled", "gone", "unknown"]


class JobState(Struct, frozen=True, kw_only=True):
    """State of a job as reported by its scheduler."""

    state: SchedulerState
    raw: str = ""
    """The scheduler's own term."""
    reason: str = ""
    advice: str = ""
    """Of a queued job: what the reason means, and what the user can do."""
    starts: float | None = None
    """Of a queued job: when its scheduler expects it to start, in seconds since the epoch."""
    time_left_s: float | None = None
    """Of a running job: time until its time limit."""
    nodes: tuple[str, ...] = ()
    num_nodes: int | None = None
    """Nodes that it has or requests."""
    gpus: int | None = None
    """GPUs that it has or requests; None if its scheduler does not report them."""
    exit_code: int | None = None
    restarts: int = 0
    """Restarts as counted by the scheduler."""
    is_deleted: bool = False
    """For a job that is gone: whether its scheduler keeps ended jobs, so that it must have been deleted."""


class JobRuntime(Protocol):
    """A runtime with jobs that outlive the command: `start` submits, and records the job with
    `primus.launch.jobs.submissions.remember_submission`.

    The file has these members in addition to those of a runtime. They are called by `jobs list`, `jobs wait`,
    `jobs cancel` and `jobs logs`, on any machine that shares the user's home folder.
    """

    def find_states(self, submissions: Sequence[Submission], /) -> Mapping[str, JobState]:
        """State of each job by id; leave out the jobs that the scheduler does not know.

        Ask the scheduler once for all jobs. Raise `primus.errors.PrimusError` if it does not answer.
        """
        ...

    def cancel(self, submission: Submission, /) -> None:
        """Cancel a job. Raise `primus.errors.PrimusError` if the scheduler refuses."""
        ...

    @property
    @optional_value(None)
    def print_logs(self) -> Callable[[Submission, bool, int | None], None] | None:
        """Function `print_logs(submission, follow, tail)` that prints the log of node 0; `tail` is a number of lines
        or None. Default: None; the files of `submission.logs` are printed."""
        ...


class PostRefused(PrimusError):
    """A platform does not accept the progress of a run; it is not asked again."""


class ProgressRuntime(Protocol):
    """A runtime that posts the progress of a run from its first node, where PROGRESS_VARIABLE names it."""

    def post_progress(self, progress: RunProgress, target: str, environ: Mapping[str, str], /) -> None:
        """Post `progress` to `target`, the rest of the variable. Raise `PostRefused` if it will never be accepted, and
        `primus.errors.PrimusError` if the platform does not respond."""
        ...


class PlaceRuntime(Protocol):
    """A runtime whose platform knows where its nodes stand on the network."""

    def find_own_place(self, environ: Mapping[str, str], /) -> tuple[str, ...]:
        """The switches above this node, outermost first; empty if the platform does not say. Raise
        `primus.errors.PrimusError` if it refuses or does not respond."""
        ...


class ClusterNode(Struct, frozen=True, kw_only=True):
    """A node of a cluster, as its scheduler reports it."""

    name: str
    state: Literal["idle", "busy", "drained", "down"]
    reason: str = ""
    """Why it is not idle, in the words of the scheduler."""
    gpus: int | None = None
    """GPUs that a job may request; None if its scheduler does not report them."""


class NodeJob(Struct, frozen=True, kw_only=True):
    """A job that checks one node."""

    node: ClusterNode
    name: str
    """Name of the job."""
    limit_s: float
    """Time limit of the check itself."""
    start_s: float | None = None
    """Time in which the job must have started; None waits for a busy node."""


class NodeRuntime(Protocol):
    """A runtime that reaches single nodes of its cluster, for `nodes check`.

    The file has these members in addition to those of a runtime.
    """

    def list_nodes(self, words: Sequence[str], environ: Mapping[str, str], /) -> Sequence[ClusterNode]:
        """The nodes that the runtime with the options `words` may use, by name. Only queries the scheduler. Raise
        `primus.errors.PrimusError` if it does not answer."""
        ...

    def select_node(self, words: Sequence[str], job: NodeJob, /) -> Sequence[str]:
        """`words` with the options for a job on this one node, which no other job shares. Raise
        `primus.errors.UsageError` for words that cannot be used with it."""
        ...

    @property
    @optional_value(None)
    def collect_output(self) -> Callable[[Sequence[str], NodeJob, Mapping[str, str]], str] | None:
        """Function `collect_output(words, job, environ)` that waits for the end of a job that the command only submits,
        deletes it, also after an error, and returns what it has printed. Raise `primus.errors.PrimusError` if it does
        not start or end in time. Default: None; the command itself waits and prints."""
        ...


RUNTIMES = PlugInKind[Runtime]("runtimes", Runtime, implies={"COMMANDS": "run"})
JOB_RUNTIMES = PlugInKind[JobRuntime]("runtimes", JobRuntime)
NODE_RUNTIMES = PlugInKind[NodeRuntime]("runtimes", NodeRuntime)
LOG_FORMAT_VARIABLE = "PRIMUS_LOG_FORMAT"
"""Variable of the processes that show a run which trains elsewhere: `long` where the experiment chooses long lines."""
PROGRESS_VARIABLE = "PRIMUS_POST_PROGRESS"
"""Variable that a runtime sets on node 0, RUNTIME:TARGET, to have the progress of the run posted; empty for nowhere."""
PLACE_RUNTIMES = PlugInKind[PlaceRuntime]("runtimes", PlaceRuntime)
PROGRESS_RUNTIMES = PlugInKind[ProgressRuntime]("runtimes", ProgressRuntime)
