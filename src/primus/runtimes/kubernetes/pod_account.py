"""Requests to the API server with the account of the pod that sends them.

They need nothing but the standard library, because the image of a pod need not have the package `kubernetes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from primus.errors import PrimusError
from primus.machine.cluster import NODE_NAME_VARIABLE
from primus.runtime import PostRefused
from primus.runtimes.kubernetes.client import ACCOUNT
from primus.web.session import HttpSession, NoResponseError

TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20
"""A node with the names of its images has some 20 KiB."""


def request_as_pod(method: str, path: str, body: bytes | None, environ: Mapping[str, str], kind: str) -> Any:
    """Response to a request to the cluster of this pod; `{}` in `path` stands for its namespace.

    Raises:
        PostRefused: The pod has no account, or the server rejects the request.
        PrimusError: The server does not respond, or is unhealthy.
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").is_file():
        raise PostRefused("the pod has no account of the cluster (automountServiceAccountToken)")
    namespace = (ACCOUNT / "namespace").read_text().strip()
    url = f"https://{f'[{host}]' if ':' in host else host}:{port}{path.format(namespace)}"
    return send_request(method, url, body, ACCOUNT / "token", str(ACCOUNT / "ca.crt"), kind)


def read_own_labels(environ: Mapping[str, str]) -> dict[str, str]:
    """Labels of the node that this pod runs on.

    Raises:
        PrimusError: As `request_as_pod`.
    """
    node = request_as_pod("GET", f"/api/v1/nodes/{environ[NODE_NAME_VARIABLE]}", None, environ, "application/json")
    return dict(node["metadata"].get("labels") or {})


def send_request(
    method: str, url: str, body: bytes | None, token: Path, ca_file: str | None, kind: str = "application/json"
) -> Any:
    """Response of a server to a request with the token of a file; None if it is not JSON.

    Raises:
        PostRefused: The server rejects the request.
        PrimusError: The server does not respond, or is unhealthy.
    """
    # Read for every request, because it is replaced before it expires.
    headers = {"Authorization": f"Bearer {token.read_text().strip()}", "Content-Type": kind}
    session = HttpSession(headers, timeout_s=TIMEOUT_S, max_bytes=MAX_BYTES, ca_file=ca_file, follows_redirects=False)
    try:
        answer = session.send(method, url, body)
    except NoResponseError as error:
        raise PrimusError(f"{url} cannot be reached: {error}") from None
    content = _decode_json(answer.content)
    if answer.status < HTTPStatus.BAD_REQUEST:
        return content
    message = content.get("message") if isinstance(content, dict) else None
    problem = f"{url}: {answer.status} {message or answer.content.decode(errors='replace')[:200]}"
    if answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        raise PostRefused(problem)
    raise PrimusError(problem)


def _decode_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
