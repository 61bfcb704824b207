"""A launch as a value: dry-run prints it, the run folder keeps it, and the executor runs it.

`LaunchJob` is what a task needs, `LaunchPlan` what each level of its runtimes starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, structs

from primus.errors import UsageError
from primus.hook import Stage
from primus.machine.cluster import ClusterLayout
from primus.machine.facts import DeviceKind, MachineFacts
from primus.machine.workload import JobWorkload
from primus.redaction import MASK, hide_inherited_value, redact_args, redact_value

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from primus.machine.placement.rank_groups import RankGroups
    from primus.messages import Say
    from primus.runs.store import Run
    from primus.runs.unfit_nodes import UnfitNodes


class Variable(Struct, frozen=True):
    """A variable that a plan sets, and its origin."""

    value: str
    source: str
    """``--env``, ``exp.yaml:12``, ``direct`` ..."""
    is_secret: bool = False
    """Whether the value is a secret although its name does not indicate it."""
    is_inherited: bool = False
    """Whether the user gave only its name, and the value is that of the shell."""

    def format_value(self, name: str) -> str:
        """The value of the variable `name` as it is written: redacted, or a fingerprint."""
        if self.is_inherited and not self.is_secret:
            return hide_inherited_value(name, self.value)
        return MASK if self.is_secret else redact_value(name, self.value)

    def holds_secret(self, name: str) -> bool:
        """Whether the value of the variable `name` is or contains a secret that redaction recognizes."""
        return self.is_secret or redact_value(name, self.value) != self.value


class BindMount(Struct, frozen=True):
    """A folder that is mounted in a container."""

    source: str
    target: str
    is_read_only: bool = False


class Action(Struct, frozen=True, kw_only=True):
    """What happens on this node around the workers: an environment is made, or a script of the user runs."""

    kind: Literal["environment", "hook", "patch"]
    file: str
    """The script; the folder of an environment."""
    stage: Stage = "before"
    once: bool = False
    """Runs once per job, on node 0, instead of on each node."""
    locked: bool = False
    """Runs under the lock of its node, alone among such actions."""
    timeout_s: float
    functions: tuple[str, ...] = ()
    """Decorated functions of a Python file; without them it is a plain script."""


class RestartPolicy(Struct, frozen=True, kw_only=True):
    """Supervision and restarts of the workers."""

    max_restarts: int = 0
    """Maximum consecutive restarts after failures without progress; preemption and time limits do not count."""
    backoff_s: float = 30.0
    """Delay before the first restart after a failure; it doubles for each further one without progress."""
    hang_timeout_s: float = 600.0
    """Time without progress after which workers count as hanging; 0 disables the check."""


class RankOrderPolicy(Struct, frozen=True):
    """How node 0 gives the nodes of a job their ranks."""

    by_network: bool = True
    """Whether nodes that are near each other get neighboring ranks; else they keep the scheduler's."""
    topology_file: str | None = None
    """File of the site with the switches above each node; None takes what each node knows."""


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """One level of a launch; its processes start `inner`."""

    argv: tuple[str, ...]
    env: dict[str, Variable] = {}
    """Variables that this level adds to the inherited environment. They include those of `inner`, so that `argv`
    contains no values."""
    inherited: tuple[str, ...] = ()
    """Variables that are passed by name; their values are read on the machine where the level starts."""
    avoided: dict[str, str] = {}
    """Unfit nodes that the job avoids, each with the reason."""
    mounts: tuple[BindMount, ...] = ()
    files: dict[str, str] = {}
    """Files that are written before the start: text by path."""
    notes: tuple[str, ...] = ()
    """Notes for the user about further effects."""
    actions: tuple[Action, ...] = ()
    """Actions of this node in running order."""
    step_options: tuple[str, ...] = ()
    """Options of srun that start `argv` in a container. The cluster level around this one gives them to srun; a level
    with such options has no program of its own."""
    layout: ClusterLayout | None = None
    """Nodes and processes, if this level decides them."""
    policy: RestartPolicy | None = None
    """Supervision and restarts of its workers, if this level supervises them."""
    rank_order: RankOrderPolicy | None = None
    """Order of the nodes of this level; None where no order can be chosen."""
    inner: LaunchPlan | None = None


def _accept(*_: object) -> None:
    """The check of a job that has none."""


class LaunchJob(Struct, frozen=True, kw_only=True):
    """The worker processes that a task needs, independent of any runtime."""

    name: str
    """Name of the experiment or benchmark, and of the folder of its runs."""
    workspace: str
    files: Mapping[str, str] = {}
    """Files of the run folder by relative path, such as the resolved configuration."""
    env: dict[str, Variable] = {}
    """Variables that the experiment sets for its workers."""
    check: Callable[[int], None] = _accept
    """Raises UsageError if the task cannot run with this number of processes."""
    find_cpu_problem: Callable[[], UsageError | None] = _accept
    """Returns the reason why workers cannot compute on a CPU, or None; called where the machine has no accelerator."""
    check_node: Callable[[ClusterLayout], None] = _accept
    """Raises UnfitError if this node is unfit; called on each node before anything starts there."""
    check_files: Callable[[], None] = _accept
    """Raises UsageError if this node lacks files that the job reads, which the machine that planned it could not see;
    called on each node after its hooks, before workers start."""
    check_start: Callable[[], None] = _accept
    """Raises UsageError if the job must not start now; called on the machine that creates its run folder, before
    that."""
    check_new: Callable[[str], None] = _accept
    """Raises UsageError if the job must not create the run with this id, because the same command has created one since
    this job was planned; called while no other run can be created."""
    list_rank_groups: Callable[[int], Sequence[RankGroups]] = lambda world_size: ()
    """Returns what this number of ranks exchange in a step; empty for a reduction over all of them."""
    amend: Callable[[tuple[str, ...]], LaunchJob] | None = None
    """Returns the job with further overrides, which hooks may add; None if the job accepts none."""
    patches: tuple[str, ...] = ()
    """Patch files that a replayed run had."""
    device: DeviceKind | None = None
    """Device of the workers (see machine/accelerators.py); None if the launch does not check it."""
    framework: str | None = None
    """Backend of the experiment, which may have its own hooks."""
    engines: tuple[str, ...] = ()
    """Engines of its framework, preferred first: the interpreter of the one that is installed starts the workers."""
    packages: tuple[str, ...] = ()
    """Further packages that its workers import, such as that of an experiment tracker."""
    observe: Callable[[Run, Mapping[str, str], Say], AbstractContextManager[None]] | None = None
    """Follows the run from the launcher of node 0 while open; None if nothing does."""
    log_format: str = "auto"
    """Whether the user sees short or long lines of steps."""
    allows_any_version: bool = False
    """Whether an engine is used in another version than the supported ones."""
    workload: JobWorkload | None = None
    """Facts that decide the variables of its workers; None for a job without a framework."""
    elsewhere: tuple[str, ...] | None = None
    """Words after `--run DIR` if the job runs on another machine in a run folder that was created here; None if the
    task runs there as typed."""
    resume: str | None = None
    """Run folder to continue."""
    notes: tuple[str, ...] = ()
    """Notes about the job for the plan."""
    replay_of: str | None = None
    """Run folder to replay."""
    forced: tuple[str, ...] = ()
    """Differences that a forced replay ignores."""


class PlanContext(Struct, frozen=True, kw_only=True):
    """Facts that a runtime may use for its plan."""

    environ: Mapping[str, str]
    python: str
    """Interpreter that starts the workers."""
    import_folders: Sequence[str] | None = None
    """Import path of that interpreter; None for that of the launcher."""
    gpu_facts: Callable[[], MachineFacts] = MachineFacts
    """The GPUs of this machine, without any other fact."""
    facts: Callable[[str | None], MachineFacts] = lambda master: MachineFacts()
    """Facts about this machine, and its interface to a master; read only if a runtime needs them."""
    find_unfit_nodes: Callable[[str | None], UnfitNodes | None] = lambda folder: None
    """Reads the list of unfit nodes: that in a folder, or by default the user's; None if there is none."""
    starts_workers: bool = True
    """Whether the task needs worker processes; a task that runs in the launcher uses no device."""
    hooks: Callable[[], tuple[Action, ...]] = tuple
    """Finds the hooks of the task."""
    patches: tuple[str, ...] = ()
    """Patch files that the job brings."""
    settings: Mapping[str, Variable] = {}
    """Variables that hooks and patches set."""
    workload: JobWorkload | None = None
    """Facts that decide the variables of the workers."""
    node_rank: int | None = None
    """Rank that node 0 has given to this node; None before the rendezvous."""
    terminal: str | None = None
    """Path of the terminal for the progress bar."""
    is_here: bool = True
    """Whether the level runs on this machine. If not, it is planned only to be shown: `primus-cli` plans it again where
    it runs, with the facts of that machine."""
    there: tuple[str, ...] = ()
    """The command that a cluster or container level starts: `primus-cli` with the rest of the chain."""
    directory: str = ""
    """Absolute run folder for a cluster or container level; it is created before the level starts."""
    attempt: int = 0
    """Number of this attempt of the run."""
    name: str = ""
    """Default name of the job: its experiment, else its task."""


def extends_list(name: str, value: str, before: str | None) -> bool:
    """Whether `value` is a path list, such as PATH, that keeps all previous entries."""
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


def format_plan(plan: LaunchPlan) -> str:
    """Format the plan as indented text, one block per level."""
    blocks = []
    level: LaunchPlan | None = plan
    depth = 0
    while level is not None:
        blocks.append("\n".join("    " * depth + line for line in _format_level(level)))
        level, depth = level.inner, depth + 1
    return "\n\n".join(blocks)


def _format_level(plan: LaunchPlan) -> list[str]:
    import shlex  # most commands show no plan

    lines = ["command:", f"  {shlex.join(redact_args(plan.argv))}"]
    if plan.layout:
        shape = plan.layout
        lines += ["layout:"]
        lines += [
            f"  {name}: {getattr(shape, name)}{_format_source(shape.sources.get(name))}"
            for name in _list_layout_names(plan)
        ]
    if plan.rank_order and plan.rank_order.by_network:
        source = plan.rank_order.topology_file or "what each node knows of its switches"
        lines += [f"  order of ranks: nodes below one switch are neighbors, by {source}"]
    if plan.policy:
        lines += ["supervision:", *(f"  {line}" for line in _format_policy(plan.policy))]
    if plan.env:
        lines += ["environment, over the inherited:"]
        lines += [f"  {name}={v.format_value(name)}{_format_source(v.source)}" for name, v in sorted(plan.env.items())]
    if plan.actions:
        scripts = "hooks and patches, in this order:"
        title = f"environments, {scripts}" if plan.actions[0].kind == "environment" else scripts
        lines += [title, *(f"  {_format_action(action)}" for action in plan.actions)]
    if plan.inherited:
        lines += ["passed on by name:", f"  {' '.join(plan.inherited)}"]
    if plan.mounts:
        lines += ["mounts:"] + [
            f"  {m.source} -> {m.target}{' (read-only)' if m.is_read_only else ''}" for m in plan.mounts
        ]
    if plan.avoided:
        lines += ["unfit nodes, avoided:", *(f"  {name}: {why}" for name, why in plan.avoided.items())]
    for path, content in plan.files.items():
        lines += [f"file {path}:"] + [f"  | {line}" for line in content.splitlines()]
    return lines + [f"note: {note}" for note in plan.notes]


def _format_policy(policy: RestartPolicy) -> list[str]:
    restarts = f"{policy.max_restarts}" + (f", the first after {policy.backoff_s:g} s" if policy.max_restarts else "")
    hang = f"after {policy.hang_timeout_s:g} s without progress" if policy.hang_timeout_s else "never"
    return [f"restarts: {restarts}", f"hang: {hang}"]


def _list_layout_names(plan: LaunchPlan) -> list[str]:
    assert plan.layout
    several = ["nnodes", "node_rank", "master_addr", "master_port"] if plan.layout.nnodes > 1 else []
    return ["nproc", *several]


def _format_action(action: Action) -> str:
    where = "once" if action.once else "each node"
    alone = ", alone" if action.locked else ""
    return f"{action.stage} {action.kind} {action.file}  # {where}{alone}, at most {action.timeout_s:g} s"


def _format_source(source: str | None) -> str:
    return f"  # {source}" if source else ""
