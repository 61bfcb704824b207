"""Ask a read-only program, within a time limit and without leaving a child behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct


class Answer(Struct, frozen=True, kw_only=True):
    """How a program answered."""

    state: Literal["ok", "missing", "failed", "slow"]
    """`slow` was ended at the limit."""
    text: str = ""
    """Standard output."""
    problem: str = ""
    """Why there is no good answer: the last line of standard error, or the exit code."""
    duration_s: float = 0.0


def output(argv: Sequence[str], timeout_s: float = 5.0, cwd: Path | None = None) -> str | None:
    """Standard output of a command without its last newline; None where it is missing, fails or takes too long."""
    answer = call(argv, limit_s=timeout_s, cwd=cwd)
    return answer.text.rstrip("\n") if answer.state == "ok" else None


def call(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, limit_s: float = 5.0, cwd: Path | None = None
) -> Answer:
    """What the program `argv` says; it and all that it started are killed at the limit, or when it has ended.

    Args:
        environ: Its environment, whose PATH finds it; None for that of this process.
    """
    program = shutil.which(argv[0], path=None if environ is None else environ.get("PATH", os.defpath))
    if program is None:
        return Answer(state="missing", problem=f"{argv[0]} is not installed")
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            [program, *argv[1:]],
            env=None if environ is None else dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(state="failed", problem=f"{argv[0]}: {error.strerror}")
    with child:
        try:
            text, complaint = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Answer(state="slow", problem=f"{argv[0]} gave no answer in {limit_s:g} s", duration_s=limit_s)
        finally:
            _kill_group(child)
    duration_s = time.monotonic() - began
    if not child.returncode:
        return Answer(state="ok", text=text, duration_s=duration_s)
    said = (complaint.strip() or text.strip()).rpartition("\n")[2]
    problem = said or f"{argv[0]} ended with exit code {child.returncode}"
    return Answer(state="failed", text=text, problem=problem[:200], duration_s=duration_s)


def _kill_group(child: subprocess.Popen[str]) -> None:
    """Kill the program with everything it started, and close its pipes, which a grandchild may hold."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
