"""Run one script of a hook or patch in its own session, with a time limit, and log its output without secrets.

A script sets something by lines on its standard output, as in AMD-AGI/Primus:

    env.NAME=VALUE            a variable for the workers
    extra.dotted.name=VALUE   a setting of the experiment

Everything else, and all of standard error, goes to its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from msgspec import Struct

from primus import process, redaction

LOG_LIMIT_BYTES = 8 * 2**20
LINE_LIMIT_BYTES = 64 * 2**10
LONGEST_SECRET_BYTES = 4 * 2**10
"""Bytes that are read beyond the limit of a line, so that redaction sees a secret at the limit as a whole."""
TAIL_LINES = 10
POLL_S = 0.05
GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
DRAIN_S = 0.5
"""Time to read the remaining output of a script that has exited: a daemon that left its session may hold the pipe open,
so that end of file may never come."""

MARK = "PRIMUS_SCRIPT"
"""Variable with a value unique to one script: it finds processes of the script that have left its session."""

ENV_LINE = re.compile(r"env\.([A-Za-z_][A-Za-z0-9_]*)=(.*)")
EXTRA_LINE = re.compile(r"extra\.([A-Za-z_](?:[A-Za-z0-9_.]*[A-Za-z0-9_])?)=(.*)")


class ScriptResult(Struct, frozen=True, kw_only=True):
    """Result and settings of a script."""

    exit_code: int | None = None
    """None if a signal ended it."""
    problem: str = ""
    """``exit code 3``, ``it was not over after 600 s``; empty on success."""
    signal: int | None = None
    """Signal to the launcher that ended it."""
    env: dict[str, str] = {}
    extra: dict[str, str] = {}
    tail: tuple[str, ...] = ()
    """Last lines of its output, secrets redacted."""


class ScriptLog:
    """The log of one script: redacted, and limited in size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left_bytes = LOG_LIMIT_BYTES
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)

    def append_line(self, line: bytes) -> None:
        """Append a line of the script; beyond the size limit only the tail is kept, in memory."""
        # Kept even beyond the limit: the last lines usually contain the error.
        self._tail.append(line)
        if self._left_bytes > 0:
            data = self._format_line(line).encode() + b"\n"
            # The write that crosses the limit is replaced by the note; later lines do not get here.
            self._left_bytes -= len(data)
            self._file.write(data if self._left_bytes > 0 else b"[further output is not logged]\n")

    def append_note(self, text: str) -> None:
        """Append a line of the launcher itself."""
        self._file.write(
            f"[{redaction.redact_log_text(text, assigned_only=True)}]\n".encode("utf-8", "backslashreplace")
        )

    def tail(self) -> tuple[str, ...]:
        """Last lines of the script."""
        return tuple(map(self._format_line, self._tail))

    def _format_line(self, line: bytes) -> str:
        text = line.decode("utf-8", "backslashreplace")
        return redaction.redact_log_text(text, assigned_only=True)[:LINE_LIMIT_BYTES]


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    file: Path,
    *,
    reads_settings: bool = True,
    interrupted: Callable[[], int | None] = lambda: None,
) -> ScriptResult:
    """Run a script until its end, its time limit or a signal to the launcher.

    All its processes are stopped with it. After a success, processes that left its session keep running (daemons).

    Args:
        argv: The command.
        environ: Its whole environment.
        timeout_s: Time limit in seconds.
        file: Log to append to.
        reads_settings: Whether lines of its standard output may set variables or settings.
        interrupted: Returns the signal that asked the launcher to stop; None if there was none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as handle:
        log = ScriptLog(handle)
        log.append_note(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(redaction.redact_args(argv))}")
        started = time.monotonic()
        output = _ScriptOutput(log, reads_settings=reads_settings)
        # Unique among all scripts on this node, because it decides which processes are killed.
        mark = f"{os.getpid()}.{time.time_ns()}"
        # The order matters: the shell outlives the cleanup, so that a launcher killed during it leaves no process.
        with contextlib.ExitStack() as stack:
            try:
                child = stack.enter_context(_start_script(argv, {**environ, MARK: mark}))
            except OSError as error:
                return ScriptResult(problem=f"{argv[0]} cannot be started: {error.strerror}")
            try:
                stopped, heard = _follow_output(child, output, timeout_s, interrupted)
            finally:
                # After a success only the session is stopped: a daemon that a hook has started deliberately may keep
                # running.
                process.end_program(child, GRACE_S, mark="" if child.poll() == 0 else f"{MARK}={mark}")
                # After all writers were stopped, because the pipe then reaches its end.
                output.drain(child)
        problem = stopped or _describe_exit_code(child.returncode)
        log.append_note(f"{problem or 'exit code 0'}, {time.monotonic() - started:.1f} s")
    code = None if stopped or child.returncode < 0 else child.returncode
    return ScriptResult(
        exit_code=code, problem=problem, signal=heard, env=output.env, extra=output.extra, tail=log.tail()
    )


@contextlib.contextmanager
def _start_script(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a script whose process group a shell kills when this process dies, even by SIGKILL."""
    shell = ["sh", "-c", 'read -r group && { read -r word || kill -s KILL -- "-$group"; }']
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(shell, stdin=pipe, stdout=null, stderr=null, start_new_session=True) as watcher:
        assert watcher.stdin
        told = watcher.stdin.fileno()

        def announce_group() -> None:
            os.write(told, b"%d\n" % os.getpid())

        try:
            # Announced before the script's first instruction: it never runs unwatched.
            yield subprocess.Popen(
                argv,
                env=dict(environ),
                stdin=null,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=announce_group,
            )
        finally:
            # A second line tells the shell that the script was stopped in order. Only end of file without it makes the
            # shell kill.
            watcher.communicate(b"over\n")


def _follow_output(
    child: subprocess.Popen[bytes], output: _ScriptOutput, timeout_s: float, interrupted: Callable[[], int | None]
) -> tuple[str, int | None]:
    """Read output until the child ends or must be stopped; gives the reason for a stop, and the signal behind it."""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for stream in (child.stdout, child.stderr):
            assert stream
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while child.poll() is None:
            # Checked on every round, which lasts POLL_S at most, so that a silent script cannot delay a time limit or a
            # signal.
            if time.monotonic() > deadline:
                return f"it was not over after {timeout_s:g} s", None
            heard = interrupted()
            if heard is not None:
                return f"interrupted by {signal.Signals(heard).name}", heard
            # Both pipes are closed but the script is alive: only its exit remains to wait for.
            if not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
                continue
            for key, _ in selector.select(POLL_S):
                if not output.read(key.fileobj, is_stdout=key.fileobj is child.stdout):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
    return "", None


def _describe_exit_code(returncode: int) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit code {returncode}" if returncode else ""


class _ScriptOutput:
    """Lines of both streams: settings are collected, and every line is logged."""

    def __init__(self, log: ScriptLog, *, reads_settings: bool) -> None:
        self.env: dict[str, str] = {}
        self.extra: dict[str, str] = {}
        self._log = log
        self._speaks = reads_settings
        self._begun = {True: b"", False: b""}

    def read(self, stream: IO[bytes], *, is_stdout: bool) -> bool:
        """Read what is available; False at the end of the stream."""
        try:
            data = os.read(stream.fileno(), 2**16)
        except BlockingIOError:
            return True
        *lines, rest = (self._begun[is_stdout] + data).split(b"\n")
        for line in lines:
            self._take_line(line, is_stdout=is_stdout)
        # Bounds the memory for a line without end. A few bytes beyond the limit stay, so that a secret at the limit is
        # still recognized as a whole.
        self._begun[is_stdout] = rest[: LINE_LIMIT_BYTES + LONGEST_SECRET_BYTES]
        return bool(data)

    def drain(self, child: subprocess.Popen[bytes]) -> None:
        """Read the rest of the pipes after the child has ended, and the last incomplete lines."""
        deadline = time.monotonic() + DRAIN_S
        for stream, is_stdout in ((child.stdout, True), (child.stderr, False)):
            assert stream
            os.set_blocking(stream.fileno(), False)
            # A daemon that inherited the pipe may write forever, so the deadline bounds the loop.
            while time.monotonic() < deadline and _has_data(stream) and self.read(stream, is_stdout=is_stdout):
                pass
            stream.close()
            if self._begun[is_stdout]:
                self._take_line(self._begun[is_stdout], is_stdout=is_stdout)

    def _take_line(self, data: bytes, *, is_stdout: bool) -> None:
        line = data.rstrip(b"\r")
        is_order = is_stdout and self._speaks and line.startswith((b"env.", b"extra."))
        if is_order:
            is_understood = self._take_setting(line)
        self._log.append_line(line)
        if is_order and not is_understood:
            self._log.append_note("the line above sets nothing: expected env.NAME=VALUE or extra.name=VALUE")

    def _take_setting(self, line: bytes) -> bool:
        """Record the setting of a line; False if the line is malformed."""
        try:
            text = line.decode()
        except UnicodeDecodeError:
            return False
        env, extra = ENV_LINE.fullmatch(text), EXTRA_LINE.fullmatch(text)
        if "\0" in text or len(line) > LINE_LIMIT_BYTES:
            return False
        if env:
            self.env[env[1]] = env[2]
            # Before the line is logged: the value of a secret variable must be masked in the line that sets it.
            redaction.learn({env[1]: env[2]})
        if extra:
            self.extra[extra[1]] = extra[2]
        return bool(env or extra)


def _has_data(stream: IO[bytes]) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(0))
