"""Remove the results and runs of comparisons, but no file that primus did not create; without --yes, only list them."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from primus.config.flags import Positional
from primus.errors import UsageError
from primus.report import table
from primus.task import TaskContext


class Options(Struct, frozen=True, kw_only=True):
    """Options of `compare purge`."""

    folder: Positional = "output"
    """Folder of a comparison, or one that has several."""
    with_data: bool = False
    """Also remove the token files that primus prepared for the named datasets of the cells."""
    yes: bool = False
    """Remove the files instead of listing them."""


def run(options: Options, context: TaskContext) -> None:
    """Remove the comparisons in the folder.

    Raises:
        UsageError: No comparison is found, or another process uses one.
        PrimusError: A file cannot be removed.
    """
    from primus.comparison.folder.comparison_folder import list_comparison_folders
    from primus.comparison.folder.purge import find_purged_paths, remove_paths

    folders = list_comparison_folders(Path(options.folder))
    if not folders:
        raise UsageError(f"{options.folder} has no comparison", "name the folder of one: output/NAME")
    purged = [find_purged_paths(folder, has_data=options.with_data) for folder in folders]
    if options.yes:
        for each in purged:
            remove_paths(each)
    verb = "removed" if options.yes else "would remove"
    lines = []
    for each in purged:
        lines.append(f"{verb} {len(each.paths)} files and runs of {each.folder}, {table.format_size(each.size_bytes)}")
        lines += [f"  {path}" for path in each.paths if not options.yes]
        lines += [f"  kept, not made by primus: {path}" for path in each.kept]
    context.result(purged, "\n".join([*lines, *([] if options.yes else ["--yes removes them"])]))
