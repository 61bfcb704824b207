"""Notifications as their receivers get them: Slack's webhook, any address, and a mail server, all on loopback."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from fakes.cli import find_free_port, wait_for
from observers.conftest import ObservedFolder
from primus.errors import UsageError

CANARY = "canary-T0-B0-xyz"


class Inbox:
    """What was received."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.mails: list[str] = []
        self.status = 200
        self.url = ""
        self.mail_server = ""


class HttpHandler(BaseHTTPRequestHandler):
    inbox: Inbox

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.inbox.posts.append((self.path, dict(self.headers), json.loads(body)))
        self.send_response(self.inbox.status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


class MailHandler(socketserver.StreamRequestHandler):
    """SMTP (RFC 5321), without TLS."""

    inbox: Inbox

    def handle(self) -> None:
        self.wfile.write(b"220 mail.example\r\n")
        while line := self.rfile.readline().strip():
            word = line.split()[0].upper()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = list(iter(lambda: self.rfile.readline().rstrip(b"\r\n"), b"."))
                self.inbox.mails.append(b"\n".join(lines).decode())
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    handlers = [type("Http", (HttpHandler,), {"inbox": found}), type("Mail", (MailHandler,), {"inbox": found})]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handlers[0]) as web,
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), handlers[1]) as mail,
    ):
        found.url = f"http://127.0.0.1:{web.server_address[1]}"
        found.mail_server = f"127.0.0.1:{mail.server_address[1]}"
        for server in (web, mail):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        for server in (web, mail):
            server.shutdown()


def fail(observed: ObservedFolder) -> None:
    """The run trains two steps, hangs, and fails."""
    observed.start()
    observed.step(1)
    observed.step(2)
    observed.append("hang", rank=1, problem="rank 1 hangs: no progress for 60 s")
    observed.append("run_ended", state="failed", exit_code=1, reason="rank 1 hangs")
    observed.close()


def test_slack_is_told_of_a_hang_and_a_failure(observed: ObservedFolder, inbox: Inbox) -> None:
    observed.observe([{"notify": {"slack": True}}], PRIMUS_SLACK_WEBHOOK=f"{inbox.url}/{CANARY}")
    fail(observed)
    assert [path for path, _, _ in inbox.posts] == [f"/{CANARY}"] * 2
    hang, failure = (content["text"].splitlines() for _, _, content in inbox.posts)
    assert hang[0] == "night 20260101_120000-ab12 hangs at step 2 of 300"
    assert failure[:2] == ["night 20260101_120000-ab12 failed at step 2 of 300", "reason: rank 1 hangs"]


def test_a_program_gets_values_and_the_token_of_its_variable(observed: ObservedFolder, inbox: Inbox) -> None:
    environ = {"PRIMUS_NOTIFY_WEBHOOK": f"{inbox.url}/hook", "PRIMUS_NOTIFY_TOKEN": CANARY}
    observed.observe([{"notify": {"url": True, "when": ["start", "end"]}}], **environ)
    observed.start()
    observed.step(300)
    observed.append("run_ended", state="done", exit_code=0, reason="")
    observed.close()
    assert [content["event"] for _, _, content in inbox.posts] == ["start", "end"]
    _, headers, end = inbox.posts[1]
    assert headers["Authorization"] == f"Bearer {CANARY}"
    expected = {"state": "done", "experiment": "night", "step": 300, "exit_code": 0, "loss": 8.25 - 75}
    assert end.items() >= expected.items()


def test_a_mail_says_in_its_subject_what_happened(observed: ObservedFolder, inbox: Inbox) -> None:
    options = {"mail_to": ["ann@example.org"], "mail_from": "primus@example.org", "mail_server": inbox.mail_server}
    observed.observe([{"notify": {**options, "when": ["failure"]}}])
    fail(observed)
    (mail,) = inbox.mails
    assert "Subject: primus: night 20260101_120000-ab12 failed at step 2 of 300" in mail
    assert "To: ann@example.org" in mail and "reason: rank 1 hangs" in mail


def test_a_receiver_that_refuses_or_is_away_is_said_without_its_address(observed: ObservedFolder, inbox: Inbox) -> None:
    inbox.status = 403
    mail = {"mail_to": ["ann@example.org"], "mail_server": f"127.0.0.1:{find_free_port()}"}
    observed.observe([{"notify": {"slack": True, **mail}}], PRIMUS_SLACK_WEBHOOK=f"{inbox.url}/{CANARY}")
    fail(observed)
    said = "\n".join(observed.said)
    assert "failure was not sent by slack: HTTP 403" in said and "failure was not sent by mail: " in said
    assert CANARY not in said


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "nobody is told"),
        ({"slack": True}, "PRIMUS_SLACK_WEBHOOK is not set"),
        ({"url": True}, "PRIMUS_NOTIFY_WEBHOOK is not an address"),
        ({"mail_to": ["a@b"], "mail_user": "ann"}, "PRIMUS_MAIL_PASSWORD is not set"),
        ({"slack": f"https://hooks.example/{CANARY}"}, "notify: Expected bool, got str"),
        ({"slak": True}, "unknown option 'slak'"),
    ],
)
def test_what_is_missing_is_an_error_before_the_run(
    options: dict[str, Any], problem: str, observed: ObservedFolder
) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        observed.observe([{"notify": options}], PRIMUS_NOTIFY_WEBHOOK=CANARY)
    assert CANARY not in str(caught.value)


def test_a_password_is_not_sent_without_tls(observed: ObservedFolder, inbox: Inbox) -> None:
    options = {"mail_to": ["ann@example.org"], "mail_server": inbox.mail_server, "mail_user": "ann"}
    observed.observe([{"notify": options}], PRIMUS_MAIL_PASSWORD=CANARY)
    fail(observed)
    assert inbox.mails == []
    assert any("has no TLS: the password is not sent" in text for text in observed.said)


def test_a_run_that_fails_tells_it_and_leaves_no_address_behind(tmp_path: Path, inbox: Inbox) -> None:
    (tmp_path / "e.yaml").write_text(
        "exp_name: night\nmodules: {pre_trainer: {framework: blabber, model: tiny.yaml, overrides: "
        "{mock_data: true, seq_length: 128, train_iters: 4, observers: [{notify: {slack: true, url: true}}]}}}\n"
    )
    words = ["direct", "--single", "--", "train", "pretrain", "--config", "e.yaml"]
    environ = dict.fromkeys(("PRIMUS_SLACK_WEBHOOK", "PRIMUS_NOTIFY_WEBHOOK"), f"{inbox.url}/{CANARY}")
    environ |= {"no_proxy": "*", "OTEL_EXPORTER_OTLP_HEADERS": f"x-team={CANARY}", "PRIMUS_MAIL_PASSWORD": CANARY}
    planned = cli.run("--dry-run", *words, cwd=tmp_path, **environ)
    assert planned.returncode == 0 and inbox.posts == []
    done = cli.run(*words, cwd=tmp_path, **environ)
    wait_for(lambda: inbox.posts, "the notification")
    assert [content["text"].split()[0] for _, _, content in inbox.posts] == ["night"] * 2
    said = planned.stdout + planned.stderr + done.stdout + done.stderr
    left = [file.read_text(errors="replace") for file in (tmp_path / "output").rglob("*") if file.is_file()]
    assert not [text for text in (said, *left) if CANARY in text]
