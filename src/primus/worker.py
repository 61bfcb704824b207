"""`python -m primus.worker RUN_DIR ATTEMPT`: one rank of a run, one process per device.

The launcher, or the elastic agent, starts it and reads its exit code; the launcher also reads its heartbeats and error
file. The order in `main` matters: output goes to the rank's log before the task is imported, which may print; signals
are handled before the task starts; the last heartbeat, of the phase `exit`, follows the error file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from primus import patch, registry
from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError
from primus.experiment import read_run_experiment
from primus.interpreter import exclude_working_folder_of_children
from primus.process import run_until_end
from primus.redaction import learn, redacting
from primus.runs.attempt import Attempt, RankPlace, forget_stacks, write_stacks_when_asked
from primus.runs.files import read_json
from primus.runs.store import Run
from primus.runtime import LaunchRequest
from primus.task import TASKS

PEERS_S = 0.3
"""Delay before a failed rank exits. When a rank is killed, its peers fail within milliseconds. The agent polls every
0.1 s, so it sees the killed rank end before its peers."""


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run this rank; gives the exit code. All output goes to the rank's log."""
    learn(environ)  # secrets, before the first line of output
    run, number = Run(Path(argv[0])), int(argv[1])
    rank = int(environ.get("RANK", "0"))
    place = RankPlace(rank, int(environ.get("LOCAL_RANK", "0")), int(environ.get("WORLD_SIZE", "1")))
    # The log is open before the first import of user code, so that every message of a plug-in is in it.
    console = _redirect_output(run.attempt_folder(number) / f"rank_{rank}.log")
    # Before the first heartbeat, from which the launcher knows the process id: by default SIGUSR2 ends a process.
    write_stacks_when_asked(run.attempt_folder(number), rank)
    attempt = Attempt(run, number, place, console, handles_signals=True)
    exclude_working_folder_of_children()  # data loaders start child processes
    try:
        request = read_json(run.directory / "request.json", LaunchRequest)
        _apply_patches(attempt, environ)
        registry.load_plug_in(TASKS, request.task).work(attempt)
    except PrimusError as error:
        print(error, file=sys.stderr)
        attempt.record_failure(error, error.exit_code)
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        # Before the delay below, so that the file is complete when the launcher sees the rank end.
        attempt.record_failure(error, EXIT_FAILED)
        if place.world_size > 1:
            time.sleep(PEERS_S)
        return EXIT_FAILED
    finally:
        attempt.close()
        forget_stacks(attempt.folder, rank)
        with contextlib.suppress(OSError):  # the reader of the console has exited
            console.close()
    return EXIT_OK


def _apply_patches(attempt: Attempt, environ: Mapping[str, str]) -> None:
    """Apply the patches of upstream packages, and record them.

    Raises:
        PrimusError: One of them failed.
    """
    applied = []
    for choice in patch.choose_patches(environ, lambda: _find_backend(attempt.run, environ)):
        if not choice.applies:
            continue
        patch.apply_patch(choice)
        what = choice.patch
        late = f"; it expired on {what.expires}: check whether it is still needed" if choice.state == "expired" else ""
        print(f"patch {choice.name}: {what.target} {choice.installed}: {what.reason} ({what.link}){late}", flush=True)
        applied.append({"name": choice.name, "target": what.target, "version": choice.installed, "state": choice.state})
    if applied:
        attempt.event("patches", applied=applied)


def _find_backend(run: Run, environ: Mapping[str, str]) -> str:
    """Backend of the run's experiment; empty if the task trains nothing, so that it imports no engine to patch it."""
    return read_run_experiment(run, environ).trainer.framework if run.config.is_file() else ""


def _redirect_output(log: Path) -> TextIO:
    """Redirect standard output and error of this process, C libraries included, to `log`; gives the original output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    console = redacting(os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace"))
    # O_APPEND: a restarted attempt and child processes write to the same file without overwriting each other.
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # text in the buffer belongs to the console
        os.dup2(file, stream.fileno())
    os.close(file)
    sys.stdout, sys.stderr = redacting(sys.stdout), redacting(sys.stderr)
    return console


if __name__ == "__main__":
    run_until_end(lambda: main(sys.argv[1:], os.environ))
