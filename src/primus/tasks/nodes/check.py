"""Run preflight on one node, and clear it if it passes, or on all idle nodes (--idle)."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from primus.config.flags import Positional
from primus.errors import EXIT_OK, EXIT_UNFIT, PrimusError, UsageError
from primus.launch.signals import raise_on_signals
from primus.machine.cluster import find_node_name
from primus.preflight.cluster_check.idle_nodes import check_idle_nodes
from primus.preflight.cluster_check.node_jobs import (
    IdleNodesRequest,
    build_node_command,
    load_node_runtime,
    make_node_job,
)
from primus.preflight.cluster_check.report import format_text
from primus.preflight.cluster_check.result import read_answer
from primus.preflight.report.unfit_list import record_unfit_node
from primus.preflight.session import OtherPreflight
from primus.runs import unfit_nodes
from primus.runs.store import create_run_id
from primus.runtime import ClusterNode
from primus.task import TaskContext
from primus.tasks.nodes._list_folder import choose_list

PASSES_WORDS = True


class Options(Struct, frozen=True, kw_only=True):
    """Options of `nodes check`."""

    node: Positional = ""
    """Name of the node; other words, such as --level full, are passed to preflight."""
    idle: bool = False
    """Check all idle nodes of the cluster instead, each in a job of its own; other nodes are only listed."""
    runtime: str = ""
    """How to reach the nodes: 'slurm srun -p gpu', 'kubernetes --image X', or 'ssh --hosts n[1-8]' (default: slurm srun
    where Slurm is installed)."""
    limit: Annotated[float, Meta(gt=0)] = 30.0
    """Minutes that the check of a node may take, which is the time limit of its job."""
    start_limit: Annotated[float, Meta(gt=0)] = 60.0
    """--idle: seconds in which the job of a node must start; a node that is not idle any more is not waited for."""
    parallel: Annotated[int, Meta(ge=1)] = 16
    """--idle: nodes that are checked at the same time."""
    results: str = "./output/nodes-check"
    """--idle: folder of the results; each check makes a subfolder, and is compared with the earlier ones."""
    resume: bool = False
    """--idle: continue the last check in that folder with the nodes that have no result."""
    unfit_nodes: str | None = None
    """Folder of the list (default: PRIMUS_UNFIT_NODES, else that of the user)."""


class IdleOptions(Options, frozen=True, kw_only=True):
    """Options of `nodes check --idle`: words without a dash are values of preflight's options."""

    node: str = ""
    """Not used with --idle."""


def choose_options(words: Sequence[str]) -> type[Options]:
    """Options without the name of a node for --idle."""
    return IdleOptions if "--idle" in words else Options


def run(options: Options, context: TaskContext) -> int:
    """Check the node, and record the result in the list; gives 0 if it is fit, and 3 if not.

    Raises:
        UsageError: There is no node, or no runtime that reaches it.
        PrimusError: Preflight could not be run there.
    """
    _check_options(options)
    context = msgspec.structs.replace(context, environ=choose_list(context.environ, options.unfit_nodes))
    if options.idle:
        check, code = check_idle_nodes(_make_request(options, context), context)
        context.result(check, format_text(check))
        context.say(f"report: {Path(options.results) / check.id / 'report.html'}")
        return code
    found = _run_preflight(options, context)
    reasons = [reason for each in found.reasons.values() for reason in each]
    if found.verdict == "pass":
        cleared = unfit_nodes.clear_node(context.environ, options.node, "preflight passed", "preflight")
        text = "is fit, and not in the list any more" if cleared else "is fit"
    elif found.verdict == "fail":
        record_unfit_node(options.node, reasons, "", context)
        text = "is unfit"
    else:  # what could not be checked says nothing of the node, for or against it
        text = "could not be checked completely, and stays in the list if it is there"
    context.result(
        {"node": options.node, "verdict": found.verdict, "reasons": reasons},
        "".join([f"{options.node} {text}", *(f"\n  {reason}" for reason in reasons)]),
    )
    return EXIT_OK if found.verdict == "pass" else EXIT_UNFIT


def _check_options(options: Options) -> None:
    if not options.node and not options.idle:
        raise UsageError("nodes check needs a node", "nodes check n3 --level full, or nodes check --idle")
    if options.node and options.idle:
        raise UsageError(f"--idle cannot be combined with a node: {options.node}", "remove one of them")
    if options.node:
        unfit_nodes.check_node_name(options.node)


def plan_notes(options: Options, context: TaskContext) -> list[str]:
    """What a dry run prints: the state of each node, and the job on each that is idle. It asks the scheduler, and
    changes nothing.

    Raises:
        UsageError: There is no node, or no runtime that reaches it.
        PrimusError: The scheduler does not answer.
    """
    _check_options(options)
    if not options.idle and _is_here(options):
        return [_format_command(_build_local_command(context))]
    request = _make_request(options, context)
    runtime = load_node_runtime(request.runtime[0])
    nodes = (
        runtime.list_nodes(request.runtime[1:], context.environ)
        if options.idle
        else [_find_node(request, options, context)]
    )
    notes: list[str] = []
    for node in nodes:
        notes.append(f"{node.name}: {node.state}{f' ({node.reason})' if node.reason else ''}")
        if options.idle and node.state != "idle":
            continue
        job = make_node_job("dry-run", node, request.limit_s, request.start_s if options.idle else None)
        command = build_node_command(request, runtime, job)
        notes.append(_format_command(command))
        if runtime.collect_output:  # a manifest says more than the command that creates it
            notes.append(_run_command(["--dry-run", *command], context.environ).stdout.rstrip())
    return notes


def _format_command(command: Sequence[str]) -> str:
    return f"runs: primus-cli {shlex.join(command)}"


def _is_here(options: Options) -> bool:
    return not options.runtime and unfit_nodes.is_same_node(options.node, find_node_name())


def _build_local_command(context: TaskContext) -> list[str]:
    return ["direct", "--", "preflight", "--no-record-unfit", *context.overrides]


def _make_request(options: Options, context: TaskContext) -> IdleNodesRequest:
    """The jobs that are asked for.

    Raises:
        UsageError: There is no runtime.
    """
    has_slurm = shutil.which("srun", path=context.environ.get("PATH")) is not None
    words = shlex.split(options.runtime) or (["slurm", "srun"] if has_slurm else [])
    if not words:
        hint = "nodes check n3 --runtime 'ssh --user me', or run preflight there and then nodes remove n3"
        raise UsageError("nodes check needs --runtime: there is no Slurm here", hint)
    end = words.index("--") if "--" in words else len(words)  # behind it is a container on the node
    return IdleNodesRequest(
        runtime=tuple(words[:end]),
        inner=(*words[end:], "--", "preflight", "--no-record-unfit", *context.overrides),
        results=Path(options.results),
        resume=options.resume,
        parallel=options.parallel,
        limit_s=60 * options.limit,
        start_s=options.start_limit,
    )


def _run_preflight(options: Options, context: TaskContext) -> OtherPreflight:
    """Run it with its progress on standard error; gives its verdict.

    Raises:
        UsageError: No runtime reaches the node.
        PrimusError: It gave no verdict.
    """
    if _is_here(options):
        command = _build_local_command(context)
        context.say(_format_command(command))
        return _read_verdict(_run_command(["--json", *command], context.environ))
    request = _make_request(options, context)
    runtime = load_node_runtime(request.runtime[0])
    node = _find_node(request, options, context)
    job = make_node_job(create_run_id(), node, request.limit_s, None)
    command = build_node_command(request, runtime, job)
    context.say(_format_command(command))
    done = _run_command(["--json", *command], context.environ)
    if runtime.collect_output and done.returncode == EXIT_OK:
        with raise_on_signals():  # so that the job is deleted
            done.stdout = runtime.collect_output(request.runtime[1:], job, context.environ)
    return _read_verdict(done)


def _find_node(request: IdleNodesRequest, options: Options, context: TaskContext) -> ClusterNode:
    """The node, with its number of GPUs where the job has to ask for them."""
    runtime = load_node_runtime(request.runtime[0])
    if runtime.collect_output:
        nodes = runtime.list_nodes(request.runtime[1:], context.environ)
        found = next((each for each in nodes if unfit_nodes.is_same_node(each.name, options.node)), None)
        if found is None:
            raise UsageError(f"there is no node '{options.node}' with GPUs", "kubernetes nodes lists the nodes")
        return found
    return ClusterNode(name=options.node, state="idle")


def _run_command(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "primus", *command]
    return subprocess.run(
        argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )


def _read_verdict(done: subprocess.CompletedProcess[str]) -> OtherPreflight:
    try:
        return read_answer(done.stdout, OtherPreflight)
    except PrimusError as error:
        raise PrimusError(
            f"{error.problem} (exit code {done.returncode})", "the lines above say why; nothing is recorded"
        ) from None
