"""Build the pod of one node of a job."""

from __future__ import annotations

from typing import Any

from primus.errors import UsageError
from primus.launch.supervision.restart_policy import NO_RESTART_CODE
from primus.machine.cluster import NODE_NAME_VARIABLE
from primus.runtime import PROGRESS_VARIABLE
from primus.runtimes.kubernetes import names, node_script, placement, volumes
from primus.runtimes.kubernetes.job_spec import NO_VOLUME, list_secret_references
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.target import JobSpec

Manifest = dict[str, Any]
"""An object of Kubernetes, or a part of one, as YAML or JSON has it: an open document that the server checks."""
GPU_RESOURCE = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}
"""Resource name of a GPU in the vendors' device plug-ins; it is also the key of the taint of their nodes."""
PROGRESS_PATHS = {
    "jobset": f"/apis/{names.JOBSET}/namespaces/{{}}/jobsets",
    "trainjob": f"/apis/{names.TRAINER}/namespaces/{{}}/trainjobs",
}
"""Objects that the first pod annotates with the progress of the run; the pod knows its namespace."""
CAPABILITIES = ["IPC_LOCK", "SYS_PTRACE"]
"""IPC_LOCK pins memory for RDMA, as a pod has no ulimits; SYS_PTRACE reads the stacks of a process that hangs."""


def build_pod_template(job_spec: JobSpec, container: Manifest) -> Manifest:
    """The template of the pods, which run `container`."""
    options = job_spec.options
    spec: Manifest = {"restartPolicy": "Never", "containers": [container], **build_pod_spec_override(job_spec)}
    if options.host_network:
        # With the host's network, the default policy would resolve names by the DNS of the node, not of the cluster.
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    return {"metadata": {"labels": build_labels(job_spec), **build_annotations(options)}, "spec": spec}


def build_annotations(options: Options) -> Manifest:
    """The annotations of the pods' metadata, which place them."""
    annotations = placement.build_pod_annotations(options)
    return {"annotations": annotations} if annotations else {}


def build_labels(job_spec: JobSpec) -> dict[str, str]:
    """Labels of all objects of a run."""
    return {names.OURS: "primus", names.RUN: job_spec.run_id}


def build_pod_spec_override(job_spec: JobSpec) -> Manifest:
    """Fields of the pod that a TrainJob may override in its runtime, without containers."""
    options = job_spec.options
    vendor = GPU_RESOURCE.get(options.gpu_vendor)
    spec: Manifest = {"terminationGracePeriodSeconds": options.grace, "volumes": _build_volumes(job_spec)}
    if vendor:
        spec["tolerations"] = [{"key": vendor, "operator": "Exists", "effect": "NoSchedule"}]
    if affinity := _build_node_affinity(job_spec):
        spec["affinity"] = affinity
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secret]
    return spec


def build_runtime_container(job_spec: JobSpec) -> Manifest:
    """The container of a TrainingRuntime's pods; the TrainJob sets its command and variables."""
    return {"name": names.REPLICATED_JOB, "image": job_spec.options.image, **build_container_override(job_spec)}


def build_container(job_spec: JobSpec) -> Manifest:
    """The container of a JobSet's pods."""
    options = job_spec.options
    return {
        "name": names.REPLICATED_JOB,
        "image": options.image,
        "command": build_container_command(job_spec),
        "env": [each for each in _build_rank_variables(options) if each["name"] not in job_spec.env]
        + build_container_variables(job_spec),
        "ports": [{"containerPort": options.port}],
        "resources": build_resources(options),
        # The last lines of a failed container's log become its message: the reason outlives the pod's log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **build_container_override(job_spec),
    }


def build_container_override(job_spec: JobSpec) -> Manifest:
    """Fields of the container that a TrainJob may override in its runtime."""
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # the pod's, not ours
        {"name": "run", "mountPath": node_script.RUN_FILES, "readOnly": True},
    ]
    for number, volume in enumerate(volumes.parse_volumes(job_spec.options.volume)):
        mount: Manifest = {"name": f"volume-{number}", "mountPath": volume.path}
        mounts.append(mount | {"readOnly": True} if volume.is_read_only else mount)
    if not volumes.list_writable_volumes(job_spec.options.volume):
        mounts.append({"name": "output", "mountPath": str(NO_VOLUME)})
    return {"volumeMounts": mounts, "securityContext": {"capabilities": {"add": CAPABILITIES}}}


def build_container_command(job_spec: JobSpec) -> list[str]:
    """Command of the container."""
    words = ("sh", node_script.RUN_SCRIPT, job_spec.inside, job_spec.options.workdir or ".", *job_spec.command)
    return [escape_variable_references(word) for word in words]


def build_container_variables(job_spec: JobSpec) -> list[Manifest]:
    """Variables of the container: values, and references to Secrets."""
    env: list[Manifest] = [{"name": "PRIMUS_NO_RESTART_CODE", "value": str(NO_RESTART_CODE)}]
    if NODE_NAME_VARIABLE not in job_spec.env:
        # Pods have names of their own; failures and places on the network are those of nodes.
        env.append({"name": NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    path = PROGRESS_PATHS.get(job_spec.options.target_name)
    if path and PROGRESS_VARIABLE not in job_spec.env:
        env.append({"name": PROGRESS_VARIABLE, "value": f"kubernetes:{path}/{job_spec.name}"})
    env += [{"name": name, "value": escape_variable_references(value)} for name, value in sorted(job_spec.env.items())]
    own = {name: (names.name_secret(job_spec.name), name) for name in job_spec.secrets}
    for name, (secret, key) in sorted((own | list_secret_references(job_spec.options)).items()):
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return env


def build_resources(options: Options) -> Manifest:
    """Limits of the pod; for devices they are also its requests."""
    vendor = GPU_RESOURCE.get(options.gpu_vendor)
    limits = {vendor: str(options.gpu)} if vendor else {}
    limits |= _parse_rdma_resources(options)
    limits |= {"cpu": options.cpu} if options.cpu != "0" else {}
    limits |= {"memory": options.memory} if options.memory else {}
    return {"limits": limits} if limits else {}


def escape_variable_references(value: str) -> str:
    """`value` with `$` doubled: Kubernetes expands $(NAME), and $$ to $, in commands and variables.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    return value.replace("$", "$$")


def _parse_rdma_resources(options: Options) -> dict[str, str]:
    found = {}
    for word in options.rdma:
        name, _, count = word.partition("=")
        if "/" not in name or not count.isdigit():
            raise UsageError(f"--rdma {word}: expected RESOURCE=N", "for example --rdma rdma/hca=8")
        found[name] = count
    return found


def _build_rank_variables(options: Options) -> list[Manifest]:
    """Variables with the node's rank and the rendezvous address."""
    annotation = {"fieldPath": f"metadata.annotations['{names.RANK_OF_POD}']"}
    coordinator = {"fieldPath": f"metadata.annotations['{names.COORDINATOR}']"}
    return [
        {"name": "NNODES", "value": str(options.replica)},
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": annotation}},
        {"name": "MASTER_ADDR", "valueFrom": {"fieldRef": coordinator}},
        {"name": "MASTER_PORT", "value": str(options.port)},
        *([{"name": "GPUS_PER_NODE", "value": str(options.gpu)}] if options.gpu else []),
    ]


def _build_volumes(job_spec: JobSpec) -> list[Manifest]:
    options = job_spec.options
    # Container runtimes give /dev/shm 64 MiB, which data loaders and NCCL exceed.
    memory = {"medium": "Memory", **({"sizeLimit": options.shm} if options.shm else {})}
    found: list[Manifest] = [{"name": "shm", "emptyDir": memory}, {"name": "run", "configMap": run_files(job_spec)}]
    for number, volume in enumerate(volumes.parse_volumes(options.volume)):
        is_claim = not volume.source.startswith("/")
        where = (
            {"persistentVolumeClaim": {"claimName": volume.source}} if is_claim else _refer_to_pod_field(volume.source)
        )
        found.append({"name": f"volume-{number}", **where})
    return found if volumes.list_writable_volumes(options.volume) else [*found, {"name": "output", "emptyDir": {}}]


def _refer_to_pod_field(path: str) -> Manifest:
    # Without a type, a path that is missing on a node would not be noticed: the pod would get an empty folder.
    return {"hostPath": {"path": path, "type": "Directory"}}


def run_files(job_spec: JobSpec) -> Manifest:
    """Volume source with the run folder's files: key and path of each."""
    items = [{"key": node_script.SCRIPT, "path": node_script.SCRIPT}]
    items += [{"key": key, "path": f"{node_script.FILES}/{name}"} for key, name in list_run_file_keys(job_spec).items()]
    return {"name": names.name_run_files(job_spec.name), "items": items}


def list_run_file_keys(job_spec: JobSpec) -> dict[str, str]:
    """Paths of the run folder's files by ConfigMap key; keys allow letters, digits, `.`, `-` and `_` only."""
    found: dict[str, str] = {}
    for number, name in enumerate(sorted(job_spec.files)):
        plain = "".join(
            letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "." for letter in name
        )
        # Keys are limited to 253 characters; the rest leaves room for the number of a duplicate.
        key = plain[:200]
        found[key if key not in (*found, node_script.SCRIPT, ".", "..") else f"{key}.{number}"] = name
    return found


def _build_node_affinity(job_spec: JobSpec) -> Manifest:
    """Affinity to the nodes of the list, and anti-affinity between the pods: one pod per node."""
    allowed, excluded = job_spec.options.allowed_nodes, job_spec.options.excluded_nodes
    wanted = [{"key": names.NODE_NAME, "operator": "In", "values": list(allowed)}] if allowed else []
    wanted += [{"key": names.NODE_NAME, "operator": "NotIn", "values": list(excluded)}] if excluded else []
    found: Manifest = {}
    if wanted:
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if job_spec.options.replica > 1:
        # Two pods of a job on one node would compete for its GPUs and for the rendezvous port.
        alone = {"labelSelector": {"matchLabels": {names.JOB_OF_POD: job_spec.name}}, "topologyKey": names.NODE_NAME}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}
    return found
