"""Post the progress of a run from its first pod: the status of a TrainJob, else an annotation of the job's object.

Both need nothing but the standard library, because the image of a pod need not have the package `kubernetes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path

from primus.errors import PrimusError
from primus.runs.run_progress import RunProgress, format_progress
from primus.runtime import PostRefused
from primus.runtimes.kubernetes import names
from primus.runtimes.kubernetes.client import ACCOUNT
from primus.web.session import HttpSession, NoResponseError

STATUS_URL, STATUS_CA, STATUS_TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
"""Variables that Kubeflow Trainer 2.2 sets in the pods of a TrainJob if its feature TrainJobStatus is on (its user
guide, "TrainJob Progress and Training Metrics"): an address, and paths of a certificate and of a token that rotates."""
TIMEOUT_S = 10.0
MAX_BYTES = 1 << 16


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
        _send("POST", url, body, Path(environ.get(STATUS_TOKEN, "")), environ.get(STATUS_CA))
        return
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").is_file():
        raise PostRefused("the pod has no account of the cluster (automountServiceAccountToken)")
    namespace = (ACCOUNT / "namespace").read_text().strip()
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}{target.format(namespace)}"
    body = json.dumps({"metadata": {"annotations": {names.PROGRESS: format_progress(progress)}}}).encode()
    _send("PATCH", url, body, ACCOUNT / "token", str(ACCOUNT / "ca.crt"), "application/merge-patch+json")


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


def _send(method: str, url: str, body: bytes, token: Path, ca_file: str | None, kind: str = "application/json") -> None:
    # Read for every request, because it is replaced before it expires.
    headers = {"Authorization": f"Bearer {token.read_text().strip()}", "Content-Type": kind}
    session = HttpSession(headers, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES, ca_file=ca_file, follows_redirects=False)
    try:
        answer = session.send(method, url, body)
    except NoResponseError as error:
        raise PrimusError(f"{url} cannot be reached: {error}") from None
    if answer.status < HTTPStatus.BAD_REQUEST:
        return
    problem = f"{url}: {answer.status} {_read_message(answer.content)}"
    if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        raise PostRefused(problem)
    raise PrimusError(problem)


def _read_message(content: bytes) -> str:
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:200]
