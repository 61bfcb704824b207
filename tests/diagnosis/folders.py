"""Run folders and logs of failed attempts as workers and launchers write them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primus.runs import store
from primus.runs.store import RankFailure, Run, RunMetadata, RunOutcome, State

BEGAN = time.mktime((2026, 1, 10, 12, 0, 0, -1, -1, -1))
PROGRESS = "step {step}  loss 9.{step:03}  grad_norm 1.2  12,000 tokens/s"


def make(folder: Path, state: State = "failed", attempts: int = 1) -> Run:
    """A run whose launcher has begun `attempts` attempts, ten minutes apart."""
    outcome = RunOutcome(state=state, exit_code=1 if state == "failed" else None, reason="bang")
    metadata = RunMetadata(
        id="20260110_120000-abcd",
        name="night",
        task="train pretrain",
        created=BEGAN,
        started=BEGAN,
        attempts=attempts,
        outcome=outcome,
    )
    run = store.create_run(folder / "night" / "20260110_120000-abcd", metadata)
    (run.directory / "logs").mkdir()
    for number in range(attempts):
        run.attempt_folder(number).mkdir()
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 600 * number))
        say(run, f"[{began}] attempt {number} on node0", "torchrun --nproc 2")
    return run


def say(run: Run, *lines: str, log: str = "launch.log") -> None:
    """Add lines to a log of the launcher."""
    path = run.directory / "logs" / log
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(line + "\n" for line in lines)


def rank(run: Run, number: int, *lines: str, attempt: int = 0, steps: int = 3) -> None:
    """The log of a rank: some steps, then `lines`."""
    done = [PROGRESS.format(step=step) for step in range(1, steps + 1)]
    (run.attempt_folder(attempt) / f"rank_{number}.log").write_text("\n".join([*done, *lines, ""]))


def error(run: Run, number: int, problem: str, after_s: float, attempt: int = 0, **fields: Any) -> None:
    """What a rank says that it failed of, so long after the beginning of the attempt."""
    at = BEGAN + 600 * attempt + after_s
    fields = {"host": f"node{number // 2}", "exit_code": 1} | fields
    failure = RankFailure(
        rank=number, time=at, problem=problem, log=f"logs/attempt_{attempt}/rank_{number}.log", **fields
    )
    path = run.attempt_folder(attempt) / f"rank_{number}.error.json"
    path.write_bytes(json.dumps({name: getattr(failure, name) for name in failure.__struct_fields__}).encode())


def beat(run: Run, number: int, phase: str, after_s: float, host: str = "", attempt: int = 0) -> None:
    """The last heartbeat of a rank."""
    at = BEGAN + 600 * attempt + after_s
    value = {"pid": 1, "host": host or f"node{number // 2}", "time": at, "phase": phase, "step": 3, "progress_time": at}
    (run.attempt_folder(attempt) / f"rank_{number}.heartbeat.json").write_text(json.dumps(value))


def names(causes: Sequence[Any]) -> list[str]:
    return [cause.signature for cause in causes]
