"""A server on this machine that speaks the part of the Hugging Face hub's protocol that reading its files needs."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CONVERTED = "refs/convert/parquet"


@dataclass
class Repo:
    """A dataset or model: files of each branch and the header of its README."""

    files: dict[str, bytes] = field(default_factory=dict)
    converted: dict[str, bytes] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch or commit."""
        for branch, files in (("main", self.files), (CONVERTED, self.converted)):
            commit = hashlib.sha1(f"{branch}{sorted(files)}".encode()).hexdigest()
            if revision in (branch, commit):
                return (commit, files) if files or branch == "main" else None
        return None


class LocalHub:
    """``with LocalHub() as hub: hub.repos["me/data"] = Repo(...)``; `log` has each request."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.plain: dict[str, bytes] = {}
        """Files at ``/plain/NAME``, with ranges, and at ``/stream/NAME``, without."""
        self.log: list[str] = []
        self.breaks: list[int] = []
        """For each of the next answers that carry a file: bytes after which the connection breaks."""
        self.damaged: set[str] = set()
        """Paths whose content arrives with another first byte."""
        self.status: dict[str, tuple[int, str]] = {}
        """Answer to every request for a repository: status and the hub's code for it."""
        self.refusals: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next answers, whatever is asked."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent(self, name: str) -> list[str]:
        """Requests that asked for the content of a file, with their range."""
        return [line for line in self.log if line.startswith("GET") and name in line]


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def handle(self) -> None:
        with suppress(ConnectionError):  # who only wanted the header goes away
            super().handle()

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.log.append(" ".join(filter(None, (self.command, path, self.headers.get("Range")))))
        if self.hub.refusals:
            status, headers = self.hub.refusals.pop(0)
            self._error(status, **headers)
            return
        if match := re.fullmatch(r"/(plain|stream)/(.+)", path):
            content = self.hub.plain.get(match[2])
            self._file(match[2], content, {}, ranges=match[1] == "plain") if content is not None else self._error(404)
            return
        match = re.match(r"(/api)?(?:/datasets|(?<=/api)/models|)/([^/]+/[^/]+)", path)
        repo = self.hub.repos.get(match[2]) if match else None
        if match and match[2] in self.hub.status:
            self._error(*self.hub.status[match[2]])
        elif not match or not repo:
            self._error(404, "RepoNotFound")
        elif match[1]:
            self._api(repo, match[2], path[match.end() :], body)
        else:
            self._resolve(repo, path[match.end() :])

    def _api(self, repo: Repo, name: str, rest: str, body: bytes) -> None:
        action, _, revision = rest.lstrip("/").partition("/")
        folder = ""
        if action == "tree" and not repo.at(revision):
            revision, _, folder = revision.partition("/")
        at = repo.at(revision or "main")
        if not at:
            self._error(404, "RevisionNotFound")
            return
        commit, files = at
        if action in ("", "revision"):
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": name, "sha": commit, "siblings": siblings, "cardData": repo.card, "tags": []})
        elif action == "paths-info":
            self._json([_entry(path, files[path]) for path in parse_qs(body.decode())["paths"] if path in files])
        else:
            self._json([_entry(path, content) for path, content in files.items() if path.startswith(folder)])

    def _resolve(self, repo: Repo, rest: str) -> None:
        match = re.fullmatch(rf"/resolve/({CONVERTED}|[^/]+)/(.+)", rest)
        at = repo.at(match[1]) if match else None
        if not match or not at or match[2] not in at[1]:
            self._error(404, "EntryNotFound")
            return
        content = at[1][match[2]]
        headers = {"X-Repo-Commit": at[0], "X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{_sha256(content)}"'}
        self._file(match[2], content, headers)

    def _file(self, name: str, content: bytes, headers: dict[str, str], ranges: bool = True) -> None:
        etag = f'"{_sha256(content)}"'
        if name in self.hub.damaged:
            content = b"X" + content[1:]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if ranges else None
        first, last = (int(asked[1]), int(asked[2] or len(content) - 1)) if asked else (0, len(content) - 1)
        part = content[first : last + 1]
        self.send_response(206 if asked else 200)
        if ranges:
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(part)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        for key, value in {"ETag": etag, **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        keep = self.hub.breaks.pop(0) if self.hub.breaks else len(part)
        head, tail = (b"", b"") if ranges else (b"%x\r\n" % len(part), b"\r\n0\r\n\r\n")
        self.close_connection = keep < len(part)
        self.wfile.write(head + part[:keep] + (b"" if self.close_connection else tail))

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _error(self, status: int, code: str = "", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if path.endswith((".parquet", ".gz", ".zst")):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 130}
    return entry


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
