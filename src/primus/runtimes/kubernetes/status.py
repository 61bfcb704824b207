"""Read the states of jobs, pods and nodes from objects of the Kubernetes API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from primus.launch.supervision.restart_policy import NO_RESTART_CODE
from primus.runtime import JobState, SchedulerState
from primus.runtimes.kubernetes import names
from primus.runtimes.kubernetes.pod import GPU_RESOURCE
from primus.runtimes.kubernetes.target import JobView, NodeView, PodView

MODEL_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "amd.com/gpu.family",
)
"""Labels with the model of a node's GPUs, set by the vendors' feature discovery."""
ENDS: dict[str, SchedulerState] = {"Completed": "done", "Complete": "done", "Failed": "failed"}
"""Final conditions of a JobSet and of a TrainJob."""


def build_job_view(job: Any, pods: Sequence[Any], warnings: Sequence[Any]) -> JobView:
    """A JobSet or TrainJob with its pods and warning events."""
    views = tuple(sorted(map(build_pod_view, pods), key=lambda pod: pod.rank or 0))
    state = _read_job_state(job, views)
    # What a pod waits for now comes before warning events, which may belong to an earlier attempt.
    waits = [f"{pod.name}: {pod.message}" for pod in views if pod.message and pod.phase in ("Pending", "Running")]
    messages = list_messages(warnings)
    meta = job["metadata"]
    replicas, per_node = _count_replicas(job), _count_gpus_per_node(job)
    if state.state in ("queued", "running"):
        gpus = None if replicas is None or per_node is None else replicas * per_node
        state = structs.replace(state, num_nodes=replicas, gpus=gpus)
    return JobView(
        id=meta["name"],
        name=meta["name"],
        kind=job.get("kind") or "",
        state=state,
        replicas=replicas,
        created=meta.get("creationTimestamp") or "",
        run=meta.get("labels", {}).get(names.RUN, ""),
        pods=views,
        message=next(iter(waits or messages), "") or state.reason or _read_progress(job),
    )


def list_messages(events: Sequence[Any]) -> list[str]:
    """Messages of events, newest first."""
    return [str(each.get("message", "")) for each in sorted(events, key=_read_event_time, reverse=True)]


def build_pod_view(pod: Any) -> PodView:
    """A pod of a job."""
    meta, reported = pod["metadata"], pod.get("status", {})
    # Kubernetes sets the completion index as an annotation, and as a label from 1.28 on.
    rank = meta.get("annotations", {}).get(names.RANK_OF_POD, meta.get("labels", {}).get(names.RANK_OF_POD))
    containers = reported.get("containerStatuses") or ()
    own: Any = next((each for each in containers if each["name"] == names.REPLICATED_JOB), {})
    ended = own.get("state", {}).get("terminated") or {}
    return PodView(
        name=meta["name"],
        rank=int(rank) if rank is not None else None,
        node=pod.get("spec", {}).get("nodeName") or "",
        phase="Terminating" if meta.get("deletionTimestamp") else reported.get("phase", ""),
        exit_code=ended.get("exitCode"),
        restarts=own.get("restartCount", 0),
        message=_explain_pod_state(reported, own, ended),
    )


def _explain_pod_state(reported: Any, own: Any, ended: Any) -> str:
    """Why a pod is waiting, or how it ended."""
    waiting = own.get("state", {}).get("waiting") or {}
    # The container's own reason (ImagePullBackOff, OOMKilled) is more specific than the conditions of its pod.
    if waiting.get("reason") not in (None, "ContainerCreating"):
        return ": ".join(filter(None, (waiting["reason"], waiting.get("message", ""))))
    if ended.get("reason") not in (None, "Completed"):
        return ": ".join(filter(None, (ended["reason"], _find_reason(ended.get("message", "")))))
    refused = [
        each
        for each in reported.get("conditions") or ()
        if each["type"] == "PodScheduled" and each["status"] == "False"
    ]
    if refused:
        return str(refused[0].get("message") or refused[0].get("reason") or "not scheduled")
    return ": ".join(filter(None, (reported.get("reason", ""), reported.get("message", ""))))


def _find_reason(log: str) -> str:
    """The line of primus in the last lines of a container's log that says why it failed; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("primus-cli: ")), lines[-1] if lines else "")


def _read_job_state(job: Any, pods: Sequence[PodView]) -> JobState:
    reported = job.get("status") or {}
    conditions = {each["type"]: each for each in reported.get("conditions") or () if each["status"] == "True"}
    # A final condition comes first: it stays true while the pods of the job are deleted.
    ended = next((kind for kind in ENDS if kind in conditions or kind == reported.get("terminalState")), None)
    restarts = reported.get("restarts", 0)
    nodes = tuple(dict.fromkeys(pod.node for pod in pods if pod.node))
    if ended:
        reason = conditions.get(ended, {}).get("message", "")
        code = 0 if ENDS[ended] == "done" else _exit_code(pods)
        # The condition says that a pod has failed, the pod why. Others fail because of it, by signals.
        causes = [f"node {pod.rank or 0}: {pod.message}" for pod in pods if code and pod.exit_code == code]
        reason = causes[0] if causes else reason
        return JobState(state=ENDS[ended], raw=ended, reason=reason, nodes=nodes, exit_code=code, restarts=restarts)
    # Deletion takes as long as the grace period of the pods, during which they still run.
    if job["metadata"].get("deletionTimestamp"):
        return JobState(state="cancelled", raw="Terminating", nodes=nodes, restarts=restarts)
    if "Suspended" in conditions or job["spec"].get("suspend"):
        reason = conditions.get("Suspended", {}).get("message", "")
        return JobState(state="queued", raw="Suspended", reason=reason, nodes=nodes, restarts=restarts)
    groups = reported.get("replicatedJobsStatus") or reported.get("jobsStatus") or ()
    # A list of jobs is read without pods; then the counts of the replicated jobs decide.
    is_running = any(pod.phase == "Running" for pod in pods) or any(each.get("ready") for each in groups)
    raw = "Running" if is_running else "Pending"
    return JobState(state="running" if is_running else "queued", raw=raw, nodes=nodes, restarts=restarts)


def _exit_code(pods: Sequence[PodView]) -> int:
    """Exit code of the job: NO_RESTART_CODE if a pod has it, else the first that is not 0."""
    # The other pods are then ended by signals, whose codes would hide that a restart is useless.
    codes = [pod.exit_code for pod in pods if pod.exit_code]
    return NO_RESTART_CODE if NO_RESTART_CODE in codes else codes[0] if codes else 1


def _count_replicas(job: Any) -> int | None:
    spec = job["spec"]
    found: int | None = spec.get("trainer", {}).get("numNodes")
    if found is None and spec.get("replicatedJobs"):
        found = spec["replicatedJobs"][0]["template"]["spec"].get("completions")
    return found


def _read_progress(job: Any) -> str:
    """The progress that the first pod has posted to the job, if it has."""
    posted: str = (job["metadata"].get("annotations") or {}).get(names.PROGRESS, "")
    trainer = job.get("status", {}).get("trainerStatus") or {}
    return posted or (f"{trainer['progressPercentage']} % done" if "progressPercentage" in trainer else "")


def _count_gpus_per_node(job: Any) -> int | None:
    """GPUs of a pod, from the limits of the job's template; None if the job has none of ours."""
    spec = job["spec"]
    if "trainer" in spec:
        limits = (spec["trainer"].get("resourcesPerNode") or {}).get("limits")
    else:
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"] if "replicatedJobs" in spec else {}
        limits = next((each.get("resources", {}).get("limits") for each in template.get("containers") or ()), None)
    return None if limits is None else _sum_gpus(limits)


def _read_event_time(event: Any) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


def find_newest_pod(pods: Sequence[PodView], rank: int) -> PodView | None:
    """The running pod of a node, or its last one."""
    # A terminating pod was replaced by a restart. A job of one node may have no rank annotation.
    alive = [pod for pod in pods if (pod.rank or 0) == rank and pod.phase != "Terminating"]
    return alive[-1] if alive else None


def build_node_view(node: Any, pods: Sequence[Any] | None) -> NodeView:
    """A node, and the number of its GPUs that `pods` use; None if the pods are not known."""
    meta, reported = node["metadata"], node.get("status", {})
    ready: Any = next((each for each in reported.get("conditions") or () if each["type"] == "Ready"), {})
    here = None if pods is None else [pod for pod in pods if pod.get("spec", {}).get("nodeName") == meta["name"]]
    is_closed = bool(node.get("spec", {}).get("unschedulable"))
    labels = meta.get("labels", {})
    return NodeView(
        name=meta["name"],
        is_ready=ready.get("status") == "True" and not is_closed,
        is_cordoned=is_closed,
        gpus=_sum_gpus(reported.get("allocatable") or {}),
        gpus_used=None if here is None else sum(map(_count_pod_gpus, here)),
        model=next((labels[name] for name in MODEL_LABELS if name in labels), ""),
        message="cordoned: accepts no new pods"
        if is_closed
        else ""
        if ready.get("status") == "True"
        else ready.get("message", ""),
    )


def _sum_gpus(amounts: Mapping[str, str]) -> int:
    return sum(int(amounts.get(resource, 0)) for resource in GPU_RESOURCE.values())


def _count_pod_gpus(pod: Any) -> int:
    return sum(
        _sum_gpus((each.get("resources") or {}).get("limits") or {}) for each in pod["spec"].get("containers") or ()
    )
