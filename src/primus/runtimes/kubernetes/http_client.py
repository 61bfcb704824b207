"""Requests to a Primus-SaFE server, with retries, and hints for rejected requests.

A POST is not retried after a lost answer, since the server would create a second workload: the caller looks for the
workload first.
Source of paths, headers and error codes: AMD-AGI/Primus-SaFE, SaFE/apiserver/pkg/handlers and SaFE/docs/apis.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from primus.errors import PrimusError, UsageError
from primus.redaction import MASK
from primus.runtimes.kubernetes.target import Place, RequestRefused
from primus.web.retries import choose_cluster_pause, parse_retry_after, repeat_request
from primus.web.session import HttpResponse, HttpSession, NoResponseError

BASE = "/api/v1"
TOKEN_VARIABLE = "PRIMUS_SAFE_TOKEN"  # noqa: S105  # its name
TIMEOUT_S = 30.0
BUSY = frozenset((429, 502, 503, 504))
"""Statuses that may be transient."""
LARGEST_ANSWER_BYTES = 64 << 20
QUOTA = "Primus.00008"
"""Error code of an exhausted quota; it comes with 503, but is not transient."""

HINTS = {
    401: f"set {TOKEN_VARIABLE} or --token-file FILE to a valid API key (ak-...)",
    403: "the user of the key has no permission in this workspace",
    404: "check --workspace; to list jobs: kubernetes list",
    409: "to list existing jobs: kubernetes list",
    413: "the experiment's files are too large for the server",
}


class UncertainRequestError(PrimusError):
    """The request may have been carried out: the response was lost or is not conclusive."""


class SafeServer:
    """Client of a Primus-SaFE server, with the account of an API key.

    Args:
        place: Address of the server.
        environ: Variables, among them the key.
        hidden: Values to redact in the server's messages.
    """

    def __init__(self, place: Place, environ: Mapping[str, str], hidden: Sequence[str] = ()) -> None:
        self.url = place["url"]
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = _read_token(place, environ)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if place["api"] == "legacy":
            headers["userId"] = hashlib.md5(place["user"].encode(), usedforsecurity=False).hexdigest()
        elif not token:
            raise UsageError(f"{self.url} needs an API key", HINTS[401])
        self._hidden = [value for value in (token, *hidden) if value]
        # A redirection could send the key to another server.
        self._session = HttpSession(
            headers, timeout_s=TIMEOUT_S, max_bytes=LARGEST_ANSWER_BYTES, follows_redirects=False
        )

    def get_json(self, path: str, **query: object) -> dict[str, Any]:
        """Response to a GET request, with retries.

        Raises:
            RequestRefused: The server rejects the request.
            PrimusError: It cannot be reached.
        """
        given = {name: value for name, value in query.items() if value is not None}
        found = self._request_with_retries("GET", f"{path}?{urlencode(given)}" if given else path)
        if not isinstance(found, dict):
            raise self.build_foreign_answer_error("not a JSON object")
        return found

    def build_foreign_answer_error(self, what: str) -> PrimusError:
        """The error for a response that is `what`."""
        return PrimusError(f"{self.url}: the response is {what}", "check that --url is a Primus-SaFE server")

    def delete_resource(self, path: str) -> None:
        """Delete a resource, with retries; after a lost answer it may already be deleted."""
        self._request_with_retries("DELETE", path)

    def post_json(self, path: str, body: Any) -> Any:
        """Create a resource; retries only after 429, which the server sends before it creates anything.

        Raises:
            UncertainRequestError: The resource may have been created.
            RequestRefused: The server rejects the request.
        """

        def choose_pause(error: Exception, attempt: int) -> float | None:
            if isinstance(error, _Busy) and error.status == HTTPStatus.TOO_MANY_REQUESTS:
                return choose_cluster_pause(attempt, error.asked_s)
            return None

        try:
            return repeat_request(lambda: self._request_once("POST", path, body), choose_pause)
        except _Busy as error:
            # Another busy status may come from a proxy after the server has created the workload.
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise UncertainRequestError(error.problem, error.hint) from None
            raise
        except NoResponseError as error:
            # Without a connection the server has not seen the request, so that nothing can have been created.
            problem = self._build_unreachable_error(error)
            raise problem if error.is_unsent else UncertainRequestError(problem.problem, problem.hint) from None

    def _request_with_retries(self, method: str, path: str) -> Any:
        sent = 0

        def request() -> Any:
            nonlocal sent
            sent += 1
            try:
                return self._request_once(method, path, None)
            except RequestRefused as error:
                # In a second attempt 404 means that the first one was carried out.
                if method == "DELETE" and sent > 1 and error.status == HTTPStatus.NOT_FOUND:
                    return None
                raise

        def choose_pause(error: Exception, attempt: int) -> float | None:
            is_transient = isinstance(error, _Busy | NoResponseError)
            return choose_cluster_pause(attempt, getattr(error, "asked_s", None)) if is_transient else None

        try:
            return repeat_request(request, choose_pause)
        except _Busy as error:
            raise PrimusError(error.problem, error.hint) from None
        except NoResponseError as error:
            raise self._build_unreachable_error(error) from None

    def _request_once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        answer = self._session.send(method, f"{self.url}{BASE}{path}", data)
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            raise self._build_refusal_error(answer)
        if not answer.content:
            return None
        try:
            return json.loads(answer.content)
        except ValueError:
            raise self.build_foreign_answer_error("not JSON") from None

    def _build_unreachable_error(self, error: NoResponseError) -> PrimusError:
        return PrimusError(f"{self.url}: {error}", "check --url, and that this machine can reach it")

    def _build_refusal_error(self, answer: HttpResponse) -> PrimusError:
        """The error for a response with an error status."""
        code, message = "", ""
        try:
            body = json.loads(answer.content or b"{}")
            code, message = str(body.get("errorCode") or ""), str(body.get("errorMessage") or "")
        except (ValueError, AttributeError):
            pass
        # Servers repeat parts of a rejected request in their messages.
        for value in self._hidden:
            message = message.replace(value, MASK)
        problem = f"{self.url}: {message or answer.reason} ({code or f'HTTP {answer.status}'})"
        if answer.status in BUSY and code != QUOTA:
            return _Busy(
                problem, "the server is busy; try again later", answer.status, parse_retry_after(answer.headers)
            )
        if answer.status < HTTPStatus.BAD_REQUEST:
            target = answer.headers.get("Location", "elsewhere")
            return RequestRefused(f"{self.url} redirects to {target}", "use that address as --url", answer.status)
        hint = "the quota of the workspace is exhausted: request fewer nodes, or wait" if code == QUOTA else ""
        return RequestRefused(problem, hint or HINTS.get(answer.status, ""), answer.status)


def quote_path_segment(text: str) -> str:
    """`text` quoted as one segment of a path."""
    return quote(text, safe="")


def check_url(text: str) -> str:
    """`text`, checked to be the address of a server.

    Raises:
        UsageError: It is not, or it contains a password.
    """
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an address, or an invalid port
        is_address = False
    if not is_address or parts.query or parts.fragment:
        raise UsageError("--url is not the address of a server", "for example https://safe.example.org")
    if parts.username or parts.password:
        raise UsageError("--url contains a user or password", f"put the API key in {TOKEN_VARIABLE}")
    return text.rstrip("/").removesuffix(BASE)


def _read_token(place: Place, environ: Mapping[str, str]) -> str:
    file = place.get("token_file")
    if not file:
        return _check_token(environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE)
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"--token-file {file}: {reason}") from None
    if not token:
        raise UsageError(f"--token-file {file} is empty", "write the API key into it")
    return _check_token(token, f"--token-file {file}")


def _check_token(token: str, where: str) -> str:
    """`token`, checked to be valid in an HTTP header; the error of http.client would contain it.

    Raises:
        UsageError: It is not valid.
    """
    if len(token.split()) > 1 or not token.isascii() or not token.isprintable():
        raise UsageError(f"{where} does not contain exactly one API key")
    return token


class _Busy(RequestRefused):
    """A refusal that may be transient."""
