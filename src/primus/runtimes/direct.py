"""Run on this machine: plain Python for one process per node, torchrun's elastic agent for more."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct, structs

from primus import interpreter
from primus.errors import UsageError
from primus.hook import STAGES
from primus.launch import variables
from primus.launch.hooks import discovery
from primus.launch.supervision import flight_recorder
from primus.launch.supervision.agent_report import AGENT, name_agent_report_file
from primus.machine.cluster import RANK_VARIABLES, ClusterLayout, JobSize, LayoutFlags, find_layout
from primus.machine.devices import count_devices, list_usable_devices
from primus.machine.facts import MachineFacts
from primus.machine.placement.node_place import TOPOLOGY_VARIABLE
from primus.plan import LaunchPlan, PlanContext, RankOrderPolicy, RestartPolicy, Variable, extends_list
from primus.runs.store import Run

if TYPE_CHECKING:
    from primus.machine.environment.precedence import Environment
    from primus.runs.tuned_files import TunedSettings

LEVEL = "node"
PROCESSES_PER_CORE = 16
MOST_UNCHECKED = 64
"""Processes that are never too many for the cores: a dry run may be for the node of a cluster."""
LEAST_MEMORY = 256 << 20
"""Bytes of memory that a worker needs before it has a model: what `import torch` takes."""
NSYS_OPTIONS = ("--trace=cuda,nvtx", "--trace-fork-before-exec=true", "--wait=primary")
"""Of `nsys launch`, which records nothing until `nsys start`: the agent forks the workers (Nsight Systems user guide,
CLI launch command switch options)."""
LAUNCH_LAYERS = ("hook", "patch", "experiment", "--env")
"""Layers of variables that are set for this launch."""


class Options(Struct, frozen=True, kw_only=True):
    """Run on this machine."""

    nproc: Annotated[int | None, Meta(extra={"aliases": ("--nproc-per-node", "--nproc_per_node")})] = None
    """Processes on this node (default: GPUS_PER_NODE, else one per accelerator, else 1)."""
    oversubscribe: bool = False
    """Start more processes than fit the cores, devices and memory of this machine."""
    nnodes: int | None = None
    """Number of nodes; start each with its own --node-rank (default: NNODES or the scheduler's number, else 1)."""
    node_rank: int | None = None
    """Rank of this node, from 0 (default: NODE_RANK or the scheduler's)."""
    master_addr: str | None = None
    """Address of node 0 (default: MASTER_ADDR or the scheduler's first node)."""
    master_port: int | None = None
    """Rendezvous port on node 0 (default: MASTER_PORT, else 1234 on several nodes and a free port on one)."""
    single: bool = False
    """Run one process without torchrun, regardless of the number of devices."""
    env: tuple[str, ...] = ()
    """Environment variable of the workers: NAME=VALUE, NAME of a variable that is set, or a file; may be repeated."""
    env_file: tuple[str, ...] = ()
    """File of NAME=VALUE lines for the workers; --env takes precedence; may be repeated."""
    patch: tuple[str, ...] = ()
    """Script (.sh, .py) to run on each node before the workers start; exit code 2: does not apply; may be repeated."""
    no_hooks: bool = False
    """Run no hooks."""
    attachable: Literal["rocprofv3", "nsys"] | None = None
    """Start the workers so that `profile attach` can record them later: with ROCP_TOOL_ATTACH=1, or under
    `nsys launch`."""
    no_tuned: bool = False
    """Ignore the results of `tune` for this machine."""
    max_restarts: Annotated[int, Meta(ge=0)] = 0
    """Maximum restarts after failures; the counter resets when a newer checkpoint is written."""
    restart_delay: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds before the first restart; doubled for each further one without progress."""
    hang_timeout: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds without progress in a training step after which a rank counts as hanging; 0 disables the check."""
    rank_order: Literal["network", "scheduler"] = "network"
    """Ranks of three and more nodes: `network` puts nodes below one switch beside each other, `scheduler` keeps the
    order in which they were given."""
    topology_file: str | None = None
    """File of the switches above each node: YAML, CSV, Slurm's topology.conf or measurements of a preflight (default:
    PRIMUS_TOPOLOGY_FILE, else what each node knows)."""
    rdzv_backend: Literal["static", "c10d"] = "static"
    """Rendezvous of torchrun on several nodes: static keeps the node ranks, c10d assigns them in order of arrival."""


def wrap(plan: LaunchPlan, options: Options, context: PlanContext) -> LaunchPlan:
    """The plan that starts all workers of this node, from `plan`, which starts one.

    Raises:
        UsageError: The layout or a variable is invalid.
    """
    shape = build_layout(options, context)
    is_job_of_slurm = context.starts_workers and "SLURM_JOB_ID" in context.environ
    if is_job_of_slurm:
        _check_step(context.environ)
    if context.starts_workers and shape.nproc > 1 and not options.oversubscribe:
        _check_processes(shape, context.facts(shape.master_of_several))
    from_files = variables.parse_variables(options.env_file, "--env-file", {}) if options.env_file else {}
    typed = (from_files, variables.parse_variables(options.env, "--env", context.environ) if options.env else {})
    env: dict[str, Variable] = plan.env | typed[0] | typed[1]
    collected = NodeVariables({})
    if context.starts_workers:
        collected = _collect_node_variables(shape, plan.env, typed, context, uses_tuned=not options.no_tuned)
        env = collected.env
    if context.terminal and shape.node_rank == 0:
        env |= {"PRIMUS_PROGRESS": Variable(context.terminal, "terminal")}
    if context.starts_workers and shape.world_size > 1 and list_usable_devices(context.gpu_facts(), context.environ):
        env |= flight_recorder.make_recorder_variables(context.directory, context.attempt, {**context.environ, **env})
    argv = plan.argv
    if context.starts_workers:
        env = {name: variable for name, variable in env.items() if name not in RANK_VARIABLES}
        # Several processes of a node need an agent that starts them, and c10d one that numbers the nodes.
        # Below a profiler it reports how they ended, whatever exit code the profiler has.
        is_launched = options.attachable == "nsys"
        if shape.nproc > 1 or is_launched or (shape.nnodes > 1 and options.rdzv_backend == "c10d"):
            argv = _build_agent_command(argv, shape, context, options.rdzv_backend)
        elif shape.nnodes > 1:
            env |= {name: Variable(value, "layout") for name, value in shape.make_rank_variables().items()}
        if options.attachable:
            from primus.runs.processes import NSYS_SESSION, ROCPROF_ATTACH  # how `profile attach` finds a process

            session = f"primus-{Path(context.directory).name}-{context.attempt}-{shape.node_rank}"
            name, value = (NSYS_SESSION, session) if is_launched else (ROCPROF_ATTACH, "1")
            env |= {name: Variable(value, "--attachable")}
            argv = ("nsys", "launch", f"--session-new={session}", *NSYS_OPTIONS, *argv) if is_launched else argv
    hooks = () if options.no_hooks else context.hooks()
    scripts = hooks + discovery.plan_patch_files(options.patch or context.patches, context.environ)
    actions = (*plan.actions, *sorted(scripts, key=lambda action: STAGES.index(action.stage)))
    unused = _list_unused_nodes(shape, context.environ) if is_job_of_slurm else ()
    notes = (*plan.notes, *unused, *collected.notes)
    files = {**plan.files, **collected.files}
    policy = None
    if context.starts_workers:
        policy = RestartPolicy(
            max_restarts=options.max_restarts, backoff_s=options.restart_delay, hang_timeout_s=options.hang_timeout
        )
    return structs.replace(
        plan,
        argv=argv,
        env=env,
        files=files,
        layout=shape,
        notes=notes,
        actions=actions,
        policy=policy,
        rank_order=_choose_rank_order(options, shape, context),
    )


def _check_step(environ: Mapping[str, str]) -> None:
    """Check that a step of Slurm has one launcher on each node: further ones would start the same ranks again.

    Raises:
        UsageError: It has more.
    """
    tasks, nodes = (environ.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"))
    if "SLURM_STEP_ID" in environ and tasks.isdecimal() and nodes.isdecimal() and int(tasks) > int(nodes):
        raise UsageError(
            f"srun started {tasks} tasks on {nodes} nodes, and each would start the ranks of its node",
            "start one task on each node (srun --ntasks-per-node=1); direct --nproc N sets the processes of each",
        )


def _list_unused_nodes(shape: ClusterLayout, environ: Mapping[str, str]) -> tuple[str, ...]:
    """A warning if the launch uses one node of a job of several: in a batch script, or in the shell of salloc."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if "SLURM_STEP_ID" in environ or shape.sources.get("nnodes") != "default" or nodes == "1":
        return ()
    return (f"warning: this job of Slurm has {nodes} nodes, and `direct` uses one; to use all: slurm srun -- TASK",)


def _check_processes(shape: ClusterLayout, facts: MachineFacts) -> None:
    """Check that a machine can be meant for so many processes.

    Raises:
        UsageError: There are more than its cores, devices or memory allow.
    """
    fitting = max(MOST_UNCHECKED, PROCESSES_PER_CORE * (facts.cpu.usable or 1), len(facts.partitions))
    if facts.memory.total_bytes:
        fitting = min(fitting, max(1, facts.memory.total_bytes // LEAST_MEMORY))
    if shape.nproc > fitting:
        memory = f", {facts.memory.total_bytes / 2**30:.0f} GiB of memory" if facts.memory.total_bytes else ""
        machine = f"{facts.cpu.usable or 1} processors, {len(facts.partitions)} devices{memory}"
        raise UsageError(
            f"{shape.sources.get('nproc', 'nproc')}: {shape.nproc} processes do not fit this machine ({machine})",
            f"use at most {fitting}, or add --oversubscribe if you mean it",
        )


def list_patch_files(options: Options) -> tuple[str, ...]:
    """Files of `--patch`."""
    return options.patch


def find_size(options: Options) -> JobSize:
    """The sizes that are typed."""
    return JobSize(nodes=options.nnodes, devices_per_node=1 if options.single else options.nproc)


def _choose_rank_order(options: Options, shape: ClusterLayout, context: PlanContext) -> RankOrderPolicy | None:
    """Order of the nodes; None where torchrun numbers them, or no worker starts."""
    if shape.nnodes == 1 or not context.starts_workers or options.rdzv_backend == "c10d":
        return None
    file = options.topology_file or context.environ.get(TOPOLOGY_VARIABLE)
    return RankOrderPolicy(by_network=options.rank_order == "network", topology_file=file)


def build_layout(options: Options, context: PlanContext) -> ClusterLayout:
    """Number of nodes and processes, from `options` and the environment.

    Raises:
        UsageError: The values are invalid, or contradict each other.
    """
    if options.single:
        if (options.nproc or 1) > 1 or (options.nnodes or 1) > 1:
            raise UsageError("--single runs one process", "remove --nproc and --nnodes")
        return ClusterLayout(nproc=1, sources={"nproc": "--single", "nnodes": "--single"})
    flags = LayoutFlags(
        nproc=options.nproc,
        nnodes=options.nnodes,
        node_rank=options.node_rank if context.node_rank is None else context.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
    )
    return find_layout(context.environ, partial(_count_devices, context), flags)


def _count_devices(context: PlanContext) -> int:
    return (
        len(list_usable_devices(context.gpu_facts(), context.environ))
        if context.starts_workers
        else count_devices(context.environ)
    )


class NodeVariables(Struct, frozen=True):
    """What the workers of a node get."""

    env: dict[str, Variable]
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = {}
    """Files on the local disk: text by path."""


def _collect_node_variables(
    shape: ClusterLayout,
    given: Mapping[str, Variable],
    typed: Sequence[Mapping[str, Variable]],
    context: PlanContext,
    *,
    uses_tuned: bool,
) -> NodeVariables:
    """Variables from the machine, hooks, patches, `given` and `typed`.

    Variables that the user's shell already sets are not included.
    """
    from primus.machine.environment.precedence import (  # not for what starts no workers
        GivenVariables,
        JobNode,
        build_environment,
        find_rocm_library,
        find_torch_version,
    )
    from primus.machine.network.selection import CHOICES, Network, choose_network

    by_user = {**given, **typed[0], **typed[1]}
    facts = context.gpu_facts()
    # For one process without GPUs nothing else decides a variable, unless the user selects a network.
    if facts.devices or shape.world_size > 1 or any(name in by_user or name in context.environ for name in CHOICES):
        facts = context.facts(shape.master_of_several)
    folders = sys.path if context.import_folders is None else context.import_folders
    is_tuned = uses_tuned and bool(facts.devices) and context.workload is not None and context.is_here
    tuned = _find_tuned_settings(facts, by_user, context, folders) if is_tuned else None
    node = JobNode(
        facts=facts,
        network=choose_network(facts, shape.nnodes, context.environ) if shape.nnodes > 1 else Network(),
        layout=shape,
        workload=context.workload,
        torch=find_torch_version(facts, folders) if facts.devices else None,
        rocm_library=find_rocm_library(context.environ) if facts.devices else None,
        tuned=tuned.settings if tuned else {},
    )
    values = GivenVariables(
        shell=context.environ,
        given=given,
        typed=typed,
        hooks=_select_by_source(context.settings, "hook"),
        patches=_select_by_source(context.settings, "patch"),
    )
    decided = build_environment(node, values)
    decisions = _list_decisions(decided, {**context.settings, **by_user})
    notes = (*(tuned.notes if tuned else ()), *(f"warning: {warning}" for warning in decided.warnings))
    variables = _extend_path_lists(context) | decisions
    copies = tuned.copies if tuned else None
    # Files are written only if nothing that the user set takes their place.
    if copies is None or copies.variable not in decisions or decisions[copies.variable].value != copies.value:
        return NodeVariables(variables, notes)
    return NodeVariables(variables, (copies.note, *notes), copies.files)


def _list_decisions(decided: Environment, chosen: Mapping[str, Variable]) -> dict[str, Variable]:
    """The variables to set, with their sources; those of the shell are inherited."""
    return {
        name: chosen[name]
        if choice.layer in LAUNCH_LAYERS
        else Variable(choice.value, f"{choice.layer}: {choice.reason}")
        for name, choice in decided.variables.items()
        if choice.value is not None and choice.layer != "user"
    }


def _find_tuned_settings(
    facts: MachineFacts, by_user: Mapping[str, Variable], context: PlanContext, folders: Sequence[str]
) -> TunedSettings:
    """What was tuned for the GPUs, and for the PyTorch in `folders`."""
    from primus.runs.tuned_files import build_tuned_settings
    from primus.site_folders import find_distribution

    environ = {**context.environ, **{name: variable.value for name, variable in by_user.items()}}
    return build_tuned_settings(environ, facts, find_distribution("torch", folders))


def _extend_path_lists(context: PlanContext) -> dict[str, Variable]:
    """Path lists of the user's shell, such as PATH, that hooks and patches have extended."""
    settings, environ = context.settings, context.environ
    return {name: each for name, each in settings.items() if extends_list(name, each.value, environ.get(name))}


def _select_by_source(settings: Mapping[str, Variable], kind: str) -> dict[str, Variable]:
    return {name: variable for name, variable in settings.items() if variable.source.startswith(kind)}


def _build_agent_command(
    worker: tuple[str, ...], shape: ClusterLayout, context: PlanContext, backend: str
) -> tuple[str, ...]:
    """The command of the elastic agent, which starts `worker`, a Python command, once for each process.

    A static rendezvous keeps node ranks as given; one node without a port lets the agent choose a free one.
    """
    script = worker[1:]  # without the interpreter: the agent starts workers with its own
    folder = Run(Path(context.directory)).attempt_folder(context.attempt)
    report = f"--report={name_agent_report_file(folder, shape.node_rank)}"
    agent = interpreter.build_module_command(context.python, AGENT, report)
    common = (*agent, f"--nproc-per-node={shape.nproc}", f"--nnodes={shape.nnodes}")
    if shape.master_port is None:
        return (*common, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *script)
    if backend == "c10d":
        return (
            *common,
            "--rdzv-backend=c10d",
            f"--rdzv-id={Path(context.directory).name}-{context.attempt}",
            f"--rdzv-endpoint={shape.master_addr}:{shape.master_port}",
            f"--rdzv-conf=is_host={int(shape.node_rank == 0)}",
            *script,
        )
    return (
        *common,
        f"--node-rank={shape.node_rank}",
        f"--master-addr={shape.master_addr}",
        f"--master-port={shape.master_port}",
        *script,
    )
