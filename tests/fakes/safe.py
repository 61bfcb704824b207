"""A Primus-SaFE server on this machine, which enforces its contract and can be unwell.

Source of paths, fields and error codes: AMD-AGI/Primus-SaFE, SaFE/apiserver/pkg/handlers and SaFE/docs/apis.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "ak-canary-of-safe"
USER = "someone"
WORKSPACE = "ws"


class Safe:
    """The server's state."""

    def __init__(self, *, is_legacy: bool) -> None:
        self.is_legacy = is_legacy
        self.workloads: dict[str, dict[str, Any]] = {}
        self.nodes: list[dict[str, Any]] = []
        self.logs: dict[tuple[str, str], list[str]] = {}
        self.requests: list[str] = []
        self.trouble: list[tuple[str, str]] = []
        """What goes wrong with the next requests of a method: `503`, `429`, `drop before`, `drop after`, ..."""
        self.url = ""

    def add(self, **fields: Any) -> str:
        identity = f"wl-{len(self.workloads)}"
        self.workloads[identity] = {"workloadId": identity, "phase": "Pending", "creationTime": "2026-01-01", **fields}
        return identity


class Wrong(Exception):
    """A request that the server refuses."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


NAME = re.compile(r"[a-z][-a-z0-9.]{0,44}[a-z0-9]")
"""DisplayNameRule of SaFE/webhooks/pkg/utils.go for a PyTorchJob."""


def _created(safe: Safe, body: dict[str, Any]) -> str:
    name = body.get("displayName", "")
    _demand(bool(NAME.fullmatch(name)), f"the name({name}) must consist of 1 to 44 lower case alphanumeric characters")
    if safe.is_legacy:
        _demand(isinstance(body.get("resource"), dict), "the resource is empty")
        _demand(isinstance(body.get("image"), str) and isinstance(body.get("entryPoint"), str), "image and entryPoint")
        workspace = body.get("workspace")
    else:
        arrays = [body.get(name) for name in ("resources", "images", "entryPoints")]
        _demand(bool(arrays[0]), "the resources are empty")
        _demand(all(isinstance(each, list) for each in arrays), "resources, images and entryPoints are arrays")
        _demand(len({len(each) for each in arrays if each}) == 1, "the arrays are not equally long")
        _demand(body["resources"][0]["replica"] == 1, "the master's replica is 1")
        for point in body["entryPoints"]:
            base64.b64decode(point, validate=True)
        workspace = body.get("workspaceId")
    if workspace != WORKSPACE:
        raise Wrong(404, "Primus.02001", f"workspace {workspace} not found; {json.dumps(body.get('env'))}")
    for each in body.get("resources") or [body["resource"]]:
        _demand(all(isinstance(each.get(name), str) for name in ("cpu", "memory")), "amounts are strings")
    _demand(all(isinstance(value, str) for value in body.get("env", {}).values()), "variables are strings")
    return safe.add(**body)


def _demand(is_so: bool, message: str) -> None:
    if not is_so:
        raise Wrong(400, "Primus.00002", message)


class _Handler(BaseHTTPRequestHandler):
    safe: Safe

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        self.safe.requests.append(f"{self.command} {self.path}")
        wrong = self._trouble()
        if wrong == "drop before":
            return
        if wrong.isdigit():
            headers = {"Retry-After": "0"} if wrong == "429" else {"Location": "/elsewhere"} if wrong == "302" else {}
            self._send(int(wrong), {"errorCode": "Primus.00001", "errorMessage": "not well"}, **headers)
            return
        if wrong.startswith("200 "):
            self._send(200, None, text=wrong.removeprefix("200 "))
            return
        try:
            answer = self._answer(body)
        except Wrong as error:
            self._send(error.status, {"errorCode": error.code, "errorMessage": str(error)})
            return
        if wrong == "504 after":
            self._send(504, None)
        elif wrong != "drop after":
            self._send(200, answer)

    def _trouble(self) -> str:
        for number, (method, what) in enumerate(self.safe.trouble):
            if method == self.command:
                del self.safe.trouble[number]
                return what
        return ""

    def _send(self, status: int, value: Any, text: str | None = None, **headers: str) -> None:
        data = (json.dumps(value) if text is None else text).encode()
        self.send_response(status)
        for name, header in headers.items():
            self.send_header(name.replace("_", "-"), header)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, body: Any) -> Any:
        self._check_key()
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.split("/")[1:]
        if words[:2] != ["api", "v1"]:
            raise Wrong(404, "Primus.00005", "no such path")
        if words[2:] == ["nodes"]:
            return {"totalCount": len(self.safe.nodes), "items": self.safe.nodes}
        if words[2:] == ["workloads"]:
            return {"workloadId": _created(self.safe, body)} if self.command == "POST" else self._list(query)
        identity = words[3]
        if words[2] != "workloads" or identity not in self.safe.workloads:
            raise Wrong(404, "Primus.01001", f"workload {identity} not found")
        if self.command == "DELETE":
            del self.safe.workloads[identity]
            return None
        if len(words) == 7 and words[4] == "pods" and words[6] == "logs":
            return {"logs": self.safe.logs[identity, words[5]][-int(query["tailLines"]) :]}
        return self.safe.workloads[identity]

    def _check_key(self) -> None:
        user = hashlib.md5(USER.encode(), usedforsecurity=False).hexdigest()
        is_known = self.headers.get("userId") == user if self.safe.is_legacy else False
        if not is_known and self.headers.get("Authorization") != f"Bearer {KEY}":
            raise Wrong(401, "Primus.00009", f"unauthorised: {self.headers.get('Authorization')}")

    def _list(self, query: dict[str, str]) -> Any:
        items = list(self.safe.workloads.values())[::-1]
        if "description" in query:
            items = [each for each in items if query["description"] in each.get("description", "")]
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 100))
        return {"totalCount": len(items), "items": items[offset : offset + limit]}


@contextmanager
def serving(*, is_legacy: bool = False) -> Iterator[Safe]:
    """A server, until the end."""
    safe = Safe(is_legacy=is_legacy)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"safe": safe}))
    safe.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield safe
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
