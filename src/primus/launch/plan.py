"""A launch as a value: what dry-run prints, the snapshot keeps and the executor performs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from primus.hook import Stage
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import DeviceKind, MachineFacts
from primus.machine.workload import JobWorkload
from primus.redaction import MASK, redact_args, redact_value


class Variable(Struct, frozen=True):
    """A value that a plan sets, and who set it."""

    value: str
    source: str
    """``--env``, ``exp.yaml:12``, ``direct`` ..."""
    is_secret: bool = False
    """Whether the value is a secret under a name that does not tell."""

    def format_value(self, name: str) -> str:
        """The value of the variable `name`, or the mask."""
        return MASK if self.is_secret else redact_value(name, self.value)


class BindMount(Struct, frozen=True):
    """A folder that is seen inside."""

    source: str
    target: str
    is_read_only: bool = False


class Action(Struct, frozen=True, kw_only=True):
    """A script of the user that runs on this node, around the workers."""

    kind: Literal["hook", "patch"]
    file: str
    stage: Stage = "before"
    once: bool = False
    """Once per job, on node 0, rather than on each node."""
    locked: bool = False
    """Alone on its node."""
    timeout_s: float
    functions: tuple[str, ...] = ()
    """Decorated functions of a Python file; without them it is a plain script."""


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """How workers are watched and restarted."""

    max_restarts: int = 0
    """Restarts after failures without progress in between; preemption and time limits do not count."""
    backoff_s: float = 30.0
    """Time before the first restart after a failure; each further one takes twice as long."""
    hang_timeout_s: float = 600.0
    """Time without progress after which workers count as hanging; 0 for never."""


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """One level of a launch; `inner` is what its processes start in turn."""

    argv: tuple[str, ...]
    env: dict[str, Variable] = {}
    """Variables that this level sets over the inherited environment; those of `inner` are among them, so that a value
    need not stand in `argv`."""
    inherited: tuple[str, ...] = ()
    """Variables that are passed on by name, their values being those of the machine where the level starts."""
    mounts: tuple[BindMount, ...] = ()
    files: dict[str, str] = {}
    """Files that are written before the start, text by path."""
    notes: tuple[str, ...] = ()
    """What happens besides, in words."""
    actions: tuple[Action, ...] = ()
    """Hooks and patches of this node in running order."""
    layout: ClusterLayout | None = None
    """Nodes and processes, where this level decides them."""
    policy: RestartPolicy | None = None
    """How its workers are watched and restarted, where this level does that."""
    inner: LaunchPlan | None = None


class LaunchJob(Struct, frozen=True, kw_only=True):
    """What a task wants of worker processes, before any runtime is known."""

    name: str
    """Name of the experiment or benchmark; the folder of its runs."""
    workspace: str
    files: dict[str, str] = {}
    """Files of the run folder by relative path, such as the resolved configuration."""
    env: dict[str, Variable] = {}
    """Variables that the experiment sets for its workers."""
    check: Callable[[int], None] = lambda world_size: None
    """Raises UsageError where the task cannot run with this many processes."""
    check_node: Callable[[ClusterLayout], None] = lambda layout: None
    """Raises UnfitError where this node is not fit; called on each node before anything starts there."""
    check_start: Callable[[], None] = lambda: None
    """Raises UsageError where the job must not start now; called where its run folder would be made, before that."""
    amend: Callable[[tuple[str, ...]], LaunchJob] | None = None
    """The job with further words that change the experiment, such as a hook may add; None where it takes none."""
    patches: tuple[str, ...] = ()
    """Patch files that a replayed run had."""
    device: DeviceKind | None = None
    """What the workers compute on (see machine/accelerators.py); None where the launch does not check that."""
    framework: str | None = None
    """Backend of the experiment, which may have hooks of its own."""
    workload: JobWorkload | None = None
    """What the variables of its workers depend on; None for a job of no backend."""
    elsewhere: tuple[str, ...] | None = None
    """Words that follow `--run DIR` where the job is done on another machine in a run folder that was made here; None
    where the task is done there as it was typed."""
    resume: str | None = None
    """Run folder to continue."""
    notes: tuple[str, ...] = ()
    """What the plan should say about the job."""
    replay_of: str | None = None
    """Run folder that is replayed."""
    forced: tuple[str, ...] = ()
    """Differences that a forced replay goes over."""


class PlanContext(Struct, frozen=True, kw_only=True):
    """What a runtime may know of the machine where it plans."""

    environ: Mapping[str, str]
    python: str
    """Interpreter that starts the workers."""
    facts: Callable[[str | None], MachineFacts] = lambda master: MachineFacts()
    """What this machine is, and by which interface it reaches a master; read only where a runtime needs it."""
    starts_workers: bool = True
    """Whether the task needs worker processes; one that is done in the launcher's needs nothing of the machine."""
    hooks: Callable[[], tuple[Action, ...]] = tuple
    """Finds the hooks of the task."""
    patches: tuple[str, ...] = ()
    """Patch files that the job brings."""
    settings: Mapping[str, Variable] = {}
    """What hooks and patches set."""
    workload: JobWorkload | None = None
    """What the variables of the workers depend on."""
    terminal: str | None = None
    """Path of the terminal that progress may be drawn on."""
    is_here: bool = True
    """Whether the level is performed on this machine. If not it is planned only to be shown: where it is performed
    `primus-cli` plans it again, and finds out there what depends on the machine."""
    there: tuple[str, ...] = ()
    """The command that a level which leaves this machine starts: `primus-cli` with the rest of the chain."""
    directory: str = ""
    """Run folder, absolute, for a level that leaves this machine; it exists once anything is performed."""
    attempt: int = 0
    """Which attempt of the run this is."""
    name: str = ""
    """What the job may be called: its experiment, else its task."""


def extends_list(name: str, value: str, before: str | None) -> bool:
    """Whether `value` is a list such as PATH with all that it had before."""
    return name.endswith("PATH") and before is not None and f":{before}:" in f":{value}:"


def redact_plan(plan: LaunchPlan) -> dict[str, Any]:
    """`plan` as JSON values with every secret masked."""
    values = structs.asdict(plan)
    values["argv"] = redact_args(plan.argv)
    values["env"] = {
        name: {"value": variable.format_value(name), "source": variable.source} for name, variable in plan.env.items()
    }
    values["inner"] = redact_plan(plan.inner) if plan.inner else None
    return values
