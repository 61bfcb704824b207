"""Ranks of native runs, each forked from the server of `fakes.gloo`.

An interpreter that imports torch takes more CPU time than the training of a test. tests/launch starts ranks as users
do.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import selectors
import signal
import subprocess
import time
from multiprocessing.connection import Connection

from fakes import gloo as gloo  # names what the server imports


class ForkedWorker:
    """One rank, with the part of `subprocess.Popen` that tests use.

    Args:
        argv: Words behind `python -m primus.worker`.
        env: All its variables.
        is_heard: Whether its standard output is kept for `communicate`.
    """

    def __init__(self, argv: list[str], env: dict[str, str], is_heard: bool) -> None:
        self.stdout, writer = multiprocessing.Pipe(duplex=False)
        forks = multiprocessing.get_context("forkserver")
        self._process = forks.Process(target=_run_rank, args=(argv, env, writer if is_heard else None))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        writer.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("primus.worker", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """What it says until its end."""
        deadline, said = time.monotonic() + timeout, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout.fileno(), selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise subprocess.TimeoutExpired("primus.worker", timeout, said)
                part = os.read(self.stdout.fileno(), 1 << 16)
                if not part:
                    break
                said += part
        self.wait(max(0.0, deadline - time.monotonic()))
        return said.decode(), None

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run_rank(argv: list[str], env: dict[str, str], output: Connection | None) -> None:
    """What `python -m primus.worker` does."""
    os.environ.clear()
    os.environ.update(env)
    silent = os.open(os.devnull, os.O_RDWR)
    os.dup2(output.fileno() if output else silent, 1)
    os.dup2(silent, 2)
    os.close(silent)
    if output:
        output.close()

    from primus import worker
    from primus.process import run_until_end

    try:
        run_until_end(lambda: worker.main(argv, os.environ))
    except SystemExit:
        atexit._run_exitfuncs()  # multiprocessing calls none; the first of run_until_end exits
