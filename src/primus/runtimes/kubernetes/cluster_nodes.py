"""The nodes of a Kubernetes cluster by state, and the job that checks one of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from primus.errors import PrimusError, UsageError
from primus.launch.jobs import job_states, submissions
from primus.runtime import ClusterNode, NodeJob
from primus.runtimes.kubernetes import commands, status
from primus.runtimes.kubernetes.commands import load_target
from primus.runtimes.kubernetes.options import parse, remove_options
from primus.runtimes.kubernetes.target import JobView, KubernetesTarget, NodeView, Place

KEPT_S = 3600
"""Seconds after which the server deletes a job that this machine could not delete."""


def list_nodes(words: Sequence[str], environ: Mapping[str, str]) -> list[ClusterNode]:
    """The nodes with GPUs, or all nodes if the job in `words` needs none.

    Raises:
        PrimusError: The server does not respond, or the user may not list nodes.
    """
    options = parse(words)
    server = load_target(options.target_name)
    found = server.list_nodes(server.resolve_place(options, environ), environ)
    named = options.allowed_nodes
    return [
        _build_cluster_node(view, is_shared=options.gpu == 0)
        for view in found
        if (view.gpus or options.gpu == 0) and (not named or view.name in named)
    ]


def _build_cluster_node(view: NodeView, *, is_shared: bool) -> ClusterNode:
    if view.is_cordoned:
        return ClusterNode(name=view.name, state="drained", reason=view.message, gpus=view.gpus)
    if not view.is_ready:
        return ClusterNode(name=view.name, state="down", reason=view.message or "not ready", gpus=view.gpus)
    if view.gpus_used and not is_shared:
        reason = f"{view.gpus_used} of {view.gpus} GPUs in use"
        return ClusterNode(name=view.name, state="busy", reason=reason, gpus=view.gpus)
    return ClusterNode(name=view.name, state="idle", gpus=view.gpus)


def select_node(words: Sequence[str], job: NodeJob) -> tuple[str, ...]:
    """`words` for a job of one pod, which has all GPUs of the node.

    Raises:
        UsageError: They are of another command or of Primus-SaFE.
    """
    options = parse(words)
    if options.command not in ("", "create"):
        raise UsageError(f"nodes check creates jobs: remove '{options.command}' from --runtime kubernetes")
    if options.target_name == "safe":
        raise UsageError(
            "nodes check does not support --url (Primus-SaFE), whose jobs have ids of its own", "remove it"
        )
    given = {word.partition("=")[0] for word in words}
    ours = {"--name": job.name, "--nodelist": job.node.name, "--max-restarts": "0"}
    if job.node.gpus is not None:
        ours["--gpu"] = str(job.node.gpus)
    ours["--cpu"] = "0"  # no limit: the checks need few, and the size of the node is unknown
    if options.target_name == "jobset":
        ours["--ttl"] = str(KEPT_S)
    for name in ("--name", "--nodelist"):
        given.discard(name)  # of the node, whatever was typed
    kept = remove_options(words, ("--name", "--nodelist"))
    kept = kept if options.command else ("create", *kept)
    return (*kept, *(word for name, value in ours.items() if name not in given for word in (name, value)))


def collect_output(words: Sequence[str], job: NodeJob, environ: Mapping[str, str]) -> str:
    """Wait for the job, and give the log of its pod; the job is deleted in any case.

    Raises:
        PrimusError: It is not scheduled or does not end in time, or its log cannot be read.
    """
    submission = submissions.find_submission(job.name, environ)
    place = submission.place
    server = load_target(place["target"])
    try:
        view = _wait_for_end(server, place, job, environ)
        job_states.record_end(submission, view.state)
        pod = status.find_newest_pod(view.pods, 0)
        if pod is None:
            raise PrimusError(f"the job on {job.node.name} has no pod: {view.message or view.state.reason}")
        lines: list[str] = []
        server.open_log_reader(place, job.name, environ, lines.append, None).read(pod.name, follow=False)
        return "".join(lines)
    finally:
        with contextlib.suppress(PrimusError):  # the server deletes it after KEPT_S
            server.delete_job(place, job.name, environ)


def _wait_for_end(server: KubernetesTarget, place: Place, job: NodeJob, environ: Mapping[str, str]) -> JobView:
    began = time.monotonic()
    while True:
        view = server.get_job(place, job.name, environ)
        if view.state.state in job_states.ENDED:
            return view
        waited_s = time.monotonic() - began
        # A pod has a node as soon as it is scheduled; the image that it pulls then counts as a part of the check.
        is_scheduled = any(pod.node for pod in view.pods)
        why = view.message or view.state.reason
        if job.start_s is not None and not is_scheduled and waited_s > job.start_s:
            raise PrimusError(f"not scheduled within {job.start_s:g} s{f': {why}' if why else ''}")
        if waited_s > job.limit_s + (job.start_s or 0):
            raise PrimusError(f"not ended within {job.limit_s:g} s{f': {why}' if why else ''}")
        time.sleep(commands.POLL_S)
