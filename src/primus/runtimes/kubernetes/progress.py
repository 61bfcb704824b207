"""Post the progress of a run from its first pod: the status of a TrainJob, else an annotation of the job's object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

from primus.runs.run_progress import RunProgress, format_progress
from primus.runtimes.kubernetes import names
from primus.runtimes.kubernetes.pod_account import request_as_pod, send_request

STATUS_URL, STATUS_CA, STATUS_TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Variables that Kubeflow Trainer 2.2 sets in the pods of a TrainJob if its feature TrainJobStatus is on (its user
guide, "TrainJob Progress and Training Metrics"): an address, and paths of a certificate and of a token that rotates."""


def post_progress(progress: RunProgress, target: str, environ: Mapping[str, str]) -> None:
    """Post `progress`.

    Args:
        progress: What to post.
        target: Path of the job's object in the API; `{}` stands for the namespace.
        environ: Variables of the pod.

    Raises:
        PostRefused: The server does not permit it.
        PrimusError: The server does not respond, or is unhealthy.
    """
    url = environ.get(STATUS_URL)
    if url:
        body = json.dumps({"trainerStatus": _build_trainer_status(progress)}).encode()
        send_request("POST", url, body, Path(environ.get(STATUS_TOKEN, "")), environ.get(STATUS_CA))
        return
    body = json.dumps({"metadata": {"annotations": {names.PROGRESS: format_progress(progress)}}}).encode()
    request_as_pod("PATCH", target, body, environ, "application/merge-patch+json")


def _build_trainer_status(progress: RunProgress) -> dict[str, object]:
    status: dict[str, object] = {
        "progressPercentage": progress.percentage,
        "metrics": [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in (("step", progress.step), ("loss", progress.loss))
            if value is not None
        ],
        "lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if progress.remaining_s is not None:
        status["estimatedRemainingSeconds"] = round(progress.remaining_s)
    return status
