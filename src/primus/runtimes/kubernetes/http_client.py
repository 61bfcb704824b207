"""Requests to a Primus-SaFE server, with time limits, retries, and hints for rejected requests.

A POST is not retried after a lost answer, since the server would create a second workload: the caller looks for the
workload first. The client uses the standard library, so that a server is reachable without the package `kubernetes`.
Source of paths, headers and error codes: AMD-AGI/Primus-SaFE, SaFE/apiserver/pkg/handlers and SaFE/docs/apis.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from primus.errors import PrimusError, UsageError
from primus.redaction import MASK
from primus.retry_after import parse_retry_after
from primus.runtimes.kubernetes.target import Place, RequestRefused

BASE = "/api/v1"
TOKEN_VARIABLE = "PRIMUS_SAFE_TOKEN"  # noqa: S105  # its name
TIMEOUT_S = 30.0
DELAYS_S = (0.5, 1.0, 2.0, 4.0)
"""Pauses between the attempts of one request."""
LONGEST_DELAY_S = 30.0
"""Maximum of a pause that the server requests (Retry-After)."""
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
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = _read_token(place, environ)
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        if place["api"] == "legacy":
            self._headers["userId"] = hashlib.md5(place["user"].encode(), usedforsecurity=False).hexdigest()
        elif not token:
            raise UsageError(f"{self.url} needs an API key", HINTS[401])
        self._hidden = [value for value in (token, *hidden) if value]
        self._opener = urllib.request.build_opener(_NoRedirect)

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
        for delay in (*DELAYS_S, None):
            try:
                return self._request_once("POST", path, body)
            except _Busy as error:
                # Another busy status may come from a proxy after the server has created the workload.
                if error.status != http.client.TOO_MANY_REQUESTS:
                    raise UncertainRequestError(error.problem, error.hint) from None
                if delay is None:
                    raise RequestRefused(error.problem, error.hint, error.status) from None
                time.sleep(error.wait_s or delay)
            except _NoAnswer as error:
                # Without a connection the server has not seen the request, so that nothing can have been created.
                if error.is_unsent:
                    raise PrimusError(error.problem, error.hint) from None
                raise UncertainRequestError(error.problem, error.hint) from None
        raise AssertionError

    def _request_with_retries(self, method: str, path: str) -> Any:
        for number, delay in enumerate((*DELAYS_S, None)):
            try:
                return self._request_once(method, path, None)
            except (_Busy, _NoAnswer) as error:
                if delay is None:
                    raise PrimusError(error.problem, error.hint) from None
                time.sleep(error.wait_s or delay)
            except RequestRefused as error:
                # In a second attempt 404 means that the first one was carried out.
                if method == "DELETE" and number and error.status == http.client.NOT_FOUND:
                    return None
                raise
        raise AssertionError

    def _request_once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{BASE}{path}", data, self._headers, method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                # Bounded: a wrong address may lead to an endless response.
                content = answer.read(LARGEST_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._build_refusal_error(error) from None
        except urllib.error.URLError as error:
            is_unsent = isinstance(error.reason, ConnectionRefusedError) or "getaddrinfo" in repr(error.reason)
            raise _NoAnswer(f"{self.url}: {_describe_error(error.reason)}", is_unsent=is_unsent) from None
        except (OSError, http.client.HTTPException) as error:
            raise _NoAnswer(f"{self.url}: {_describe_error(error)}") from None
        if not content:
            return None
        try:
            return json.loads(content)
        except ValueError:
            raise self.build_foreign_answer_error("not JSON") from None

    def _build_refusal_error(self, error: urllib.error.HTTPError) -> PrimusError:
        """The error for a response with an error status."""
        code, message = "", ""
        try:
            body = json.loads(error.read(1 << 20) or b"{}")
            code, message = str(body.get("errorCode") or ""), str(body.get("errorMessage") or "")
        except (ValueError, AttributeError, OSError, http.client.HTTPException):
            pass
        # Servers repeat parts of a rejected request in their messages.
        for value in self._hidden:
            message = message.replace(value, MASK)
        problem = f"{self.url}: {message or error.reason} ({code or f'HTTP {error.code}'})"
        if error.code in BUSY and code != QUOTA:
            asked_s = parse_retry_after(error.headers.get("Retry-After"), error.headers.get("Date"))
            return _Busy(problem, error.code, None if asked_s is None else min(asked_s, LONGEST_DELAY_S))
        if 300 <= error.code < 400:
            target = error.headers.get("Location", "elsewhere")
            return RequestRefused(f"{self.url} redirects to {target}", "use that address as --url", error.code)
        hint = "the quota of the workspace is exhausted: request fewer nodes, or wait" if code == QUOTA else ""
        return RequestRefused(problem, hint or HINTS.get(error.code, ""), error.code)


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


class _Busy(PrimusError):
    def __init__(self, problem: str, status: int, wait_s: float | None) -> None:
        super().__init__(problem, "the server is busy; try again later")
        self.status = status
        self.wait_s = wait_s


class _NoAnswer(PrimusError):
    wait_s: float | None = None

    def __init__(self, problem: str, *, is_unsent: bool = False) -> None:
        super().__init__(problem, "check --url, and that this machine can reach it")
        self.is_unsent = is_unsent


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would send the key to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _describe_error(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {TIMEOUT_S:.0f} s"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)
