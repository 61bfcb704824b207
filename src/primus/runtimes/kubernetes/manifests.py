"""What is made for a job: a JobSet or a TrainJob, the ConfigMap of its run folder, the Secret of its variables."""

from __future__ import annotations

from primus.errors import UsageError
from primus.launch.supervision.restart_policy import NO_RESTART_CODE
from primus.runtimes.kubernetes import names, node_script, pod
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.pod import Manifest
from primus.runtimes.kubernetes.target import JobSpec

JOBSET = "jobset.x-k8s.io/v1alpha2"
TRAINER = "trainer.kubeflow.org/v1alpha1"
MAX_RESTARTS = 3
LARGEST_CONFIG_MAP_BYTES = 1 << 20
"""Kubernetes' limit."""
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer installs."""


def build_manifests(order: JobSpec) -> list[Manifest]:
    """What is made for a job, without its Secret, in the order of making; the job itself is the last.

    Raises:
        UsageError: The run folder's files do not fit into a ConfigMap.
    """
    config_map = _config_map(order)
    if order.options.target_name == "jobset":
        return [config_map, _build_jobset(order)]
    runtimes = [_training_runtime(order)] if has_own_runtime(order.options) else []
    return [config_map, *runtimes, _train_job(order)]


def build_secret_manifest(order: JobSpec) -> Manifest | None:
    """The Secret with the job's secret variables; None where there are none. It is never shown or kept."""
    if not order.secrets:
        return None
    meta = _build_metadata(order, names.name_secret(order.name))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": dict(order.secrets)}


def has_own_runtime(options: Options) -> bool:
    """Whether a TrainJob asks for what cannot be changed of an existing runtime."""
    return options.host_network or options.max_restarts is not None or options.priority_class is not None


def _build_metadata(order: JobSpec, name: str, **labels: str) -> Manifest:
    namespace = order.options.namespace or order.options.workspace
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {**pod.build_labels(order), **labels},
    }


def _job_metadata(order: JobSpec) -> Manifest:
    queue = order.options.queue
    return _build_metadata(order, order.name, **({names.QUEUE: queue} if queue else {}))


def _config_map(order: JobSpec) -> Manifest:
    data = {
        node_script.SCRIPT: node_script.TEXT,
        **{key: order.files[name] for key, name in pod.list_run_file_keys(order).items()},
    }
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > LARGEST_CONFIG_MAP_BYTES:
        largest = max(order.files, key=lambda name: len(order.files[name]))
        raise UsageError(
            f"the files of the run folder take {size} bytes, and a ConfigMap holds {LARGEST_CONFIG_MAP_BYTES}: "
            f"the largest is {largest}",
            "put large files on a volume, and name them there",
        )
    meta = _build_metadata(order, names.name_run_files(order.name))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True, "data": data}


def _build_jobset(order: JobSpec) -> Manifest:
    options = order.options
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": names.REPLICATED_JOB, "jobIndex": 0, "podIndex": 0},
        **_build_replicated_job(order, pod.build_container(order), {}),
    }
    if options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl
    return {"apiVersion": JOBSET, "kind": "JobSet", "metadata": _job_metadata(order), "spec": spec}


def _build_replicated_job(order: JobSpec, container: Manifest, meta: Manifest) -> Manifest:
    """One Indexed Job with a pod for each node, and when all of it is started again.

    A preempted pod does not count; a pod that ends with NO_RESTART_CODE ends the job. The pods of one attempt are gone
    before those of the next begin: they want the same GPUs.
    """
    options = order.options
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    never = {"containerName": names.REPLICATED_JOB, "operator": "In", "values": [NO_RESTART_CODE]}
    job = {
        "completions": options.replica,
        "parallelism": options.replica,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": never},
            ]
        },
        "template": pod.build_pod_template(order, container),
    }
    replicated = {"name": names.REPLICATED_JOB, "replicas": 1, "template": {**meta, "spec": job}}
    return {"failurePolicy": _failure_policy(options), "replicatedJobs": [replicated]}


def _failure_policy(options: Options) -> Manifest:
    """The first rule that fits counts; without one all is started again, and that counts (JobSet)."""
    told = {"onJobFailureReasons": ["PodFailurePolicy"]}
    pattern = f".*exit code {NO_RESTART_CODE}.*"
    return {
        "maxRestarts": MAX_RESTARTS if options.max_restarts is None else options.max_restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {"name": "doNotRestart", "action": "FailJobSet", **told, "onJobFailureMessagePatterns": [pattern]},
            {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **told},
        ],
    }


def _train_job(order: JobSpec) -> Manifest:
    options = order.options
    own = {
        "kind": "TrainingRuntime",
        "apiGroup": "trainer.kubeflow.org",
        "name": names.name_training_runtime(order.name),
    }
    trainer: Manifest = {
        "image": options.image,
        "numNodes": options.replica,
        "numProcPerNode": options.gpu or 1,
        "command": pod.build_container_command(order),
        "env": pod.build_container_variables(order),
        "resourcesPerNode": pod.build_resources(options),
    }
    spec: Manifest = {"runtimeRef": own if has_own_runtime(options) else {"name": RUNTIME}, "trainer": trainer}
    if not has_own_runtime(options):
        spec["runtimePatches"] = [_build_pod_override(order)]
    return {"apiVersion": TRAINER, "kind": "TrainJob", "metadata": _job_metadata(order), "spec": spec}


def _build_pod_override(order: JobSpec) -> Manifest:
    """What the job needs of the pods of a runtime that exists."""
    container = {"name": names.REPLICATED_JOB, **pod.build_container_override(order)}
    spec = {**pod.build_pod_spec_override(order), "containers": [container]}
    job = {"name": names.REPLICATED_JOB, "template": {"spec": {"template": {"spec": spec}}}}
    return {
        "manager": "primus.amd.com/cli",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def _training_runtime(order: JobSpec) -> Manifest:
    """A runtime for what cannot be changed of an existing one: the network of the nodes, restarts, priority."""
    options = order.options
    meta = _build_metadata(order, names.name_training_runtime(order.name), **{names.FRAMEWORK: "torch"})
    spec = {
        "mlPolicy": {"numNodes": options.replica, "torch": {}},
        "template": {
            "spec": _build_replicated_job(
                order, pod.runtime_container(order), {"metadata": {"labels": {names.ANCESTOR: "trainer"}}}
            )
        },
    }
    return {"apiVersion": TRAINER, "kind": "TrainingRuntime", "metadata": meta, "spec": spec}
