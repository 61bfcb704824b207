"""Check all idle nodes of a cluster at once: a small job for each of them, and a folder with the results.

Nodes that are busy, drained or down are reported as their scheduler sees them, and are not touched. States of a node:

    idle        no job yet, or it has just been asked for
    running     a process of ours waits for its job; the number of such processes is limited
    done        its result is written, by rename
    no answer   the job did not start in time, because somebody was faster, or gave no verdict

Ctrl-C ends the processes of the running nodes, each of which cancels its own job; the folder can be continued.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from primus.errors import EXIT_OK, EXIT_UNFIT, PrimusError, UsageError
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.preflight.cluster_check import drift, report, result
from primus.preflight.cluster_check.node_jobs import IdleNodesRequest, NodeJobs, load_node_runtime
from primus.preflight.cluster_check.report import ClusterCheck
from primus.preflight.cluster_check.result import CheckFolder, NodeCheckResult
from primus.preflight.findings.thresholds import Thresholds
from primus.preflight.report.unfit_list import record_unfit_node
from primus.runs import unfit_nodes
from primus.runs.store import create_run_id
from primus.runtime import ClusterNode
from primus.task import TaskContext


def check_idle_nodes(request: IdleNodesRequest, context: TaskContext) -> tuple[ClusterCheck, int]:
    """Check all idle nodes, and write the report into the folder of the check.

    Gives the check and its exit code: 0 if all that were asked are fit, 3 if one is not or gave no answer, and that of
    a signal that stopped it.

    Raises:
        PrimusError: The scheduler does not answer, or the folder cannot be written.
        UsageError: The runtime cannot be used, or there is nothing to continue.
    """
    runtime = load_node_runtime(request.runtime[0])
    nodes = runtime.list_nodes(request.runtime[1:], context.environ)
    folder, began = _choose_folder(request), time.time()
    results = folder.read_results()
    asked = [node for node in nodes if node.state == "idle" and node.name not in results]
    context.say(
        f"{len(nodes)} nodes, {len(asked)} of them idle and to be checked, "
        f"{request.parallel} at a time; results: {folder.directory}"
    )
    problems, code = _run_jobs(asked, request, folder, results, context)
    check = _build_check(nodes, results, problems, folder, request, began, context, is_complete=code is None)
    report.write_cluster_check(check, results, folder)
    _record_unfit_nodes(check, context)
    if code is not None:
        return check, code
    bad = [each for each in check.nodes if each.state in ("unfit", "unknown", "no answer")]
    return check, EXIT_UNFIT if bad else EXIT_OK


def _choose_folder(request: IdleNodesRequest) -> CheckFolder:
    """A new folder, or the last one.

    Raises:
        UsageError: There is none to continue, or it is of another command.
    """
    command = shlex.join(request.inner[1:])
    if not request.resume:
        folder = CheckFolder(request.results / create_run_id())
        folder.write_command(command)
        return folder
    folders = result.find_check_folders(request.results)
    if not folders:
        raise UsageError(f"--resume: there is no check in {request.results}", "leave it out, or give --results")
    if (before := folders[-1].read_command()) != command:
        raise UsageError(f"--resume: the last check has run '{before}'", "give the same options, or leave out --resume")
    return folders[-1]


def _run_jobs(
    asked: Sequence[ClusterNode],
    request: IdleNodesRequest,
    folder: CheckFolder,
    results: dict[str, NodeCheckResult],
    context: TaskContext,
) -> tuple[dict[str, str], int | None]:
    """Check the nodes, and add their results; gives the problems by node, and the exit code of an interruption."""
    problems: dict[str, str] = {}
    jobs = NodeJobs(request, folder, context)
    with raise_on_signals(), ThreadPoolExecutor(request.parallel) as pool:
        futures = {pool.submit(jobs.run_job, node): node.name for node in asked}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                node = futures[future]
                try:
                    results[node] = future.result()
                    state = result.STATE_OF_VERDICT[results[node].verdict]
                except PrimusError as error:
                    problems[node], state = error.problem, "no answer"
                context.say(f"{number}/{len(asked)} {node}: {state}{': ' * (node in problems)}{problems.get(node, '')}")
        except KeyboardInterrupt as error:
            context.say("stopping: the jobs of this check are cancelled")
            pool.shutdown(wait=False, cancel_futures=True)
            jobs.stop()
            return problems, find_exit_code(error)
    return problems, None


def _build_check(
    nodes: Sequence[ClusterNode],
    results: dict[str, NodeCheckResult],
    problems: dict[str, str],
    folder: CheckFolder,
    request: IdleNodesRequest,
    began: float,
    context: TaskContext,
    *,
    is_complete: bool,
) -> ClusterCheck:
    earlier = result.read_earlier_results(request.results, folder)
    before = [each.id for each in result.find_check_folders(request.results) if each.id != folder.id]
    merged = result.merge_reports(list(results.values()))
    listed = unfit_nodes.read_unfit_nodes(context.environ)
    entries = {node.name: entry.format_reason() for node in nodes if (entry := listed.find(node.name))}
    return ClusterCheck(
        id=folder.id,
        began=began,
        duration_s=round(time.time() - began, 3),
        command=shlex.join(request.inner[1:]),
        is_complete=is_complete,
        nodes=tuple(result.combine_states(nodes, results, problems, entries)),
        previous=before[-1] if before and any(node in earlier for node in results) else "",
        changes=tuple(drift.find_changes(results, earlier, Thresholds().outlier_percent)),
        slowest_links=tuple(drift.find_slowest_links(results)),
        differences=tuple(
            each for each in merged.findings if each.group == "cluster" and each.status not in ("ok", "info")
        ),
    )


def _record_unfit_nodes(check: ClusterCheck, context: TaskContext) -> None:
    """Record unfit nodes, if others pass the same checks: else the site or an option is to blame."""
    if check.list_nodes("fit"):
        for node in check.list_nodes("unfit"):
            record_unfit_node(node.node, list(node.reasons), check.id, context)
    # A check without load may miss what fails under load: only a check of the one node clears it.
    listed = [node.node for node in check.list_nodes("fit") if node.listed]
    if listed:
        context.say(
            f"fit, but in the list of unfit nodes: {', '.join(listed)}; nodes check NODE --level full clears it"
        )
