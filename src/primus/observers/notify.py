"""Tell a person or a program that a run has ended, failed or hangs: by Slack, mail, or a request to any address.

Addresses and passwords are secrets, so they come from variables and never from options: PRIMUS_SLACK_WEBHOOK,
PRIMUS_NOTIFY_WEBHOOK (and PRIMUS_NOTIFY_TOKEN, sent as `Authorization: Bearer`), PRIMUS_MAIL_PASSWORD.
"""

from __future__ import annotations

import json
import smtplib
import ssl
from collections.abc import Callable, Mapping, Sequence
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct, field

from primus.errors import PrimusError, UsageError
from primus.observer import Observer
from primus.redaction import learn, redact
from primus.web.session import HttpSession, NoResponseError

if TYPE_CHECKING:
    from primus.observer import ObservedRun
    from primus.runs.events import Event
    from primus.runs.run_metrics import RunMetrics

SLACK_VARIABLE = "PRIMUS_SLACK_WEBHOOK"
URL_VARIABLE, TOKEN_VARIABLE = "PRIMUS_NOTIFY_WEBHOOK", "PRIMUS_NOTIFY_TOKEN"
PASSWORD_VARIABLE = "PRIMUS_MAIL_PASSWORD"  # noqa: S105 - its name
SECRET_VARIABLES = (SLACK_VARIABLE, URL_VARIABLE, TOKEN_VARIABLE, PASSWORD_VARIABLE)
TIMEOUT_S = 10.0
"""For a connection and an answer; shorter than the launcher waits for an observer at the end."""

When = Literal["start", "end", "failure", "hang", "restart"]


class Options(Struct, frozen=True, kw_only=True):
    """Options of `notify`."""

    when: list[When] = field(default_factory=lambda: ["end", "failure", "hang"])
    """`end`: the run is done or was stopped; `failure`: it has failed; `hang`: ranks make no progress; also `start` and
    `restart`."""
    slack: bool = False
    """Post to the incoming webhook of Slack, or of a service with the same format, in $PRIMUS_SLACK_WEBHOOK."""
    url: bool = False
    """POST the notification as JSON to $PRIMUS_NOTIFY_WEBHOOK."""
    mail_to: list[str] = []
    """Addresses that get a mail."""
    mail_from: str | None = None
    """Sender; the user's name at the host when null."""
    mail_server: str = "localhost:25"
    """HOST:PORT of the mail server; port 465 is TLS from the start, others use STARTTLS where the server has it."""
    mail_user: str | None = None
    """User name at the mail server, with the password in $PRIMUS_MAIL_PASSWORD."""


class Notification(NamedTuple):
    """What is told."""

    what: When
    headline: str
    """In one line."""
    values: Mapping[str, Any]
    """By name, for programs."""

    def format_text(self) -> str:
        """For people: the headline, then a line for each value that they need."""
        shown = ("reason", "loss", "host", "folder")
        return "\n".join([self.headline, *(f"{name}: {self.values[name]}" for name in shown if self.values.get(name))])


class NotifyObserver(Observer):
    """Sends a notification for each event that is asked for."""

    def __init__(self, options: Options, observed: ObservedRun) -> None:
        self._options, self._observed = options, observed
        learn({name: observed.environ[name] for name in SECRET_VARIABLES if observed.environ.get(name)})
        self._channels = _open_channels(options, observed)

    def observe(self, events: Sequence[Event], metrics: RunMetrics) -> None:
        found = [_describe_event(event, metrics, self._observed) for event in events]
        problems = []
        for each in found:
            if each is None or each.what not in self._options.when:
                continue
            for name, send in self._channels.items():
                try:
                    send(each)
                except (NoResponseError, PrimusError, OSError, smtplib.SMTPException) as error:
                    # The others are still told.
                    problems.append(f"{each.what} was not sent by {name}: {redact(str(error))}")
        if problems:
            raise PrimusError("; ".join(problems))


def _describe_event(event: Event, metrics: RunMetrics, observed: ObservedRun) -> Notification | None:
    """What an event tells; None for other events."""
    kind = event["kind"]
    run = f"{observed.name} {observed.run.id}"
    step = metrics.last_step.get("step", event.get("step", 0))
    where = f"at step {step}" + (f" of {metrics.train_iters}" if metrics.train_iters else "")
    reason = redact(str(event.get("reason") or event.get("problem") or ""))
    told: dict[str, tuple[When, str]] = {
        "run_started": ("start", f"{run} trains on {event.get('world_size', 1)} x {event.get('device', 'device')}"),
        "hang": ("hang", f"{run} hangs {where}"),
        "restart": ("restart", f"{run} restarts {where}"),
    }
    if kind == "run_ended":
        state = str(event.get("state"))
        what: When = "failure" if state == "failed" else "end"
        told[kind] = what, f"{run} {'is done' if state == 'done' else state} {where}"
    if kind not in told:
        return None
    what, headline = told[kind]
    values = {
        "event": what,
        "state": metrics.state,
        "experiment": observed.name,
        "run": observed.run.id,
        "host": observed.host,
        "folder": str(observed.run.directory),
        "step": step,
        "train_iters": metrics.train_iters,
        "loss": metrics.last_step.get("loss"),
        "reason": reason,
        "exit_code": event.get("exit_code"),
        "time": event["time"],
    }
    return Notification(what, headline, values)


def _open_channels(options: Options, observed: ObservedRun) -> dict[str, Callable[[Notification], None]]:
    """How to send, by name.

    Raises:
        UsageError: Nothing is asked for, or a variable is missing.
    """
    environ = observed.environ
    channels: dict[str, Callable[[Notification], None]] = {}
    if options.slack:
        slack = _read_address(environ, SLACK_VARIABLE)
        channels["slack"] = lambda found: _post(slack, {"text": found.format_text()})
    if options.url:
        url, token = _read_address(environ, URL_VARIABLE), environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        channels["url"] = lambda found: _post(url, {**found.values, "text": found.format_text()}, headers)
    if options.mail_to:
        if options.mail_user and not environ.get(PASSWORD_VARIABLE):
            raise UsageError(f"observers: notify: {PASSWORD_VARIABLE} is not set", "export it, or leave out mail_user")
        channels["mail"] = lambda found: _send_mail(found, options, environ, observed.host)
    if not channels:
        raise UsageError("observers: notify: nobody is told", "set slack: true, url: true, or mail_to: [ADDRESS]")
    return channels


def _read_address(environ: Mapping[str, str], name: str) -> str:
    address = environ.get(name, "")
    if urlsplit(address).scheme not in ("http", "https"):
        problem = "is not set" if not address else "is not an address that begins with https://"
        raise UsageError(
            f"observers: notify: {name} {problem}",
            f"export {name}=https://...; a container or another host gets it by --env {name}",
        )
    return address


def _post(url: str, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    session = HttpSession(headers, timeout_s=TIMEOUT_S, max_bytes=4096, follows_redirects=False)
    answer = session.send("POST", url, body)
    if not 200 <= answer.status < 300:
        text = redact(answer.content.decode(errors="replace").strip())[:200]
        raise PrimusError(f"HTTP {answer.status} {text or answer.reason}")


def _send_mail(found: Notification, options: Options, environ: Mapping[str, str], host: str) -> None:
    server, _, port = options.mail_server.rpartition(":")
    server, number = (server, int(port)) if server and port.isdecimal() else (options.mail_server, 25)
    message = EmailMessage()
    message["Subject"] = f"primus: {found.headline}"
    message["From"] = options.mail_from or f"{environ.get('USER', 'primus')}@{host}"
    message["To"] = ", ".join(options.mail_to)
    message.set_content(found.format_text())
    context = ssl.create_default_context()
    is_tls = number == smtplib.SMTP_SSL_PORT
    with (
        smtplib.SMTP_SSL(server, number, timeout=TIMEOUT_S, context=context)
        if is_tls
        else smtplib.SMTP(server, number, timeout=TIMEOUT_S)
    ) as mail:
        mail.ehlo()
        if not is_tls and mail.has_extn("starttls"):
            mail.starttls(context=context)
        elif not is_tls and options.mail_user:
            raise PrimusError(f"{options.mail_server} has no TLS: the password is not sent", "use port 465 or 587")
        if options.mail_user:
            mail.login(options.mail_user, environ[PASSWORD_VARIABLE])
        mail.send_message(message)


def open_observer(options: Options, observed: ObservedRun) -> NotifyObserver:
    """Check the options and the variables."""
    return NotifyObserver(options, observed)
