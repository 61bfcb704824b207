"""Files that hold the logs of runs: those of all ranks and attempts of a run belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from primus.errors import UsageError
from primus.training_logs.formats import run_events
from primus.training_logs.formats.tensorboard import MARK

PLAIN_SUFFIXES = (".log", ".txt", ".out", ".err")
SUFFIXES = tuple(f"{plain}{packed}" for packed in ("", ".gz", ".xz", ".bz2") for plain in PLAIN_SUFFIXES)
RANK = re.compile(r"(?:rank|node|worker|proc|gpu|host)[-_.]?(\d+)|(?<=/)(\d+)(?=/std(?:out|err)\.log$)")
"""Number of a rank in a path; torchrun writes `ATTEMPT/RANK/stdout.log`."""
ATTEMPT = re.compile(r"(?:attempt|restart|try)[-_.]?(\d+)|(?<=\.tfevents\.)(\d+)[^/]*")
STDIN = Path("/dev/stdin")
STREAM = re.compile(r"std(?:out|err)(?=\.log$)")


class RunLogFile(Struct, frozen=True):
    """A file with its place in the run."""

    path: Path
    rank: int | None
    attempt: int


class LogGroup(Struct, frozen=True):
    """The files of one run, by attempt and rank."""

    name: str
    files: tuple[RunLogFile, ...]


def find_logs(words: Sequence[str]) -> list[LogGroup]:
    """The logs that the words of a command name: files, each one a run, and folders.

    Raises:
        UsageError: A word names nothing, or a folder without logs.
    """
    groups: list[LogGroup] = []
    for word in words:
        path = STDIN if word == "-" else Path(word)
        if path.is_file() or path.is_fifo() or path == STDIN:
            groups.append(LogGroup(word, (RunLogFile(path, None, 0),)))
        elif path.is_dir():
            found = _group_files(path)
            if not found:
                raise UsageError(
                    f"{word}: the folder has no logs",
                    f"names of logs end with {', '.join(PLAIN_SUFFIXES)}, then .gz, .xz or .bz2; or name a file",
                )
            groups += found
        elif path.exists():
            raise UsageError(f"{word}: neither a file nor a folder", "`-` reads standard input")
        else:
            raise UsageError(f"{word}: no such file or folder")
    return groups


def _group_files(folder: Path) -> list[LogGroup]:
    groups: dict[str, list[RunLogFile]] = {}
    runs = []
    for path in _list_files(folder):
        if path.name == run_events.FILE:
            runs.append(LogGroup(str(path.parent), (RunLogFile(path, None, 0),)))
            continue
        text = f"/{path.relative_to(folder).as_posix()}"
        rank, attempt = _find_number(RANK, text), _find_number(ATTEMPT, text)
        key = STREAM.sub("*", ATTEMPT.sub("*", RANK.sub("*", text)))[1:]
        groups.setdefault(key, []).append(RunLogFile(path, rank, attempt or 0))
    return runs + [
        LogGroup(
            str(files[0].path if len(files) == 1 else folder / key),
            tuple(sorted(files, key=lambda file: (file.attempt, file.rank or 0, file.path))),
        )
        for key, files in sorted(groups.items())
    ]


def _list_files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        if run_events.is_run_folder(Path(place)):
            # Its logs say less than its events.
            folders.clear()
            yield Path(place, run_events.FILE)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not Path(place, name).is_symlink())
        for name in sorted(names):
            path = Path(place, name)
            is_log = name.endswith(SUFFIXES) or MARK in name
            # The newest log of each rank has a link next to the folders of the attempts.
            if is_log and not name.startswith(".") and not path.is_symlink():
                yield path


def _find_number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(next(group for group in found.groups() if group)) if found else None
