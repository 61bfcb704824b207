"""Traces of a run, or files and folders of traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from primus.errors import UsageError
from primus.runs import events, store
from primus.runs.store import Run

SUFFIXES = (".json", ".json.gz", ".trace", ".trace.gz")
_HINT = "record one with train --profile steps=5:8"


def find_run_traces(run: Run) -> list[Path]:
    """Traces of the newest profile of a run, by rank; none if it recorded none."""
    named = [event.get("files") for event in events.read_events(run.events) if event["kind"] == "profile"]
    newest = [run.directory / file for file in (named[-1] if named else None) or ()]
    found = [file for file in newest if file.name.endswith(SUFFIXES) and file.is_file()]
    if found:
        return found
    # The event is written when all ranks have written: a run that was killed in between has files only.
    folders = sorted((run.directory / "profiles").glob("attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
    return _list_folder(folders[-1]) if folders else []


def find_traces(words: Sequence[str], workspace: Path) -> list[Path]:
    """The files that the words of a command name: files, folders, and runs by folder, id or experiment.

    Raises:
        UsageError: A word names nothing, or a run or folder without traces.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_file():
            found.append(path)
            continue
        if word.endswith(SUFFIXES) and not path.exists():
            raise UsageError(f"{word}: file not found", _HINT)
        if path.is_dir() and not (path / "metadata.json").is_file():
            files = _list_folder(path)
            what = f"{word}: the folder has no traces ({', '.join(SUFFIXES)})"
        else:
            run = store.find_run(word, workspace)
            files = find_run_traces(run)
            what = f"{run.directory}: the run has no profile"
        if not files:
            raise UsageError(what, _HINT)
        found += files
    return found


def _list_folder(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if path.is_file() and path.name.endswith(SUFFIXES)]
    return sorted(files, key=lambda path: (len(path.name), path.name))
