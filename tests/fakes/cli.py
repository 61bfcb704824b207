"""The real command as a process of its own, with the plug-ins of tests/fakes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import primus

PLUGINS = Path(__file__).parent / "plugins"
SOURCE = Path(primus.__file__).parents[1]


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with the plug-ins and `changes`; None takes a variable away."""
    env = dict(os.environ)
    env |= {"PYTHONPATH": str(SOURCE), "PRIMUS_PLUGINS": str(PLUGINS), "PYTHONWARNINGS": "default"}
    return {name: value for name, value in (env | changes).items() if value is not None}


def run(
    *words: str, cwd: Path, timeout_s: float = 40, before: str = "", **env: str | None
) -> subprocess.CompletedProcess[str]:
    """The command until its end."""
    with started(*words, cwd=cwd, before=before, **env) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@contextmanager
def started(*words: str, cwd: Path, before: str = "", **env: str | None) -> Iterator[subprocess.Popen[str]]:
    """The command, ended with everything that it started if it is still there at the end.

    Args:
        words: What is typed.
        cwd: Where it runs.
        before: Python that its process executes first, such as a shorter time limit.
        env: Changes of the environment.
    """
    script = f"import sys\n{before}\nfrom primus.cli.main import main\nsys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_default_signals,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()


def _default_signals() -> None:
    """Signals as a terminal gives them, however the tests themselves were started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def find_free_port() -> int:
    """A port of the loopback interface that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Returns once `condition` holds; fails when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
