from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from primus.web.session import HttpSession, NoResponseError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]
    elsewhere = ""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        is_cut = self.path in ("/cut", "/refused")
        target = {"/here": "/end", "/there": f"{self.elsewhere}/end"}.get(self.path)
        self.send_response(302 if target else 404 if self.path in ("/none", "/refused") else 200)
        if target:
            self.send_header("Location", target)
        body = b"" if target else b"x" * 100
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:5] if is_cut else body)
        self.close_connection = is_cut


@pytest.fixture
def servers() -> Iterator[list[ThreadingHTTPServer]]:
    found = []
    for _ in range(2):
        handler = type("Handler", (_Handler,), {"seen": []})
        found.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=found[-1].serve_forever, args=(0.01,), daemon=True).start()
    found[0].RequestHandlerClass.elsewhere = f"http://127.0.0.1:{found[1].server_port}"  # type: ignore[attr-defined]
    yield found
    for server in found:
        server.shutdown()
        server.server_close()


def open_session(**changes: bool) -> HttpSession:
    return HttpSession({"User-Agent": "primus"}, timeout_s=5.0, max_bytes=10, **changes)


def list_requests(server: ThreadingHTTPServer) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = server.RequestHandlerClass.seen  # type: ignore[attr-defined]
    return found


def test_credentials_of_a_url_are_sent_to_its_host_only(servers: list[ThreadingHTTPServer]) -> None:
    url = f"http://me:swordfish@127.0.0.1:{servers[0].server_port}"
    credentials = "Basic bWU6c3dvcmRmaXNo"
    assert open_session().send("GET", f"{url}/here").status == 200
    assert list_requests(servers[0]) == [("/here", credentials), ("/end", credentials)]
    assert open_session().send("GET", f"{url}/there").status == 200
    assert list_requests(servers[1]) == [("/end", None)]


def test_a_password_may_contain_the_sign_before_the_host(servers: list[ThreadingHTTPServer]) -> None:
    assert open_session().send("GET", f"http://me:sword@fish@127.0.0.1:{servers[0].server_port}/end").status == 200
    assert list_requests(servers[0]) == [("/end", "Basic bWU6c3dvcmRAZmlzaA==")]


def test_a_response_that_is_cut_off_is_none_unless_it_is_a_refusal(servers: list[ThreadingHTTPServer]) -> None:
    url = f"http://127.0.0.1:{servers[0].server_port}"
    session = HttpSession({}, timeout_s=5.0, max_bytes=1000)
    with pytest.raises(NoResponseError, match="IncompleteRead"):
        session.send("GET", f"{url}/cut")
    refused = session.send("GET", f"{url}/refused")
    assert (refused.status, refused.content) == (404, b"")


def test_a_response_is_bounded_and_has_any_status(servers: list[ThreadingHTTPServer]) -> None:
    url = f"http://127.0.0.1:{servers[0].server_port}"
    found = [open_session().send_within(5.0, "GET", url + path) for path in ("/end", "/none")]
    assert [(each.status, each.content) for each in found] == [(200, b"x" * 10), (404, b"x" * 10)]
    kept = open_session(follows_redirects=False).send("GET", f"{url}/here")
    assert (kept.status, kept.headers["Location"]) == (302, "/end")


def test_requests_go_through_the_proxy_of_the_variables(
    servers: list[ThreadingHTTPServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{servers[0].server_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert open_session().send("GET", "http://server.invalid/page").status == 200
    assert list_requests(servers[0]) == [("http://server.invalid/page", None)]


def test_a_server_that_is_not_there_has_not_seen_the_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NoResponseError, match="refused") as caught:
        open_session().send("GET", f"http://me:swordfish@127.0.0.1:{port}/")
    assert caught.value.is_unsent
    assert "swordfish" not in str(caught.value)


def test_a_silent_server_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(NoResponseError, match=r"no answer in 0\.1 s"):
            open_session().send_within(0.1, "GET", url)
        session = HttpSession({}, timeout_s=0.1, max_bytes=10)
        with pytest.raises(NoResponseError, match="no response within") as caught:
            session.send("GET", url)
    assert not caught.value.is_unsent
