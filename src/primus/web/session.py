"""A session for our own HTTP requests: time limits, proxies, certificates, redirections and a bound on the answer.

It uses the standard library only, because it also runs before any package is installed. Proxies are those of the
variables `http_proxy`, `https_proxy` and `no_proxy`; certificates those of the system, or of SSL_CERT_FILE.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit


class HttpResponse(NamedTuple):
    """Response of a server, with any status."""

    status: int
    reason: str
    """Text of the status."""
    headers: Mapping[str, str]
    content: bytes
    """Body; cut at `max_bytes` of the session."""


class NoResponseError(Exception):
    """No response of the server; the text is the reason, without credentials."""

    def __init__(self, reason: object, *, is_unsent: bool = False, is_untrusted: bool = False) -> None:
        super().__init__(getattr(reason, "strerror", None) or str(reason) or type(reason).__name__)
        self.is_unsent = is_unsent
        """Whether there was no connection, so that the server has not seen the request."""
        self.is_untrusted = is_untrusted
        """Whether the server can be reached, but its certificate is not valid here."""


class HttpSession:
    """Sends requests.

    Args:
        headers: Of each request.
        timeout_s: Longest wait for a connection, and for the next bytes of an answer.
        max_bytes: A longer body is cut: a wrong address may lead to an endless response.
        ca_file: Certificates to trust instead of the system's.
        follows_redirects: Whether redirections are followed; credentials are sent to the first host only.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        *,
        timeout_s: float,
        max_bytes: int,
        ca_file: str | None = None,
        follows_redirects: bool = True,
    ) -> None:
        self._headers = headers
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._ca_file = ca_file
        self._redirects = _Redirects if follows_redirects else _NoRedirects

    def send(self, method: str, url: str, body: bytes | None = None) -> HttpResponse:
        """The response to a request; credentials in the URL are sent as a header.

        Raises:
            NoResponseError: There is none.
        """
        parts, headers = urlsplit(url), dict(self._headers)
        if parts.username:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
            # urllib does not send credentials of a URL, and its errors would show them.
            url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        try:
            request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return self._read_response(answer, answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return self._read_response(error, error.code)
        except urllib.error.URLError as error:
            is_unsent = isinstance(error.reason, (ConnectionRefusedError, socket.gaierror))
            untrusted = isinstance(error.reason, ssl.SSLError)
            raise NoResponseError(self._describe(error.reason), is_unsent=is_unsent, is_untrusted=untrusted) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoResponseError(self._describe(error)) from None

    def send_within(self, limit_s: float, method: str, url: str) -> HttpResponse:
        """The response to a request within a time that name resolution, which has no limit of its own, counts for.

        Raises:
            NoResponseError: There is none.
        """
        found: list[HttpResponse | NoResponseError] = []

        def send() -> None:
            try:
                found.append(self.send(method, url))
            except NoResponseError as error:
                found.append(error)

        # A daemon thread, because nothing interrupts the resolver: the process may end before it does.
        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        thread.join(limit_s)
        response = found[0] if found else NoResponseError(f"no answer in {limit_s:g} s")
        if isinstance(response, NoResponseError):
            raise response
        return response

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        context = ssl.create_default_context(cafile=self._ca_file)
        return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), self._redirects)

    def _read_response(self, answer: Any, status: int) -> HttpResponse:
        try:
            content = answer.read(self._max_bytes)
            # http.client reports a missing rest only to who asks for the whole content.
            if answer.length and len(content) < self._max_bytes:
                raise http.client.IncompleteRead(content, answer.length)
        except (OSError, http.client.HTTPException):
            if status < http.client.BAD_REQUEST:
                raise
            content = b""  # the status of a refusal says enough
        return HttpResponse(status, answer.reason, answer.headers, content)

    def _describe(self, error: object) -> object:
        return f"no response within {self._timeout_s:.0f} s" if isinstance(error, TimeoutError) else error


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *args: Any) -> urllib.request.Request | None:
        found = super().redirect_request(req, *args)
        if found is not None and urlsplit(found.full_url).netloc != urlsplit(req.full_url).netloc:
            found.remove_header("Authorization")
        return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None
