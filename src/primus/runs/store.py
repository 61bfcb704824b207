"""Run folders by name: create, find, list, continue."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, structs

from primus.errors import PrimusError, UsageError, describe_owner, did_you_mean
from primus.runs import lock
from primus.runs.files import read_json, write_json

State = Literal["planned", "running", "done", "failed", "interrupted"]
Action = Literal["retry", "exclude", "stop"]
"""Reaction to a failure: restart, restart without its node, or stop because operator action is needed."""


class RankFailure(Struct, frozen=True, kw_only=True):
    """Failure of a rank."""

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


class RunOutcome(Struct, frozen=True, kw_only=True):
    """State or outcome of a run."""

    state: State = "planned"
    exit_code: int | None = None
    reason: str = ""
    first_failure: RankFailure | None = None


class RunMetadata(Struct, frozen=True, kw_only=True):
    """The metadata.json of a run."""

    id: str
    name: str
    """exp_name, or the task if it has no experiment."""
    command: list[str] = []
    """Words that were typed, secrets masked."""
    task: str
    runtimes: list[str] = []
    user: str = ""
    host: str = ""
    working_folder: str = ""
    """Folder in which the command was typed: that of relative paths in the experiment."""
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
    """Differences that a forced replay ignored."""
    outcome: RunOutcome = RunOutcome()


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

    def attempt_folder(self, number: int) -> Path:
        """Folder of the logs, heartbeats and errors of one attempt."""
        return self.directory / "logs" / f"attempt_{number}"

    def read_metadata(self) -> RunMetadata:
        """Read metadata.json.

        Raises:
            PrimusError: It is missing or damaged.
        """
        file = self.directory / "metadata.json"
        hint = "`runs list` shows other runs; `runs clean --damaged` removes damaged ones"
        return read_json(file, RunMetadata, hint)

    def update_metadata(self, **changes: object) -> RunMetadata:
        """Change fields of metadata.json."""
        # Without a separate lock: while nodes run, the launcher of node 0 writes; what watches their job (`run-step`,
        # a command that waits) writes only an end that no node has recorded.
        metadata = structs.replace(self.read_metadata(), **changes)
        write_json(self.directory / "metadata.json", metadata)
        return metadata

    def hold_lock(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the run while it is being executed; gives False if another process of this host holds it."""
        return lock.hold_run(self.directory)

    def is_active(self) -> bool:
        """Whether a process is executing the run now, on this host or, as far as files tell, on another one."""
        return lock.find_holder(self.directory) is not None


RUN_ID = re.compile(r"\d{8}_\d{6}-[0-9a-f]{4}")


def create_run_id(now: float | None = None) -> str:
    """A new run id, `<YYYYmmdd_HHMMSS>-<4 hex>` in local time: the order by name is the order by time."""
    return f"{time.strftime('%Y%m%d_%H%M%S', time.localtime(now))}-{os.urandom(2).hex()}"


def create_run(directory: Path, metadata: RunMetadata) -> Run:
    """Create the run folder `directory`, and point the links next to it at it.

    Raises:
        PrimusError: The folder cannot be created.
    """
    try:
        # Fails if the folder exists: two runs with the same id must not share it.
        directory.mkdir(parents=True)
    except OSError as error:
        is_refused = isinstance(error, PermissionError)
        owner = f"{describe_owner(directory)}: " if is_refused else ""
        hint = f"{owner}choose another --workspace{', or another exp_name' * is_refused}"
        raise PrimusError(f"{directory}: cannot be created: {error.strerror}", hint) from None
    write_json(directory / "metadata.json", metadata)
    point_links(directory.parent, directory.name)
    return Run(directory)


LATEST = "latest"
LINKS = (LATEST, "logs", "tensorboard")
"""Links next to the runs of an experiment: `latest`, and those folders of the newest run that AMD-AGI/Primus has there:
`output/EXP/logs/rank_0.log`."""


def point_links(experiment: Path, newest: str) -> None:
    """Point the links of an experiment at its run `newest`; without a run, remove them."""
    if not newest:
        for link in filter(Path.is_symlink, map(experiment.joinpath, LINKS)):
            link.unlink(missing_ok=True)
        return
    # Created next to the link and renamed over it, so that `latest` always exists for readers.
    temporary = experiment / f".latest.tmp.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(newest)
    os.replace(temporary, experiment / LATEST)
    for name in LINKS[1:]:  # through `latest`, so that the next run changes that one alone
        with contextlib.suppress(FileExistsError):  # the link of an earlier run, or a folder of the user
            (experiment / name).symlink_to(f"{LATEST}/{name}")


OURS = ("request.json", "events.jsonl", "config/primus_config.yaml", "env/primus_env_dump.txt")
"""Files that identify a folder with the name of a run as a run if its metadata cannot be read."""


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run whose metadata can be read; it may have been renamed, or copied from elsewhere."""
    if folder.is_symlink() or folder.name.startswith("."):
        return False
    try:
        return bool(RUN_ID.fullmatch(Run(folder).read_metadata().id))
    except PrimusError:
        return False


def is_damaged_run(folder: Path) -> bool:
    """Whether `folder` is certainly a run of primus although its metadata cannot be read.

    Metadata that is valid JSON of another structure belongs to another tool. Metadata that this user may not read is
    not damaged: the run of another user must not be taken for garbage.
    """
    if folder.is_symlink() or not RUN_ID.fullmatch(folder.name) or is_run(folder):
        return False
    try:
        msgspec.json.decode((folder / "metadata.json").read_bytes())
    except PermissionError:
        return False
    except (OSError, ValueError):  # absent or truncated
        return any((folder / name).is_file() for name in OURS)
    return False


def is_private_run(folder: Path) -> bool:
    """Whether `folder` has the name of a run, and this user has no permission to read it."""
    if not RUN_ID.fullmatch(folder.name) or folder.is_symlink():
        return False
    try:
        (folder / "metadata.json").open("rb").close()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def list_private_runs(workspace: Path, experiment: str | None = None) -> list[Path]:
    """Folders of runs in a workspace, or of one experiment in it, that this user has no permission to read."""
    entries = (workspace / experiment).glob("*") if experiment else workspace.glob("*/*")
    return sorted(entry for entry in entries if is_private_run(entry))


def list_runs(folder: Path) -> list[Run]:
    """Runs of one experiment, oldest first, including damaged ones."""
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for a name that is too long
        return []
    return [Run(entry) for entry in sorted(folder.iterdir()) if is_run(entry) or is_damaged_run(entry)]


def list_workspace_runs(workspace: Path) -> list[Run]:
    """Runs of all experiments of a workspace, oldest first."""
    if not os.path.isdir(workspace):
        return []
    folders = [entry for entry in workspace.iterdir() if entry.is_dir()]
    return sorted((run for folder in folders for run in list_runs(folder)), key=lambda run: run.id)


def find_run(name: str, workspace: Path) -> Run:
    """Find a run by its folder, its id or a prefix of it, or its experiment (the newest run).

    Raises:
        UsageError: No run matches, or several ids have this prefix.
    """
    if os.path.isfile(Path(name) / "metadata.json"):
        return Run(Path(name).resolve())
    in_experiment = list_runs(workspace / name)
    if in_experiment:
        return in_experiment[-1]
    runs = list_workspace_runs(workspace)
    matching = [run for run in runs if run.id.startswith(name) or f"{run.directory.parent.name}/{run.id}" == name]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"'{name}' matches {len(matching)} runs", f"for example {matching[0].id} and {matching[1].id}")
    if is_private_run(Path(name)):
        raise UsageError(f"{name}: permission denied", "ask its owner for read permission")
    if os.path.isdir(name):
        raise UsageError(f"{name} is not a run folder: it has no metadata.json", "list the runs with: runs list")
    if name.startswith(("/", "./", "../")):
        hint = "list the runs with: runs list; a job needs the same working folder on all nodes and where you submit it"
        raise UsageError(f"{name}: no such file or folder on {os.uname().nodename}", hint)
    known = [run.id for run in runs] + [run.directory.parent.name for run in runs]
    raise UsageError(
        f"no run '{name}' in {workspace}", did_you_mean(name, known) if known else "the workspace has no runs"
    )


def find_place(word: str, workspace: Path) -> str:
    """The folder of the run that `word` names as in `find_run`, or `word` where it is a path.

    Raises:
        UsageError: It is neither, or several ids have this prefix.
    """
    if os.path.lexists(os.path.expanduser(word)):
        return word
    try:
        return str(find_run(word, workspace).directory)
    except UsageError as error:
        if "/" in word:  # a path, whose absence its reader reports
            return word
        raise UsageError(f"{word}: no such file or folder, and {error.problem}", error.hint) from None
