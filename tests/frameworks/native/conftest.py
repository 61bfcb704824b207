"""Runs of the native backend: a folder made by hand, trained in this process or by workers that can be killed."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes import cli
from fakes.forked_worker import ForkedWorker
from fakes.training_runs import write_training_run
from primus import experiment
from primus.frameworks import native
from primus.runs import events
from primus.runs.attempt import Attempt
from primus.runs.store import Run

DEADLINE_S = 90.0
SETTINGS: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 32,
    "train_iters": 8,
    "micro_batch_size": 2,
    "bf16": False,
    "lr": 1e-2,
    "compile": False,
    "disable_tensorboard": True,
}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """``make_run("name", lr=1e-3, ...)`` is a run folder of the model `tiny` as the launcher leaves it to workers."""
    return partial(write_training_run, tmp_path, SETTINGS)


@pytest.fixture
def train() -> Callable[..., Attempt]:
    """``train(run)`` trains a run to its end in this process."""

    def train_run(run: Run, number: int = 0, stop: str | None = None) -> Attempt:
        attempt = Attempt(run, number)
        attempt.stop_signal = stop
        try:
            native.train(experiment.read_run_experiment(run), attempt)
        finally:
            attempt.close()
        return attempt

    return train_run


class Workers:
    """The processes of one attempt, with the variables that torchrun gives them."""

    def __init__(self, run: Run, world: int = 1, number: int = 0, limit_bytes: int | None = None, **env: str) -> None:
        self.run, self.world, self.number = run, world, number
        shared = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", **env}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(cli.find_free_port())}
        argv = [str(run.directory), str(number)]
        self.processes = [
            ForkedWorker(argv, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, rank == 0)
            for rank in range(world)
        ]
        if limit_bytes is not None:
            for process in self.processes:
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    def wait(self) -> list[int]:
        """Exit codes by rank, once all have ended."""
        return [process.wait(DEADLINE_S) for process in self.processes]

    def succeed(self) -> str:
        """What rank 0 said to people; fails the test where a worker failed."""
        said, _ = self.processes[0].communicate(timeout=DEADLINE_S)
        assert self.wait() == [0] * self.world, self.log(0)
        return said

    def wait_for_step(self, step: int) -> None:
        """Return once a step is recorded in this attempt."""
        self.wait_for_event("step", step)

    def wait_for_event(self, kind: str, step: int = 0) -> None:
        """Return once this attempt has recorded an event of a kind at `step` or later."""
        self._wait_until(lambda: any(event["step"] >= step for event in attempt_events(self.run, self.number, kind)))

    def wait_for_checkpoint(self, step: int) -> None:
        """Return once the checkpoint of a step is complete."""
        self._wait_until(lambda: (self.run.checkpoints / f"step_{step:08d}" / "manifest.json").exists())

    def send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def log(self, rank: int) -> str:
        return (self.run.attempt_folder(self.number) / f"rank_{rank}.log").read_text()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
            process.stdout.close()

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, self.log(0)
            assert all(process.poll() is None for process in self.processes), self.log(0)
            time.sleep(0.01)


@pytest.fixture
def start_workers() -> Iterator[Callable[..., Workers]]:
    """``start_workers(run, world=2)`` starts the workers of an attempt; what still runs at the end is killed."""
    started: list[Workers] = []

    def start(run: Run, **options: Any) -> Workers:
        started.append(Workers(run, **options))
        return started[-1]

    yield start
    for workers in started:
        workers.close()


def attempt_events(run: Run, number: int, kind: str) -> list[events.Event]:
    """Events of a kind that one attempt recorded."""
    found, current = [], -1
    for event in events.read_events(run.events):
        current = event["attempt"] if event["kind"] == "run_started" else current
        if current == number and event["kind"] == kind:
            found.append(event)
    return found
