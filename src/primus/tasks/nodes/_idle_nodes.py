"""Check all idle nodes of a cluster at once: a small job for each of them, and a folder with the results.

Nodes that are busy, drained or down are reported as their scheduler sees them, and are not touched. States of a node:

    idle        no job yet, or it has just been asked for
    running     a process of ours waits for its job; the number of such processes is limited
    done        its result is written, by rename
    no answer   the job did not start in time, because somebody was faster, or gave no verdict

Ctrl-C ends the processes of the running nodes, each of which cancels its own job; the folder can be continued.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from primus import registry
from primus.errors import EXIT_OK, EXIT_UNFIT, PrimusError, UsageError
from primus.launch.jobs import submissions
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.preflight.cluster_check import drift, report, result
from primus.preflight.cluster_check.result import CheckFolder, NodeCheckResult, PreflightAnswer
from primus.preflight.findings.thresholds import Thresholds
from primus.preflight.report.unfit_list import record_unfit_node
from primus.runs import unfit_nodes
from primus.runs.files import write_text
from primus.runs.store import create_run_id
from primus.runtime import JOB_RUNTIMES, NODE_RUNTIMES, ClusterNode, NodeJob, NodeRuntime
from primus.task import TaskContext

STOP_LIMIT_S = 30.0
"""Time in which a process has to cancel its job after SIGTERM."""
MARGIN_S = 60.0
"""Time beyond the limit of a job in which its scheduler has to end it."""
LONGEST_SLUG = 21
"""Characters of a node's name in that of its job: the name of a pod has 63 at most, with those of the check and the
suffix of JobSet."""
LAST_WORDS = 300
"""Characters of the last line of a job without verdict."""


class IdleNodesRequest(Struct, frozen=True, kw_only=True):
    """What is asked for."""

    runtime: tuple[str, ...]
    """Name and options of the runtime, without inner runtimes."""
    inner: tuple[str, ...]
    """Words behind them: further runtimes, and preflight with its options."""
    results: Path
    resume: bool
    parallel: int
    limit_s: float
    start_s: float


class NodeJobs:
    """The jobs of one check, each with a process of this machine. `run_job` is called by threads."""

    def __init__(self, request: IdleNodesRequest, folder: CheckFolder, context: TaskContext) -> None:
        self._request, self._folder, self._context = request, folder, context
        self._runtime = load_node_runtime(request.runtime[0])
        self._environ = _leave_allocation(context.environ)
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._submitted: set[str] = set()
        self._is_stopped = False

    def run_job(self, node: ClusterNode) -> NodeCheckResult:
        """Check one node.

        Raises:
            PrimusError: Its job has not started, or gave no verdict.
        """
        request = self._request
        job = make_node_job(self._folder.id, node, request.limit_s, request.start_s)
        text = self._run_command(build_node_command(request, self._runtime, job), job)
        if self._runtime.collect_output:
            text = self._collect_output(job)
        found = result.build_check_result(node.name, result.read_answer(text, PreflightAnswer))
        self._folder.write_result(found)
        return found

    def _collect_output(self, job: NodeJob) -> str:
        """The output of a job that was submitted."""
        assert self._runtime.collect_output
        with self._lock:
            is_stopped = self._is_stopped
            self._submitted.add(job.name)
        if is_stopped:  # while the job was submitted
            self._cancel_job(job.name)
            raise PrimusError("the check was stopped")
        try:
            return self._runtime.collect_output(self._request.runtime[1:], job, self._environ)
        finally:
            with self._lock:
                self._submitted.discard(job.name)

    def _cancel_job(self, name: str) -> None:
        """Cancel a job that was submitted; whoever waits for it finds that it is gone."""
        with suppress(PrimusError):
            submission = submissions.find_submission(name, self._environ)
            registry.load_plug_in(JOB_RUNTIMES, submission.runtime).cancel(submission)

    def _run_command(self, command: Sequence[str], job: NodeJob) -> str:
        """Run the command to its end; gives what it has printed.

        Raises:
            PrimusError: It was not finished in time, or was stopped, or has printed nothing.
        """
        with self._start_child([sys.executable, "-m", "primus", "--json", *command]) as child:
            try:
                out, err = child.communicate(timeout=job.limit_s + (job.start_s or 0.0) + MARGIN_S)
            except subprocess.TimeoutExpired:
                end_child(child)
                raise PrimusError(f"not ended within {job.limit_s:g} s") from None
        write_text(self._folder.locate_log(job.node.name), err)
        if not out.strip() and (child.returncode or not self._runtime.collect_output):
            raise PrimusError(_find_last_words(err) or f"the command ended with exit code {child.returncode}")
        return out

    @contextmanager
    def _start_child(self, argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        with self._lock:
            if self._is_stopped:
                raise PrimusError("the check was stopped")
            # In a session of its own: Ctrl-C reaches this process only, which ends the others in order.
            child = subprocess.Popen(
                argv,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._children.add(child)
        try:
            yield child
        finally:
            with self._lock:
                self._children.discard(child)

    def stop(self) -> None:
        """End all processes and start no more; each cancels its job."""
        with self._lock:
            self._is_stopped = True
            children, submitted = list(self._children), list(self._submitted)
        for name in submitted:
            self._cancel_job(name)
        # A submission that is cut off may leave a job that nobody knows: it ends first, and its job is cancelled then.
        deadline = time.monotonic() + (STOP_LIMIT_S if self._runtime.collect_output else 0.0)
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            child.terminate()
        for child in children:
            end_child(child)


def _leave_allocation(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables without those of an allocation of Slurm, whose nodes srun would take instead of a job of its own."""
    is_inside = "SLURM_JOB_ID" in environ
    kept = ("SLURM_CONF",)
    return {
        name: value for name, value in environ.items() if not is_inside or name in kept or not name.startswith("SLURM_")
    }


def end_child(child: subprocess.Popen[str]) -> None:
    """Ask a process to end, and kill it after the limit."""
    child.terminate()
    try:
        child.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _find_last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # primus-cli's own message, behind which a hint may stand, says more than the last line.
    own = [line for line in lines if line.startswith(("srun: error", "primus-cli: "))]
    return (own or lines or [""])[0 if own else -1].removeprefix("primus-cli: ")[:LAST_WORDS]


def load_node_runtime(name: str) -> NodeRuntime:
    """The runtime `name`, which must reach single nodes.

    Raises:
        UsageError: There is no such runtime, or it does not.
    """
    name = {"k8s": "kubernetes"}.get(name, name)
    if not registry.has_plug_in(NODE_RUNTIMES.name, name):
        raise UsageError(
            f"--runtime {name}: there is no such runtime", "such as 'slurm srun -p gpu'; see docs/nodes.md"
        )
    try:
        return registry.load_plug_in(NODE_RUNTIMES, name)
    except PrimusError as error:
        raise UsageError(
            f"--runtime {name} does not reach single nodes: {error.problem}", "see docs/nodes.md"
        ) from None


def make_node_job(check: str, node: ClusterNode, limit_s: float, start_s: float | None) -> NodeJob:
    """The job on `node`; its name is unique, and a name of Kubernetes as it is (RFC 1123)."""
    slug = re.sub(r"[^a-z0-9]+", "-", node.name.lower()).strip("-")
    if slug != node.name or len(slug) > LONGEST_SLUG:
        digest = hashlib.sha256(node.name.encode()).hexdigest()[:8]
        slug = f"{slug[: LONGEST_SLUG - len(digest) - 1].strip('-')}-{digest}"
    return NodeJob(node=node, name=f"check-{check.replace('_', '-')}-{slug}", limit_s=limit_s, start_s=start_s)


def build_node_command(request: IdleNodesRequest, runtime: NodeRuntime, job: NodeJob) -> list[str]:
    """Words of primus-cli that run preflight in a job of one node."""
    name, *words = request.runtime
    return [name, *runtime.select_node(words, job), *request.inner]


def check_idle_nodes(request: IdleNodesRequest, context: TaskContext) -> int:
    """Check all idle nodes; gives 0 if all that were asked are fit, 3 if one is not or gave no answer.

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
    context.result(check, report.format_text(check))
    context.say(f"report: {folder.directory / 'report.html'}")
    if code is not None:
        return code
    bad = [each for each in check.nodes if each.state in ("unfit", "unknown", "no answer")]
    return EXIT_UNFIT if bad else EXIT_OK


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
) -> report.ClusterCheck:
    earlier = result.read_earlier_results(request.results, folder)
    before = [each.id for each in result.find_check_folders(request.results) if each.id != folder.id]
    merged = result.merge_reports(list(results.values()))
    listed = unfit_nodes.read_unfit_nodes(context.environ)
    entries = {node.name: entry.format_reason() for node in nodes if (entry := listed.find(node.name))}
    return report.ClusterCheck(
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


def _record_unfit_nodes(check: report.ClusterCheck, context: TaskContext) -> None:
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
