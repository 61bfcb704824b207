"""Where Kubernetes shall place the pods of a job: `--placement` as annotations for Kueue or JobSet."""

from __future__ import annotations

import re

from primus.errors import UsageError, find_nearest
from primus.machine.placement.node_labels import LABELS
from primus.runtimes.kubernetes import names
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import NodeLabels

KUEUE = "kueue.x-k8s.io/podset-{}-topology"
"""Annotation of a pod template (Kueue, Topology Aware Scheduling)."""
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
"""Annotation of a JobSet: each of its jobs has a domain of the topology for itself (JobSet, Exclusive Placement)."""
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def build_pod_annotations(options: Options) -> dict[str, str]:
    """Annotations of the pod template.

    Kueue looks for one domain of the preferred level, and for one of each level above it where the pods do not fit: by
    the name of the node, the lowest level, it finds the fewest switches.

    Raises:
        UsageError: The placement needs Kueue, or is not a label.
    """
    placement = options.placement
    if placement in (None, "any"):
        return {KUEUE.format("unconstrained"): "true"} if placement and options.queue else {}
    if placement == "near":
        if options.queue is None:
            raise UsageError(
                "--placement near: the scheduler of Kubernetes does not know switches",
                "add --queue NAME of a Kueue queue, or give a node label that the pods must share",
            )
        return {KUEUE.format("preferred"): names.NODE_NAME}
    if not _LABEL.fullmatch(placement or ""):
        raise UsageError(
            f"--placement {placement}: neither near nor any nor a node label",
            "such as cloud.provider.com/topology-rack; `kubectl get nodes --show-labels` lists them",
        )
    return {KUEUE.format("required"): str(placement)} if options.queue else {}


def build_job_annotations(options: Options) -> dict[str, str]:
    """Annotations of the JobSet, for a label that its pods must share without a queue.

    Raises:
        UsageError: A TrainJob has no such annotation.
    """
    if options.placement in (None, "any", "near") or options.queue:
        return {}
    if options.target_name == "trainjob":
        raise UsageError(
            f"--placement {options.placement}: a TrainJob is placed by Kueue only",
            "add --queue, or use --target jobset",
        )
    return {EXCLUSIVE: str(options.placement)}


def is_level(placement: str | None) -> bool:
    """Whether a placement is the label of a level that all pods must share."""
    return placement not in (None, "any", "near")


def check_level(options: Options, labels: NodeLabels) -> None:
    """Check that the cluster has the level of `--placement`: pods that require another one wait without end.

    With a queue the levels are those of Kueue's topologies, also for nodes that an autoscaler adds later.

    Raises:
        UsageError: It has others.
    """
    label = str(options.placement)
    carried = {name for each in labels.nodes.values() for name in each}
    levels = [level for each in labels.topologies for level in each] if options.queue else []
    known = dict.fromkeys([*levels, names.NODE_NAME] if levels else carried)
    if label in known or not known:
        return
    who = "no Topology of Kueue has this level" if levels else "no node of the cluster has this label"
    shown = levels or [each for each in LABELS if each in carried]
    close = find_nearest(label, known)
    hint = f"did you mean {close}?" if close else f"use one of {', '.join(dict.fromkeys(shown))}" if shown else ""
    raise UsageError(f"--placement {label}: {who}", hint or "`kubectl get nodes --show-labels` lists their labels")
