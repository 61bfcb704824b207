"""A training run that another task starts by the launcher, in the environment of its engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from primus.config.load import COMMANDS
from primus.config.schema import Stage
from primus.launch.signals import find_exit_code, raise_on_signals
from primus.process import end_program, set_parent_death_signal

FIRST_LINES = '{\n  "run"'
"""Beginning of the JSON of `train pretrain --json`."""


class ChildRun(NamedTuple):
    """How such a run ended."""

    printed: dict[str, Any]
    """Its result: the run folder and the outcome; empty if the run did not start."""
    errors: str
    exit_code: int
    interrupted_by: int | None = None
    """Signal to this process, which ended the run."""


def train_in_child(
    file: Path, words: Sequence[str], environ: Mapping[str, str], nproc: int | None, stage: Stage = "pre_trainer"
) -> ChildRun:
    """Train the experiment `file` with `words` as overrides, and wait for its end.

    A signal that asks this process to stop is passed on: the run saves what it has and ends; a second one kills it.
    """
    processes = ["--nproc", str(nproc)] if nproc else []
    task = COMMANDS[stage].split()
    command = [sys.executable, "-m", "primus", "direct", *processes, "--", *task, "--config", str(file)]
    child = subprocess.Popen(
        [*command, *words, "--json"],
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A terminal sends Ctrl-C to its whole process group; the run would take the second copy for a demand to be
        # killed.
        start_new_session=True,
        preexec_fn=set_parent_death_signal,
    )
    number = None
    with raise_on_signals():
        try:
            try:
                text, errors = child.communicate()
            except KeyboardInterrupt as interrupt:
                number = find_exit_code(interrupt) - 128
                child.send_signal(number)
                text, errors = child.communicate()
        finally:
            end_program(child)
    try:
        # After the lines of the training, which may contain braces.
        printed = msgspec.json.decode(text[max(0, text.rfind(FIRST_LINES)) :], type=dict[str, Any])
    except msgspec.MsgspecError:
        printed = {}
    return ChildRun(printed, errors, child.returncode, number)
