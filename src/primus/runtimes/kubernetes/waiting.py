"""Explain why a job of a cluster waits: its Workload in Kueue, its pods, and their warning events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from primus.runtime import JobState
from primus.runtimes.kubernetes.target import PodView

ADVICE = {
    r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull": (
        "check --image; a private registry needs --pull-secret"
    ),
    r"allows to fit only \d+ out of \d+ pod": (
        "no domain of this topology level has room for all pods: wait until jobs there end, or ask for a wider level"
    ),
    r"insufficient (unused )?quota|exceed\w* .*quota|quota.* exceeded": (
        "the quota is used up: the job starts when others end; kubectl describe clusterqueues, or quota"
    ),
    r"(LocalQueue|ClusterQueue) .*(n't exist|not exist|inactive)": (
        "check --queue; kubectl get localqueues lists the queues"
    ),
    r"Insufficient \S*(gpu|rdma|hca)": "no node has as many free devices: kubernetes nodes shows those in use",
    r"Insufficient (cpu|memory)": "no node has as much free: use a smaller --cpu or --memory",
    r'persistentvolumeclaim ".*" not found': "the claim of --volume is not in this namespace: kubectl get pvc",
    r"unbound immediate PersistentVolumeClaims": "the claim of --volume has no volume yet: kubectl describe pvc",
    r"CreateContainerConfigError": "a Secret or a ConfigMap that the pod names is missing: check --secret",
    r"untolerated taint": "the nodes have a taint that the job does not tolerate: check --vendor",
    r"didn't match .*(affinity|selector)": "no node fits --nodelist and --exclude",
    r"MountVolume|AttachVolume": "the node cannot mount a volume: check --volume",
}
"""What to do, by what is found in messages of kubelet, kube-scheduler and Kueue (their sources, and the messages of
`kubectl describe`); the first match counts."""
CREATING = "its image is being pulled, or its volumes are being mounted"
"""State of a pod that has a node and no message yet (ContainerCreating)."""
WORKLOAD_CONDITIONS = ("Admitted", "QuotaReserved")
"""Conditions of a Workload that say why it is not admitted yet (kueue.x-k8s.io, WorkloadStatus)."""


def explain_wait(
    job: str, state: JobState, pods: Sequence[PodView], warnings: Sequence[str], workloads: Sequence[Any]
) -> JobState:
    """`state` of a queued job with the reason of its wait, and what to do about it.

    Args:
        job: Name of the job.
        state: Its state, from the job alone.
        pods: Its pods.
        warnings: Messages of warning events about it, newest first.
        workloads: Workloads of Kueue in its namespace.
    """
    waits = [f"{pod.name}: {pod.message}" for pod in pods if pod.message and pod.phase in ("Pending", "Running")]
    waits += [f"{pod.name}: {CREATING}" for pod in pods if pod.phase == "Pending" and pod.node]
    # What Kueue does not admit has no pods; of one that is admitted, pods come before events of an earlier attempt.
    found = [*_read_workload_messages(job, workloads), *waits, *warnings, state.reason]
    reason = " ".join(next(filter(None, found), "").split())
    advice = next((text for pattern, text in ADVICE.items() if re.search(pattern, reason)), "")
    return structs.replace(state, reason=reason, advice=advice)


def _read_workload_messages(job: str, workloads: Sequence[Any]) -> list[str]:
    messages = []
    for workload in workloads:
        if job not in [owner.get("name") for owner in workload["metadata"].get("ownerReferences") or ()]:
            continue
        conditions = {each["type"]: each for each in workload.get("status", {}).get("conditions") or ()}
        if conditions.get("Admitted", {}).get("status") == "True":
            continue
        waiting = [conditions[name] for name in reversed(WORKLOAD_CONDITIONS) if name in conditions]
        messages += [f"Kueue: {each['message']}" for each in waiting if each["status"] == "False" and each["message"]]
    return messages
