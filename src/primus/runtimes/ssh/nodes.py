"""Start one node on each host over ssh, pass signals on, and stop all nodes when one fails.

Each node goes through these states, watched by a poll of its ssh process:

    running     ssh is alive. Signals to this process go to the host as a word on standard input.
    failed      ssh has exited with a code other than 0. The other nodes get PEERS_S to end by themselves, because
                their launchers notice a lost peer and report it better than this process can; then SIGTERM.
    stopping    a signal was sent. After GRACE_S the connections are closed, and the hosts stop their tasks themselves.

A host that could not be reached stops the others at once: they wait for it in the rendezvous.
"""

from __future__ import annotations

import contextlib
import math
import os
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
from primus.launch.terminal_relay import open_relay
from primus.redaction import redact
from primus.runs.store import Run, RunMetadata
from primus.runtimes.ssh import script
from primus.runtimes.ssh.hosts import SshHost

LOGS = "logs/ssh"
POLL_S = 0.05
PEERS_S = 15.0
"""Time for the other nodes to notice a failed one by themselves; their launchers take up to 10 s."""
GRACE_S = 75.0
"""Time for nodes to save and exit after a signal; their launchers give the workers 60 s of it."""
SSH_EXIT_LIMIT_S = 10.0
"""Time for ssh to exit after its input was closed or it was terminated."""
SSH_FAILED = 255
"""Exit code of ssh if it fails itself, or if a signal has ended the command (ssh(1), EXIT STATUS)."""
NUM_TAIL_LINES = 5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SshNode(Struct, frozen=True, kw_only=True):
    """A node to start."""

    host: SshHost
    argv: tuple[str, ...]
    login: str
    """Arguments with which a user reaches the host by `ssh`, for messages."""
    script: str
    """Script that the host reads from standard input; it contains the values of variables."""


class SshNodeFailure(Struct, frozen=True, kw_only=True):
    """Failure of a node."""

    rank: int
    host: str
    problem: str
    hint: str = ""
    exit_code: int = EXIT_FAILED


def run_nodes(targets: Sequence[SshNode], environ: Mapping[str, str], run: Run | None) -> int:
    """Start all nodes and wait until they have ended; gives the exit code.

    The output of node 0 goes to this terminal. Output of other nodes goes to files in `logs/ssh` of the run folder;
    without a run folder, to standard error with the host's name before each line.

    Raises:
        PrimusError: ssh is not installed.
    """
    sys.stdout.flush()
    # Read before the start: only an outcome that differs belongs to this attempt.
    before = run.read_metadata() if run else None
    folder = run.directory / LOGS if run else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    connections: list[SshConnection] = []
    # Signals are recorded before the first connection is opened, and passed on to all connections afterwards.
    with _SshSignalHandler() as signals, open_relay(environ) as terminal:
        try:
            for rank, target in enumerate(targets):
                connections.append(SshConnection(rank, target, environ, folder, terminal))
            failure = _wait_for_nodes(connections, signals)
        finally:
            for connection in connections:
                connection.close()
    return _report_end(connections, failure, signals, run, before)


class SshConnection:
    """An ssh process, with a thread that writes its input and one that reads its output.

    Args:
        rank: Of the node.
        target: Its host.
        environ: Variables of ssh.
        folder: Of the logs, if there is a run folder.
        terminal: File descriptor for what the user sees; None for the standard streams.
    """

    def __init__(
        self, rank: int, target: SshNode, environ: Mapping[str, str], folder: Path | None, terminal: int | None
    ) -> None:
        self.rank = rank
        self._terminal = terminal
        self.host = target.host
        self.label = self.host.display_name
        self.login = target.login
        self.log = folder / f"{rank}-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.label)}.log" if folder and rank else None
        self.tail: deque[str] = deque(maxlen=NUM_TAIL_LINES)
        # A queue, because a write to a stalled connection would block the thread that watches all nodes.
        self._words: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.process = self._start_ssh(target.argv, environ)
        writer = threading.Thread(
            target=self._write_stdin, args=(script.encode_with_length(target.script),), daemon=True
        )
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        writer.start()
        self._reader.start()

    def _start_ssh(self, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start ssh in its own session: Ctrl-C is passed on as a word, and must not end the connection."""
        own = self.rank == 0
        try:
            return subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=self._terminal if own else subprocess.PIPE,
                stderr=subprocess.PIPE if own else subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PrimusError(f"{argv[0]} cannot be started: {error.strerror}", "install the OpenSSH client") from None

    def send_signal_name(self, word: str | None) -> None:
        """Send a signal's name; None closes the input, on which the host stops its task."""
        self._words.put(word)

    def close(self) -> None:
        """Stop ssh if it is still running."""
        if self.process.poll() is None:
            self.send_signal_name(None)
            # Closing the input stops the task on the host; SIGTERM stops an ssh that still connects and reads no input.
            self.process.terminate()
            try:
                self.process.wait(SSH_EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.send_signal_name(None)  # ends the writer thread, which would wait for a word forever
        self.join_reader()

    def join_reader(self) -> None:
        """Wait until all output of an ssh that has ended is copied."""
        # Bounded: a background process of ssh (ControlPersist) may keep the pipe open.
        self._reader.join(SSH_EXIT_LIMIT_S)

    def _write_stdin(self, first: bytes) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):  # ssh has ended; its exit code tells why
            self.process.stdin.write(first)
            self.process.stdin.flush()
            # The script ends here; standard input stays open for the names of signals.
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
                # Decoded with surrogates, so that bytes that are not UTF-8 are copied unchanged.
                shown = redact(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
                if log:
                    log.write(shown)
                    log.flush()
                else:
                    sys.stderr.flush()
                    os.write(sys.stderr.fileno() if self._terminal is None else self._terminal, prefix + shown)


def _wait_for_nodes(connections: Sequence[SshConnection], signals: _SshSignalHandler) -> SshNodeFailure | None:
    """Wait for all nodes; the first failure stops the others, and is returned."""
    failure: SshNodeFailure | None = None
    num_passed_on = 0
    end_at = cut_at = math.inf
    # end_at: when the nodes that are left get SIGTERM; cut_at: when their connections are closed. Infinity: not set.
    while any(connection.process.poll() is None for connection in connections):
        now = time.monotonic()
        for number in signals.seen[num_passed_on:]:
            _signal_all_nodes(connections, signal.Signals(number).name.removeprefix("SIG"))
            num_passed_on += 1
            # SIGUSR1 and SIGUSR2 leave the end to the launchers: they are warnings of a scheduler further out.
            if number in STOP_SIGNALS:
                # A second signal does not extend the grace period of the first one.
                cut_at = min(cut_at, now + GRACE_S)
        # After a signal, nodes exit with codes other than 0 on purpose: only an unsignalled end is a failure.
        if failure is None and not signals.seen:
            failure = _find_first_failure(connections)
            if failure:  # the others would wait for an unreachable host until the rendezvous times out
                end_at = now + (0 if failure.exit_code == EXIT_UNFIT else PEERS_S)
        if now > end_at:
            _signal_all_nodes(connections, "TERM")
            # State `stopping`; SIGTERM is sent once.
            end_at, cut_at = math.inf, now + GRACE_S
        if now > cut_at:
            break
        time.sleep(POLL_S)
    # The loop may end before it has seen the exit of the last node.
    return failure or _find_first_failure(connections)


def _signal_all_nodes(connections: Sequence[SshConnection], word: str) -> None:
    for connection in connections:
        if connection.process.poll() is None:
            connection.send_signal_name(word)


def _find_first_failure(connections: Sequence[SshConnection]) -> SshNodeFailure | None:
    for connection in connections:
        code = connection.process.poll()
        if code:
            return _describe_failure(connection, code)
    return None


_REASONS = (
    (
        r"Host key for (\S+) has changed",
        "its host key has changed",
        "if the host was installed again: ssh-keygen -R '{0}'; else another machine answers in its place",
    ),
    (r"Host key verification failed", "unknown host key", "log in once in a terminal: ssh {login}"),
    (r'Load key "(.*)": bad permissions', "ssh ignores the key {0}, which others may read", "chmod 600 {0}"),
    (r"Permission denied \((.*)\)", "login denied: {0}", "set up a key (passwords are not used): ssh-copy-id {login}"),
    (r"Could not resolve hostname [^:]*: (.*)", "unknown host name: {0}", "check the spelling, or use an address"),
    (
        r"connect to (?:host|address) .*: (.*)",
        "cannot be reached: {0}",
        "check that the host is up and its SSH server listens on this port",
    ),
    (r"Connection timed out", "cannot be reached: no response", "check that the host is up"),
    (
        r"Too many authentication failures",
        "login denied: too many keys were offered",
        "choose one: --option IdentityFile=...",
    ),
    (
        r"(Bad configuration option: .*|.*line \d+: .*)",
        "invalid ssh configuration: {0}",
        "fix --option or ~/.ssh/config",
    ),
    (
        r"kex_exchange_identification: (.*)",
        "the SSH server closed the connection: {0}",
        "its MaxStartups may be too low (sshd_config)",
    ),
)
"""Messages of ssh if it cannot connect: pattern, meaning, hint."""
_LOST = re.compile(r"Timeout, server .* not responding|closed by remote host|Connection reset|Broken pipe|disconnect")


def _describe_failure(connection: SshConnection, code: int) -> SshNodeFailure:
    connection.join_reader()
    # The reader was joined first, because the last lines of ssh give the reason.
    who = f"node {connection.rank} ({connection.label})"
    output = "\n".join(connection.tail)
    if code != SSH_FAILED:
        is_missing = code in (126, 127)
        hint = "if primus-cli has another path there, use --entry PATH or --python PATH" if is_missing else ""
        return _build_node_failure(
            connection, f"{who} failed with exit code {code}", hint, code if code > 0 else EXIT_FAILED
        )
    for pattern, meaning, hint in _REASONS:
        match = re.search(pattern, output)
        if match:
            problem = f"{who}: {meaning.format(*match.groups())}"
            return _build_node_failure(
                connection, problem, hint.format(*match.groups(), login=connection.login), EXIT_UNFIT
            )
    if _LOST.search(output):
        hint = "check that the host is up"
        return _build_node_failure(connection, f"{who}: the connection was lost", hint, EXIT_FAILED)
    killed = 128 + signal.SIGKILL
    return _build_node_failure(
        connection, f"{who}: its launcher was killed", "check the kernel log of the host for out-of-memory", killed
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
    """Print and record the end if no node could; gives the exit code, that of the run if the hosts share its folder."""
    codes = [connection.process.returncode for connection in connections]
    if signals.seen:
        cut = [connection.label for connection, code in zip(connections, codes, strict=True) if code < 0]
        if cut:
            print(f"primus-cli: {', '.join(cut)} did not stop in time; connections closed", file=sys.stderr)
        # A launcher's own exit code is preferred over 255, which ssh also gives for a connection that was closed on
        # purpose.
        code = next((code for code in codes if 0 < code != SSH_FAILED), 128 + signals.seen[0] if any(codes) else 0)
        return conclude_remote(run, before, code, signal.Signals(signals.seen[0]).name, state="interrupted")
    if failure is None:
        return conclude_remote(run, before, 0, "all hosts exited with code 0")
    # Hosts may not share the run folder; then nobody has printed the failure.
    is_reported = run is not None and before is not None and read_reported_outcome(run, before) is not None
    if not is_reported or connections[failure.rank].process.returncode == SSH_FAILED:  # else node 0 has printed it
        _print_failure(connections[failure.rank], failure)
    return conclude_remote(run, before, failure.exit_code, failure.problem, is_said=True)


def _print_failure(connection: SshConnection, failure: SshNodeFailure) -> None:
    print(f"primus-cli: {failure.problem}", file=sys.stderr)
    if failure.hint:
        print(f"  {failure.hint}", file=sys.stderr)
    if connection.log and connection.tail:
        print("".join(f"  | {line}\n" for line in connection.tail) + f"  log: {connection.log}", file=sys.stderr)


class _SshSignalHandler:
    """Records the signals to this process, in order, while the nodes run."""

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
