"""Folders of finished runs whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primus.runs.files import to_json, write_json, write_text
from primus.runs.store import Run, RunMetadata, RunOutcome

START = 1_700_000_000.0


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run]:
    """``make_run(steps, ...)`` is a finished run with a step for each (seconds, of which waiting for data)."""

    def make(
        steps: list[tuple[float, float]],
        *,
        started: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        name: str = "20231114_221320-0000",
        after: list[dict[str, Any]] = [],  # noqa: B006 - read only
        **numbers: Any,
    ) -> Run:
        run = Run(tmp_path / name)
        time = START + 10
        recorded: list[dict[str, Any]] = [{"time": time, "kind": "run_started", "step": 0, **(started or {})}]
        for number, (seconds, waiting) in enumerate(steps, start=1):
            time += seconds
            rate = {"tokens": 1000, "tokens_per_s": 1000 / seconds, "tokens_per_s_per_device": 1000 / seconds}
            times = {"step_time_s": seconds, "data_time_s": waiting, "loss": 5.0 - number / 100}
            recorded.append({"time": time, "kind": "step", "step": number, **rate, **times, **numbers})
        recorded += [{"time": time, **event} for event in after]
        write_text(run.events, "".join(f"{to_json(event)}\n".replace("\n", "") + "\n" for event in recorded))
        ended = time + sum(event.get("time_s", 0) for event in after)
        metadata = RunMetadata(
            id=run.id, name="test", task="train pretrain", created=START, started=START, ended=ended,
            outcome=RunOutcome(state="done", exit_code=0),
        )  # fmt: skip
        write_json(run.directory / "metadata.json", metadata)
        module = {"framework": "native", "model": "tiny", "overrides": settings or {}}
        write_text(run.config, to_json({"exp_name": "test", "modules": {"pre_trainer": module}}))
        return run

    return make
