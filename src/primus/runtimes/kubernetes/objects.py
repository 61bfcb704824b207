"""JobSets and TrainJobs through the Kubernetes API."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from msgspec import structs

from primus.errors import PrimusError, UsageError
from primus.runtime import JobState
from primus.runtimes.kubernetes import manifests, names, status, volumes, waiting
from primus.runtimes.kubernetes.client import KubernetesClient, resolve_cluster
from primus.runtimes.kubernetes.job_spec import list_secret_references
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.pod import Manifest, build_resources
from primus.runtimes.kubernetes.target import (
    JobSpec,
    JobView,
    LogReader,
    NodeLabels,
    NodeView,
    Place,
    RequestRefused,
    SubmissionUncertain,
    Write,
)

PATHS = {
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "JobSet": f"/apis/{names.JOBSET}/namespaces/{{}}/jobsets",
    "TrainJob": f"/apis/{names.TRAINER}/namespaces/{{}}/trainjobs",
    "TrainingRuntime": f"/apis/{names.TRAINER}/namespaces/{{}}/trainingruntimes",
}
NODES = "/api/v1/nodes"
TOPOLOGY_VERSIONS = ("v1beta2", "v1beta1", "v1alpha1")
"""Versions of Kueue's API with the Topology, newest first: v1alpha1 until 0.13."""
KUEUE_VERSIONS = ("v1beta1", "v1beta2")
"""Versions of Kueue's API with the Workload; older clusters have the first one only, newer ones both."""
KINDS = {"jobset": "JobSet", "trainjob": "TrainJob"}
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
"""k8s.io/apimachinery/pkg/api/resource, without exponents."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
"""Name of an object (RFC 1123)."""


def resolve_place(options: Options, environ: Mapping[str, str]) -> Place:
    """Place in `options`.

    Raises:
        UsageError: No cluster is configured.
    """
    namespace = options.namespace or options.workspace
    return {"target": options.target_name, **resolve_cluster(options.kubeconfig, options.context, namespace, environ)}


def check(options: Options) -> None:
    """Reject options that JobSet and TrainJob do not support.

    Raises:
        UsageError: An option is not supported, missing or invalid.
    """
    volumes.parse_volumes(options.volume)
    build_resources(options)
    list_secret_references(options)
    if not options.image:
        raise UsageError(
            "kubernetes create needs --image", "use an image with primus-cli, for example rocm/primus:v25.10"
        )
    foreign = {"--priority": options.priority is not None, "--api": options.api != "current"}
    foreign |= {"--token-file": options.token_file is not None}
    if options.target_name == "trainjob":
        reserved = [word.partition("=")[0] for word in options.env if word.startswith("PET_")]
        foreign |= {f"--env {name}, which Kubeflow Trainer sets itself": True for name in reserved}
        foreign |= {"--ttl": options.ttl is not None, "--port": options.port != Options().port}
    for name, is_given in foreign.items():
        if is_given:
            raise UsageError(f"--target {options.target_name} does not support {name}", "remove it")
    for name in ("cpu", "memory", "shm"):
        value = getattr(options, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise UsageError(f"--{name} {value} is not a quantity", "for example 96, or 1024Gi")
    if options.vendor not in (None, "none") and options.gpu == 0:
        raise UsageError(f"--vendor {options.vendor} needs GPUs", "add --gpu N, or remove --vendor")


def format_job(job_spec: JobSpec, *, as_json: bool) -> str:
    """The objects that `create` would send, without the values of the Secret."""
    import json

    from primus.runtimes.kubernetes import manifest_yaml

    made = manifests.build_manifests(job_spec)
    if as_json:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": made}, indent=2)
    return _describe_secret(job_spec) + manifest_yaml.format_yaml_documents(made).rstrip("\n")


def _describe_secret(job_spec: JobSpec) -> str:
    if not job_spec.secrets:
        return ""
    name = names.name_secret(job_spec.name)
    keys = sorted(job_spec.secrets)
    by_hand = " ".join(f"--from-file={key}=FILE" for key in keys)
    return (
        f"# `create` also creates the Secret {name} with {', '.join(keys)}; its values are not shown.\n"
        f"# To create it yourself: kubectl create secret generic {name} {by_hand}\n---\n"
    )


def create_job(job_spec: JobSpec, place: Place, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Create the job and its parts, which are deleted with it; gives its name.

    Raises:
        PrimusError: The server rejects a request, or cannot be reached; objects that were created are deleted.
    """
    server = KubernetesClient(place)
    *before, job = manifests.build_manifests(job_spec)
    hidden = manifests.build_secret_manifest(job_spec)
    # The job is created last: its pods mount the ConfigMap and the Secret, and would wait for them.
    wanted = [*before, *([hidden] if hidden else []), job]
    paths = [f"{PATHS[each['kind']].format(server.namespace)}/{each['metadata']['name']}" for each in wanted]
    created: list[str] = []  # also the one whose answer has not come
    try:
        for path, each in zip(paths, wanted, strict=True):
            # Before the request: if its answer is lost, the object may exist and has to be deleted.
            created.append(path)
            _create_or_verify(server, path, each, job_spec)
    except PrimusError as error:
        _delete_created_objects(server, created, job_spec)
        if len(created) > 1 and not isinstance(error, RequestRefused):  # the server had responded before
            raise SubmissionUncertain(
                error.problem, f"look for {job_spec.name} with 'kubernetes list' before you try again"
            ) from None
        raise
    # Also for Ctrl-C: the created objects would otherwise stay in the namespace without a job.
    except BaseException:
        _delete_created_objects(server, created, job_spec)
        raise
    _set_owner_references(server, paths[:-1], job, paths[-1], say)
    return job_spec.name


def _create_or_verify(server: KubernetesClient, path: str, each: Manifest, job_spec: JobSpec) -> None:
    """Create an object; one of the same run that exists already is from a request whose answer was lost."""
    try:
        server.create_object(path.rpartition("/")[0], each)
    except RequestRefused as error:
        # 409 for an object of this run is the answer to a repeated POST. The names contain the run's id, so other runs
        # have others.
        if error.status != HTTPStatus.CONFLICT or not _is_created_by_run(server, path, job_spec):
            raise


def _delete_created_objects(server: KubernetesClient, paths: Sequence[str], job_spec: JobSpec) -> None:
    """Delete the objects of this run, also those whose answer was lost; objects of other runs are kept."""
    for path in reversed(paths):
        with contextlib.suppress(PrimusError):
            if _is_created_by_run(server, path, job_spec):
                server.delete_object(path)


def _is_created_by_run(server: KubernetesClient, path: str, job_spec: JobSpec) -> bool:
    found: bool = server.get_object(path)["metadata"].get("labels", {}).get(names.RUN) == job_spec.run_id
    return found


def _set_owner_references(
    server: KubernetesClient, paths: Sequence[str], job: Manifest, job_path: str, say: Callable[[str], None]
) -> None:
    """Make the job the owner of its parts, so that Kubernetes deletes them with it."""
    try:
        # Owner references need the uid, which the server assigns. They are set afterwards for this reason.
        uid = server.get_object(job_path)["metadata"]["uid"]
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": job["metadata"]["name"], "uid": uid}
        for path in paths:
            server.patch_object(path, {"metadata": {"ownerReferences": [owner]}})
    except PrimusError as error:
        say(f"the job is created, but its ConfigMap and Secret are kept until `kubernetes delete`: {error.problem}")


def find_states(place: Place, ids: Sequence[str], environ: Mapping[str, str]) -> dict[str, JobState]:
    """States of jobs, queued ones with the reason of their wait; `gone` for a job that does not exist."""
    server = KubernetesClient(place)
    jobs = _list_job_objects(server, KINDS[place["target"]])
    found = {name: status.build_job_view(each, (), ()).state for name, each in jobs.items()}
    # Pods say what a queued job waits for, and why a job has failed: one request for all such jobs.
    unclear = [each for each in ids if each in found and found[each].state in ("queued", "failed")]
    pods = _list_pods_by_job(server, unclear) if unclear else {}
    found |= {each: status.build_job_view(jobs[each], pods[each], ()).state for each in unclear}
    if queued := {each: found[each] for each in unclear if found[each].state == "queued"}:
        found |= _explain_waits(server, queued, pods)
    reason = "it was deleted, or its --ttl has expired"
    gone = JobState(state="gone", raw="NotFound", is_deleted=True, reason=reason)
    return {each: found.get(each, gone) for each in ids}


def list_jobs(place: Place, environ: Mapping[str, str]) -> list[JobView]:
    """The jobs that primus created, without their pods; newest last."""
    jobs = _list_job_objects(KubernetesClient(place), KINDS[place["target"]])
    views = [status.build_job_view(each, (), ()) for each in jobs.values()]
    return sorted(views, key=lambda view: (view.created, view.id))


def _list_job_objects(server: KubernetesClient, kind: str) -> dict[str, Any]:
    """The jobs that primus created, by name."""
    items = server.list_items(PATHS[kind].format(server.namespace), labelSelector=f"{names.OURS}=primus")
    # Owned objects belong to a job that is in the list already.
    own = [each for each in items if not each["metadata"].get("ownerReferences")]  # a TrainJob creates a JobSet
    return {each["metadata"]["name"]: {"kind": kind, **each} for each in own}  # items of a list have no kind


def _list_pods_by_job(server: KubernetesClient, jobs: Sequence[str]) -> dict[str, list[Any]]:
    """The pods of each job; none if the user may not read pods."""
    found: dict[str, list[Any]] = {job: [] for job in jobs}
    with contextlib.suppress(RequestRefused):
        path = f"/api/v1/namespaces/{server.namespace}/pods"
        for pod in server.list_items(path, labelSelector=f"{names.JOB_OF_POD} in ({','.join(jobs)})"):
            found[pod["metadata"]["labels"][names.JOB_OF_POD]].append(pod)
    return found


def _explain_waits(
    server: KubernetesClient, states: Mapping[str, JobState], pods: Mapping[str, Sequence[Any]]
) -> dict[str, JobState]:
    """States of queued jobs with the reasons of their waits; what the user may not read is left out."""
    warnings, workloads = _list_warnings(server), _list_workloads(server)
    return {
        job: waiting.explain_wait(
            job,
            state,
            [status.build_pod_view(pod) for pod in pods[job]],
            status.list_messages(_select_events(warnings, job)),
            workloads,
        )
        for job, state in states.items()
    }


def _list_workloads(server: KubernetesClient) -> list[Any]:
    """Workloads of Kueue; empty in a cluster without it."""
    for version in KUEUE_VERSIONS:
        with contextlib.suppress(RequestRefused):
            return server.list_items(f"/apis/kueue.x-k8s.io/{version}/namespaces/{server.namespace}/workloads")
    return []


def get_job(place: Place, job: str, environ: Mapping[str, str]) -> JobView:
    """One job with its pods.

    Raises:
        UsageError: The job does not exist.
    """
    server = KubernetesClient(place)
    found = _get_job_object(server, place, job)
    pods = _list_job_pods(server, job)
    is_over = bool(found.get("status", {}).get("terminalState"))
    warnings = [] if is_over else _select_events(_list_warnings(server), job)
    view = status.build_job_view(found, pods, warnings)
    if view.state.state != "queued":
        return view
    messages = status.list_messages(warnings)
    state = waiting.explain_wait(job, view.state, view.pods, messages, _list_workloads(server))
    return structs.replace(view, state=state, message=state.reason or view.message)


def _get_job_object(server: KubernetesClient, place: Place, job: str) -> Any:
    kind = KINDS[place["target"]]
    try:
        return server.get_object(f"{PATHS[kind].format(server.namespace)}/{_check_job_name(job)}")
    except RequestRefused as error:
        if (
            error.status != HTTPStatus.NOT_FOUND
            or "page not found" in error.problem
            or "requested resource" in error.problem
        ):
            raise
        raise UsageError(
            f"no {kind} '{job}' in namespace {server.namespace}",
            "to list jobs: kubernetes list; --namespace selects others",
        ) from None


def _check_job_name(job: str) -> str:
    """`job`, checked because it becomes part of a path."""
    if not _NAME.fullmatch(job):
        raise UsageError(f"{job!r} is not the name of a job", "to list jobs: kubernetes list")
    return job


def _list_job_pods(server: KubernetesClient, job: str) -> list[Any]:
    path = f"/api/v1/namespaces/{server.namespace}/pods"
    items = server.list_items(path, labelSelector=f"{names.JOB_OF_POD}={job}")
    return sorted(items, key=lambda pod: pod["metadata"].get("creationTimestamp") or "")


def _list_warnings(server: KubernetesClient) -> list[Any]:
    """Warning events of the namespace, such as an exceeded quota; empty if the user may not read events."""
    try:
        return server.list_items(f"/api/v1/namespaces/{server.namespace}/events", fieldSelector="type=Warning")
    except RequestRefused:
        return []


def _select_events(events: Sequence[Any], job: str) -> list[Any]:
    """The events of the job and its pods."""
    about = [(each, each["involvedObject"].get("name", "")) for each in events]
    return [each for each, name in about if name == job or name.startswith(f"{job}-{names.REPLICATED_JOB}-")]


def open_log_reader(place: Place, job: str, environ: Mapping[str, str], write: Write, tail: int | None) -> LogReader:
    """A reader of the log of a node, across lost connections and restarts."""
    from primus.runtimes.kubernetes import pod_log

    return pod_log.PodLogFollower(KubernetesClient(place), write, tail)


def delete_job(place: Place, job: str, environ: Mapping[str, str]) -> None:
    """Delete a job, its pods and its parts.

    Raises:
        UsageError: The job does not exist.
    """
    server = KubernetesClient(place)
    name = _check_job_name(job)
    paths = {kind: path.format(server.namespace) for kind, path in PATHS.items()}
    found = [server.delete_object(f"{paths[KINDS[place['target']]]}/{name}")]
    found.append(server.delete_object(f"{paths['ConfigMap']}/{names.name_run_files(name)}"))
    found.append(server.delete_object(f"{paths['Secret']}/{names.name_secret(name)}"))
    if place["target"] == "trainjob":
        found.append(server.delete_object(f"{paths['TrainingRuntime']}/{names.name_training_runtime(name)}"))
    if not any(found):
        raise UsageError(f"no job '{job}' in namespace {server.namespace}", "to list jobs: kubernetes list")


def read_node_labels(place: Place, environ: Mapping[str, str]) -> NodeLabels:
    """The labels of the nodes, and the levels that Kueue uses."""
    server = KubernetesClient(place)
    nodes = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in server.list_items(NODES)}
    return NodeLabels(nodes=nodes, topologies=_list_topologies(server))


def _list_topologies(server: KubernetesClient) -> list[list[str]]:
    """Node labels of each Topology of Kueue, outermost first; empty without Kueue, or if the user may not read them."""
    for version in TOPOLOGY_VERSIONS:
        with contextlib.suppress(RequestRefused):
            found = server.list_items(f"/apis/kueue.x-k8s.io/{version}/topologies")
            levels = [[level["nodeLabel"] for level in each["spec"]["levels"]] for each in found]
            return [[label for label in labels if label != names.NODE_NAME] for labels in levels]
    return []


def list_nodes(place: Place, environ: Mapping[str, str]) -> list[NodeView]:
    """The nodes of the cluster, by name."""
    server = KubernetesClient(place)
    items = server.list_items(NODES)
    try:
        pods = server.list_items("/api/v1/pods", fieldSelector="status.phase!=Succeeded,status.phase!=Failed")
    except RequestRefused:  # many users may list nodes, but not the pods of other namespaces
        pods = None
    return sorted((status.build_node_view(each, pods) for each in items), key=lambda node: node.name)
