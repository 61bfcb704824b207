"""A task that tells what is seen inside a container, and values that a shell would mangle."""

from __future__ import annotations

import json
from pathlib import Path

SEE = '''"""Tell what is seen inside, and wait for a signal where that is asked for."""

import json
import os
import pathlib
import signal
import socket
import time
from typing import Annotated

from msgspec import Meta, Struct


class Options(Struct, kw_only=True):
    """Options of `see`."""

    words: Annotated[tuple[str, ...], Meta(extra={"positional": True})] = ()
    """Whatever."""
    code: int = 0
    """Exit code."""
    waits: bool = False
    """Wait for SIGTERM, and end with exit code 9."""


def run(options, context):
    """See."""
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    limits = pathlib.Path("/proc/self/limits").read_text()
    seen = {"words": options.words, "env": dict(os.environ), "host": socket.gethostname(), "cwd": os.getcwd()}
    seen["limits"] = limits
    pathlib.Path("seen.json").write_text(json.dumps(seen))
    while options.waits and not heard:
        time.sleep(0.05)
    if heard:
        time.sleep(0.5)  # a second one would come at once
        pathlib.Path("heard").write_text(str(heard))
    return 9 if heard else options.code
'''

EXPERIMENT = """\
modules:
  pre_trainer:
    framework: native
    model: tiny
    overrides:
      {mock_data: true, seq_length: 16, train_iters: 5, micro_batch_size: 1, global_batch_size: 1, bf16: false,
       compile: false}
"""
"""A few seconds on a processor."""

HOSTILE = ["a b", "$(touch /tmp/x)", "`id`", "'\"", "a,B=c", "line\nbreak", "*", "\\", "é €", "", "x" * 100_000]


def seen(cwd: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((cwd / "seen.json").read_text())
    return found


def started_inside(folder: Path) -> bool:
    return (folder / "seen.json").exists() and (folder / "seen.json").stat().st_size > 0
