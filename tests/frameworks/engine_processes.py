"""Processes of an engine that answer the requests of many tests: an engine takes seconds to import."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_python import build_command, engine_variables

TIME_LIMIT_S = 240
"""For the answer to one list of requests."""


class EngineProcesses:
    """Processes that train together, one for each rank; see `engine_service`.

    Args:
        engine: Whose interpreter runs them.
        script: Which they run.
        world: Number of processes.
    """

    def __init__(self, engine: str, script: Path, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"{engine}-processes-")
        store = Path(self._folder.name) / "store"
        self._logs = [Path(self._folder.name) / f"rank_{rank}.log" for rank in range(world)]
        self._processes = []
        for rank, log in enumerate(self._logs):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "STORE": store.as_uri()}
            with log.open("wb") as file:
                self._processes.append(
                    subprocess.Popen(
                        build_command(engine, script),
                        env=engine_variables(engine) | place,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        start_new_session=True,
                    )
                )

    def ask(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of requests; a process that fails or takes too long ends the test."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(json.dumps(requests).encode() + b"\n")
            process.stdin.flush()
        return list(json.loads(self._read_answers()[0]))

    def end(self) -> None:
        """End the processes and their forks; the end of their standard input ends them, too."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self._folder.cleanup()

    def _read_answers(self) -> list[bytes]:
        """A line of each process."""
        answers = dict.fromkeys(range(len(self._processes)), b"")
        deadline = time.monotonic() + TIME_LIMIT_S
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                assert ready, f"no answer in {TIME_LIMIT_S} s\n{self._read_logs()}"
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    assert part, f"rank {key.data} has ended\n{self._read_logs()}"
                    answers[key.data] += part
                    if part.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [answers[rank] for rank in sorted(answers)]

    def _read_logs(self) -> str:
        return "\n".join(log.read_text(errors="replace")[-6000:] for log in self._logs)


_processes: dict[tuple[str, int], EngineProcesses] = {}


def ask_engine(engine: str, script: Path, world: int, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of requests, by processes that are started for the first of them."""
    key = engine, world
    if key not in _processes:
        _processes[key] = EngineProcesses(engine, script, world)
    try:
        return _processes[key].ask(requests)
    except BaseException:
        _processes.pop(key).end()
        raise


@atexit.register
def end_processes() -> None:
    """End the processes of all engines."""
    while _processes:
        _processes.popitem()[1].end()
