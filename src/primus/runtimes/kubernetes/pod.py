"""The pod of one node of a job."""

from __future__ import annotations

from typing import Any

from primus.errors import UsageError
from primus.launch.policy import NO_RESTART_CODE
from primus.runtimes.kubernetes import entry, names, volumes
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.order import NO_VOLUME, secret_references
from primus.runtimes.kubernetes.target import Order

Manifest = dict[str, Any]
GPU_RESOURCE = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}
"""What the vendors' device plug-ins call a GPU; it is also the key of the taint of their nodes."""
CAPABILITIES = ["IPC_LOCK", "SYS_PTRACE"]
"""To pin memory for RDMA, as a pod has no ulimits; to write the stacks of a process that hangs."""


def template(order: Order, container: Manifest) -> Manifest:
    """The template of the pods, which run `container`."""
    options = order.options
    spec: Manifest = {"restartPolicy": "Never", "containers": [container], **rest_of_spec(order)}
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    return {"metadata": {"labels": labels(order)}, "spec": spec}


def labels(order: Order) -> dict[str, str]:
    """By which what was made for a run is found."""
    return {names.OURS: "primus", names.RUN: order.run_id}


def rest_of_spec(order: Order) -> Manifest:
    """What a TrainJob may change of its runtime's pods, without the containers."""
    options = order.options
    vendor = GPU_RESOURCE.get(options.gpu_vendor)
    spec: Manifest = {"terminationGracePeriodSeconds": options.grace, "volumes": _volumes(order)}
    if vendor:
        spec["tolerations"] = [{"key": vendor, "operator": "Exists", "effect": "NoSchedule"}]
    if affinity := _affinity(order):
        spec["affinity"] = affinity
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": name} for name in options.pull_secret]
    return spec


def runtime_container(order: Order) -> Manifest:
    """The container of a TrainingRuntime's pods; what it starts, with what, is the TrainJob's to say."""
    return {"name": names.REPLICATED_JOB, "image": order.options.image, **rest_of_container(order)}


def container(order: Order) -> Manifest:
    """The container of a JobSet's pods."""
    options = order.options
    return {
        "name": names.REPLICATED_JOB,
        "image": options.image,
        "command": command(order),
        "env": [each for each in _place(options) if each["name"] not in order.env] + variables(order),
        "ports": [{"containerPort": options.port}],
        "resources": resources(options),
        **rest_of_container(order),
    }


def rest_of_container(order: Order) -> Manifest:
    """What a TrainJob may change of its runtime's container."""
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # the pod's, not ours
        {"name": "run", "mountPath": entry.RUN_FILES, "readOnly": True},
    ]
    for number, volume in enumerate(volumes.parsed(order.options.volume)):
        mount: Manifest = {"name": f"volume-{number}", "mountPath": volume.path}
        mounts.append(mount | {"readOnly": True} if volume.is_read_only else mount)
    if not volumes.writable(order.options.volume):
        mounts.append({"name": "output", "mountPath": str(NO_VOLUME)})
    return {"volumeMounts": mounts, "securityContext": {"capabilities": {"add": CAPABILITIES}}}


def command(order: Order) -> list[str]:
    """What the container starts."""
    words = ("sh", entry.RUN_SCRIPT, order.inside, order.options.workdir or ".", *order.command)
    return [unexpanded(word) for word in words]


def variables(order: Order) -> list[Manifest]:
    """The variables of a container: values, and references to Secrets."""
    env: list[Manifest] = [{"name": "PRIMUS_NO_RESTART_CODE", "value": str(NO_RESTART_CODE)}]
    env += [{"name": name, "value": unexpanded(value)} for name, value in sorted(order.env.items())]
    own = {name: (names.secrets(order.name), name) for name in order.secrets}
    for name, (secret, key) in sorted((own | secret_references(order.options)).items()):
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return env


def resources(options: Options) -> Manifest:
    """Limits of a pod; those of devices are also its requests."""
    vendor = GPU_RESOURCE.get(options.gpu_vendor)
    limits = {vendor: str(options.gpu)} if vendor else {}
    limits |= _rdma(options)
    limits |= {"cpu": options.cpu} if options.cpu != "0" else {}
    limits |= {"memory": options.memory} if options.memory else {}
    return {"limits": limits} if limits else {}


def unexpanded(value: str) -> str:
    """`value` as Kubernetes gives it to the process: it replaces $(NAME), and $$ by $, in commands and variables.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    return value.replace("$", "$$")


def _rdma(options: Options) -> dict[str, str]:
    found = {}
    for word in options.rdma:
        name, _, count = word.partition("=")
        if "/" not in name or not count.isdigit():
            raise UsageError(f"--rdma {word}: expected RESOURCE=N", "--rdma rdma/hca=8")
        found[name] = count
    return found


def _place(options: Options) -> list[Manifest]:
    """Variables that tell a node its place among the others."""
    annotation = {"fieldPath": f"metadata.annotations['{names.RANK_OF_POD}']"}
    coordinator = {"fieldPath": f"metadata.annotations['{names.COORDINATOR}']"}
    return [
        {"name": "NNODES", "value": str(options.replica)},
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": annotation}},
        {"name": "MASTER_ADDR", "valueFrom": {"fieldRef": coordinator}},
        {"name": "MASTER_PORT", "value": str(options.port)},
        *([{"name": "GPUS_PER_NODE", "value": str(options.gpu)}] if options.gpu else []),
    ]


def _volumes(order: Order) -> list[Manifest]:
    options = order.options
    memory = {"medium": "Memory", **({"sizeLimit": options.shm} if options.shm else {})}
    found: list[Manifest] = [{"name": "shm", "emptyDir": memory}, {"name": "run", "configMap": run_files(order)}]
    for number, volume in enumerate(volumes.parsed(options.volume)):
        is_claim = not volume.source.startswith("/")
        where = {"persistentVolumeClaim": {"claimName": volume.source}} if is_claim else _of_node(volume.source)
        found.append({"name": f"volume-{number}", **where})
    return found if volumes.writable(options.volume) else [*found, {"name": "output", "emptyDir": {}}]


def _of_node(path: str) -> Manifest:
    return {"hostPath": {"path": path, "type": "Directory"}}


def run_files(order: Order) -> Manifest:
    """The run folder's files as a volume: their keys, and where they are below it."""
    items = [{"key": entry.SCRIPT, "path": entry.SCRIPT}]
    items += [{"key": key, "path": f"{entry.FILES}/{name}"} for key, name in keys(order).items()]
    return {"name": names.run_files(order.name), "items": items}


def keys(order: Order) -> dict[str, str]:
    """Keys of the run folder's files, which may hold letters, digits, dots and dashes only, and their paths."""
    found: dict[str, str] = {}
    for number, name in enumerate(sorted(order.files)):
        plain = "".join(
            letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "." for letter in name
        )
        key = plain[:200]
        found[key if key not in (*found, entry.SCRIPT, ".", "..") else f"{key}.{number}"] = name
    return found


def _affinity(order: Order) -> Manifest:
    """Every node of the list may be used, and each for one pod."""
    allowed, excluded = order.options.allowed_nodes, order.options.excluded_nodes
    wanted = [{"key": names.NODE_NAME, "operator": "In", "values": list(allowed)}] if allowed else []
    wanted += [{"key": names.NODE_NAME, "operator": "NotIn", "values": list(excluded)}] if excluded else []
    found: Manifest = {}
    if wanted:
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        found["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if order.options.replica > 1:
        alone = {"labelSelector": {"matchLabels": {names.JOB_OF_POD: order.name}}, "topologyKey": names.NODE_NAME}
        found["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [alone]}
    return found
