"""A training run that another task starts by the launcher, in the environment of its engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

FIRST_LINES = '{\n  "run"'
"""Beginning of the JSON of `train pretrain --json`."""


class ChildRun(NamedTuple):
    """How such a run ended."""

    printed: dict[str, Any]
    """Its result: the run folder and the outcome; empty if the run did not start."""
    errors: str
    exit_code: int


def train_in_child(file: Path, words: Sequence[str], environ: Mapping[str, str], nproc: int | None) -> ChildRun:
    """Train the experiment `file` with `words` as overrides, and wait for its end."""
    processes = ["--nproc", str(nproc)] if nproc else []
    command = [sys.executable, "-m", "primus", "direct", *processes, "--", "train", "pretrain", "--config", str(file)]
    done = subprocess.run(
        [*command, *words, "--json"],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        # After the lines of the training, which may contain braces.
        printed = msgspec.json.decode(done.stdout[max(0, done.stdout.rfind(FIRST_LINES)) :], type=dict[str, Any])
    except msgspec.MsgspecError:
        printed = {}
    return ChildRun(printed, done.stderr, done.returncode)
