"""Delete run folders that match conditions; without --yes, only list them."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import EXIT_FAILED, EXIT_OK, PrimusError, UsageError, did_you_mean, find_owner
from primus.launch.jobs import run_claims
from primus.report import table
from primus.runs import store, summary
from primus.runs.store import Run
from primus.task import TaskContext

DELETED = ".deleted."
"""Prefix of the name of a run while it is deleted: an interrupted deletion leaves no run."""


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs clean`."""

    workspace: str = "./output"
    """Folder that holds all run folders."""
    name: str | None = None
    """Only runs of this experiment."""
    failed: bool = False
    """Only runs that failed, died or were interrupted."""
    damaged: bool = False
    """Only runs with unreadable metadata; they are kept unless this option is given."""
    keep: Annotated[int, Meta(ge=0)] | None = None
    """Keep the newest N runs of each experiment."""
    older_than_days: Annotated[float, Meta(ge=0)] = 0.0
    """Only runs created more than this many days ago."""
    yes: bool = False
    """Delete the runs instead of listing them."""


def run(options: Options, context: TaskContext) -> int:
    """Delete the runs that match every condition; gives 1 if one of them cannot be deleted.

    Only a folder whose name equals the run id in its metadata is a run here; links are not followed. An active run, or
    one of a queued or running job, is never deleted.

    Raises:
        UsageError: No condition is given, or the experiment does not exist.
    """
    if not (options.failed or options.damaged or options.keep is not None or options.older_than_days):
        raise UsageError(
            "runs clean needs a condition",
            "--failed, --damaged, --keep N or --older-than-days D; several must all hold",
        )
    folders = list(_find_experiment_folders(options))
    candidates = [item for folder in folders for item in _find_matching_runs(folder, options)]
    chosen = [item for item in candidates if not _is_in_use(item, context)]
    problems: list[PrimusError] = []
    if options.yes:
        chosen = [item for item in chosen if _delete_run(Run(Path(item.directory)), problems)]
        for folder in folders:
            _finish_deletions(folder)
    verb = "deleted" if options.yes else "would delete"
    total = table.format_size(sum(item.size_bytes for item in chosen))
    lines = [f"{verb} {item.id}  {item.name}  {item.state}  {table.format_size(item.size_bytes)}" for item in chosen]
    ending = "" if options.yes or not chosen else "; --yes deletes them"
    context.result(chosen, "\n".join([*lines, f"{len(chosen)} runs, {total}{ending}"]))
    for problem in problems:
        print(f"primus-cli: {problem}", file=sys.stderr)
    return EXIT_FAILED if problems else EXIT_OK


def _find_experiment_folders(options: Options) -> Iterator[Path]:
    """Folders of the experiments directly below the workspace, links excluded.

    Raises:
        UsageError: `--name` is not the name of one.
    """
    workspace = Path(options.workspace)
    found = sorted(path for path in workspace.glob("*") if path.is_dir() and not path.is_symlink())
    if options.name is None:
        yield from found
        return
    named = [path for path in found if path.name == options.name]
    if not named:
        names = [path.name for path in found]
        raise UsageError(
            f"--name: no experiment '{options.name}' in {workspace}",
            did_you_mean(options.name, names) if names else "the name is that of a folder in the workspace, not a path",
        )
    yield from named


def _find_matching_runs(folder: Path, options: Options) -> list[summary.RunSummary]:
    """Runs of an experiment that match the conditions."""
    own = [run for run in store.list_runs(folder) if _is_provable(run)]
    wanted = [
        run
        for run in _drop_newest_runs(own, options.keep or 0)
        if store.is_damaged_run(run.directory) == options.damaged
    ]
    return [item for item in map(summary.summarize_run, wanted) if _is_match(item, options)]


def _is_provable(run: Run) -> bool:
    """Whether a folder is certainly the run with its name; a renamed copy was made on purpose, and is kept."""
    return store.is_damaged_run(run.directory) or run.read_metadata().id == run.directory.name


def _drop_newest_runs(runs: list[Run], keep: int) -> list[Run]:
    return runs[: len(runs) - keep] if keep < len(runs) else []


def _is_match(item: summary.RunSummary, options: Options) -> bool:
    is_old = time.time() - item.created >= options.older_than_days * 86400
    return is_old and (not options.failed or item.state in ("failed", "died", "interrupted"))


def _is_in_use(item: summary.RunSummary, context: TaskContext) -> bool:
    run = Run(Path(item.directory))
    return run.is_active() or run_claims.is_held(run, context.environ)


def _delete_run(run: Run, problems: list[PrimusError]) -> bool:
    """Rename the run, then delete it; gives False if a launcher has started it in the meantime, or after a problem.

    A run that cannot be deleted, such as that of another user, does not keep the others from being deleted.
    """
    directory = run.directory
    doomed = directory.with_name(DELETED + directory.name)
    try:
        # The lock excludes a launcher that resumes the run between the check and the deletion.
        with run.hold_lock() as is_ours:
            if not is_ours:
                return False
            # A rename is atomic: readers see the whole run or none. Its name marks the rest for the next cleaning.
            directory.rename(doomed)
        # Outside of the lock, which is a file in the folder.
        shutil.rmtree(doomed)
    except PrimusError as error:
        problems.append(error)
        return False
    except OSError as error:
        owner = find_owner(doomed if doomed.exists() else directory)
        problem = f"{directory}: cannot be deleted: {error.strerror or error}"
        problems.append(PrimusError(problem, f"it belongs to {owner}, who can delete it"))
        return False
    latest = directory.with_name(store.LATEST)
    if latest.is_symlink() and not latest.exists():
        remaining = store.list_runs(directory.parent)
        store.point_links(directory.parent, remaining[-1].directory.name if remaining else "")
    return True


def _finish_deletions(folder: Path) -> None:
    """Finish deletions of runs that were interrupted."""
    for left in folder.glob(f"{DELETED}*"):
        if store.RUN_ID.fullmatch(left.name.removeprefix(DELETED)) and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
