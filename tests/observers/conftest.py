"""Runs that observers follow, made of events that the tests append."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from primus.launch import run_observers
from primus.launch.run_observers import observe_run
from primus.observer import OBSERVERS
from primus.plug_in_choice import choose_plug_ins
from primus.runs.events import EventLog
from primus.runs.store import Run, RunMetadata, create_run


class ObservedFolder:
    """A run folder whose events the chosen observers follow."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        self.run = run
        self.said: list[str] = []
        self._log = EventLog(run.events)
        self._stack = stack

    def observe(self, entries: Any, **environ: str) -> None:
        """Open the observers."""
        self._stack.enter_context(observe_run(choose_plug_ins(OBSERVERS, entries), self.run, environ, self.said.append))

    def start(self) -> None:
        """A run on two devices begins."""
        self.append("run_started", world_size=2, train_iters=300, backend="native", device="CPU", step=0)

    def step(self, number: int, **changes: Any) -> None:
        """A step ends."""
        values = {
            "loss": 8.25 - number / 4, "grad_norm": 5.96, "learning_rate": 1e-4, "tokens": 8192, "step_time_s": 0.25,
            "data_time_s": 0.001, "tokens_per_s": 32768.0, "tokens_per_s_per_device": 16384.0, "mfu": 0.4,
            "tflops_per_device": 120.5, "memory_gib": 1.5, "skipped": False,
        }  # fmt: skip
        self.append("step", step=number, **{**values, **changes})

    def append(self, kind: str, **fields: Any) -> None:
        self._log.append(kind, **fields)

    def close_log(self) -> None:
        self._log.close()

    def close(self) -> None:
        """The run ends, and the observers with it."""
        self._stack.close()


@pytest.fixture
def observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObservedFolder]:
    monkeypatch.setattr(run_observers, "INTERVAL_S", 0.02)
    monkeypatch.setenv("no_proxy", "*")
    run = create_run(
        tmp_path / "output/night/20260101_120000-ab12",
        RunMetadata(id="20260101_120000-ab12", name="night", task="train pretrain", created=0.0),
    )
    with ExitStack() as stack:
        found = ObservedFolder(run, stack)
        yield found
    found.close_log()
