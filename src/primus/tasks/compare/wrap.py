"""Pack the results of a comparison into one archive, to be compared with those of other machines."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import UsageError
from primus.report import table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare wrap`."""

    folder: Positional = "output"
    """Folder of a comparison, or one that has several."""
    output: str | None = None
    """The archive; NAME.zip in the current folder when omitted."""
    runs: bool = False
    """Include the events, logs and configuration of the run folders; never checkpoints."""


class WrittenArchive(Struct, frozen=True, kw_only=True):
    """An archive that was written."""

    comparison: str
    archive: str
    num_files: int
    size_bytes: int


def run(options: Options, context: TaskContext) -> None:
    """Write an archive of each comparison in the folder.

    Raises:
        UsageError: No comparison is found, or several for one --output.
        PrimusError: An archive cannot be written.
    """
    from primus.comparison.folder.archive import write_archive
    from primus.comparison.folder.comparison_folder import list_comparison_folders

    folders = list_comparison_folders(Path(options.folder))
    if not folders:
        raise UsageError(f"{options.folder} has no comparison", "name the folder of one: output/NAME, or run it first")
    if options.output and len(folders) > 1:
        names = ", ".join(each.path.name for each in folders)
        raise UsageError(f"--output names one archive, and {options.folder} has {names}", "name one of them")
    written = []
    for folder in folders:
        archive = Path(options.output or f"{folder.path.resolve().name}.zip")
        count = write_archive(folder, archive, has_runs=options.runs)
        written.append(
            WrittenArchive(
                comparison=str(folder.path), archive=str(archive), num_files=count, size_bytes=archive.stat().st_size
            )
        )
    lines = [f"{each.archive}: {each.num_files} files, {table.format_size(each.size_bytes)}" for each in written]
    lines.append("compare them: primus-cli direct -- compare report " + " ".join(each.archive for each in written))
    context.result(written, "\n".join(lines))
