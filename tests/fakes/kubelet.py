"""A node of a Kubernetes test cluster: it says how its pods stand, and gives their logs to the API server."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlparse

from fakes import cli


class Api:
    """Plain requests to the API server."""

    def __init__(self, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.url = next(part for part in self.kubeconfig.read_text().split('"') if part.startswith("https://"))
        self._context = ssl.create_default_context(cafile=str(folder / "certs" / "apiserver.crt"))

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """The answer to a request of the administrator."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": "Bearer admin-token", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, timeout=20, context=self._context) as answer:
                return json.loads(answer.read())
        except HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.code} {error.read().decode()}") from None

    def set_status(self, path: str, status: Any) -> None:
        """Say how an object stands, as its controller does."""
        self.ask("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")


def start_container(api: Api, path: str, folder: Path, **changes: str) -> subprocess.Popen[str]:
    """The first container of a pod, as a process of this machine: its command and variables come from the API server.

    Args:
        api: The server.
        path: Of the pod.
        folder: Gets the files of its config maps; claims are mounted at paths of this machine.
        changes: Variables that differ here, such as the address of the first pod, which needs a cluster's DNS.
    """
    pod = api.ask("GET", path)
    (container,) = pod["spec"]["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    words = list(container["command"])
    for volume in pod["spec"]["volumes"]:
        if "configMap" in volume:
            texts = api.ask("GET", f"{path.rpartition('/pods/')[0]}/configmaps/{volume['configMap']['name']}")["data"]
            for item in volume["configMap"]["items"]:
                file = folder / volume["name"] / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(texts[item["key"]])
            words = [word.replace(mounts[volume["name"]], str(folder / volume["name"])) for word in words]
    environ = {each["name"]: each.get("value", "") or _read_field(pod, each) for each in container["env"]}
    return subprocess.Popen(
        words,
        env=cli.environment(**{**environ, **changes}),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _read_field(pod: Any, variable: Any) -> str:
    field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
    return str(pod["metadata"]["annotations"].get(field.partition("'")[2].rstrip("']"), ""))


class Kubelet:
    """Logs by pod; a connection is cut after `cut_after` lines, once."""

    def __init__(self) -> None:
        self.logs: dict[str, list[str]] = {}
        self.cut_after: int | None = None
        self.requests: list[str] = []
        self.port = 0


@contextmanager
def serving(folder: Path) -> Iterator[Kubelet]:
    """A node's server on loopback, with the API server's own certificate."""
    kubelet = Kubelet()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kubelet.requests.append(self.path)
            query = {key: values[-1] for key, values in parse_qs(urlparse(self.path).query).items()}
            pod = urlparse(self.path).path.split("/")[3]
            lines = kubelet.logs.get(pod, [])
            if "sinceTime" in query:
                lines = [line for line in lines if line[:19] >= query["sinceTime"][:19]]
            if "tailLines" in query:
                lines = lines[-int(query["tailLines"]) :] if int(query["tailLines"]) else []
            if "follow" in query and kubelet.cut_after is not None:
                lines, kubelet.cut_after = lines[: kubelet.cut_after], None
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(lines).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "certs" / "apiserver.crt", folder / "certs" / "apiserver.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    kubelet.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kubelet
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
