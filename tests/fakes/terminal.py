"""A command in a terminal of its own, as a person sees it: keys are typed, and Ctrl-C reaches its foreground group."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fakes import cli
from primus.runs import events
from primus.runs.store import Run

CTRL_C = b"\x03"


class Terminal:
    """A process whose controlling terminal is a pty; what it shows is collected."""

    def __init__(self, process: subprocess.Popen[bytes], leader: int) -> None:
        self.process = process
        self.shown = ""
        self._leader = leader

    def tell(self, number: signal.Signals) -> None:
        """Press Ctrl-C, or send another signal to the command alone."""
        if number == signal.SIGINT:
            self.type(CTRL_C)
        else:
            os.kill(self.process.pid, number)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._leader, keys)

    def wait_for(self, condition: str, timeout_s: float = 60) -> None:
        """Returns once a text that matches the pattern `condition` was shown."""
        deadline = time.monotonic() + timeout_s
        while not re.search(condition, self.shown):
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


@contextlib.contextmanager
def training(*runtime: str, cwd: Path, experiment: str, **environ: str | None) -> Iterator[Terminal]:
    """`primus-cli RUNTIME -- train pretrain` of the experiment `e`, in a terminal, once it has made a step."""
    (cwd / "e.yaml").write_text(experiment)
    words = [sys.executable, "-m", "primus.cli.main", *runtime, "--", "train", "pretrain", "--config", "e.yaml"]
    with opened(words, cwd, cli.environment(**environ)) as terminal:
        terminal.wait_for(r"step +\d.*(?s:.)*━", 100)  # a short line above the bar, wherever the workers run
        yield terminal


def check_saved(terminal: Terminal, cwd: Path, number: signal.Signals) -> None:
    """The run has saved when it was told to stop, and its exit code and its reason are what the terminal shows."""
    code = terminal.ended()
    folder = next(cwd.glob("output/*/2*/metadata.json")).parent
    outcome = Run(folder).read_metadata().outcome
    saved = [
        event["step"] for event in events.read_events(folder / "events.jsonl") if event["kind"] == "checkpoint_saved"
    ]
    assert saved[-1] == events.read_steps(folder / "events.jsonl")[-1]["step"]
    assert (outcome.state, outcome.reason) == ("interrupted", f"{number.name}; saved at step {saved[-1]}")
    assert code == outcome.exit_code == 128 + number, terminal.shown
    assert f"primus-cli: run interrupted: {outcome.reason}" in terminal.shown
