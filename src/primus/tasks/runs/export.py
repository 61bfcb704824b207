"""Write a run into one file that another person can import and replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from primus.config.flags import PositionalRun
from primus.errors import UsageError
from primus.launch.jobs import run_claims
from primus.report import table
from primus.runs import store, summary
from primus.runs.store import Run
from primus.task import TaskContext

if TYPE_CHECKING:
    from primus.run_archive.export_run import RunArchive


class Options(Struct, frozen=True, kw_only=True):
    """Options of `runs export`."""

    run: PositionalRun
    """Run folder, run id or its beginning, or name of an experiment (its newest run)."""
    output: str
    """The archive: FILE.tar.zst, FILE.tar.gz or FILE.tar.xz."""
    with_checkpoint: bool = False
    """Include the newest checkpoint, and the weights that the run began with."""
    with_data: bool = False
    """Include the data and the tokenizer."""
    hashes: bool = False
    """Ask the package index for the hashes of the packages, by uv."""
    unfinished: bool = False
    """Export a run that failed or was interrupted."""
    force: bool = False
    """Overwrite an existing file."""
    workspace: str = "./output"
    """Folder that holds all run folders."""


def plan_notes(options: Options, context: TaskContext) -> Sequence[str]:
    """What would be exported."""
    return [f"archive of {_find_run(options, context).directory}: {options.output}"]


def run(options: Options, context: TaskContext) -> None:
    """Write the archive.

    Raises:
        UsageError: The run does not exist, is executing or did not end well, or the file exists.
        UnfitError: Nothing on this machine writes .zst.
        PrimusError: The run is damaged, or a file cannot be read or written.
    """
    from primus.run_archive.export_run import ExportChoices, export_run

    found = _find_run(options, context)
    choices = ExportChoices(
        with_checkpoint=options.with_checkpoint, with_data=options.with_data, with_hashes=options.hashes
    )
    written = export_run(found, Path(options.output).expanduser(), choices, context.environ)
    context.result(written, _format_result(written))


def _find_run(options: Options, context: TaskContext) -> Run:
    """The run, if it can be exported now."""
    from primus.run_archive.compression import check_ending

    output = Path(options.output).expanduser()
    check_ending(output)
    if output.exists() and not options.force:
        raise UsageError(f"{output} exists", "name another --output, or overwrite it with --force")
    found = store.find_run(options.run, Path(options.workspace))
    metadata = found.read_metadata()
    state = summary.find_run_state(found, metadata)
    if found.is_active() or (state in ("planned", "running") and run_claims.is_held(found, context.environ)):
        raise UsageError(f"{found.directory} is executing, or waits in a queue", "export it when it has ended")
    if state != "done" and not options.unfinished:
        reason = f": {metadata.outcome.reason}" if metadata.outcome.reason else ""
        raise UsageError(f"{found.directory} is not complete: {state}{reason}", "--unfinished exports it as it is")
    return found


def _format_result(written: RunArchive) -> str:
    lines = [f"{written.file}: {written.num_files} files, {table.format_size(written.size_bytes)}"]
    lines += [f"without {each}" for each in written.omitted]
    lines += [f"names a place of this machine: {each}" for each in written.local_paths]
    return "\n".join([*lines, f"import it: primus-cli direct -- runs import {written.file}"])
