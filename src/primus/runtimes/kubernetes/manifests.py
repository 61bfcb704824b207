"""Build the manifests of a job: JobSet or TrainJob, ConfigMap with its run folder, Secret with its variables."""

from __future__ import annotations

from primus.errors import UsageError
from primus.launch.supervision.restart_policy import NO_RESTART_CODE
from primus.runtimes.kubernetes import names, node_script, placement, pod
from primus.runtimes.kubernetes.options import Options
from primus.runtimes.kubernetes.pod import Manifest
from primus.runtimes.kubernetes.target import JobSpec

MAX_RESTARTS = 3
LARGEST_CONFIG_MAP_BYTES = 1 << 20
"""Limit of Kubernetes (documentation of ConfigMaps)."""
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer installs."""


def build_manifests(job_spec: JobSpec) -> list[Manifest]:
    """The objects of a job without its Secret, in creation order; the job itself is the last.

    Raises:
        UsageError: The run folder's files do not fit into a ConfigMap.
    """
    config_map = _build_config_map(job_spec)
    if job_spec.options.target_name == "jobset":
        return [config_map, _build_jobset(job_spec)]
    runtimes = [_build_training_runtime(job_spec)] if has_own_runtime(job_spec.options) else []
    return [config_map, *runtimes, _train_job(job_spec)]


def build_secret_manifest(job_spec: JobSpec) -> Manifest | None:
    """The Secret with the job's secret variables, or None. It is never shown or recorded."""
    if not job_spec.secrets:
        return None
    meta = _build_metadata(job_spec, names.name_secret(job_spec.name))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "type": "Opaque",
        "stringData": dict(job_spec.secrets),
    }


def has_own_runtime(options: Options) -> bool:
    """Whether a TrainJob sets options that cannot be overridden in an existing runtime."""
    return options.host_network or options.max_restarts is not None or options.priority_class is not None


def _build_metadata(job_spec: JobSpec, name: str, **labels: str) -> Manifest:
    namespace = job_spec.options.namespace or job_spec.options.workspace
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {**pod.build_labels(job_spec), **labels},
    }


def _build_job_metadata(job_spec: JobSpec) -> Manifest:
    options = job_spec.options
    meta = _build_metadata(job_spec, job_spec.name, **({names.QUEUE: options.queue} if options.queue else {}))
    annotations = placement.build_job_annotations(options)
    return {**meta, "annotations": annotations} if annotations else meta


def _build_config_map(job_spec: JobSpec) -> Manifest:
    data = {
        node_script.SCRIPT: node_script.TEXT,
        **{key: job_spec.files[name] for key, name in pod.list_run_file_keys(job_spec).items()},
    }
    size = sum(len(key) + len(text.encode()) for key, text in data.items())
    if size > LARGEST_CONFIG_MAP_BYTES:
        largest = max(job_spec.files, key=lambda name: len(job_spec.files[name]))
        raise UsageError(
            f"the files of the run folder have {size} bytes, more than the {LARGEST_CONFIG_MAP_BYTES} of a ConfigMap; "
            f"the largest is {largest}",
            "put large files on a volume, and use their paths there",
        )
    meta = _build_metadata(job_spec, names.name_run_files(job_spec.name))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": True, "data": data}


def _build_jobset(job_spec: JobSpec) -> Manifest:
    options = job_spec.options
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": names.REPLICATED_JOB, "jobIndex": 0, "podIndex": 0},
        **_build_replicated_job(job_spec, pod.build_container(job_spec), {}),
    }
    if options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl
    return {"apiVersion": names.JOBSET, "kind": "JobSet", "metadata": _build_job_metadata(job_spec), "spec": spec}


def _build_replicated_job(job_spec: JobSpec, container: Manifest, meta: Manifest) -> Manifest:
    """One Indexed Job with a pod per node, and its restart policy.

    Any failed pod fails the Job (backoffLimit 0), and JobSet recreates all pods, since a training job needs all of its
    nodes. A preempted pod does not count as a failure; a pod that exits with NO_RESTART_CODE fails the job for good.
    BlockingRecreate deletes all pods of an attempt before it creates those of the next, which need the same GPUs.
    """
    options = job_spec.options
    # Kubernetes sets this condition on pods that a preemption, an eviction or a drained node ends.
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    never = {"containerName": names.REPLICATED_JOB, "operator": "In", "values": [NO_RESTART_CODE]}
    job = {
        "completions": options.replica,
        "parallelism": options.replica,
        "completionMode": "Indexed",
        # The Job itself restarts nothing: JobSet restarts all pods together.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": never},
            ]
        },
        "template": pod.build_pod_template(job_spec, container),
    }
    replicated = {"name": names.REPLICATED_JOB, "replicas": 1, "template": {**meta, "spec": job}}
    return {"failurePolicy": _build_failure_policy(options), "replicatedJobs": [replicated]}


def _build_failure_policy(options: Options) -> Manifest:
    """Restart rules: JobSet applies the first that matches, else it restarts all pods and counts the restart."""
    # Both rules match a Job that its pod failure policy has failed; the message of the Job distinguishes the cases.
    by_pod_policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    pattern = f".*exit code {NO_RESTART_CODE}.*"
    return {
        "maxRestarts": MAX_RESTARTS if options.max_restarts is None else options.max_restarts,
        "restartStrategy": "BlockingRecreate",
        "rules": [
            # The order matters: without the first rule, a job that must not restart would count as preempted.
            {"name": "doNotRestart", "action": "FailJobSet", **by_pod_policy, "onJobFailureMessagePatterns": [pattern]},
            {"name": "preempted", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_pod_policy},
        ],
    }


def _train_job(job_spec: JobSpec) -> Manifest:
    options = job_spec.options
    own = {
        "kind": "TrainingRuntime",
        "apiGroup": "trainer.kubeflow.org",
        "name": names.name_training_runtime(job_spec.name),
    }
    trainer: Manifest = {
        "image": options.image,
        "numNodes": options.replica,
        "numProcPerNode": options.gpu or 1,
        "command": pod.build_container_command(job_spec),
        "env": pod.build_container_variables(job_spec),
        "resourcesPerNode": pod.build_resources(options),
    }
    spec: Manifest = {"runtimeRef": own if has_own_runtime(options) else {"name": RUNTIME}, "trainer": trainer}
    if not has_own_runtime(options):
        spec["runtimePatches"] = [_build_pod_override(job_spec)]
    return {"apiVersion": names.TRAINER, "kind": "TrainJob", "metadata": _build_job_metadata(job_spec), "spec": spec}


def _build_pod_override(job_spec: JobSpec) -> Manifest:
    """Overrides of the pods of an existing runtime."""
    container = {"name": names.REPLICATED_JOB, **pod.build_container_override(job_spec)}
    spec = {**pod.build_pod_spec_override(job_spec), "containers": [container]}
    annotations = pod.build_annotations(job_spec.options)
    template = {"metadata": annotations, "spec": spec} if annotations else {"spec": spec}
    job = {"name": names.REPLICATED_JOB, "template": {"spec": {"template": template}}}
    return {"manager": "primus.amd.com/cli", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def _build_training_runtime(job_spec: JobSpec) -> Manifest:
    """A runtime for options that cannot be overridden in an existing one: host network, restarts, priority."""
    options = job_spec.options
    meta = _build_metadata(job_spec, names.name_training_runtime(job_spec.name), **{names.FRAMEWORK: "torch"})
    spec = {
        "mlPolicy": {"numNodes": options.replica, "torch": {}},
        "template": {
            "spec": _build_replicated_job(
                job_spec, pod.build_runtime_container(job_spec), {"metadata": {"labels": {names.ANCESTOR: "trainer"}}}
            )
        },
    }
    return {"apiVersion": names.TRAINER, "kind": "TrainingRuntime", "metadata": meta, "spec": spec}
