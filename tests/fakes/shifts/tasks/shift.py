"""Workers that count steps and save them, and meet with what --acts says in each attempt, for tests of supervision."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import PrimusError, UsageError
from primus.plan import LaunchJob
from primus.runs import events
from primus.runs.files import read_json, to_json
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt

LIMIT_S = 40.0
"""Time after which a worker ends whatever happens, so that no test leaves one behind."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `shift`."""

    acts: Positional = "none"
    """What happens in the attempts, with commas between: ACT@STEP, or none."""
    rank: int = 0
    """The rank that it happens to."""
    steps: int = 6
    """Steps in all."""
    save: int = 2
    """Steps between checkpoints."""
    step_s: float = 0.02
    """Time of a step."""
    run: str | None = None
    """Run folder to continue."""


def prepare(options: Options, context: TaskContext) -> LaunchJob:
    """The job of `options`."""
    return LaunchJob(
        name="shift",
        workspace="out",
        files={} if options.run else {"config/shift.json": to_json(options)},
        resume=options.run,
    )


def work(attempt: Attempt) -> None:
    """Count on from the newest checkpoint."""
    options = read_json(attempt.run.directory / "config" / "shift.json", Options)
    begin, deadline = _saved(attempt), time.monotonic() + LIMIT_S
    acts = options.acts.split(",")
    act, _, at = (acts[attempt.number] if attempt.number < len(acts) else "none").partition("@")
    attempt.event("run_started", attempt=attempt.number)
    for step in range(begin + 1, options.steps + 1):
        is_slow = act == "slow" and attempt.rank == options.rank
        attempt.beat("train", step - 1, {"step_time_s": options.step_s, "compute_time_s": 0.02 if is_slow else 0.01})
        if act not in ("none", "slow") and attempt.rank == options.rank and step == int(at):
            _meet(act, attempt, deadline)
        if attempt.stop_signal:
            attempt.event("checkpoint_saved", step=step - 1)
            attempt.event("interrupted", signal=attempt.stop_signal, step=step - 1)
            return
        assert time.monotonic() < deadline, "the test's limit"
        time.sleep(options.step_s)
        attempt.event("step", step=step, loss=1 / step)
        if step % options.save == 0:
            attempt.event("checkpoint_saved", step=step)
    attempt.beat("train", options.steps)


def _saved(attempt: Attempt) -> int:
    return max(
        (each["step"] for each in events.read_events(attempt.run.events) if each["kind"] == "checkpoint_saved"),
        default=0,
    )


def _meet(act: str, attempt: Attempt, deadline: float) -> None:
    if act == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif act == "raise":
        raise PrimusError("three is not four")
    elif act == "refuse":
        raise UsageError("nobody can do that")
    elif act == "exit":
        sys.exit(7)
    elif act == "sleep":
        while time.monotonic() < deadline:
            time.sleep(0.05)
    elif act == "usr1":
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    elif act == "fill":
        with (attempt.folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1024))
        os.kill(os.getpid(), signal.SIGKILL)
    elif act == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
