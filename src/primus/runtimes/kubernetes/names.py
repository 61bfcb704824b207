"""Names and labels of the objects of a job."""

from __future__ import annotations

OURS = "app.kubernetes.io/managed-by"
RUN = "primus.run"
PROGRESS = "primus.progress"
"""Annotation of a job with its progress."""
JOBSET, TRAINER = "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"
"""Groups and versions of JobSet, and of TrainJob with its runtimes."""
JOB_OF_POD = "jobset.sigs.k8s.io/jobset-name"
"""Label of a pod; the JobSet of a TrainJob has the TrainJob's name."""
RANK_OF_POD = "batch.kubernetes.io/job-completion-index"
COORDINATOR = "jobset.sigs.k8s.io/coordinator"
NODE_NAME = "kubernetes.io/hostname"
QUEUE = "kueue.x-k8s.io/queue-name"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK = "trainer.kubeflow.org/framework"
REPLICATED_JOB = "node"
"""Name of the replicated job in a JobSet, and of its container."""


def name_run_files(job: str) -> str:
    """The ConfigMap with a job's run folder."""
    return f"{job}-run"


def name_secret(job: str) -> str:
    """The Secret with a job's secret variables."""
    return f"{job}-env"


def name_training_runtime(job: str) -> str:
    """The TrainingRuntime of a TrainJob."""
    return f"{job}-runtime"
