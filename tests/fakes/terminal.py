"""A command in a terminal of its own, as a person sees it: keys are typed, and Ctrl-C reaches its foreground group."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CTRL_C = b"\x03"


class Terminal:
    """A process whose controlling terminal is a pty; what it shows is collected."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process = process
        self.shown = ""
        self._leader = leader

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._leader, keys)

    def wait_for(self, condition: str, timeout_s: float = 60) -> None:
        """Returns once the text `condition` was shown."""
        deadline = time.monotonic() + timeout_s
        while condition not in self.shown:
            assert time.monotonic() < deadline and self._read(), f"{condition!r} was not shown:\n{self.shown}"

    def ended(self, timeout_s: float = 60) -> int:
        """The exit code, once the process has ended; 128 + N where signal N ended it."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.shown}"
            self._read()
        while self._read(0.0):
            pass
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def _read(self, timeout_s: float = 0.2) -> bool:
        """Take in what is shown; whether there may be more."""
        if not select.select([self._leader], [], [], timeout_s)[0]:
            return timeout_s > 0 and self.process.poll() is None
        try:
            data = os.read(self._leader, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def opened(words: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Iterator[Terminal]:
    """Run `words` in a terminal; it is hung up in the end, and what is left of the command is killed."""
    leader, follower = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=dict(environ),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(follower)
    try:
        yield Terminal(process, leader)
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
        process.wait()
        os.close(leader)
