"""Delete run folders that are no longer needed; shows them first."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from primus.errors import UsageError
from primus.launch import jobs
from primus.report import table
from primus.runs import store, summary
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs clean`."""

    workspace: str = "./output"
    """Folder of all run folders."""
    name: str | None = None
    """Only the runs of this experiment."""
    failed: bool = False
    """Only runs that failed, died or were interrupted."""
    keep: Annotated[int, Meta(ge=0)] = 0
    """Keep the newest N runs of each experiment."""
    older_than_days: Annotated[float, Meta(ge=0)] = 0.0
    """Only runs that were created longer ago than this."""
    yes: bool = False
    """Delete; without it the runs are only listed."""


def run(options: Options, context: TaskContext) -> None:
    """Delete the runs that match every condition; a run that is being executed, or that a job has, is never touched.

    Raises:
        UsageError: No condition is given.
    """
    if not (options.failed or options.keep or options.older_than_days):
        raise UsageError("runs clean needs a condition", "--failed, --keep N or --older-than-days D")
    matching = [item for item in _candidates(options) if _matches(item, options)]
    chosen = [item for item in matching if not jobs.is_held(store.Run(Path(item.directory)), context.environ)]
    if options.yes:
        for item in chosen:
            _delete(Path(item.directory))
    verb = "deleted" if options.yes else "would delete"
    total = table.size(sum(item.size_bytes for item in chosen))
    lines = [f"{verb} {item.id}  {item.name}  {item.state}  {table.size(item.size_bytes)}" for item in chosen]
    ending = "" if options.yes or not chosen else "; --yes deletes them"
    context.result(chosen, "\n".join([*lines, f"{len(chosen)} runs, {total}{ending}"]))


def _candidates(options: Options) -> list[summary.Summary]:
    """All runs but the newest `keep` of each experiment."""
    workspace = Path(options.workspace)
    folders = [workspace / options.name] if options.name else sorted(p for p in workspace.glob("*") if p.is_dir())
    runs = [run for folder in folders for run in _without_newest(store.runs_of(folder), options.keep)]
    return [summary.of(run) for run in runs if not run.is_active()]


def _without_newest(runs: list[store.Run], keep: int) -> list[store.Run]:
    return runs[: len(runs) - keep] if keep < len(runs) else []


def _matches(item: summary.Summary, options: Options) -> bool:
    is_old = time.time() - item.created >= options.older_than_days * 86400
    return is_old and (not options.failed or item.state in ("failed", "died", "interrupted"))


def _delete(directory: Path) -> None:
    """Take the run out of sight in one step, then delete it."""
    doomed = directory.with_name(f".deleted.{directory.name}")
    directory.rename(doomed)
    shutil.rmtree(doomed)
    latest = directory.with_name("latest")
    if latest.is_symlink() and not latest.exists():
        remaining = store.runs_of(directory.parent)
        latest.unlink()
        if remaining:
            latest.symlink_to(remaining[-1].directory.name)
