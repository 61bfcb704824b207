"""Start one node on each host, pass signals on, and end all of them when one fails."""

from __future__ import annotations

import contextlib
import math
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from msgspec import Struct

from primus.errors import EXIT_FAILED, EXIT_UNFIT, PrimusError
from primus.launch.foreground import PASSED_ON
from primus.launch.run_remote import conclude_remote, read_reported_outcome
from primus.redaction import redact
from primus.runs.store import Run, RunMetadata
from primus.runtimes.ssh import script
from primus.runtimes.ssh.hosts import SshHost

LOGS = "logs/ssh"
POLL_S = 0.05
PEERS_S = 15.0
"""Time that the other nodes have to notice by themselves that one has failed; their launchers take up to 10 s."""
GRACE_S = 75.0
"""Time that nodes have to save and end after a signal; their launchers give the workers 60 s of it."""
LOST_S = 10.0
"""Time that ssh has to end once its input is closed or it is told to."""
SSH_FAILED = 255
"""Exit code of ssh when it fails itself, or when a signal has ended the command (ssh(1), EXIT STATUS)."""
NUM_TAIL_LINES = 5
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SshNode(Struct, frozen=True, kw_only=True):
    """A node to start."""

    host: SshHost
    argv: tuple[str, ...]
    login: str
    """What a person types after `ssh` to reach the host in the same way."""
    script: str
    """What its host is told on standard input; it holds the values of variables."""


class SshNodeFailure(Struct, frozen=True, kw_only=True):
    """How a node has failed."""

    rank: int
    host: str
    problem: str
    hint: str = ""
    exit_code: int = EXIT_FAILED


def run_nodes(targets: Sequence[SshNode], environ: Mapping[str, str], run: Run | None) -> int:
    """Start all nodes and wait until they have ended; gives the exit code.

    Node 0 speaks here as if it ran here. What others say goes to files below `logs/ssh` of the run folder; where there
    is no run folder, to standard error with their names before each line.

    Raises:
        PrimusError: ssh is not installed.
    """
    sys.stdout.flush()
    before = run.read_metadata() if run else None
    folder = run.directory / LOGS if run else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    connections: list[SshConnection] = []
    with _SshSignalHandler() as signals:
        try:
            for rank, target in enumerate(targets):
                connections.append(SshConnection(rank, target, environ, folder))
            failure = _wait_for_nodes(connections, signals)
        finally:
            for connection in connections:
                connection.close()
    return _report_end(connections, failure, signals, run, before)


class SshConnection:
    """An ssh process and what is said over it."""

    def __init__(self, rank: int, target: SshNode, environ: Mapping[str, str], folder: Path | None) -> None:
        self.rank = rank
        self.host = target.host
        self.label = self.host.display_name
        self.login = target.login
        self.log = folder / f"{rank}-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.label)}.log" if folder and rank else None
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        self._words: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = self._start_ssh(target.argv, environ)
        talker = threading.Thread(
            target=self._write_stdin, args=(script.encode_with_length(target.script),), daemon=True
        )
        self._listener = threading.Thread(target=self._copy_output, daemon=True)
        talker.start()
        self._listener.start()

    def _start_ssh(self, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """ssh in a session of its own: an interrupt of the terminal is passed on, and must not end the connection."""
        own = self.rank == 0
        try:
            return subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=None if own else subprocess.PIPE,
                stderr=subprocess.PIPE if own else subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PrimusError(f"{argv[0]}: cannot be started: {error.strerror}", "install OpenSSH's client") from None

    def send_signal_name(self, word: str | None) -> None:
        """Send a signal's name; None ends the input, and with it whatever runs there."""
        self._words.put(word)

    def close(self) -> None:
        """End ssh if it has not ended."""
        if self.process.poll() is None:
            self.send_signal_name(None)
            self.process.terminate()
            try:
                self.process.wait(LOST_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.send_signal_name(None)
        self.join_listener()

    def join_listener(self) -> None:
        """Return once all that was said has arrived; ssh has ended."""
        self._listener.join(LOST_S)

    def _write_stdin(self, first: bytes) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # ssh has ended; its exit code says how
            self.process.stdin.write(first)
            self.process.stdin.flush()
            for word in iter(self._words.get, None):
                self.process.stdin.write(f"{word}\n".encode())
                self.process.stdin.flush()
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _copy_output(self) -> None:
        stream = self.process.stderr if self.rank == 0 else self.process.stdout
        assert stream
        prefix = b"" if self.rank == 0 else f"{self.label}: ".encode()
        with stream, open(self.log, "ab") if self.log else contextlib.nullcontext() as log:
            for line in stream:
                self.tail.append(redact(line.decode(errors="replace")).rstrip())
                shown = redact(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
                if log:
                    log.write(shown)
                    log.flush()
                else:
                    sys.stderr.buffer.write(prefix + shown)
                    sys.stderr.flush()


def _wait_for_nodes(connections: Sequence[SshConnection], signals: _SshSignalHandler) -> SshNodeFailure | None:
    """Wait for all nodes; the first one that fails ends the others. Gives that failure."""
    failure: SshNodeFailure | None = None
    num_passed_on = 0
    end_at = cut_at = math.inf
    while any(connection.process.poll() is None for connection in connections):
        now = time.monotonic()
        for number in signals.seen[num_passed_on:]:
            _signal_all_nodes(connections, signal.Signals(number).name.removeprefix("SIG"))
            num_passed_on += 1
            if number in ENDING:
                cut_at = min(cut_at, now + GRACE_S)
        if failure is None and not signals.seen:
            failure = _first_failure(connections)
            if failure:  # one that never began is missed by the others only after minutes
                end_at = now + (0 if failure.exit_code == EXIT_UNFIT else PEERS_S)
        if now > end_at:
            _signal_all_nodes(connections, "TERM")
            end_at, cut_at = math.inf, now + GRACE_S
        if now > cut_at:
            break
        time.sleep(POLL_S)
    return failure or _first_failure(connections)


def _signal_all_nodes(connections: Sequence[SshConnection], word: str) -> None:
    for connection in connections:
        if connection.process.poll() is None:
            connection.send_signal_name(word)


def _first_failure(connections: Sequence[SshConnection]) -> SshNodeFailure | None:
    for connection in connections:
        code = connection.process.poll()
        if code:
            return _describe_failure(connection, code)
    return None


_REASONS = (
    (r"Host key verification failed", "its host key is not known, or has changed", "log in once by hand: ssh {login}"),
    (r"Permission denied \((.*)\)", "it does not let us in: {0}", "a key is needed, no password: ssh-copy-id {login}"),
    (r"Could not resolve hostname [^:]*: (.*)", "its name is not known: {0}", ""),
    (
        r"connect to (?:host|address) .*: (.*)",
        "it cannot be reached: {0}",
        "is it up, and its SSH server at this port?",
    ),
    (r"Connection timed out", "it cannot be reached: it does not answer", "is it up?"),
    (
        r"Too many authentication failures",
        "it does not let us in: too many keys were offered",
        "--option IdentityFile=...",
    ),
    (r"(Bad configuration option: .*|.*line \d+: .*)", "ssh refuses its settings: {0}", ""),
    (r"kex_exchange_identification: (.*)", "its SSH server hung up: {0}", "its MaxStartups may be too low"),
)
"""What ssh says when it cannot begin, and what that means."""
_LOST = re.compile(r"Timeout, server .* not responding|closed by remote host|Connection reset|Broken pipe|disconnect")


def _describe_failure(connection: SshConnection, code: int) -> SshNodeFailure:
    connection.join_listener()
    who = f"node {connection.rank} ({connection.label})"
    said = "\n".join(connection.tail)
    if code != SSH_FAILED:
        hint = "is primus-cli at the same place there? else --entry PATH or --python PATH" if code in (126, 127) else ""
        return _build_node_failure(
            connection, f"{who} failed with exit code {code}", hint, code if code > 0 else EXIT_FAILED
        )
    for pattern, meaning, hint in _REASONS:
        match = re.search(pattern, said)
        if match:
            problem = f"{who}: {meaning.format(*match.groups())}"
            return _build_node_failure(connection, problem, hint.format(login=connection.login), EXIT_UNFIT)
    if _LOST.search(said):
        return _build_node_failure(connection, f"{who}: the connection was lost", "the host may be down", EXIT_FAILED)
    killed = 128 + signal.SIGKILL
    return _build_node_failure(
        connection, f"{who}: its launcher was killed", "the kernel may have run out of memory there", killed
    )


def _build_node_failure(connection: SshConnection, problem: str, hint: str, code: int) -> SshNodeFailure:
    return SshNodeFailure(rank=connection.rank, host=connection.label, problem=problem, hint=hint, exit_code=code)


def _report_end(
    connections: Sequence[SshConnection],
    failure: SshNodeFailure | None,
    signals: _SshSignalHandler,
    run: Run | None,
    before: RunMetadata | None,
) -> int:
    """Say how it ended, and record it where no node could; gives the exit code of the run, where the hosts share it."""
    codes = [connection.process.returncode for connection in connections]
    if signals.seen:
        cut = [connection.label for connection, code in zip(connections, codes, strict=True) if code < 0]
        if cut:
            print(f"primus-cli: {', '.join(cut)} did not end in time; left to end there", file=sys.stderr)
        code = next((code for code in codes if 0 < code != SSH_FAILED), 128 + signals.seen[0] if any(codes) else 0)
        return conclude_remote(run, before, code, signal.Signals(signals.seen[0]).name, state="interrupted")
    if failure is None:
        return conclude_remote(run, before, 0, "")
    is_told = run is not None and before is not None and read_reported_outcome(run, before) is not None
    if not is_told or connections[failure.rank].process.returncode == SSH_FAILED:  # else node 0 has said it
        _print_failure(connections[failure.rank], failure)
    return conclude_remote(run, before, failure.exit_code, failure.problem, is_said=True)


def _print_failure(connection: SshConnection, failure: SshNodeFailure) -> None:
    print(f"primus-cli: {failure.problem}", file=sys.stderr)
    if failure.hint:
        print(f"  {failure.hint}", file=sys.stderr)
    if connection.log and connection.tail:
        print("".join(f"  | {line}\n" for line in connection.tail) + f"  log: {connection.log}", file=sys.stderr)


class _SshSignalHandler:
    """The signals that arrive while the nodes run, in order."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __enter__(self) -> _SshSignalHandler:
        numbers = [number for number in (signal.SIGINT, *PASSED_ON) if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._record_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
