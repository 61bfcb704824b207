"""Workers that do what --do says, for tests."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import PrimusError
from primus.plan import LaunchJob, Variable
from primus.runs.files import read_json, to_json
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.runs.attempt import Attempt

LIMIT_S = 30.0
"""Time after which a waiting worker ends whatever happens, so that no test leaves one behind."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `tiny`."""

    do: Positional = "end"
    """What the worker does: end, raise, refuse, exit, kill, wait, save or ignore."""
    rank: int | None = None
    """Only this rank does it; the others wait to be ended."""
    name: str = "tiny"
    """Name of the runs."""
    workspace: str = "out"
    """Folder that holds all run folders."""
    setting: str = ""
    """Part of the configuration."""
    variable: str | None = None
    """NAME=VALUE, as an experiment's `env:` would set it."""
    run: str | None = None
    """Run folder to continue."""


def prepare(options: Options, context: TaskContext) -> LaunchJob:
    """The job of `options`."""
    name, _, value = (options.variable or "").partition("=")
    return LaunchJob(
        name=options.name,
        workspace=options.workspace,
        files={"config/tiny.json": to_json(options)},
        env={name: Variable(value, "tiny.yaml:1")} if name else {},
        resume=options.run,
    )


def work(attempt: Attempt) -> None:
    """Do it."""
    options = read_json(attempt.run.directory / "config" / "tiny.json", Options)
    attempt.event("run_started", attempt=attempt.number)
    attempt.say(f"rank {attempt.rank} of {attempt.world_size} does {options.do}")
    attempt.beat("train", 1)
    print(f"variable {os.environ.get('SHOWN')}", flush=True)
    is_ours = options.rank in (None, attempt.rank)
    act = ACTIONS[options.do] if is_ours else _wait
    act(attempt)


def _end(attempt: Attempt) -> None:
    attempt.event("step", step=1, loss=2.5, tokens_per_s=10.0)


def _raise(attempt: Attempt) -> None:
    raise ValueError("three is not four")


def _refuse(attempt: Attempt) -> None:
    raise PrimusError("the data is gone", "bring it back")


def _exit(attempt: Attempt) -> None:
    sys.exit(7)


def _kill(attempt: Attempt) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wait(attempt: Attempt) -> None:
    """Until a signal, which ends it at once."""
    _until(lambda: attempt.stop_signal is not None)


def _save(attempt: Attempt) -> None:
    """Until a signal; then save and say so, as the trainer does."""
    _wait(attempt)
    attempt.event("checkpoint_saved", step=3)
    attempt.event("interrupted", signal=attempt.stop_signal, step=3)


def _ignore(attempt: Attempt) -> None:
    """Whatever comes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (attempt.folder / "deaf").touch()
    _until(lambda: False)


def _until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.01)


ACTIONS = {
    "end": _end,
    "raise": _raise,
    "refuse": _refuse,
    "exit": _exit,
    "kill": _kill,
    "wait": _wait,
    "save": _save,
    "ignore": _ignore,
}
