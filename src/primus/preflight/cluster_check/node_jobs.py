"""Small jobs that run preflight on nodes of a cluster, each with a process of this machine that waits for it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from primus import registry
from primus.errors import PrimusError, UsageError
from primus.launch.jobs import submissions
from primus.preflight.cluster_check import result
from primus.preflight.cluster_check.result import CheckFolder, NodeCheckResult, PreflightAnswer
from primus.runs.files import write_text
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
