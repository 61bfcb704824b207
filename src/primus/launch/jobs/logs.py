"""Print the logs of a job: existing content, and with follow new lines until the job ends."""

from __future__ import annotations

import glob
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from primus.launch.jobs.job_states import JobWatch
from primus.runtime import JobState, Submission

POLL_S = 0.3


def list_log_files(submission: Submission, rank: int | None = None) -> list[Path]:
    """The existing logs of the job, or the log of one rank.

    Relative patterns are resolved in the run folder.
    """
    if rank is not None:
        path = Path(submission.directory) / "logs" / f"rank_{rank}.log"
        return [path] if path.is_file() else []
    root = glob.escape(submission.directory)
    found = [name for pattern in submission.logs for name in glob.glob(os.path.join(root, pattern), recursive=True)]
    return [Path(name) for name in sorted(dict.fromkeys(found)) if os.path.isfile(name)]


def print_logs(paths: Sequence[Path], tail: int | None, out: TextIO) -> None:
    """Print all of each log or its last `tail` lines; several logs get headings with their names."""
    for path in paths:
        if len(paths) > 1:
            out.write(f"==> {path} <==\n")
        with path.open(encoding="utf-8", errors="replace") as lines:
            out.writelines(lines if tail is None else deque(lines, tail))
    out.flush()


def follow_logs(
    submission: Submission,
    environ: Mapping[str, str],
    out: TextIO,
    say: Callable[[str], None],
    *,
    tail: int | None = None,
    rank: int | None = None,
) -> JobState:
    """Print the job's logs as they grow, until it ends; gives its final state."""
    watch = JobWatch(submission, environ, say)
    reader = _LogPrinter(out, tail)
    next_look = 0.0
    is_over = False
    while True:
        if time.monotonic() >= next_look:
            # Polled before the logs are read: lines that arrive before the end are then read in this round.
            is_over = watch.poll_state()
            next_look = time.monotonic() + watch.pause_s
        reader.print_new_lines(list_log_files(submission, rank))
        if is_over:
            return watch.state
        time.sleep(POLL_S)


class _LogPrinter:
    """Prints what was appended to files since the last call; a restart may give a rank another log file."""

    def __init__(self, out: TextIO, tail: int | None) -> None:
        self._out = out
        self._tail = tail
        self._at: dict[tuple[int, int], int] = {}
        self._named: Path | None = None

    def print_new_lines(self, paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("rb") as file:
                self._print_file(path, file, len(paths) > 1)
        # Only the first call shortens logs; files that appear later are new, and printed whole.
        self._tail = None

    def _print_file(self, path: Path, file: BinaryIO, is_one_of_several: bool) -> None:
        facts = os.fstat(file.fileno())
        # By inode, not by name: after a restart the name may lead to another file, whose lines are all new.
        key = (facts.st_dev, facts.st_ino)
        if key not in self._at and self._tail is not None:
            self._at[key] = _last_lines(file, self._tail)
        file.seek(self._at.get(key, 0))
        text = file.read()
        self._at[key] = file.tell()
        if not text:
            return
        if is_one_of_several and self._named != path:
            self._out.write(f"==> {path} <==\n")
            self._named = path
        self._out.write(text.decode(errors="replace"))
        self._out.flush()


def _last_lines(file: BinaryIO, count: int) -> int:
    """Offset of the last `count` lines of a file."""
    begins: deque[int] = deque([0], count + 1)
    for line in file:
        begins.append(begins[-1] + len(line))
    return begins[0] if count else begins[-1]
