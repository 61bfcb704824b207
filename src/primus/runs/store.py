"""Run folders by name: create, find, list, continue."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from msgspec import Struct, structs

from primus.errors import PrimusError, UsageError, did_you_mean
from primus.runs.files import read_json, write_json

State = Literal["planned", "running", "done", "failed", "interrupted"]
Action = Literal["retry", "exclude", "stop"]
"""What a failure asks for: the same once more, the same without its node, or a person."""


class Failure(Struct, frozen=True, kw_only=True):
    """What a rank failed of."""

    rank: int
    host: str
    time: float
    """Seconds since the epoch."""
    problem: str
    hint: str = ""
    log: str = ""
    """The rank's log, relative to the run folder."""
    exit_code: int = 1
    signature: str = ""
    """Name of the failure signature that was found, such as `gpu-out-of-memory`."""
    action: Action = "retry"


class Outcome(Struct, frozen=True, kw_only=True):
    """How a run stands, or ended."""

    state: State = "planned"
    exit_code: int | None = None
    reason: str = ""
    first_failure: Failure | None = None


class Metadata(Struct, frozen=True, kw_only=True):
    """The metadata.json of a run."""

    id: str
    name: str
    """exp_name, or the task where there is no experiment."""
    command: list[str] = []
    """Words that were typed, secrets masked."""
    task: str
    runtimes: list[str] = []
    user: str = ""
    host: str = ""
    git_revision: str | None = None
    git_dirty: bool | None = None
    version: str = ""
    """Version of primus."""
    created: float
    """Seconds since the epoch."""
    started: float | None = None
    ended: float | None = None
    attempts: int = 0
    """Attempts that were started."""
    replay_of: str | None = None
    forced: list[str] = []
    """Differences that a forced replay went over."""
    outcome: Outcome = Outcome()


class Run:
    """A run folder; see docs/run-folder.md for its layout."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def config(self) -> Path:
        """The resolved experiment, an experiment file itself."""
        return self.directory / "config" / "primus_config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def attempt(self, number: int) -> Path:
        """Folder of the logs, heartbeats and errors of one attempt."""
        return self.directory / "logs" / f"attempt_{number}"

    def metadata(self) -> Metadata:
        """Read metadata.json.

        Raises:
            PrimusError: It is missing or damaged.
        """
        return read_json(self.directory / "metadata.json", Metadata)

    def update(self, **changes: object) -> Metadata:
        """Change fields of metadata.json."""
        metadata = structs.replace(self.metadata(), **changes)
        write_json(self.directory / "metadata.json", metadata)
        return metadata

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Hold the run while it is being executed; gives False where another process holds it."""
        with (self.directory / ".lock").open("w") as file:
            yield _locked(file, fcntl.LOCK_EX)

    def is_active(self) -> bool:
        """Whether a process is executing the run now, on this machine."""
        try:
            with (self.directory / ".lock").open() as file:
                return not _locked(file, fcntl.LOCK_SH, tries=1)
        except OSError:
            return False


def _locked(file: TextIO, kind: int, tries: int = 10) -> bool:
    """Lock `file` until it is closed; a few tries, since who only asks whether it is locked holds it for a moment."""
    for _ in range(tries):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.02)
    return False


def new_id(now: float | None = None) -> str:
    """A fresh run id, `<YYYYmmdd_HHMMSS>-<4 hex>` in local time: sorted by name is sorted by time."""
    return f"{time.strftime('%Y%m%d_%H%M%S', time.localtime(now))}-{os.urandom(2).hex()}"


def create(directory: Path, metadata: Metadata) -> Run:
    """Make the run folder `directory`, and point `latest` beside it to it.

    Raises:
        PrimusError: The folder cannot be made.
    """
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise PrimusError(f"{directory}: cannot be created: {error.strerror}", "choose another --workspace") from None
    write_json(directory / "metadata.json", metadata)
    _point_latest(directory)
    return Run(directory)


def _point_latest(directory: Path) -> None:
    temporary = directory.with_name(f".latest.tmp.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(directory.name)
    os.replace(temporary, directory.with_name("latest"))


def runs_of(folder: Path) -> list[Run]:
    """Runs of one experiment, oldest first."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name that is too long
        return []
    found = [entry for entry in folder.iterdir() if not entry.is_symlink() and (entry / "metadata.json").is_file()]
    return [Run(entry) for entry in sorted(found)]


def runs_under(workspace: Path) -> list[Run]:
    """Runs of all experiments of a workspace, oldest first."""
    if not os.path.isdir(workspace):
        return []
    folders = [entry for entry in workspace.iterdir() if entry.is_dir()]
    return sorted((run for folder in folders for run in runs_of(folder)), key=lambda run: run.id)


def find(name: str, workspace: Path) -> Run:
    """The run that `name` means: a folder, an id or the beginning of one, an experiment (its newest run).

    Raises:
        UsageError: There is none, or several begin so.
    """
    if os.path.isfile(Path(name) / "metadata.json"):
        return Run(Path(name).resolve())
    in_experiment = runs_of(workspace / name)
    if in_experiment:
        return in_experiment[-1]
    runs = runs_under(workspace)
    matching = [run for run in runs if run.id.startswith(name) or f"{run.directory.parent.name}/{run.id}" == name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"'{name}' begins {len(matching)} runs", f"such as {matching[0].id} and {matching[1].id}")
    known = [run.id for run in runs] + [run.directory.parent.name for run in runs]
    raise UsageError(f"no run '{name}' in {workspace}", did_you_mean(name, known) if known else "no runs there yet")
