"""A server that keeps objects as the Kubernetes API does, and fails in the ways that a test asks for."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Fault:
    """What happens to the next requests instead of, or after, what they ask for."""

    def __init__(
        self,
        status: int = 0,
        *,
        method: str = "",
        path: str = "",
        after: bool = False,
        wait_s: float = 0.0,
        retry_after: str = "",
        text: str = "",
    ) -> None:
        self.status = status
        self.method = method
        self.path = path
        self.after = after
        self.wait_s = wait_s
        self.retry_after = retry_after
        self.text = text

    def fits(self, method: str, path: str) -> bool:
        return method == (self.method or method) and self.path in path


class Api:
    """Objects by path, the requests that came, and the faults to come, in this order."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.requests: list[tuple[str, str, float]] = []
        self.headers: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, folder: Path, token: str = "canary-token") -> str:
        """A kubeconfig for this server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}],
            "current-context": "here",
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        return str(folder / "kubeconfig")

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """What the API says to a request."""
        if method == "POST":
            name = f"{path}/{body['metadata']['name']}"
            if name in self.objects:
                return 409, {"reason": "AlreadyExists", "message": f'"{body["metadata"]["name"]}" already exists'}
            self.objects[name] = {**body, "metadata": {**body["metadata"], "uid": str(len(self.requests))}}
            return 201, self.objects[name]
        if method == "GET" and path.rpartition("/")[2] in ("jobsets", "trainjobs", "pods", "events", "nodes"):
            return 200, {"items": [each for name, each in self.objects.items() if name.startswith(f"{path}/")]}
        if path not in self.objects:
            return 404, {"reason": "NotFound", "message": f'"{path.rpartition("/")[2]}" not found'}
        if method == "DELETE":
            return 200, self.objects.pop(path)
        if method == "PATCH":
            self.objects[path]["metadata"] |= body["metadata"]
        return 200, self.objects[path]


@contextmanager
def serving() -> Iterator[Api]:
    """The server on loopback."""
    api = Api()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            path = self.path.partition("?")[0]
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with api.lock:
                api.requests.append((self.command, path, time.monotonic()))
                api.headers.append(self.headers.get("Authorization", ""))
                fault = next((each for each in api.faults if each.fits(self.command, path)), None)
                if fault:
                    api.faults.remove(fault)
                done = api.answer(self.command, path, body) if fault is None or fault.after else None
            if fault:
                time.sleep(fault.wait_s)
                if not fault.status:
                    self.close_connection = True
                    return
            status, value = (fault.status, fault.text) if fault else done or (500, "")
            text = value if isinstance(value, str) else json.dumps(value)
            self.send_response(status)
            if fault and fault.retry_after:
                self.send_header("Retry-After", fault.retry_after)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_DELETE = do_PATCH = _do

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    api.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
